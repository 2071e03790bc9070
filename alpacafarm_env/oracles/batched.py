"""One oracle that many threads ask at once: what waits is asked in one call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
        self._waiting: list[_Asked] = []  # the first of them asks next, unless `_busy`
        self._busy = False
        self._last = 1

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The oracle's answer to these rows, whatever else it is asked in the same call."""
        mine = _Asked(instructions, responses)
        with self._changed:
            self._waiting.append(mine)
            self._changed.notify_all()
            leads, self._busy = not self._busy, True
        try:
            if not leads:
                mine.turn.wait()
            if mine.answer is None:
                self._lead()
        except BaseException:
            self._leave(mine, leads or mine.turn.is_set())
            raise
        assert mine.answer is not None
        if isinstance(mine.answer, Exception):
            raise mine.answer
        return mine.answer

    def _lead(self) -> None:
        """Asks for the first who wait, then hands over to the first of the others."""
        taken: list[_Asked] = []
        try:
            taken = self._take()
            self._ask(taken)
        except BaseException as error:
            for asked in taken:
                asked.end(OracleError(f"A call of oracle {self.name!r} was ended by {type(error).__name__}."))
            raise
        finally:
            self._last = len(taken)
            self._hand_over()

    def _hand_over(self) -> None:
        with self._changed:
            self._busy = bool(self._waiting)
            if self._waiting:
                self._waiting[0].turn.set()

    def _leave(self, mine: _Asked, leads: bool) -> None:
        """A thread that was interrupted asks no more; if it was its turn, it is the next one's."""
        with self._changed:
            left = mine in self._waiting
            if left:
                self._waiting.remove(mine)
        if left and leads:
            self._hand_over()

    def _take(self) -> list[_Asked]:
        with self._changed:
            self._changed.wait_for(self._enough, self.wait_s)
            rows, count = 0, 0
            for asked in self._waiting:
                rows += asked.rows
                if count and rows > self.max_rows:
                    break
                count += 1
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _enough(self) -> bool:
        return len(self._waiting) >= self._last or sum(asked.rows for asked in self._waiting) >= self.max_rows

    def _ask(self, taken: Sequence[_Asked]) -> None:
        """Answers each, as soon as that can be done."""
        failed = self._try(taken)
        if failed is None:
            return
        for asked in taken:
            error = failed if len(taken) == 1 or isinstance(failed, _DOWN) else self._try([asked])
            if error is not None:
                asked.end(error)

    def _try(self, taken: Sequence[_Asked]) -> Exception | None:
        """Asks once for all of them; the error if that fails, which they are not told yet."""
        self.calls += 1
        try:
            instructions, responses = ([text for asked in taken for text in asked.batch[side]] for side in (0, 1))
            verdicts, start = judge(self.oracle, instructions, responses), 0
        except Exception as error:  # noqa: BLE001 -- raised again by the threads that asked
            return error
        for asked in taken:
            part = slice(start, start + asked.rows)
            details = {key: values[part] for key, values in verdicts.details.items()}
            asked.end(Verdicts(verdicts.scores[part], details))
            start = part.stop
        return None


class _Asked:
    """What one thread asks, and the answer or error; `turn` is set when it has that or may ask."""

    def __init__(self, instructions: Sequence[str], responses: Sequence[str]) -> None:
        if len(instructions) != len(responses):
            raise ValueError(f"Expected as many instructions as responses, got {len(instructions)}, {len(responses)}.")
        self.batch, self.rows = (tuple(instructions), tuple(responses)), len(responses)
        self.answer: Verdicts | Exception | None = None
        self.turn = threading.Event()

    def end(self, answer: Verdicts | Exception) -> None:
        """Gives the answer, unless there is one."""
        if self.answer is None:
            self.answer = answer
            self.turn.set()
