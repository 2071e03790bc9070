"""Limits: how many at once, in which order, when, and when no more."""

import asyncio
import time
from itertools import pairwise

import pytest

from alpacafarm_env.errors import OutageError, PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.limits import OUTAGE, PROBES_S, ClientConfig, Limiter, Slot


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("alpacafarm_env.llm.limits.time.monotonic", lambda: self.now)

    def slot(self, later=1.0):
        """A slot that starts `later` than now."""
        self.now += later
        return Slot(self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


# ------------------------------------------------------------------------------------------------ AIMD


def test_crowded_servers_halve_the_limit_once_for_those_in_flight_together(clock):
    limiter = Limiter(32)
    together = [clock.slot(0.0) for _ in range(32)]
    clock.now += 1
    for slot in together:
        assert not limiter.failed(slot, crowded=True)
    assert limiter.limit == 16
    assert limiter.failures == 1
    limiter.failed(clock.slot(), crowded=True)
    assert limiter.limit == 8
    for _ in range(5):
        limiter.failed(clock.slot(), crowded=True)
    assert limiter.limit == 1


class Twin(Limiter):
    """Halves for each failure, as a limiter without windows does."""

    def failed(self, slot, **settings):
        self._pace.cut = float("-inf")
        return super().failed(slot, **settings)


def test_twin_without_windows_falls_to_one(clock):
    limiter = Twin(32)
    together = [clock.slot(0.0) for _ in range(32)]
    clock.now += 1
    for slot in together[:10]:
        limiter.failed(slot, crowded=True)
    assert limiter.limit == 1


def test_a_limits_worth_of_successes_raises_it_by_about_one(clock):
    limiter = Limiter(32)
    limiter.failed(clock.slot(), crowded=True)
    for window in range(1, 16):
        for _ in range(int(limiter.limit)):
            limiter.succeeded(clock.slot(0.001))
        assert 16 + 0.9 * window <= limiter.limit <= 16 + window
    for _ in range(200):
        limiter.succeeded(clock.slot(0.001))
    assert limiter.limit == 32


def test_successes_from_before_a_cut_do_not_raise(clock):
    limiter = Limiter(8)
    before = clock.slot()
    clock.now += 1
    limiter.failed(clock.slot(), crowded=True)
    limiter.succeeded(before)
    assert limiter.limit == 4


# ------------------------------------------------------------------------------------------------ outages


def failures_until_outage(limiter, clock, crowded=False):
    for count in range(1, 100):
        if limiter.failed(clock.slot(10.0), crowded=crowded):
            return count
    raise AssertionError("no outage")


@pytest.mark.parametrize("crowded", [False, True])
def test_outage_after_twenty_failures_in_a_row(clock, crowded):
    assert failures_until_outage(Limiter(4), clock, crowded) == OUTAGE == 20


def test_a_success_starts_the_count_anew(clock):
    limiter = Limiter(4)
    for _ in range(10):
        for _ in range(OUTAGE - 1):
            assert not limiter.failed(clock.slot(10.0))
        limiter.succeeded(clock.slot(10.0))
    assert failures_until_outage(limiter, clock) == OUTAGE


def test_requests_of_one_moment_are_no_outage_but_probed(clock):
    """A server that restarts breaks all connections at once; then one request at a time asks whether it is back."""
    limiter = Limiter(64)
    together = [clock.slot(0.0) for _ in range(64)]
    clock.now += 1
    assert not any(limiter.failed(slot) for slot in together)
    assert limiter.limit == 1
    assert limiter._pace.paused_until == clock.now + PROBES_S[0]
    for wait in PROBES_S[1:]:
        assert not limiter.failed(clock.slot(5.0))
        assert limiter._pace.paused_until == clock.now + wait
    limiter.succeeded(clock.slot(5.0))
    assert limiter.limit >= 32
    assert limiter.failures == 0


class Hasty(Limiter):
    """Counts and does not probe."""

    def failed(self, slot, **settings):
        self.failures += 1
        return self.failures >= OUTAGE


def test_twin_without_probes_gives_up_a_server_that_restarts(clock):
    limiter = Hasty(64)
    together = [clock.slot(0.0) for _ in range(64)]
    assert any(limiter.failed(slot) for slot in together)


# ------------------------------------------------------------------------------------------------ who, and when


async def take(limiter, name, log, **settings):
    slot = await limiter.acquire(**settings)
    log.append(name)
    return slot


def test_first_come_first_served_but_repeats_first():
    async def main():
        limiter, log = Limiter(1), []
        await limiter.acquire()
        tasks = [asyncio.create_task(take(limiter, name, log)) for name in "abc"]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(take(limiter, name, log, again=True)) for name in ("again 1", "again 2")]
        for _ in range(5):
            await asyncio.sleep(0)
            limiter.release()
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(main()) == ["again 1", "again 2", "a", "b", "c"]


def test_cancelled_requests_give_their_place_back():
    async def main():
        limiter, log = Limiter(1), []
        await limiter.acquire()
        waiting, given, last = (asyncio.create_task(take(limiter, name, log)) for name in ("w", "g", "l"))
        await asyncio.sleep(0)
        waiting.cancel()
        limiter.release()  # to `given`, which is cancelled before it runs
        given.cancel()
        await asyncio.wait_for(last, 1)
        return log, limiter.active

    assert asyncio.run(main()) == (["l"], 1)


def test_pauses_and_the_rate_a_minute():
    async def main():
        limiter = Limiter(8, per_minute=3000)
        start = time.monotonic()
        limiter.pause(start + 0.1)
        slots = await asyncio.gather(*(limiter.acquire() for _ in range(6)))
        return [slot.started - start for slot in slots]

    started = asyncio.run(main())
    assert started[0] >= 0.1
    assert all(later - earlier >= 0.0199 for earlier, later in pairwise(started))
    assert started[-1] < 1


def test_too_long_a_pause_ends_all():
    async def main():
        limiter = Limiter(1, max_wait_s=5)
        await limiter.acquire()
        waiting = asyncio.create_task(limiter.acquire())
        await asyncio.sleep(0)
        limiter.pause(time.monotonic() + 3600)
        for later in (waiting, limiter.acquire()):
            with pytest.raises(TransientAPIError, match=r"3,600 s, longer than max_wait_s=5"):
                await later

    asyncio.run(main())


def test_refusals_reach_all_each_with_its_own_error():
    async def main():
        limiter = Limiter(1)
        await limiter.acquire()
        waiting = [asyncio.create_task(limiter.acquire(again=again)) for again in (False, True, False)]
        await asyncio.sleep(0)
        limiter.refuse(PermanentAPIError("the key"))
        limiter.refuse(OutageError("later"))
        errors = await asyncio.gather(*waiting, limiter.acquire(), return_exceptions=True)
        assert {(type(error), str(error)) for error in errors} == {(PermanentAPIError, "the key")}
        assert len(set(map(id, errors))) == 4
        assert isinstance(await limiter.fresh().acquire(), Slot)

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ from loop to loop


def starts(fresh):
    """Two calls, each in a loop of its own: the limit, and the seconds from the pause's start to the second's start."""
    limiter = Limiter(16, per_minute=600)

    async def call(previous):
        current = fresh(previous)
        slot = await current.acquire()
        waiting = asyncio.create_task(current.acquire())  # left behind, as when a call ends by an error
        await asyncio.sleep(0)
        current.failed(slot, crowded=True, retry_after_s=0.3)
        waiting.cancel()
        return current, slot.started

    first, _ = asyncio.run(call(limiter))
    begun = time.monotonic()
    second, started = asyncio.run(call(first))
    return second.limit, started - begun


def test_what_was_learned_outlives_the_event_loop():
    limit, waited = starts(lambda limiter: limiter.fresh())
    assert limit == 4  # halved in each of the two calls
    assert waited >= 0.25


def test_twin_that_starts_anew_forgets():
    limit, waited = starts(lambda limiter: Limiter(16, per_minute=600))
    assert limit == 8
    assert waited < 0.1


def test_the_rate_a_minute_holds_over_calls():
    limiter = Limiter(8, per_minute=600)
    begun = time.monotonic()
    for _ in range(4):
        limiter = limiter.fresh()
        asyncio.run(limiter.acquire())
    assert time.monotonic() - begun >= 0.29


def test_after_an_outage_the_next_call_is_not_sent_one_by_one(clock):
    limiter = Limiter(32)
    failures_until_outage(limiter, clock)
    later = limiter.fresh()
    assert (later.limit, later.failures, later.refused()) == (1, 0, None)
    later.succeeded(clock.slot(5.0))
    assert later.limit >= 16


def test_the_limiter_of_a_config():
    limiter = Limiter.of(ClientConfig(max_concurrency=7, requests_per_minute=30.0, max_wait_s=5.0))
    assert (limiter.most, limiter.per_minute, limiter.max_wait_s) == (7, 30.0, 5.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_concurrency", 0),
        ("max_concurrency", True),
        ("max_attempts", 1.5),
        ("attempt_timeout_s", 0),
        ("deadline_s", float("inf")),
        ("max_wait_s", float("nan")),
        ("requests_per_minute", 0),
        ("requests_per_minute", -1.0),
    ],
)
def test_config_is_checked(name, value):
    with pytest.raises(ValueError, match=f"ClientConfig.{name} must be .*, got "):
        ClientConfig(**{name: value})
