"""Simulated annotators of the sandbox: 16 human raters, the pool of 13 annotators and the single greedy one.

Annotator j sees the parts of gold through its own weights, adds its tastes (length, lists, courtesies), prefers the
first response shown by some margin, and is uncertain by its temperature:
P(b preferred) = sigmoid((u_j(b) - u_j(a) + position) / temperature). A verdict is a draw from it.
The biases follow what Dubois et al. 2023 (arXiv 2305.14387, Figs 7 to 9) report of crowd workers and LLM annotators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..arguments import FAMILIES, match_family
from ..oracles.base import DetailedJudge, NoDeepCopy, PreferenceOracle, RewardOracle, Verdicts
from ..oracles.judges import Flip, HigherReward, KeyedDraws, Row, probability
from ..seeding import keyed_rng
from . import gold, tasks

FEATURES: Final = ("complete", "false", "repeated", "form", "fluent", "excess", "length", "list", "courtesy")
_LONGEST: Final = 300
"""Characters beyond which a response is just long, so that a taste for length is none for a page of blanks."""
_GOLD: Final = np.array(astuple(gold.WEIGHTS))


@dataclass(frozen=True)
class Annotator:
    """How one annotator differs from gold; utilities are in units of gold.

    `attention` scales the weights of gold's parts: 1 sees them as gold does, 0 not at all.
    """

    name: str
    attention: tuple[float, float, float, float, float, float]
    length: float
    """Per doubling of the characters."""
    lists: float
    """For a response with bullets."""
    courtesy: float
    """For an opener or closer."""
    position: float
    """For the response shown first."""
    temperature: float

    def weights(self) -> NDArray[np.float64]:
        """In the order of `FEATURES`."""
        tastes = (self.length, self.lists, self.courtesy)
        return np.concatenate([_GOLD * np.array(self.attention), np.array(tastes)])


# Five GPT-4-like: attentive; one likes long answers, one short ones with lists. Four ChatGPT-like: half blind to
# falsehoods and repetition, taken in by length and courtesy. Four Davinci003-like: superficial and position-biased.
POOL: Final = (
    Annotator("gpt4_1", (1.0, 0.9, 0.8, 1.0, 1.0, 1.0), 0.1, 0.3, 0.0, 0.1, 0.3),
    Annotator("gpt4_2", (0.7, 0.8, 0.8, 1.0, 1.5, 0.5), 1.0, -0.3, 0.6, 0.1, 0.3),
    Annotator("gpt4_3", (0.9, 0.9, 0.8, 1.0, 1.0, 1.0), 0.1, 0.4, 0.1, 0.0, 0.3),
    Annotator("gpt4_4", (0.7, 0.8, 0.8, 0.8, 1.0, 1.0), 0.2, 0.5, 0.3, 0.2, 0.3),
    Annotator("gpt4_5", (0.4, 0.9, 0.8, 0.8, 0.5, 2.0), -1.6, 1.3, -0.3, 0.2, 0.3),
    Annotator("chatgpt_1", (0.25, 0.5, 0.5, 0.6, 0.5, 1.0), 0.1, 0.6, 0.6, 0.2, 0.3),
    Annotator("chatgpt_2", (0.3, 0.5, 0.5, 0.5, 0.5, 1.0), 0.0, 0.4, 0.7, -0.2, 0.3),
    Annotator("chatgpt_3", (0.2, 0.4, 0.4, 0.4, 0.5, 1.0), 0.2, 0.6, 0.8, 0.2, 0.3),
    Annotator("chatgpt_4", (0.2, 0.4, 0.4, 0.4, 0.5, 1.0), 0.1, 0.6, 0.9, 0.2, 0.3),
    Annotator("davinci003_1", (0.15, 0.3, 0.3, 0.3, 0.5, 1.0), 0.1, 0.7, 0.8, 0.2, 0.3),
    Annotator("davinci003_2", (0.2, 0.3, 0.3, 0.3, 0.5, 1.0), 0.3, 0.3, 0.8, -0.2, 0.3),
    Annotator("davinci003_3", (0.15, 0.3, 0.3, 0.3, 0.5, 1.0), 0.1, 0.9, 0.9, 0.2, 0.3),
    Annotator("davinci003_4", (0.15, 0.3, 0.3, 0.2, 0.5, 1.0), 0.4, 0.2, 0.6, -0.2, 0.3),
)
GREEDY: Final = (Annotator("greedy_gpt4", (0.25, 0.3, 0.3, 0.3, 0.4, 0.6), -0.4, -0.1, 1.1, 0.0, 0.07),)
"""p_sim^GPT-4: one prompt, nearly deterministic. As in the paper it agrees with people about as often as the pool
does, and varies less: so it overlooks more and has tastes, which all its labels share."""


def _human(number: int) -> Annotator:
    """Gold's weights and mild tastes, each varied for the person."""
    rng = keyed_rng(0, "human rater", number)
    attention = tuple(np.exp(rng.normal(0.0, 0.25, size=6)).tolist())
    length, lists, courtesy = rng.normal((0.1, 1.6, 0.1), (0.4, 0.6, 0.2)).tolist()
    return Annotator(f"human_{number}", attention, length, lists, courtesy, float(rng.normal(0.2, 0.2)), 1.7)


HUMANS: Final = tuple(_human(number) for number in range(1, 17))


@lru_cache(maxsize=200_000)
def _features(instruction: str, response: str) -> tuple[float, ...] | None:
    parts = gold.parts(instruction, response)
    if parts is None:
        return None
    courteous = any(text in response for text in gold.OPENERS + gold.CLOSERS)
    bullets = bool(re.search(r"^- ", response, re.MULTILINE))
    return (*astuple(parts), float(np.log2(min(len(response), _LONGEST) + 10)), float(bullets), float(courteous))


def features(instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
    """[B, len(FEATURES)]; NaN for an instruction of another world."""
    nothing = (float("nan"),) * len(FEATURES)
    rows = [_features(str(i), r) or nothing for i, r in zip(instructions, responses, strict=True)]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(FEATURES))


def log_odds(
    gaps: NDArray[np.float64],
    weights: NDArray[np.float64],
    position: NDArray[np.float64] | float,
    temperature: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """Log-odds that the second response shown is preferred, [B].

    `gaps` is how much more of each feature the second response has, [B, len(FEATURES)]; `position` the utility of being
    shown first. The others may be the same for all pairs.
    """
    return np.asarray(((gaps * weights).sum(axis=1) - position) / temperature)


class Annotators(DetailedJudge):
    """A pool: one annotator is drawn for each pair, shown it in a random order, and asked once.

    Draws are those of `KeyedDraws(seed, name)`: a pair always gets the same verdict from the same annotator, and
    swapping the responses swaps the verdict. The judge server draws the same, so `AnnotatorPool` gets these verdicts
    over HTTP. Another `seed` is another opinion on the same pairs.
    """

    blank: Final = {"annotator": "", "shown_first": "", "cost_usd": 0.0}
    draws_order: Final = True

    def __init__(self, name: str, annotators: Sequence[Annotator], *, seed: int = 0) -> None:
        self.name = name
        self.annotators = tuple(annotators)
        self.seed = seed
        self._draws = KeyedDraws(seed, name)
        self._weights = np.array([annotator.weights() for annotator in self.annotators])  # [annotators, features]
        self._position = np.array([annotator.position for annotator in self.annotators])
        self._temperature = np.array([annotator.temperature for annotator in self.annotators])

    def probabilities(
        self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str], index: int, *, a_first: bool = True
    ) -> NDArray[np.float64]:
        """P(b preferred), [B], by annotator `index` alone, given which response is shown first."""
        rows = list(zip(map(str, instructions), a, b, strict=True))
        return probability(self._log_odds(rows, np.full(len(a), index), b_first=np.full(len(a), not a_first)))

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """[B]: 1 where b is preferred, 0 where a is, 0.5 for equal texts; DataError for another world's instruction."""
        rows = list(zip(map(str, instructions), a, b, strict=True))
        who = self._draws.annotators(rows, len(self.annotators))
        b_first = self._draws.b_first(rows)
        odds = self._log_odds(rows, who, b_first=b_first)
        same = np.array([x == y for _, x, y in rows], dtype=bool)
        scores = np.where(same, 0.5, self._draws.b_wins(rows, odds))
        names = np.array([annotator.name for annotator in self.annotators])
        details: dict[str, NDArray[Any]] = {
            "annotator": names[who],
            "shown_first": np.where(b_first, "b", "a"),
            "cost_usd": np.zeros(len(who)),
        }
        return Verdicts(scores, details)

    def _log_odds(
        self, rows: Sequence[Row], who: NDArray[np.int64], *, b_first: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Log-odds that b is preferred by each pair's annotator, [B]."""
        instructions, a, b = ([row[place] for row in rows] for place in range(3))
        gaps = features(instructions, b) - features(instructions, a)
        if np.isnan(gaps).any():
            tasks.refuse_foreign(instructions)
        position = np.where(b_first, -1.0, 1.0) * self._position[who]
        return log_odds(gaps, self._weights[who], position, self._temperature[who])


class Utility(NoDeepCopy):
    """The mean utility of annotators, in units of gold, without draw, comparison or reward model.

    What optimizing it gains or loses is due to their weights and tastes alone.
    """

    def __init__(self, name: str, annotators: Sequence[Annotator]) -> None:
        self.name = name
        self._weights = np.mean([annotator.weights() for annotator in annotators], axis=0)

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """Utilities [B]; DataError for an instruction of another world."""
        utilities: NDArray[np.float64] = features(instructions, responses) @ self._weights
        if np.isnan(utilities).any():
            tasks.refuse_foreign(instructions)
        return utilities


_POOLS: Final = {"sim_eval": POOL, "sim_gpt4": GREEDY, "human": HUMANS}


def gold_oracle() -> RewardOracle:
    """The true reward."""
    return gold.GoldOracle()


def judge(name: str, seed: int = 0) -> PreferenceOracle:
    """A judge of the sandbox; another seed is another opinion on the same pairs.

    `name` is "eval" (the pool of 13), "ann" (the pool with 25 % of its labels flipped), "greedy" (one annotator, nearly
    deterministic), "human" (16 raters) or "gold" (the truth).
    """
    key = match_family("judge", name, (*FAMILIES, "human", "gold"))
    if key == "sim_ann":
        return Flip(judge("eval", seed), 0.25, seed=seed)
    if key == "gold":
        return HigherReward(gold.GoldOracle())
    return Annotators(key, _POOLS[key], seed=seed)


def utility_oracle(name: str) -> RewardOracle:
    """The mean utility of the annotators of "eval", "greedy" or "human"."""
    key = match_family("judge with utilities", name, ("eval", "greedy", "human"))
    return Utility(f"{key}_utility", _POOLS[key])
