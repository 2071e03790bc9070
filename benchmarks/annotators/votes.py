"""What is counted of judges' opinions: agreement, bias, variance, and likings for place, length and lists.

Votes are arrays [opinions, n]: 1 where b was preferred, 0 where a was, 0.5 for a tie, NaN for no verdict. A figure is
an array [n] with NaN for a pair that it is not about, and its mean over the other pairs is the value, so that opinions
on one pair never pose as independent. Source of the definitions: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), and
the analysis that its authors released, which breaks an even vote always to the same side; here it counts half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...oracles.base import UNSCORED_REASON, PreferenceOracle, compare
from ..harness.estimates import mean_known
from ..harness.evaluation import has_list

LENGTH_GAP: Final = 8
"""Characters in the sandbox; smaller differences in length say nothing there."""
PUBLISHED_LENGTH_GAP: Final = 30
"""Characters in the released analysis, for the longer responses of real models."""


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pairs:
    """n pairs of responses, each pair to one instruction."""

    instructions: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    published: bool = False
    """Take the released analysis's definitions of longer and list, not the sandbox's."""

    def __len__(self) -> int:
        return len(self.instructions)

    def take(self, rows: Sequence[int]) -> Pairs:
        """Some of the pairs."""
        texts, a, b = (tuple(column[row] for row in rows) for column in (self.instructions, self.a, self.b))
        return Pairs(texts, a, b, self.published)

    @cached_property
    def longer(self) -> Array:
        """[n] 1 where b is longer by more than the gap, -1 where a is, 0 elsewhere."""
        gap = np.array([len(b) - len(a) for a, b in zip(self.a, self.b, strict=True)])
        least = PUBLISHED_LENGTH_GAP if self.published else LENGTH_GAP
        return np.sign(np.where(np.abs(gap) > least, gap, 0)).astype(np.float64)

    @cached_property
    def listed(self) -> Array:
        """[n] 1 where b alone has a list, -1 where a alone has one, 0 elsewhere."""
        found = [[has_list(text, published=self.published) for text in column] for column in (self.a, self.b)]
        in_a, in_b = np.array(found, dtype=np.float64)
        return np.asarray(in_b - in_a)


@dataclass(frozen=True)
class Opinions:
    """What a judge said of n pairs, several times: each array is [opinions, n]."""

    votes: Array
    """1 b, 0 a, 0.5 a tie, NaN no verdict."""
    first: Array
    """1 where the response shown first won, 0 where the other did; NaN where no order or no verdict is known."""
    cost_usd: Array
    """US dollars of a verdict; NaN where nobody was paid now (a stored answer, noise), or the price is not known."""
    annotator: NDArray[Any]
    """Names, "" where none is told."""
    noise: float = 0.0
    """Share of the verdicts that are noise, which nobody is asked about."""
    reason: str = ""
    """Why the first of those without a verdict has none, "" where none lacks one or nothing is told."""

    def by(self, annotator: str) -> Opinions:
        """The opinions of one annotator of a pool; all others are NaN."""
        others = self.annotator != annotator
        votes, first, cost = (np.where(others, np.nan, x) for x in (self.votes, self.first, self.cost_usd))
        return Opinions(votes, first, cost, self.annotator)


def ask(pairs: Pairs, judge_of: Callable[[int], PreferenceOracle], seeds: Sequence[int]) -> Opinions:
    """One opinion of each pair for each seed; the judge of a seed is asked once, for all pairs.

    Raises:
        OracleError: A judge answered with something that is no probability.
    """
    told = [compare(judge_of(seed), pairs.instructions, pairs.a, pairs.b) for seed in seeds]

    def detail(key: str, default: object) -> NDArray[Any]:
        return np.array([verdicts.details.get(key, np.full(len(pairs), default)) for verdicts in told])

    votes = np.array([(np.sign(2 * verdicts.scores - 1) + 1) / 2 for verdicts in told])
    shown = detail("shown_first", "")
    first = np.where(shown == "a", 1 - votes, np.where(shown == "b", votes, np.nan))
    # Noise is free on every call, an answer is paid for on one: taken together, a second call would look cheap.
    noised = detail("noised", False).astype(bool)
    free = noised | detail("cached", False).astype(bool)
    paid = np.where(free, np.nan, detail("cost_usd", np.nan).astype(np.float64))
    reason = next(filter(None, detail(UNSCORED_REASON, "").ravel().tolist()), "")
    return Opinions(votes, first, paid, detail("annotator", ""), float(noised.mean()), reason)


def require_verdicts(pairs: Pairs, opinions: Opinions, judge: str) -> None:
    """For judges that answer on every pair of unequal responses of their world.

    Raises:
        DataError: One had no verdict: the pairs are not of the sandbox's world.
    """
    missing = ~np.isin(opinions.votes, (0, 1)).all(axis=0)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise DataError(
            f"pair {row}: expected a verdict of {judge!r} for each pair, got none for "
            f"{pairs.instructions[row]!r}; only instructions of the sandbox can be judged."
        )


def majority(votes: Array) -> Array:
    """What most of the votes [opinions, n] say, [n]: 1 for b, -1 for a, 0 for an even vote, NaN without a vote."""
    balance = np.nan_to_num(2 * votes - 1).sum(axis=0)
    return np.where(np.isnan(votes).all(axis=0), np.nan, np.sign(balance))


def agreement(votes: Array, side: Array) -> Array:
    """Share of the votes [opinions, n] on the side (1, -1; 0 = even, which counts half) [n] or [opinions, n]; [n].

    A tie counts half too. NaN where there is no vote or no side.
    """
    ballots = 2 * votes - 1
    agree = np.where((side == 0) | (ballots == 0), 0.5, ballots == side)
    return mean_known(np.where(np.isnan(votes) | np.isnan(side), np.nan, agree))


def self_agreement(votes: Array) -> Array:
    """Share of the votes [opinions, n] that equal the majority of the others, [n]; NaN for fewer than two votes."""
    ballots = np.nan_to_num(2 * votes - 1)
    others = np.sign(ballots.sum(axis=0) - ballots)
    return agreement(votes, np.where((~np.isnan(votes)).sum(axis=0) > 1, others, np.nan))


def disagreement(votes: Array) -> Array:
    """Share of the pairs of opinions that differ, [n]: 1 vs 1; NaN for fewer than two votes, ties differ from both."""
    num, sides = (~np.isnan(votes)).sum(axis=0), [(votes == side).sum(axis=0) for side in (0, 0.5, 1)]
    same = sum(count * (count - 1) for count in sides)
    return np.where(num > 1, 1 - same / np.maximum(num * (num - 1), 1), np.nan)


def bias(votes: Array, human: Array) -> Array:
    """Whether the majority of the votes errs about the human majority [n]: 1, 0, 0.5 where either is even, or NaN."""
    side = majority(votes)
    error = np.where((side == 0) | (human == 0), 0.5, side != human)
    return np.where(np.isnan(side) | np.isnan(human), np.nan, error)


def figures(opinions: Opinions, pairs: Pairs, human: Array | None) -> dict[str, Array]:
    """Figure -> its value for each pair, [n]; NaN for a pair that it is not about.

    Args:
        opinions: One judge's.
        pairs: What they are about.
        human: The human majority [n]; None for the humans' own opinions. Each is compared with the majority of the
            others then, not of all; bias is 0 by definition and left out.
    """
    votes, itself = opinions.votes, self_agreement(opinions.votes)
    beside = {"agreement": itself}
    if human is not None:
        beside = {"agreement": agreement(votes, human), "bias": bias(votes, human)}
    return {
        **beside,
        "variance": 1 - itself,
        "disagreement": disagreement(votes),
        "prefers_first": mean_known(opinions.first),
        **likings(votes, pairs),
        "cost_per_1000": 1_000 * (1 - opinions.noise) * mean_known(opinions.cost_usd),
    }


def likings(votes: Array, pairs: Pairs) -> dict[str, Array]:
    """Shares of the votes [opinions, n] for the longer response and for the one with a list, where one is."""
    sides = {"prefers_longer": pairs.longer, "prefers_lists": pairs.listed}
    return {name: np.where(side == 0, np.nan, agreement(votes, side)) for name, side in sides.items()}
