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

from ..errors import APIError, TransientAPIError

OUTAGE = 20
"""Failures in a row, all requests of a client together, that end it."""
PROBES_S = (1.0, 2.0, 4.0)
"""The last of them are requests sent alone, after these waits: a server that restarts is not given up."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Limits of a client."""

    max_concurrency: int = 32
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


class Limiter:
    """Admits the requests of one client.

    Args:
        most: Requests in flight at most.
        per_minute: Requests started in a minute at most, evenly spread; None: any number.
        max_wait_s: The longest pause that is waited for; a longer one refuses all requests.

    Attributes:
        limit: Requests in flight now allowed, in [1, most].
        active: Requests in flight.
        failures: Failures since the last success.
    """

    def __init__(self, most: int, *, per_minute: float | None = None, max_wait_s: float = 120.0) -> None:
        self.most, self.max_wait_s = most, max_wait_s
        self.limit = float(most)
        self.active = self.failures = 0
        self.refusal: APIError | None = None
        self._spacing = 60 / per_minute if per_minute else 0.0
        self._next = self._cut = self._paused_until = -inf
        self._probe, self._before = 0, 1.0
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def reopen(self) -> None:
        """Forget a refusal and the waiting requests of a loop that has ended; the limit and the pause stay."""
        self.refusal, self.active, self.failures, self._probe = None, 0, 0, 0
        self._waiting.clear()
        self._timer = None

    async def acquire(self, *, again: bool = False) -> Slot:
        """Wait for leave to send; first come, first served, but repeats come first: their time is running.

        Raises:
            APIError: The client takes no more requests.
        """
        self._check_pause()
        if self.refusal:
            raise _like(self.refusal)
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if again else self._waiting.append)(future)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release()  # it had been given in the same turn of the loop
            raise

    def release(self) -> None:
        """Give a slot back; after what happened to its request was told."""
        self.active -= 1
        self._admit()

    def succeeded(self, slot: Slot) -> None:
        """A valid reply came."""
        if self._probe:  # it is back: less than before, but not one by one
            self.limit = max(self.limit, self._before / 2)
        self.failures = self._probe = 0
        if slot.started >= self._cut:
            self.limit = min(float(self.most), self.limit + 1 / self.limit)

    def failed(self, slot: Slot, *, crowded: bool = False, retry_after_s: float = 0.0) -> bool:
        """A request failed in a way that may pass.

        Args:
            slot: Its slot.
            crowded: The server has too much to do. Those that were in flight together count as one failure.
            retry_after_s: Nothing is sent for so many seconds.

        Returns:
            Whether this was the last of `OUTAGE` failures in a row.
        """
        now = time.monotonic()
        self.pause(now + retry_after_s)
        first = slot.started >= self._cut
        if crowded and first:
            self._cut, self.limit = now, max(1.0, self.limit / 2)
        self.failures += 1 if first or not crowded else 0
        if self.failures < OUTAGE - len(PROBES_S) or (self._probe and not first):
            return False
        if self._probe == len(PROBES_S):
            return True
        self._before = self._before if self._probe else self.limit
        self.pause(now + PROBES_S[self._probe])
        self._cut, self.limit, self._probe = now, 1.0, self._probe + 1
        return False

    def pause(self, until: float) -> None:
        """Send nothing before `until`, in seconds of the monotonic clock."""
        self._paused_until = max(self._paused_until, until)
        self._check_pause()

    def refuse(self, error: APIError) -> None:
        """Raise this error's like for all requests that wait, and all that come."""
        self.refusal = self.refusal or error
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(_like(error))

    def refused(self) -> APIError | None:
        """A copy of the error that ended this client, if one did."""
        return _like(self.refusal) if self.refusal else None

    def _check_pause(self) -> None:
        wait = self._paused_until - time.monotonic()
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
        while self._waiting and self.active < int(self.limit):
            now = time.monotonic()
            start = max(self._paused_until, self._next)
            if start > now:
                self._timer = asyncio.get_running_loop().call_later(start - now, self._admit)
                return
            future = self._waiting.popleft()
            if not future.done():  # else its request was cancelled
                self.active += 1
                self._next = max(now, self._next) + self._spacing
                future.set_result(Slot(now))


def _like(error: APIError) -> APIError:
    """A copy: one exception raised in many tasks would gather the tracebacks of all of them."""
    return type(error)(*error.args)
