"""Limits: how many at once, in which order, when, and when no more. No test here waits: the clock is the test's."""

import asyncio
from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest

from alpacafarm_env.errors import OutageError, PermanentAPIError
from alpacafarm_env.llm import limits
from alpacafarm_env.llm.limits import OUTAGE, OUTAGE_S, ClientConfig, Limiter


def use(clock, patch):
    patch.setattr(limits, "time", SimpleNamespace(monotonic=clock.time))


def limiter_of(most, **settings):
    return Limiter(ClientConfig(max_concurrency=most, **settings))


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose clock a test sets; where nothing is left to do, it moves on to the next timer by itself."""

    def __init__(self):
        self.now = 1000.0
        super().__init__()
        select = self._selector.select

        def skip(timeout):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip

    def time(self):
        return self.now

    def settle(self):
        """Run what can run now."""
        for _ in range(5):
            self.call_soon(self.stop)
            self.run_forever()

    def slot(self, later=1.0):
        """A slot that starts `later` than now."""
        self.now += later
        return self.now


@pytest.fixture
def clock(monkeypatch):
    loop = Clock()
    use(loop, monkeypatch)
    yield loop
    loop.close()


def test_slots_are_given_in_order_within_the_limits(clock):
    """Repeats go before all others; one that is cancelled holds nobody up; starts are spaced."""
    limiter, order = limiter_of(2, requests_per_minute=120), []

    async def ask(name, *, again=False):
        order.append((name, await limiter.acquire(again=again)))

    tasks = [clock.create_task(ask(name, again=name == "repeat")) for name in ("a", "b", "c", "gone", "d", "repeat")]
    clock.run_until_complete(asyncio.sleep(2.0))
    assert order == [("a", 1000.0), ("repeat", pytest.approx(1000.5))]
    assert limiter.active == 2
    tasks[3].cancel()
    for _ in range(4):
        limiter.failed(clock.now, retry_after_s=1.0)
        clock.call_soon(limiter.release)
        clock.run_until_complete(asyncio.sleep(2.0))
        assert limiter.active <= 2
    names, starts = zip(*order, strict=True)
    assert names == ("a", "repeat", "b", "c", "d")
    assert min(later - start for start, later in pairwise(starts)) >= 0.5 - 1e-9


def test_a_crowded_server_halves_the_limit_once(clock):
    limiter = limiter_of(32)
    together = [clock.slot(0.0) for _ in range(32)]
    clock.now += 1
    for slot in together:
        assert not limiter.failed(slot, crowded=True)
    assert limiter.pace.limit == 16
    limiter.succeeded(together[0])  # from before the cut: it says nothing of the new limit
    assert limiter.pace.limit == 16
    for expected in (8, 4, 2, 1, 1, 1):
        limiter.failed(clock.slot(), crowded=True)
        assert limiter.pace.limit == expected


def test_successes_raise_the_limit_one_by_one(clock):
    limiter = limiter_of(32)
    limiter.failed(clock.slot(), crowded=True)
    for window in range(1, 16):
        for _ in range(int(limiter.pace.limit)):
            limiter.succeeded(clock.slot(0.001))
        assert 16 + 0.9 * window <= limiter.pace.limit <= 16 + window
    for _ in range(200):
        limiter.succeeded(clock.slot(0.001))
    assert limiter.pace.limit == 32


def test_an_outage_is_many_failures_over_a_while(clock):
    """A server that restarts breaks all connections at once, which is none."""
    limiter = limiter_of(64)
    for _ in range(2):
        assert not any(limiter.failed(clock.now) for _ in range(64))
        limiter.succeeded(clock.slot(OUTAGE_S))  # the count starts anew
    for _ in range(OUTAGE - 1):
        assert not limiter.failed(clock.slot(OUTAGE_S))
    assert limiter.failed(clock.slot())
    later = Limiter(limiter.config, limiter.pace)
    assert (later.failures, later.refused()) == (0, None)


async def waiting(limiter, *again):
    await limiter.acquire()
    tasks = [asyncio.create_task(limiter.acquire(again=each)) for each in again]
    await asyncio.sleep(0)
    return tasks


def test_refusals_reach_all_each_with_its_own_error(clock):
    async def main():
        limiter = limiter_of(1)
        tasks = await waiting(limiter, False, True, False)
        limiter.refuse(PermanentAPIError("the key"))
        limiter.refuse(OutageError("later"))
        errors = await asyncio.gather(*tasks, limiter.acquire(), return_exceptions=True)
        assert {(type(error), str(error)) for error in errors} == {(PermanentAPIError, "the key")}
        assert len(set(map(id, errors))) == 4

    clock.run_until_complete(main())


@pytest.mark.parametrize(("name", "value"), [("max_concurrency", True), ("attempt_timeout_s", 0), ("deadline_s", inf)])
def test_a_config_is_checked(name, value):
    with pytest.raises(ValueError, match=name):
        ClientConfig(**{name: value})
