"""How many requests may be in flight, and when the next may start: a limit that finds what the server can take.

Additive increase, multiplicative decrease (Chiu and Jain 1989, doi:10.1016/0169-7552(89)90019-6): a limit's worth of
successes raises it by one, a crowded server (429, 503) halves it, once for all requests that were in flight together.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Annotated

import pydantic.dataclasses
from pydantic import Field

from ..errors import APIError, TransientAPIError

OUTAGE, OUTAGE_S = 20, 10.0
"""Failures in a row, over all requests of a client, and seconds since the first of them, that end it. A server that
restarts breaks all connections at once, and is back before."""


_Count = Annotated[int, Field(strict=True, ge=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Limits of a client."""

    max_concurrency: _Count = 64
    """Requests in flight at most; fewer while the server is crowded."""
    max_attempts: _Count = 6
    attempt_timeout_s: _Positive = 60.0
    """Wall-clock seconds for one attempt, from the first byte sent to the last byte read."""
    deadline_s: _Positive = 300.0
    """Wall-clock seconds for one request from its first attempt on, repeats and waits included."""
    requests_per_minute: _Positive | None = None
    """Requests started in a minute at most, evenly spread. None: unlimited."""
    max_wait_s: _Positive = 120.0
    """The longest wait a server may ask for; a longer one ends all requests."""


@dataclass
class Pace:
    """Knowledge of a server's limits, and when it may be asked next, in seconds of the monotonic clock.

    Limiters one after the other go on at it. Those in several threads may share it: a lost update costs no more than
    one step of the search.
    """

    limit: float
    """Requests in flight now allowed, 1 or more."""
    cut: float = -inf
    paused_until: float = -inf
    next_start: float = -inf


class Limiter:
    """Admits the requests of one client, in one event loop.

    Attributes:
        most: Requests in flight at most.
        active: Requests in flight.
        failures: Failures since the last success.
    """

    def __init__(self, config: ClientConfig, pace: Pace | None = None) -> None:
        self.config, self.most = config, config.max_concurrency
        self.pace = pace or Pace(float(self.most))
        self.active = self.failures = 0
        self.refusal: APIError | None = None
        self._spacing = 60 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._failing_since, self._number = inf, count()
        self._queue: list[tuple[bool, int, asyncio.Future[float]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, *, again: bool = False) -> float:
        """Wait for leave to send: first come, first served, but repeats before all others, as their time is running.

        Returns the start of the request on the monotonic clock, for `succeeded` and `failed`. Raises APIError if the
        client takes no more requests.
        """
        self._check_pause()
        if refusal := self.refused():
            raise refusal
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        heappush(self._queue, (not again, next(self._number), future))
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
        self.failures, self._failing_since = 0, inf
        if started >= self.pace.cut:
            self.pace.limit = min(float(self.most), self.pace.limit + 1 / self.pace.limit)

    def failed(self, started: float, *, crowded: bool = False, retry_after_s: float = 0.0) -> bool:
        """Report a passing failure: of a crowded server those in flight together halve the limit once.

        Nothing is sent for `retry_after_s` seconds. Returns whether the server is out: see `OUTAGE`.
        """
        now, pace = time.monotonic(), self.pace
        pace.paused_until = max(pace.paused_until, now + retry_after_s)
        self._check_pause()
        if crowded and started >= pace.cut:
            pace.cut, pace.limit = now, max(1.0, pace.limit / 2)
        self.failures, self._failing_since = self.failures + 1, min(self._failing_since, now)
        return self.failures >= OUTAGE and now - self._failing_since >= OUTAGE_S

    def refuse(self, error: APIError) -> None:
        """Raise a copy of this error for all requests that wait, and all to come."""
        self.refusal = self.refusal or error
        while self._queue:
            _, _, future = heappop(self._queue)
            if not future.done():
                future.set_exception(_copy(error))

    def refused(self) -> APIError | None:
        """A copy of the error that ended this client, if one did."""
        return _copy(self.refusal) if self.refusal else None

    def _check_pause(self) -> None:
        wait = self.pace.paused_until - time.monotonic()
        if wait > self.config.max_wait_s and not self.refusal:
            problem = f"The server asks for no requests for another {wait:,.0f} s, longer than max_wait_s="
            self.refuse(TransientAPIError(f"{problem}{self.config.max_wait_s:g}. Run again later: answers are kept"))

    def _admit(self) -> None:
        """Let in as many as may start now, and come back when the next may."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        pace = self.pace
        while self._queue and self.active < int(pace.limit):
            now = time.monotonic()
            start = max(pace.paused_until, pace.next_start)
            if start > now:
                self._timer = asyncio.get_running_loop().call_later(start - now, self._admit)
                return
            _, _, future = heappop(self._queue)
            if not future.done():  # else its request was cancelled
                self.active += 1
                pace.next_start = max(now, pace.next_start) + self._spacing
                future.set_result(now)


def _copy(error: APIError) -> APIError:
    """One exception raised in many tasks would gather the tracebacks of all of them."""
    return type(error)(*error.args)
