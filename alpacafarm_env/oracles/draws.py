"""A pool's draws for each pair: who judges, which response is shown first, which way a doubt falls.

Every draw is keyed on (seed, stream, instruction, unordered pair or single response) alone: not on the batch, the order
of calls or the process, nor on whether annotators are simulated here or asked over HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..seeding import keyed_uniforms

Row = tuple[str, str, str]
"""(instruction, a, b): the pair in the order in which `b_first` and `b_wins` speak of it."""


@dataclass(frozen=True)
class KeyedDraws:
    """Draws keyed on (seed, name, instruction, unordered pair): two pools that share a `name` draw alike.

    Example:
        >>> draws = KeyedDraws(0, "sim_eval")
        >>> draws.annotators([("Why?", "Because.", "No.")], 13) == draws.annotators([("Why?", "No.", "Because.")], 13)
        array([ True])
    """

    seed: int
    name: str

    def annotators(self, rows: Sequence[Row | tuple[str, str]], count: int) -> NDArray[np.int64]:
        """The index of the annotator of each pair or (instruction, response), uniform over range(count), [B]."""
        check_count(count)
        return np.floor(self._uniforms("annotator", rows) * count).astype(np.int64)

    def b_first(self, rows: Sequence[Row]) -> NDArray[np.bool_]:
        """Whether b is shown before a, [B]: for half of all pairs, and the other way for (b, a)."""
        return np.asarray((self._uniforms("order", rows) >= 0.5) == _in_order(rows))

    def b_wins(self, rows: Sequence[Row], log_odds: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether b is preferred, [B]: a draw from its probability, and the other way for (b, a).

        There is one draw for a pair, whoever judges it and whichever response is shown first, so that verdicts differ
        only where the chances do. `log_odds` are log(p / (1 - p)) of the probability p that b is preferred, [B]:
        swapping a pair changes their sign, which is exact where 1 - p is not.
        """
        in_order = _in_order(rows)
        later_wins = self._uniforms("verdict", rows) < probability(np.where(in_order, log_odds, -log_odds))
        return np.asarray(later_wins == in_order)

    def _uniforms(self, purpose: str, rows: Sequence[Row | tuple[str, str]]) -> NDArray[np.float64]:
        unordered = [(row[0], *sorted(row[1:])) for row in rows]
        return keyed_uniforms(self.seed, f"{self.name} {purpose}", unordered)


def probability(log_odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability p of each log(p / (1 - p)), [B]; NaN for NaN."""
    with np.errstate(over="ignore"):  # log-odds of -1000, as a megabyte of text may have: p is 0 then
        return np.asarray(1.0 / (1.0 + np.exp(-log_odds)))


def check_count(count: int) -> None:
    """Raises ValueError unless there is somebody to draw."""
    if count < 1:
        raise ValueError(f"A pool to draw from needs one or more annotators, got {count!r}.")


def _in_order(rows: Sequence[Row]) -> NDArray[np.bool_]:
    return np.array([a <= b for _, a, b in rows], bool)
