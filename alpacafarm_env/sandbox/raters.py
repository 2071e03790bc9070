"""Simulated raters of the sandbox: a number from 1 to 7 for a response, and a critique in words.

They are the annotators of `judges`, asked about one response at a time. Annotator j likes a response by its utility
u_j plus a noise of its own, the Gumbel noise that makes the difference of two such likings the logistic choice between
a pair; the bias for the response shown first has no part in it. A rating says where the liking stands among those of
the responses to rate in the split `preference`: their mean is 4, and 1.5 points are a standard deviation. Ratings are
those of one scale all the same: who rates with a bias or in halves is not simulated.

A critique names what its annotator sees: each of gold's parts with the probability of its `attention`, at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..arguments import match_family
from ..instructions import RATINGS
from ..oracles.base import DetailedOracle, Verdicts
from ..oracles.judges import KeyedDraws, check_count
from ..seeding import keyed_uniforms
from . import gold, tasks
from .dataset import Sandbox
from .judges import GREEDY, HUMANS, POOL, Annotator, features

MIDDLE: Final = 4.0
"""The rating of a response that is liked as the mean of `preference` is."""
POINTS: Final = 1.5
"""Points of the scale to a standard deviation of the likings."""
_NUM_CALIBRATION: Final = 2000
"""Responses that set the scale."""
Row = tuple[str, str]
"""(instruction, response)."""


class Raters(DetailedOracle):
    """One annotator is drawn for each response and asked once: a rating from 1 to 7, with a critique.

    Draws are keyed on (seed, name, instruction, response): a response gets the same rating whenever it is asked about.
    Another `seed` is another opinion.

    Args:
        name: "<name>_rating" is the oracle's name; also that of the draws.
        annotators: Who rates, each equally often; one or more.
        seed: Of the draws.
    """

    def __init__(self, name: str, annotators: Sequence[Annotator], *, seed: int = 0) -> None:
        check_count(len(annotators))
        self.name, self.seed = f"{name}_rating", seed
        self.annotators = tuple(annotators)
        self._weights = np.array([annotator.weights() for annotator in self.annotators])  # [annotators, features]
        self._temperature = np.array([annotator.temperature for annotator in self.annotators])

    def who(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        """The index of the annotator who rates each response, [B]."""
        return KeyedDraws(self.seed, self.name).annotators(rows, len(self.annotators))

    def rate(
        self,
        rows: Sequence[Row],
        who: NDArray[np.int64],
        *,
        temperature: float = 1.0,
        found: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Ratings [B], whole numbers from 1 to 7, by the annotators `who` [B].

        `temperature` multiplies the noise; at 0 each likes a response as it does on average. `found` are the features
        to go by, [B, len(FEATURES)]; if None, those of the rows, and DataError for a row of another world.
        """
        if found is None:
            found = features([ask for ask, _ in rows], [response for _, response in rows])
            if np.isnan(found).any():
                tasks.refuse_foreign([ask for ask, _ in rows])
        # Never 0, of which the logarithm is none.
        uniforms = np.maximum(self._uniforms("liking", rows), 2.0**-54)
        noise = self._temperature[who] * temperature * np.log(-np.log(uniforms))
        liking = (found * self._weights[who]).sum(axis=1) - noise
        mean, deviation = self._scale(temperature)
        points = MIDDLE + POINTS * (liking - mean[who]) / deviation[who]
        return np.asarray(np.clip(np.rint(points), RATINGS[0], RATINGS[-1]))

    def critiques(self, rows: Sequence[Row], who: NDArray[np.int64]) -> list[str]:
        """The words of the annotators `who` [B] about the responses, one or more sentences each, [B]."""
        seen = np.stack([self._uniforms(f"sees {part}", rows) for part in _REMARKS], axis=1)
        attention = np.array([annotator.attention for annotator in self.annotators])[who]
        return [_critique(row, sees) for row, sees in zip(rows, seen < attention, strict=True)]

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Ratings [B] in 1 to 7 with the details `annotator` and `critique`; DataError for another world's row."""
        rows = list(zip(map(str, instructions), responses, strict=True))
        who = self.who(rows)
        names = np.array([annotator.name for annotator in self.annotators])[who]
        ratings = self.rate(rows, who)
        return Verdicts(ratings, {"annotator": names, "critique": np.array(self.critiques(rows, who), object)})

    def _uniforms(self, purpose: str, rows: Sequence[Row]) -> NDArray[np.float64]:
        return keyed_uniforms(self.seed, f"{self.name} {purpose}", rows)

    def _scale(self, temperature: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of each annotator's likings of the split `preference`, [annotators] each.

        The deviation is that at temperature 1: a point is worth the same at any.
        """
        utilities = _calibration() @ self._weights.T
        mean = utilities.mean(axis=0) + np.euler_gamma * self._temperature * temperature
        return mean, np.sqrt(utilities.var(axis=0) + np.pi**2 / 6 * self._temperature**2)


RATERS: Final = {"sim_eval": POOL, "sim_gpt4": GREEDY, "human": HUMANS}


@lru_cache(maxsize=1)
def _calibration() -> NDArray[np.float64]:
    """Features of the first responses of `preference`, [_NUM_CALIBRATION, features]."""
    data = Sandbox()
    pairs = data.pairs()[: _NUM_CALIBRATION // 2]
    instructions = [ask for ask in data.instructions("preference")[: len(pairs)] for _ in range(2)]
    return features(instructions, [response for pair in pairs for response in pair])


_REMARKS: Final = ("complete", "false", "repeated", "form", "fluent", "excess")
"""In the order of `gold.Parts`, and of an annotator's `attention`."""
_BEST: Final = {"complete": 1.0, "form": 1.0, "fluent": 1.0}
"""The value of a part without fault, 0 if it is not listed."""
_FAULTS: Final = {
    "complete": "It has {:.0%} of what was asked for.",
    "false": "Of what it says, {:.0f} is not true.",
    "repeated": "It repeats itself, {:.0f} in all.",
    "form": "It is not in the form that was asked for.",
    "fluent": "Parts of it are no proper sentences.",
    "excess": "It goes on for longer than it needs to.",
}


def _critique(row: Row, sees: NDArray[np.bool_]) -> str:
    parts = gold.parts(*row)
    values = zip(_REMARKS, astuple(parts), sees.tolist(), strict=True) if parts else ()
    remarks = [_FAULTS[part].format(value) for part, value, seen in values if seen and value != _BEST.get(part, 0.0)]
    return " ".join(remarks) or "I see nothing wrong with it."


def raters(name: str, seed: int = 0) -> Raters:
    """The raters of a name: "eval" (the pool of 13), "greedy" (one) or "human" (16)."""
    key = match_family("raters", name, ("eval", "greedy", "human"))
    return Raters(key, RATERS[key], seed=seed)
