"""Running a coroutine from plain code, whether or not an event loop runs already (as it does in a notebook)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result.

    Where a loop runs already in this thread, the coroutine gets a loop and a thread of its own. Ctrl-C cancels it,
    waits until it has cleaned up, and raises KeyboardInterrupt.

    Raises:
        BaseException: What the coroutine raises.
    """
    inside = True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        inside = False
    if not inside:  # out here, lest every error has that RuntimeError as its context
        return asyncio.run(main)
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def cancellable() -> T:
        task = asyncio.create_task(main)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, cancellable())
        try:
            while not future.done():  # in slices: a wait without an end can miss Ctrl-C while other threads run
                wait([future], timeout=0.1)
            return future.result()
        except KeyboardInterrupt:  # leaving the block waits for the thread, so end its requests first
            for loop, task in tasks:
                with suppress(RuntimeError):  # the loop has ended by itself
                    loop.call_soon_threadsafe(task.cancel)
            raise
