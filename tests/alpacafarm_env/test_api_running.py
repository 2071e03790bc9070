"""run: from plain code, inside a running loop, with errors and with Ctrl-C."""

import asyncio
import contextvars
import signal
import threading
import time

import pytest

from alpacafarm_env.llm.run_sync import run


async def double(value):
    await asyncio.sleep(0.001)
    return 2 * value


async def fail():
    await asyncio.sleep(0.001)
    raise ValueError("as it should")


def inside(call):
    """Call from a function that a running loop calls, as a notebook's cell is."""

    async def cell():
        return call()

    return asyncio.run(cell())


@pytest.mark.parametrize("place", [lambda call: call(), inside])
def test_results_and_errors(place):
    assert place(lambda: run(double(21))) == 42
    with pytest.raises(ValueError, match="as it should") as caught:
        place(lambda: run(fail()))
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_twin_asyncio_run_fails_inside_a_loop():
    coroutine = double(21)
    with pytest.raises(RuntimeError, match="running event loop"):
        inside(lambda: asyncio.run(coroutine))
    coroutine.close()


def test_context_of_plain_code_is_seen():
    number = contextvars.ContextVar("number", default=0)
    number.set(3)

    async def read():
        return number.get()

    assert run(read()) == 3


def interrupted(place):
    """Ctrl-C while a coroutine sleeps: what it cleaned up, and the seconds it took."""
    cleaned = []

    async def sleeper():
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            await asyncio.sleep(20)
        finally:
            await asyncio.sleep(0.01)  # such as closing connections
            cleaned.append(True)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        place(lambda: run(sleeper()))
    return cleaned, time.monotonic() - start


def notebook(call):
    """As `inside`, but without asyncio.run, which would turn the signal into a cancellation that comes later."""

    async def cell():
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.parametrize("place", [lambda call: call(), notebook])
def test_interrupt_cancels_cleanly(place):
    cleaned, seconds = interrupted(place)
    assert cleaned == [True]
    assert seconds < 5
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if "ThreadPool" in t.name]
