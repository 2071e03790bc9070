"""Runs the cells of a study, here, in several processes of this machine or on a Ray cluster, with one progress report.

Each of several processes has one torch thread: two processes of one thread finish sooner than one process of two, and
a run's numbers do not depend on how many processes there are.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...errors import AlpacaFarmError, CheckpointError, DataError
from ...terminal import make_bar
from .stored import is_full
from .study import Row, Study

if TYPE_CHECKING:
    from ...agents.processes import Processes

_FORMAT = "[{percentage:3.0f}%, {elapsed} passed, {remaining} left{postfix}]"
SLOW_IMPORTS = ["alpacafarm_env.agents.reward_modeling", "alpacafarm_env.benchmarks.experiment.engine"]
RETRIES = 3  # workers that a cell may lose before it has failed: one that takes too much memory would lose all of them


@dataclass(frozen=True)
class ProgressUpdate:
    """Completed units of a running cell, an optional line for the log, and where the cell is, for the bar itself."""

    cell: str
    done: float
    text: str = ""
    state: str = ""


class CellError(Exception):
    """A failure in a cell, as text: errors themselves cannot always travel between processes.

    Attributes:
        trace: The traceback, of an unexpected error.
    """

    def __init__(self, summary: str, trace: str = "") -> None:
        super().__init__(summary, trace)
        self.summary, self.trace = summary, trace

    @classmethod
    def of(cls, error: Exception) -> CellError:
        """The text of an error."""
        if isinstance(error, CellError):
            return error
        if isinstance(error, AlpacaFarmError):
            return cls(str(error))
        return cls(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


ProgressFn = Callable[[ProgressUpdate], None]
Work = Callable[[ProgressFn], Sequence[Row]]
"""The work of a cell: a module's function, or a `functools.partial` of one, so that another process can be sent it."""


@dataclass(frozen=True)
class Cell:
    """One cell of a study: it carries its own settings, so that any process that sees the study's folder can run it.

    Attributes:
        key: The name it is stored under.
        work: What it does.
        weight: Its units of work.
        gpus: How many of a Ray cluster's GPUs it takes, or what share of one; none where the cluster has none.
    """

    key: str
    work: Work
    weight: int = 1
    gpus: float = 0

    @classmethod
    def silent(cls, key: str, work: Callable[[], Sequence[Row]]) -> Self:
        """A cell whose work reports no progress."""
        return cls(key, partial(_silent, key, work))


def _silent(key: str, work: Callable[[], Sequence[Row]], on_progress: ProgressFn) -> Sequence[Row]:
    on_progress(ProgressUpdate(key, 0))  # its time is counted from here on
    return work()


def attempt(work: Work, on_progress: ProgressFn) -> list[Row] | Exception:
    """A cell's rows, or what failed in it; a CheckpointError says that no other cell could be stored either."""
    try:
        return list(work(on_progress))
    except Exception as error:  # noqa: BLE001 - the other process reports it
        if is_full(error):
            return CheckpointError(f"{error}. What is stored is kept: make room, and call again.")
        return CellError.of(error)


def rows_of(answer: list[Row] | Exception) -> list[Row]:
    """The rows of an `attempt`; raises what failed."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def quiet(*, alone: bool = False) -> None:
    """No progress bar for every model file that is read or written; one torch thread, unless the process is alone."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    if not alone:
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
    if failed := [cell.key for cell in own if cell.key in study.failed]:
        print(f"error: cells that failed: {'; '.join(failed)}. Why is above.", file=sys.stderr)
    return [row for cell in heaviest_first for row in rows.get(cell.key, [])]


def _runner(study: Study, processes: int, num_cells: int) -> tuple[OwnProcesses | OnRay | None, int]:
    """Who runs the cells, and how many at a time; None for this process, one after the other."""
    if study.ray is not None:
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


def _in_threads(settle: Callable[[Cell], None], cells: Sequence[Cell], num: int, runner: OwnProcesses | OnRay) -> None:
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
        self._context = _start_method()

    def run(self, cell: Cell, on_progress: ProgressFn) -> Sequence[Row]:
        """The cell's rows; CellError if it fails, CancelledError if `stop` has ended it.

        Each process has its own pipe: a queue that several share has a lock, and a process that is killed while it
        holds the lock would silence all others for good.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work_in_process, args=(cell.work, sender, dict(os.environ)), daemon=True
        )
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
        """Ends all cells that run."""
        for process in list(self._running):
            self._running.discard(process)
            process.terminate()


def _start_method() -> Any:
    """Where they may, processes are forked from one that has imported what takes seconds.

    Not beside a CUDA device, which a library asks about when it is imported: a process forked after that has lost it.
    """
    import torch

    forks = sys.platform == "linux" and not torch.cuda.is_available()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    context.set_forkserver_preload(SLOW_IMPORTS)
    return context


def _work_in_process(work: Work, sender: Connection, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # that of now: the process that this one is forked from has an older one
    # Ctrl-C reaches every process of the group: let the parent explain it, and die without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A parent that was killed cannot stop us; going on would write beside the run that takes over.
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    sender.send(attempt(work, sender.send))


def _die_with_the_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


class OnRay:
    """A Ray cluster, whose tasks are the cells: a study outgrows its machine.

    Every node needs the package as the driver has it, and sees the study's folder under the same path. The driver alone
    stores rows. A task whose worker or node is lost is run again, by Ray.

    Args:
        address: As of `ray.init`; "" for the one that RAY_ADDRESS names or that runs on this machine, else a new one.

    Raises:
        DataError: Ray is not installed, or no cluster answers there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray as installed
        except ImportError as error:
            raise DataError(f"--ray: {error}. Install it (pip install 'alpacafarm-env[ray]').") from error
        ray: Any = installed  # parts of it have no types
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that starts here reports to nobody
            try:
                ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise DataError(f"--ray {address}: expected the address of a Ray cluster, got {error}") from error
        self._ray, self._running = ray, set[Any]()
        self._has_gpus = ray.cluster_resources().get("GPU", 0) > 0

    def run(self, cell: Cell, on_progress: ProgressFn) -> Sequence[Row]:
        """As `OwnProcesses.run`; progress is of whole cells."""
        on_progress(ProgressUpdate(cell.key, 0))
        gpus = cell.gpus if self._has_gpus else 0  # without any it would wait for ever; on CPUs it takes longer
        task = self._ray.remote(_attempt_there).options(name=cell.key, num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
        answer = task.remote(self._ray.cloudpickle.dumps(cell.work), str(Path.cwd()), sys.path)
        self._running.add(answer)
        try:
            return rows_of(self._ray.get(answer))
        except self._ray.exceptions.RayError as error:
            if answer not in self._running:
                raise CancelledError from None  # it was ended with the command: no failure of the cell
            raise CellError(f"its workers were lost, {RETRIES + 1} of them: {error}") from None
        finally:
            self._running.discard(answer)

    def stop(self) -> None:
        """Ends all cells that run."""
        for answer in list(self._running):
            self._running.discard(answer)
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(answer, force=True)


def _attempt_there(pickled: bytes, folder: str, path: list[str]) -> list[Row] | Exception:
    """On a node: in the driver's folder, as paths may be relative, and with its modules, one's own among them."""
    from ray import cloudpickle

    loads: Any = cloudpickle.loads
    os.chdir(folder)
    sys.path += [entry for entry in path if entry not in sys.path]
    work: Work = loads(pickled)
    return attempt(work, lambda update: None)
