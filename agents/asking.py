"""Paid oracles in a world of processes: the main one asks them, once for the rows of all, and tells the others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import WorldError
from ..oracles.base import NoDeepCopy, RewardOracle, Verdicts, is_paid, judge
from .processes import Processes


class AskedByMain(NoDeepCopy):
    """A reward oracle that the main process asks for the rows of all; they ask it together, in rounds.

    A round ends as it does with the oracle itself, for all processes: with verdicts, in which each finds its own rows,
    or with an error.
    """

    def __init__(self, oracle: RewardOracle, processes: Processes) -> None:
        self._oracle, self._processes = oracle, processes
        self.name = oracle.name
        self._over = False  # all have seen an error

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """The scores of `judge`."""
        return self.judge(instructions, responses).scores

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """One round; this process's verdicts."""
        verdicts = self._round((tuple(instructions), tuple(responses)))
        return Verdicts(np.empty(0)) if verdicts is None else verdicts

    def serve(self) -> None:
        """Takes part, without rows, in the rounds that other processes still need."""
        while self._round(None) is not None:
            pass

    def fail(self, error: BaseException) -> None:
        """Ends the others' rounds by an error of this process, unless they know of it."""
        if not self._over:
            self._processes.gather(f"{type(error).__name__}: {error}")

    def _round(self, rows: tuple[tuple[str, ...], tuple[str, ...]] | None) -> Verdicts | None:
        """None if no process has rows."""
        self._over = True  # unless nothing is raised
        parts: list[Any] = self._processes.gather(rows)
        for rank, part in enumerate(parts):
            if isinstance(part, str):
                raise WorldError(f"Process {rank} has failed: {part}")
        if all(part is None for part in parts):
            return None
        given = [part or ((), ()) for part in parts]
        batch = [[text for part in given for text in part[side]] for side in (0, 1)]
        main = self._processes.is_main
        found = self._processes.together(lambda: judge(self._oracle, *batch) if main else None)
        verdicts = self._processes.from_main(found)
        assert verdicts is not None
        self._over = False
        first = sum(len(part[0]) for part in given[: self._processes.rank])
        own = slice(first, first + len(given[self._processes.rank][0]))
        return Verdicts(verdicts.scores[own], {name: values[own] for name, values in verdicts.details.items()})


def asked(oracle: RewardOracle, processes: Processes) -> RewardOracle:
    """The oracle as processes should ask it that all do so equally often: a paid one by the main process."""
    return AskedByMain(oracle, processes) if processes.count > 1 and is_paid(oracle) else oracle


def judge_together(
    processes: Processes, oracle: RewardOracle, instructions: Sequence[str], responses: Sequence[str]
) -> Verdicts:
    """As `oracles.base.judge`, for processes that ask equally often."""
    return judge(asked(oracle, processes), instructions, responses)


@contextmanager
def asking(oracle: RewardOracle, processes: Processes) -> Iterator[RewardOracle]:
    """The same for processes that ask it as often as each needs to; all enter and leave together."""
    shared = asked(oracle, processes)
    if not isinstance(shared, AskedByMain):
        yield shared
        return
    try:
        yield shared
        shared.serve()
    except Exception as error:
        shared.fail(error)
        raise
