"""How judges judge, counted from their opinions: agreement, bias, variance, and likings for place, length and lists.

Votes are arrays [opinions, n]: 1 where b was preferred, 0 where a was, 0.5 for a tie, NaN for no verdict. A figure is
an array [n], NaN for pairs it is not about. Its value is the mean over the other pairs, so several opinions on one pair
never count as independent.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9. The definitions are those of the
authors' released analysis, except that an even vote, which they always give to the same side, counts half.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ..oracles.base import UNSCORED_REASON, PreferenceOracle, compare
from ..oracles.dials import LIST_ITEM
from ..statistics import mean_known

LENGTH_GAP: Final = 8
"""Characters; in the sandbox, smaller differences in length mean nothing."""
PUBLISHED_LENGTH_GAP: Final = 30
"""The same in the released analysis, for the longer responses of real models."""
COST: Final = "cost_per_1000"
"""US dollars for 1,000 verdicts."""
_PUBLISHED_LIST: Final = re.compile(r"^\s*(?:[-*•]|\d+[.)]|\w[.)])", re.MULTILINE)

Array = NDArray[np.float64]


def has_list(response: str, *, published: bool = False) -> bool:
    """Whether a line starts with a bullet or a number, or by the released analysis's definition also with a letter."""
    return (_PUBLISHED_LIST if published else LIST_ITEM).search(response) is not None


@dataclass(frozen=True)
class Pairs:
    """n pairs of responses, each pair to one instruction."""

    instructions: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    published: bool = False
    """Use the released analysis's definitions of longer and list, not the sandbox's."""

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, str]]) -> Self:
        """Pairs from (instruction, a, b)."""
        instructions, a, b = zip(*rows, strict=True)
        return cls(instructions, a, b)

    def __len__(self) -> int:
        return len(self.instructions)

    @cached_property
    def longer(self) -> Array:
        """[n] 1 where b is longer by more than the gap, -1 where a is, 0 elsewhere."""
        gap = np.array([len(b) - len(a) for a, b in zip(self.a, self.b, strict=True)])
        least = PUBLISHED_LENGTH_GAP if self.published else LENGTH_GAP
        return np.sign(np.where(np.abs(gap) > least, gap, 0)).astype(np.float64)

    @cached_property
    def listed(self) -> Array:
        """[n] 1 where only b has a list, -1 where only a has one, 0 elsewhere."""
        lists = [[has_list(text, published=self.published) for text in column] for column in (self.a, self.b)]
        in_a, in_b = np.array(lists, dtype=np.float64)
        return np.asarray(in_b - in_a)


@dataclass(frozen=True)
class Opinions:
    """A judge's verdicts on n pairs, several times; arrays are [opinions, n]."""

    votes: Array
    first: Array
    """1 where the response shown first won, 0 where the other did, NaN without a known order or verdict."""
    cost_usd: Array
    """Per verdict; NaN where nothing was paid now (a stored answer, noise) or the price is unknown."""
    annotator: NDArray[Any]
    """Names, "" where unknown."""
    noise: float = 0.0
    """Share of the verdicts that are noise, for which nobody is asked."""
    reason: str = ""
    """Why the first missing verdict is missing, if known."""

    def by(self, annotator: str) -> "Opinions":
        """The opinions of one annotator of a pool; all others are NaN."""
        others = self.annotator != annotator
        votes, first, cost = (np.where(others, np.nan, x) for x in (self.votes, self.first, self.cost_usd))
        return Opinions(votes, first, cost, self.annotator)


def ask(pairs: Pairs, judge_of: Callable[[int], PreferenceOracle], seeds: Sequence[int]) -> Opinions:
    """One opinion on each pair for each seed; a seed's judge is asked once, for all pairs.

    Raises:
        OracleError: A judge's answer is not a probability.
    """
    answers = [compare(judge_of(seed), pairs.instructions, pairs.a, pairs.b) for seed in seeds]

    def detail(key: str, default: object) -> NDArray[Any]:
        return np.array([verdicts.details.get(key, np.full(len(pairs), default)) for verdicts in answers])

    votes = np.array([(np.sign(2 * verdicts.scores - 1) + 1) / 2 for verdicts in answers])
    shown = detail("shown_first", "")
    first = np.where(shown == "a", 1 - votes, np.where(shown == "b", votes, np.nan))
    # Noise is free in every call, a stored answer only in later ones: counted alike, a second call would look cheaper.
    noised = detail("noised", False).astype(bool)
    free = noised | detail("cached", False).astype(bool)
    paid = np.where(free, np.nan, detail("cost_usd", np.nan).astype(np.float64))
    reason = next(filter(None, detail(UNSCORED_REASON, "").ravel().tolist()), "")
    return Opinions(votes, first, paid, detail("annotator", ""), float(noised.mean()), reason)


def majority(votes: Array) -> Array:
    """The majority of the votes [opinions, n], [n]: 1 for b, -1 for a, 0 for an even vote, NaN without a vote."""
    balance = np.nan_to_num(2 * votes - 1).sum(axis=0)
    return np.where(np.isnan(votes).all(axis=0), np.nan, np.sign(balance))


def agreement(votes: Array, side: Array) -> Array:
    """Share of the votes [opinions, n] for the side (1: b, -1: a, 0: even) [n] or [opinions, n]; [n].

    A tie and an even side count half. NaN without votes or a side.
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
    """Share of the pairs of votes that differ, a tie from both others, [n]; NaN for fewer than two votes."""
    num, sides = (~np.isnan(votes)).sum(axis=0), [(votes == side).sum(axis=0) for side in (0, 0.5, 1)]
    same = sum(count * (count - 1) for count in sides)
    return np.where(num > 1, 1 - same / np.maximum(num * (num - 1), 1), np.nan)


def bias(votes: Array, human: Array) -> Array:
    """Whether the majority of the votes differs from the human one [n]: 1, 0, 0.5 where either is even, or NaN."""
    side = majority(votes)
    error = np.where((side == 0) | (human == 0), 0.5, side != human)
    return np.where(np.isnan(side) | np.isnan(human), np.nan, error)


def likings(votes: Array, pairs: Pairs) -> dict[str, Array]:
    """Shares of the votes [opinions, n] for the longer response and for the one with a list, where one is."""
    sides = {"prefers_longer": pairs.longer, "prefers_lists": pairs.listed}
    return {name: np.where(side == 0, np.nan, agreement(votes, side)) for name, side in sides.items()}


def figures(opinions: Opinions, pairs: Pairs, human: Array | None) -> dict[str, Array]:
    """Figure -> its value for each pair, [n].

    `human` is the human majority [n]; None for the humans' own opinions, each of which is compared with the majority of
    the others, and whose bias is 0 by definition and left out.
    """
    votes, itself = opinions.votes, self_agreement(opinions.votes)
    compared = {"agreement": itself}
    if human is not None:
        compared = {"agreement": agreement(votes, human), "bias": bias(votes, human)}
    return {
        **compared,
        "variance": 1 - itself,
        "disagreement": disagreement(votes),
        "prefers_first": mean_known(opinions.first),
        **likings(votes, pairs),
        COST: 1_000 * (1 - opinions.noise) * mean_known(opinions.cost_usd),
    }
