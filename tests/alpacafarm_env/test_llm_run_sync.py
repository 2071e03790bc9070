"""run: from plain code, inside a running loop, with errors and with Ctrl-C."""

import asyncio
import signal
import threading
import time

import pytest

from alpacafarm_env.llm.client import run


def plain(call):
    return call()


def notebook(call):
    """From a function that a running loop calls; asyncio.run would turn the signal into a later cancellation."""

    async def cell():
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.parametrize("place", [plain, notebook])
def test_results_and_errors(place):
    async def work(value):
        await asyncio.sleep(0.001)
        return 42 // value

    assert place(lambda: run(work(2))) == 21
    with pytest.raises(ZeroDivisionError) as caught:
        place(lambda: run(work(0)))
    assert caught.value.__context__ is caught.value.__cause__ is None


@pytest.mark.parametrize("place", [plain, notebook])
def test_interrupt_cancels_cleanly(place):
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
    assert cleaned == [True]
    assert time.monotonic() - start < 5
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
