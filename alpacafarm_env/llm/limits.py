"""How many requests may be in flight, and when the next may start: a limit that finds what the server can take.

Additive increase, multiplicative decrease (Chiu and Jain 1989, doi:10.1016/0169-7552(89)90019-6): a limit's worth of
successes raises it by one, a crowded server (429, 503) halves it, once for all requests that were in flight together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Self

from ..errors import APIError, TransientAPIError

OUTAGE = 20
"""Failures in a row, all requests of a client together, that end it."""
PROBES_S = (1.0, 2.0, 4.0)
"""The last of them are requests sent alone, after these waits: a server that restarts is not given up."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Limits of a client."""

    max_concurrency: int = 64
    """Requests in flight at most; fewer while the server says that it is crowded."""
    max_attempts: int = 6
    """How often one request is sent at most."""
    attempt_timeout_s: float = 60.0
    """Seconds one attempt may take by the clock, from the first byte sent to the last byte read."""
    deadline_s: float = 300.0
    """Seconds one request may take from its first attempt on, repeats and waits included."""
    requests_per_minute: float | None = None
    """Requests started in a minute at most, evenly spread. None: any number."""
    max_wait_s: float = 120.0
    """The longest wait a server may ask for; if it asks for a longer one, all requests end."""

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "max_attempts"):
            value = getattr(self, name)
            self._require(type(value) is int and value >= 1, name, "an integer, 1 or more")
        for name in ("attempt_timeout_s", "deadline_s", "max_wait_s"):
            self._require(0 < getattr(self, name) < inf, name, "finite and above 0")
        rate = self.requests_per_minute
        self._require(rate is None or 0 < rate < inf, "requests_per_minute", "finite and above 0, or None")

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}.{name} must be {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Slot:
    """Leave for one request to be in flight since `started` (seconds of the monotonic clock)."""

    started: float


@dataclass
class _Pace:
    """What was learned of a server, and when it may be asked next, in seconds of the monotonic clock.

    It outlives event loops, and limiters in several threads may share it: each value is one number, and a change of it
    that another overwrites costs no more than one step of the search.
    """

    limit: float
    cut: float = -inf
    before_outage: float = 0.0
    paused_until: float = -inf
    next_start: float = -inf


class Limiter:
    """Admits the requests of one client.

    A limiter's queue belongs to one event loop. What it has learned (how many at once, until when to pause, when the
    last request started) does not: `fresh` hands it on.

    Args:
        most: Requests in flight at most.
        per_minute: Requests started in a minute at most, evenly spread; None: any number.
        max_wait_s: The longest pause that is waited for; a longer one refuses all requests.

    Attributes:
        active: Requests in flight.
        failures: Failures since the last success.
    """

    def __init__(self, most: int, *, per_minute: float | None = None, max_wait_s: float = 120.0) -> None:
        self.most, self.max_wait_s, self.per_minute = most, max_wait_s, per_minute
        self.active = self.failures = 0
        self.refusal: APIError | None = None
        self._pace = _Pace(float(most))
        self._spacing = 60 / per_minute if per_minute else 0.0
        self._probe = 0
        self._repeats: deque[asyncio.Future[Slot]] = deque()
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, config: ClientConfig) -> Self:
        """The limiter that a client's settings ask for."""
        return cls(config.max_concurrency, per_minute=config.requests_per_minute, max_wait_s=config.max_wait_s)

    def fresh(self) -> Limiter:
        """A limiter for another event loop, with nothing in flight and no refusal, that goes on at the same pace.

        The two may even be used at once, in two threads: what one learns, the other obeys. Each admits up to `limit`.
        """
        other = Limiter(self.most, per_minute=self.per_minute, max_wait_s=self.max_wait_s)
        other._pace = self._pace
        return other

    @property
    def limit(self) -> float:
        """Requests in flight now allowed, in [1, most]."""
        return self._pace.limit

    async def acquire(self, *, again: bool = False) -> Slot:
        """Wait for leave to send; first come, first served, but repeats before all others: their time is running.

        Raises:
            APIError: The client takes no more requests.
        """
        self._check_pause()
        if self.refusal:
            raise _like(self.refusal)
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        (self._repeats if again else self._waiting).append(future)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release()  # it had been given in the same turn of the loop
            raise

    def release(self) -> None:
        """Give a slot back, after what happened to its request was told."""
        self.active -= 1
        self._admit()

    def succeeded(self, slot: Slot) -> None:
        """A valid reply came."""
        pace = self._pace
        pace.limit = max(pace.limit, pace.before_outage / 2)  # it is back: less than before, but not one by one
        pace.before_outage = 0.0
        self.failures = self._probe = 0
        if slot.started >= pace.cut:
            pace.limit = min(float(self.most), pace.limit + 1 / pace.limit)

    def failed(self, slot: Slot, *, crowded: bool = False, retry_after_s: float = 0.0) -> bool:
        """A request failed in a way that may pass.

        Args:
            slot: Its slot.
            crowded: The server has too much to do. Those that were in flight together count as one failure.
            retry_after_s: Nothing is sent for so many seconds.

        Returns:
            Whether this was the last of `OUTAGE` failures in a row.
        """
        now, pace = time.monotonic(), self._pace
        self.pause(now + retry_after_s)
        first = slot.started >= pace.cut
        if crowded and first:
            pace.cut, pace.limit = now, max(1.0, pace.limit / 2)
        self.failures += 1 if first or not crowded else 0
        if self.failures < OUTAGE - len(PROBES_S) or (self._probe and not first):
            return False
        if self._probe == len(PROBES_S):
            return True
        pace.before_outage = max(pace.before_outage, pace.limit)
        self.pause(now + PROBES_S[self._probe])
        pace.cut, pace.limit, self._probe = now, 1.0, self._probe + 1
        return False

    def pause(self, until: float) -> None:
        """Send nothing before `until`, in seconds of the monotonic clock."""
        self._pace.paused_until = max(self._pace.paused_until, until)
        self._check_pause()

    def refuse(self, error: APIError) -> None:
        """Raise this error's like for all requests that wait, and all that come."""
        self.refusal = self.refusal or error
        while queue := self._repeats or self._waiting:
            future = queue.popleft()
            if not future.done():
                future.set_exception(_like(error))

    def refused(self) -> APIError | None:
        """A copy of the error that ended this client, if one did."""
        return _like(self.refusal) if self.refusal else None

    def _check_pause(self) -> None:
        wait = self._pace.paused_until - time.monotonic()
        if wait > self.max_wait_s and not self.refusal:
            self.refuse(
                TransientAPIError(
                    f"The server asks for no requests for another {wait:,.0f} s, longer than max_wait_s="
                    f"{self.max_wait_s:g}. Run again later: what was answered is kept"
                )
            )

    def _admit(self) -> None:
        """Let in as many as may start now, and come back when the next may."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        pace = self._pace
        while (queue := self._repeats or self._waiting) and self.active < int(pace.limit):
            now = time.monotonic()
            start = max(pace.paused_until, pace.next_start)
            if start > now:
                self._timer = asyncio.get_running_loop().call_later(start - now, self._admit)
                return
            future = queue.popleft()
            if not future.done():  # else its request was cancelled
                self.active += 1
                pace.next_start = max(now, pace.next_start) + self._spacing
                future.set_result(Slot(now))


def _like(error: APIError) -> APIError:
    """A copy: one exception raised in many tasks would gather the tracebacks of all of them."""
    return type(error)(*error.args)
