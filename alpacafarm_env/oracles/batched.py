"""One oracle that many threads ask at once: what waits is asked in one call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from ..errors import BudgetExceededError, OutageError
from .base import DetailedOracle, OracleError, RewardOracle, Verdicts, is_paid, judge

MAX_ROWS: Final = 256
WAIT_S: Final = 0.004
_DOWN: Final = (OutageError, BudgetExceededError, ConnectionError, TimeoutError)
"""Errors that no row is the cause of."""


class MicroBatched(DetailedOracle):
    """Asks another oracle, never twice at once: whoever comes during a call is part of the next one.

    The first to come waits for as many others as were asked for last, at most `wait_s`: one thread alone does not
    wait. If a call for several fails, each is asked for alone, so that nobody fails by another's texts; but where the
    error says that the oracle cannot be reached, or may spend no more, all get it.

    There is no thread of its own: those who ask take turns to ask for all.

    Args:
        oracle: Who is asked; its `name` and `paid` are this oracle's too.
        max_rows: Most rows of a call; who asks about more than that is asked for alone.
        wait_s: Most seconds to wait for others.
    """

    def __init__(self, oracle: RewardOracle, *, max_rows: int = MAX_ROWS, wait_s: float = WAIT_S) -> None:
        self.oracle, self.name, self.paid = oracle, oracle.name, is_paid(oracle)
        self.max_rows, self.wait_s = max_rows, wait_s
        self.calls = 0
        """Calls of the oracle so far."""
        self._changed = threading.Condition()
        self._waiting: list[_Query] = []  # the first of them asks next, unless `_busy`
        self._busy = False
        self._last = 1

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The oracle's answer to these rows, whatever else it is asked in the same call."""
        mine = _Query(instructions, responses)
        with self._changed:
            self._waiting.append(mine)
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: mine.answer or (not self._busy and self._waiting[0] is mine))
                leads = mine.answer is None
                self._busy |= leads
            if leads:
                self._lead()
        except BaseException:  # a thread that was interrupted asks no more
            with self._changed:
                self._waiting = [query for query in self._waiting if query is not mine]
                self._changed.notify_all()
            raise
        assert mine.answer is not None
        if isinstance(mine.answer, Exception):
            raise mine.answer
        return mine.answer

    def _lead(self) -> None:
        """Asks for the first who wait, and answers each as soon as that can be done."""
        batch: list[_Query] = []
        try:
            with self._changed:
                self._changed.wait_for(self._enough, self.wait_s)
                batch = self._take()
            error = self._ask(batch)
            for query in batch if error else ():
                alone = error if len(batch) == 1 or isinstance(error, _DOWN) else self._ask([query])
                if alone is not None:
                    self._answer(query, alone)
        except BaseException as error:
            for query in batch:
                self._answer(query, OracleError(f"A call of oracle {self.name!r} was ended by {type(error).__name__}."))
            raise
        finally:
            with self._changed:
                self._last, self._busy = len(batch), False
                self._changed.notify_all()

    def _enough(self) -> bool:
        return len(self._waiting) >= self._last or sum(query.rows for query in self._waiting) >= self.max_rows

    def _take(self) -> list[_Query]:
        """The first who wait, with at most `max_rows` together, or one with more."""
        totals = list(accumulate(query.rows for query in self._waiting))
        count = max(1, sum(total <= self.max_rows for total in totals))
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _ask(self, batch: Sequence[_Query]) -> Exception | None:
        """Asks once for all of them; the error if that fails, which they are not told yet."""
        self.calls += 1
        try:
            columns = ([text for query in batch for text in query.batch[side]] for side in (0, 1))
            verdicts, start = judge(self.oracle, *columns), 0
        except Exception as error:  # noqa: BLE001 -- raised again by the threads that asked
            return error
        for query in batch:
            part = slice(start, start + query.rows)
            details = {key: values[part] for key, values in verdicts.details.items()}
            self._answer(query, Verdicts(verdicts.scores[part], details))
            start = part.stop
        return None

    def _answer(self, query: _Query, answer: Verdicts | Exception) -> None:
        """Gives the answer, unless there is one."""
        with self._changed:
            query.answer = query.answer or answer
            self._changed.notify_all()


class _Query:
    """One thread's rows, and the answer or error."""

    def __init__(self, instructions: Sequence[str], responses: Sequence[str]) -> None:
        if len(instructions) != len(responses):
            raise ValueError(f"Expected as many instructions as responses, got {len(instructions)}, {len(responses)}.")
        self.batch, self.rows = (tuple(instructions), tuple(responses)), len(responses)
        self.answer: Verdicts | Exception | None = None
