"""How many requests may be in flight, and when the next may start: a limit that finds what the server can take.

Additive increase, multiplicative decrease (Chiu and Jain 1989, doi:10.1016/0169-7552(89)90019-6): a limit's worth of
successes raises it by one, a crowded server (429, 503) halves it, once for all requests that were in flight together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, fields
from math import inf

from ..errors import APIError, TransientAPIError

OUTAGE = 20
"""Failures in a row, over all requests of a client, that end it."""
PROBES_S = (1.0, 2.0, 4.0)
"""The last of them are requests sent alone, after these waits: a server that restarts is not given up."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Limits of a client."""

    max_concurrency: int = 64
    """Requests in flight at most; fewer while the server is crowded."""
    max_attempts: int = 6
    attempt_timeout_s: float = 60.0
    """Wall-clock seconds for one attempt, from the first byte sent to the last byte read."""
    deadline_s: float = 300.0
    """Wall-clock seconds for one request from its first attempt on, repeats and waits included."""
    requests_per_minute: float | None = None
    """Requests started in a minute at most, evenly spread. None: unlimited."""
    max_wait_s: float = 120.0
    """The longest wait a server may ask for; a longer one ends all requests."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, int):
                holds, expected = type(value) is int and value >= 1, "an integer, 1 or more"
            else:
                optional = field.default is None
                holds = (optional and value is None) or 0 < value < inf
                expected = "finite and above 0" + (", or None" if optional else "")
            if not holds:
                raise ValueError(f"{type(self).__name__}.{field.name} must be {expected}, got {value!r}")


@dataclass
class _Pace:
    """What was learned of a server, and when it may be asked next, in seconds of the monotonic clock.

    Limiters in several threads may share it: a lost update costs no more than one step of the search.
    """

    limit: float
    cut: float = -inf
    before_outage: float = 0.0
    paused_until: float = -inf
    next_start: float = -inf


class Limiter:
    """Admits the requests of one client.

    Its queue belongs to one event loop. What it has learned does not: `fresh` hands it on.

    Attributes:
        most: Requests in flight at most.
        active: Requests in flight.
        failures: Failures since the last success.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config, self.most = config, config.max_concurrency
        self.active = self.failures = 0
        self.refusal: APIError | None = None
        self._pace = _Pace(float(self.most))
        self._spacing = 60 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._probe = 0
        self._repeats: deque[asyncio.Future[float]] = deque()
        self._waiting: deque[asyncio.Future[float]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def fresh(self) -> Limiter:
        """A limiter for another event loop, with nothing in flight and no refusal, that goes on at the same pace.

        Both may be used at once, in two threads: each learns from the other, and admits up to `limit`.
        """
        other = Limiter(self.config)
        other._pace = self._pace
        return other

    @property
    def limit(self) -> float:
        """Requests in flight now allowed, in [1, most]."""
        return self._pace.limit

    async def acquire(self, *, again: bool = False) -> float:
        """Wait for leave to send: first come, first served, but repeats before all others, as their time is running.

        Returns the start of the request on the monotonic clock, for `succeeded` and `failed`. Raises APIError if the
        client takes no more requests.
        """
        self._check_pause()
        if refusal := self.refused():
            raise refusal
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        (self._repeats if again else self._waiting).append(future)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release()  # it had been given in the same turn of the loop
            raise

    def release(self) -> None:
        """Give a slot back, after reporting what happened to its request."""
        self.active -= 1
        self._admit()

    def succeeded(self, started: float) -> None:
        """Report a valid reply."""
        pace = self._pace
        pace.limit = max(pace.limit, pace.before_outage / 2)  # it is back: less than before, but not one by one
        pace.before_outage = 0.0
        self.failures = self._probe = 0
        if started >= pace.cut:
            pace.limit = min(float(self.most), pace.limit + 1 / pace.limit)

    def failed(self, started: float, *, crowded: bool = False, retry_after_s: float = 0.0) -> bool:
        """Report a passing failure: of a crowded server those in flight together count as one.

        Nothing is sent for `retry_after_s` seconds. Returns whether this was the last of `OUTAGE` failures in a row.
        """
        now, pace = time.monotonic(), self._pace
        self.pause(now + retry_after_s)
        first = started >= pace.cut
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
        """Raise a copy of this error for all requests that wait, and all to come."""
        self.refusal = self.refusal or error
        while queue := self._repeats or self._waiting:
            future = queue.popleft()
            if not future.done():
                future.set_exception(_copy(error))

    def refused(self) -> APIError | None:
        """A copy of the error that ended this client, if one did."""
        return _copy(self.refusal) if self.refusal else None

    def _check_pause(self) -> None:
        wait = self._pace.paused_until - time.monotonic()
        if wait > self.config.max_wait_s and not self.refusal:
            problem = f"The server asks for no requests for another {wait:,.0f} s, longer than max_wait_s="
            self.refuse(TransientAPIError(f"{problem}{self.config.max_wait_s:g}. Run again later: answers are kept"))

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
                future.set_result(now)


def _copy(error: APIError) -> APIError:
    """One exception raised in many tasks would gather the tracebacks of all of them."""
    return type(error)(*error.args)
