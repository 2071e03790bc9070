"""Runs the cells of a study, here, in several processes of this machine or on a Ray cluster, with one progress report.

Each of several processes has one torch thread: two processes of one thread finish sooner than one process of two, and
a run's numbers do not depend on how many processes there are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ...terminal import make_bar
from .cells import Cell as Cell
from .cells import CellError, Runner, Work, attempt, rows_of
from .cells import ProgressFn as ProgressFn
from .cells import ProgressUpdate as ProgressUpdate
from .stored import is_full
from .study import Row, Study

if TYPE_CHECKING:
    from ...agents.processes import Processes

_FORMAT = "[{percentage:3.0f}%, {elapsed} passed, {remaining} left{postfix}]"


def quiet() -> None:
    """One torch thread in this process, and no progress bar for every model file that is read or written."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]


class Progress:
    """A bar on stderr for several cells together: the share done, the time passed and the time left.

    Args:
        units: Cell -> its units of work.
    """

    def __init__(self, units: Mapping[str, int]) -> None:
        self._bar = make_bar(sum(units.values()), "", bar_format=_FORMAT, smoothing=0, show=bool(units))
        self._units, self._done, self._began = units, dict[str, float](), False
        self._lock = threading.Lock()  # each running cell has a thread of its own

    def update(self, update: ProgressUpdate) -> None:
        """Records how far a cell is; its first update counts what an earlier call had done, at no pace."""
        with self._lock:
            if not self._began:  # stored cells, and what a cell loads, say nothing of the pace
                self._bar.start_t = self._bar.last_print_t = time.time()
                self._began = update.done < self._units.get(update.cell, 0)
            if update.cell not in self._done:
                self._bar.initial += update.done
            if update.state:
                self._bar.set_postfix_str(update.state, refresh=False)
            self._bar.update(update.done - self._done.get(update.cell, 0))
            self._done[update.cell] = update.done
        if update.text:
            self.write(f"{self._bar} {update.text}")

    def write(self, text: str) -> None:
        """Writes lines above the bar."""
        self._bar.write(text, file=sys.stderr)

    def end(self) -> None:
        """Leaves the bar as it is, for what is written next."""
        self._bar.close()


def clock_text(seconds: float) -> str:
    """Seconds as "m:ss" or "h:mm:ss"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def run_cells(study: Study, cells: Iterable[Cell], *, processes: int = 1, world: Processes | None = None) -> list[Row]:
    """Runs the cells that are not stored yet, those that weigh most first; returns the rows of all, in that order.

    A cell that raises, or whose process dies, is reported and listed in the study's manifest; the others still run.
    What would stop the others too ends the command: a full disk, a damaged cell, models and data that have changed.

    Args:
        study: Where they are stored.
        cells: The cells.
        processes: How many run at a time, unless the study is on Ray. A single one is this process, in its main
            thread: Ctrl-C reaches no other.
        world: Processes that `follow` and do each cell together with this one. A cell that fails ends the command,
            and with it the world: the others may be waiting within that cell.

    Raises:
        CheckpointError: See above.
    """
    heaviest_first = sorted(cells, key=lambda cell: -cell.weight)
    study.plan([cell.key for cell in heaviest_first])
    stored = set(study.done)
    # Stored ones first, so that the bar shows what is left of the others.
    own = sorted(heaviest_first, key=lambda cell: cell.key not in stored)
    joined = world if world is not None and world.count > 1 else None
    alone = joined or stored.issuperset(cell.key for cell in own)
    elsewhere, at_a_time = (None, 1) if alone else _runner(study, min(processes, len(own)), len(own))
    progress = Progress({cell.key: cell.weight for cell in own})
    rows: dict[str, list[Row]] = {}
    reporting = threading.Lock()

    def work(cell: Cell) -> Sequence[Row]:
        if joined:
            joined.from_main(cell.key)
        return elsewhere.run(cell, progress.update) if elsewhere else cell.work(progress.update)

    def settle(cell: Cell) -> None:
        try:
            rows[cell.key] = study.cell(cell.key, partial(work, cell))
            progress.update(ProgressUpdate(cell.key, cell.weight))  # the only update of a cell that was stored before
        except Exception as error:  # whatever stopped one cell, the others go on
            if joined or isinstance(error, (CheckpointError, CancelledError)) or is_full(error):
                raise
            with reporting:
                _report(study, cell.key, CellError.of(error), progress)

    try:
        if elsewhere:
            _in_threads(settle, own, at_a_time, elsewhere)
        else:
            for cell in own:
                settle(cell)
    finally:
        progress.end()
    if joined:
        joined.from_main("")
    study.write_manifest()
    return [row for cell in heaviest_first for row in rows.get(cell.key, [])]


def _runner(study: Study, processes: int, num_cells: int) -> tuple[Runner | None, int]:
    """Who runs the cells, and how many at a time; None for this process, one after the other."""
    if study.ray is not None:
        from .on_ray import OnRay

        return OnRay(study.ray), num_cells  # the cluster decides how many really run
    return (OwnProcesses(), processes) if processes > 1 else (None, 1)


def follow(world: Processes, cells: Iterable[Cell]) -> int:
    """Does, on every other process of a world, the cells that `run_cells` does on the main one; the exit status."""
    works = {cell.key: cell.work for cell in cells}
    while key := world.from_main(""):
        works[key](lambda update: None)
    return 0


def _report(study: Study, key: str, error: CellError, progress: Progress) -> None:
    """Reports a failed cell; the same cause often fails many, and is explained once."""
    explained = error.summary in study.failed.values()
    study.failed[key] = error.summary
    progress.write(f"{study.name}: {key!r} failed: {error.summary}")
    if error.trace and not explained:
        progress.write(error.trace)
    study.write_manifest()


def _in_threads(settle: Callable[[Cell], None], cells: Sequence[Cell], num: int, runner: Runner) -> None:
    """Settles the cells, `num` at a time: each thread looks after one cell, and stores it at once."""
    with ThreadPoolExecutor(num) as threads:
        futures = [threads.submit(settle, cell) for cell in cells]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            raise


class OwnProcesses:
    """A process of this machine for each cell: one that is killed is reported, and the others go on."""

    def __init__(self) -> None:
        self._running: set[BaseProcess] = set()

    def run(self, cell: Cell, on_progress: ProgressFn) -> Sequence[Row]:
        """See `Runner`.

        Each process has its own pipe: a queue that several share has a lock, and a process that is killed while it
        holds the lock would silence all others for good.
        """
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work_in_process, args=(cell.work, sender), daemon=True)
        process.start()
        self._running.add(process)
        sender.close()  # the child's end is then the only one: its death ends the pipe
        try:
            while isinstance(message := receiver.recv(), ProgressUpdate):
                on_progress(message)
        except EOFError:
            process.join()
            if process not in self._running:
                raise CancelledError from None  # it was ended with the command: no failure of the cell
            raise CellError(f"its process died without an answer, exit status {process.exitcode}") from None
        finally:
            self._running.discard(process)
        process.join()
        return rows_of(message)

    def stop(self) -> None:
        """See `Runner`."""
        for process in list(self._running):
            self._running.discard(process)
            process.terminate()


def _work_in_process(work: Work, sender: Connection) -> None:
    # Ctrl-C reaches every process of the group: let the parent explain it, and die without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A parent that was killed cannot stop us; going on would write beside the run that takes over.
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    sender.send(attempt(work, sender.send))


def _die_with_the_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
