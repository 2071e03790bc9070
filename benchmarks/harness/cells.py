"""A cell of a study, and what becomes of it wherever it runs: progress, rows, or what failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from ...errors import AlpacaFarmError, CheckpointError
from .stored import is_full
from .study import Row


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
        full: Whether the disk is full, so that no other cell could be stored either.
    """

    def __init__(self, summary: str, trace: str = "", full: bool = False) -> None:
        super().__init__(summary, trace, full)
        self.summary, self.trace, self.full = summary, trace, full

    @classmethod
    def of(cls, error: Exception) -> CellError:
        """The text of an error."""
        if isinstance(error, CellError):
            return error
        if isinstance(error, AlpacaFarmError):
            return cls(str(error), full=is_full(error))
        return cls(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), is_full(error))


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
        cpus, gpus: What it takes of a Ray cluster's; gpus may be a share of one, and are 0 where a cluster has none.
    """

    key: str
    work: Work
    weight: int = 1
    cpus: float = 1
    gpus: float = 0

    @classmethod
    def silent(cls, key: str, work: Callable[[], Sequence[Row]]) -> Self:
        """A cell whose work reports no progress."""
        return cls(key, partial(_silent, key, work))


def _silent(key: str, work: Callable[[], Sequence[Row]], on_progress: ProgressFn) -> Sequence[Row]:
    on_progress(ProgressUpdate(key, 0))  # its time is counted from here on
    return work()


class Runner(Protocol):
    """Runs cells elsewhere, several at a time: each call of `run` is in a thread of its own."""

    def run(self, cell: Cell, on_progress: ProgressFn) -> Sequence[Row]:
        """The cell's rows; CellError if it fails, CancelledError if `stop` has ended it."""

    def stop(self) -> None:
        """Ends all cells that run."""


def attempt(work: Work, on_progress: ProgressFn) -> list[Row] | CellError:
    """A cell's rows, or what failed in it, to be sent to the process that stores them."""
    try:
        return list(work(on_progress))
    except Exception as error:  # noqa: BLE001 - the other process reports it
        return CellError.of(error)


def rows_of(answer: list[Row] | CellError) -> list[Row]:
    """The rows of an `attempt`; raises what failed, a CheckpointError where no other cell could be stored either."""
    if not isinstance(answer, CellError):
        return answer
    if answer.full:
        raise CheckpointError(f"{answer.summary}. What is stored is kept: make room, and call again.")
    raise answer
