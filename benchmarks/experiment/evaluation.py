"""Evaluation of responses: what the proxy, the true reward, simulated judges and human raters say of each one.

Every value is kept per response; `Evaluation.means` is the row of a table. A measure that the data's level does not
have (gold outside the sandbox, for instance) is NaN throughout, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Dataset
from ...oracles.base import RewardOracle, judge
from ...oracles.registry import make_oracle
from ...statistics import win_rate
from ..harness.report import number
from .own_judge import make_own_judge

SCORES = ("proxy", "gold", "win_rate_simulated", "win_rate_human")
"""The measures that an oracle decides, in the order of the tables."""
WIN_RATES = ("win_rate_simulated", "win_rate_human")
"""Those that are wins against the reference: a credit in [0, 1] for each response, percent in the means."""
OWN_WIN_RATE = "win_rate"
"""The win rate by a judge of one's own, where there is one."""


@dataclass(frozen=True)
class Judges:
    """One oracle a measure; None for a measure that does not exist here (its values are then NaN)."""

    proxy: RewardOracle | None = None
    """The reward that training maximises, in its own units."""
    gold: RewardOracle | None = None
    """The true reward; the sandbox has one."""
    win_rate_simulated: RewardOracle | None = None
    """Verdicts, 1 for the response and 0 for the reference, by p_sim^eval, the simulated pool without added noise."""
    win_rate_human: RewardOracle | None = None
    """The same by the human raters (in the sandbox: 16 simulated ones)."""
    win_rate: RewardOracle | None = None
    """Credit in [0, 1] by a judge of one's own; without one there is no such measure."""

    def items(self) -> tuple[tuple[str, RewardOracle | None], ...]:
        """(measure, oracle) in the order of `SCORES`, then one's own judge if there is one."""
        own = () if self.win_rate is None else (OWN_WIN_RATE,)
        return tuple((name, getattr(self, name)) for name in (*SCORES, *own))


def missing_at(level: str) -> tuple[str, ...]:
    """The measures that a level does not have: gold, the simulated pool and human raters live in the sandbox only."""
    return () if level == "sandbox" else SCORES[1:]


def judges_of(
    dataset: Dataset,
    *,
    proxy: str | Mapping[str, Any] | None = "surrogate",
    own: str | None = None,
    seed: int = 0,
) -> Judges:
    """The judges that a dataset's level has: all four in the sandbox, the proxy alone elsewhere; and one's own.

    Args:
        dataset: Whose references are to be beaten.
        proxy: The oracle that stands for the training reward, as `make_oracle` takes it.
        own: A judge of one's own, see `own_judge`.
        seed: Keys the judges' draws, together with the texts: equal responses get equal verdicts.
    """
    reward = None if proxy is None else make_oracle(proxy, dataset=dataset, seed=seed)
    judged = None if own is None else make_own_judge(own, dataset, seed=seed)
    if missing_at(dataset.level):
        return Judges(proxy=reward, win_rate=judged)
    gold, simulated, human = (make_oracle(name, dataset=dataset, seed=seed) for name in ("gold", "win_rate", "human"))
    return Judges(reward, gold, simulated, human, judged)


@dataclass(frozen=True)
class Evaluation:
    """What was found for B responses."""

    instructions: tuple[str, ...]
    responses: tuple[str, ...]
    scores: Mapping[str, NDArray[np.float64]]
    """Measure of `SCORES`, and `OWN_WIN_RATE` -> [B]; NaN = no verdict, or no such judge at this level."""
    length: NDArray[np.int64]
    """[B] characters (Unicode code points)."""
    finished: NDArray[np.float64]
    """[B] 1.0 where the response ended by itself, 0.0 where it was cut, NaN where that is unknown."""

    def __len__(self) -> int:
        return len(self.responses)

    def means(self) -> dict[str, float]:
        """Means over the responses with a verdict: win rates in percent, length in characters, finished in [0, 1]."""
        scores = {
            name: win_rate(values).win_rate if name in (*WIN_RATES, OWN_WIN_RATE) else _mean(values)
            for name, values in self.scores.items()
        }
        return {**scores, "length": _mean(self.length), "finished": _mean(self.finished)}

    def per_response(self) -> dict[str, list[Any]]:
        """Instructions, responses and every value of each, JSON-able: NaN as None."""
        values = {**self.scores, "finished": self.finished}
        plain = {
            name: [None if value != value else value for value in found.tolist()] for name, found in values.items()
        }
        return {"instructions": list(self.instructions), "responses": list(self.responses), **plain}

    def unscored(self) -> dict[str, int]:
        """Measure -> number of responses without a verdict."""
        return {name: int(np.isnan(values).sum()) for name, values in self.scores.items()}


def evaluate(
    instructions: Sequence[str],
    responses: Sequence[str],
    judges: Judges,
    *,
    finished: Sequence[bool] | NDArray[np.bool_] | None = None,
) -> Evaluation:
    """Scores B responses by every judge, one call a judge; `finished` says which ended by themselves, if known.

    Raises:
        ValueError: The sequences differ in length.
        OracleError: A judge's answer has a wrong shape, or holds an infinity.
    """
    if len(instructions) != len(responses) or (finished is not None and len(finished) != len(responses)):
        counts = (len(instructions), len(responses), None if finished is None else len(finished))
        raise ValueError(f"expected as many instructions as responses (and finished), got {counts}")
    nothing = np.full(len(responses), np.nan)
    scores = {
        name: nothing if oracle is None else judge(oracle, instructions, responses).scores
        for name, oracle in judges.items()
    }
    ended = nothing if finished is None else np.asarray(finished, dtype=np.float64)
    length = np.array([len(response) for response in responses], dtype=np.int64)
    return Evaluation(tuple(instructions), tuple(responses), scores, length, ended)


def describe(means: Mapping[str, Any]) -> str:
    """One line about the means of an evaluation, in the middle of a run; what was not measured is left out."""
    texts = {
        "proxy": ("proxy {}", ""),
        "gold": ("gold {}", ""),
        "win_rate_simulated": ("win rate {} % simulated", "%"),
        "win_rate_human": ("{} % human", "%"),
        "win_rate": ("win rate {} % by the judge", "%"),
        "kl": ("KL {}", ""),
        "length": ("length {}", "characters"),
        "seconds": ("{} s", "characters"),
    }
    known = {name: text for name, text in texts.items() if not math.isnan(means.get(name, math.nan))}
    return ", ".join(text.format(number(means[name], unit)) for name, (text, unit) in known.items())


def subset(num_items: int, num_wanted: int) -> list[int]:
    """Up to `num_wanted` positions spread evenly over `num_items`, always the same: each source has its share."""
    if num_wanted < 1:
        raise ValueError(f"expected 1 or more items to evaluate on, got {num_wanted!r}")
    count = min(num_items, num_wanted)
    return [index * num_items // count for index in range(count)]


def _mean(values: NDArray[Any]) -> float:
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else math.nan
