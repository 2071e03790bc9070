"""Cells of a study in several processes, with one progress report that a person can read while they run.

Each process has one torch thread: two processes of one thread finish sooner than one process of two, and a run's
numbers do not depend on how many processes there are.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Self, TextIO

from ...errors import AlpacaFarmError, CheckpointError
from .stored import is_full
from .study import Row, Study

if TYPE_CHECKING:
    from ...agents.processes import Processes

WORTH_SHOWING = 0.1
"""Share of the work that must be done before its pace says something: it begins with parts of another pace."""
_CLEAR = "\r\x1b[K"
"""Takes a terminal back to the start of its line and empties it."""


def quiet() -> None:
    """One torch thread in this process, and no bar for every model file that is read or written."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    # Such bars would bury the progress report.
    disable_progress_bar()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class ProgressUpdate:
    """What a running cell tells: how many of its units of work are done, and perhaps a line worth reading."""

    cell: str
    done: int
    text: str = ""


@dataclass(frozen=True)
class Failure:
    """An error as text: errors themselves cannot always travel between processes."""

    summary: str
    traceback: str
    full: bool = False
    """Whether the disk is full, so that no other cell could be kept either."""

    @classmethod
    def of(cls, error: Exception) -> Self:
        """What the error says; of one that is told in words no traceback."""
        told = str(error) if isinstance(error, AlpacaFarmError) else "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {error}", told, is_full(error))


class CellError(Exception):
    """A cell failed in its process."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


ProgressFn = Callable[[ProgressUpdate], None]
Work = Callable[[ProgressFn], Sequence[Row]]
"""A cell's work. For several processes it must be picklable: a module's function, or a `functools.partial` of one."""


class Progress:
    """Turns news of several cells into lines with the share done, the time passed and the time left.

    Args:
        units: Cell -> its units of work.
        processes: How many cells run at a time.
        stream: Where to write. On a terminal a last line is kept up to date as well.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        units: Mapping[str, int],
        processes: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._units = dict(units)
        self._processes = processes
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._start = self._began = clock()
        self._first: dict[str, int] = {}
        self._done = dict.fromkeys(units, 0)
        self._lock = threading.Lock()  # each running cell has a thread of its own

    def update(self, news: ProgressUpdate) -> None:
        """Takes in how far a cell is; the first update of a cell is what an earlier call had left done."""
        with self._lock:
            if not self._first:  # loading what a cell needs, once, says nothing of its pace
                self._began = self._clock()
            self._first.setdefault(news.cell, news.done)
            self._done[news.cell] = news.done
            clear = _CLEAR if self._stream.isatty() else ""
            if news.text:
                print(f"{clear}{self.status()} {news.text}", file=self._stream, flush=True)
            if clear:
                print(f"{clear}{self.status()}", end="", file=self._stream, flush=True)

    def status(self) -> str:
        """For instance "[ 34 %, 1:20 passed, about 2:40 left]"."""
        share = sum(self._done.values()) / max(1, sum(self._units.values()))
        left = self.seconds_left()
        rest = "time left not known yet" if math.isnan(left) else f"about {clock_text(left)} left"
        return f"[{share:4.0%}, {clock_text(self._clock() - self._start)} passed, {rest}]"

    def seconds_left(self) -> float:
        """The pace so far, with the cells that are left spread over the processes; NaN before a tenth is done.

        The last cells may not fill all processes: the remaining time is that of the fullest one, not the average.
        """
        worked = sum(self._done[cell] - first for cell, first in self._first.items())
        if not worked or worked < WORTH_SHOWING * (sum(self._units.values()) - sum(self._first.values())):
            return math.nan
        seconds_per_unit = (self._clock() - self._began) * min(self._processes, len(self._first)) / worked
        loads = [0] * self._processes
        for remaining in sorted((self._units[cell] - done for cell, done in self._done.items()), reverse=True):
            loads[loads.index(min(loads))] += remaining
        return seconds_per_unit * max(loads)


def clock_text(seconds: float) -> str:
    """Seconds as "m:ss" or "h:mm:ss"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def run_cells(study: Study, cells: Mapping[str, Work], units: Mapping[str, int], *, processes: int) -> list[Row]:
    """Runs the cells that the study has not stored yet, up to `processes` at a time; returns the rows of all.

    A cell that raises, or whose process dies, is reported and listed in the study's manifest; the others still run.
    With one process the work is done in this one, and in its main thread: Ctrl-C reaches no other.
    """
    progress = Progress(units, processes)
    running: set[BaseProcess] = set()

    def settle(key: str, work: Work) -> list[Row]:
        def run() -> Sequence[Row]:
            return work(progress.update) if processes == 1 else _run_in_process(work, progress.update, running)

        rows = study.cell(key, run)
        progress.update(ProgressUpdate(key, units[key]))  # the only news of a cell that an earlier call has stored
        return rows

    if processes == 1:
        return [row for key, work in cells.items() for row in _rows_or_failure(study, key, partial(settle, key, work))]
    with ThreadPoolExecutor(processes) as threads:
        # Threads only wait: each looks after one process and stores its cell as soon as that is finished.
        futures = {key: threads.submit(settle, key, work) for key, work in cells.items()}
        try:
            return [row for key, future in futures.items() for row in _rows_or_failure(study, key, future.result)]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise


def lead(world: Processes, study: Study, cells: Mapping[str, Work], units: Mapping[str, int]) -> list[Row]:
    """`run_cells` on the main process of a world: one cell after the other, each together with all that `follow`.

    A cell that fails ends the command, and with it the world: the others may be waiting within that cell.
    """
    progress = Progress(units, 1)

    def together(key: str) -> Sequence[Row]:
        world.from_main(key)
        return cells[key](progress.update)

    rows = []
    for key in cells:
        rows += study.cell(key, partial(together, key))
        progress.update(ProgressUpdate(key, units[key]))
    world.from_main("")
    return rows


def follow(world: Processes, cells: Mapping[str, Work]) -> int:
    """Does, on every other process of a world, the cells that the main one does; the exit status."""
    while key := world.from_main(""):
        cells[key](lambda news: None)
    return 0


def _rows_or_failure(study: Study, key: str, rows: Callable[[], list[Row]]) -> list[Row]:
    try:
        return rows()
    except CheckpointError:
        raise
    except Exception as error:  # whatever stopped one cell, the others go on; it is reported
        if is_full(error):
            raise
        failure = error.failure if isinstance(error, CellError) else Failure.of(error)
        study.failed[key] = failure.summary
        print(f"{study.name}: {key} failed\n{failure.traceback}", file=sys.stderr)
        return []


def _run_in_process(work: Work, on_progress: ProgressFn, running: set[BaseProcess]) -> list[Row]:
    """Does the work in a process of its own.

    Each process has its own pipe: a queue that several share has a lock, and a process that is killed while it holds
    the lock would silence all others for good.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_in_process, args=(work, sender), daemon=True)
    process.start()
    running.add(process)
    sender.close()  # the child's end is then the only one: its death ends the pipe
    try:
        while isinstance(message := receiver.recv(), ProgressUpdate):
            on_progress(message)
    except EOFError:
        process.join()
        died = f"its process died without an answer, exit status {process.exitcode}"
        raise CellError(Failure(died, died)) from None
    finally:
        running.discard(process)
    process.join()
    if isinstance(message, Failure):
        if message.full:
            raise CheckpointError(f"{message.summary}. What is stored is kept: make room, and call again.")
        raise CellError(message)
    rows: list[Row] = message
    return rows


def _die_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_in_process(work: Work, sender: Connection) -> None:
    # Ctrl-C reaches every process of the group: let the parent explain it, and die without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A parent that was killed cannot stop us; going on would write beside the run that takes over.
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    try:
        sender.send(list(work(sender.send)))
    except Exception as error:  # noqa: BLE001 - the parent reports it
        sender.send(Failure.of(error))
