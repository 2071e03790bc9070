"""What the win-rate curve says: the step chosen on val, the comparison with SFT on eval, and the words for both.

Pure functions of the rows of table.csv and val.csv; nothing here trains, draws or writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...statistics import PERCENT, POSITIVE, SHARE, UNBOUNDED, Interval, interval
from ..harness.study import Row, number_of

COLUMNS = ("seed", "step", "proxy", "gold", "win_rate_simulated", "win_rate_human", "kl", "length", "finished")
"""Columns of table.csv (eval) and val.csv: one row a seed and evaluation."""
WIN_RATES = ("win_rate_simulated", "win_rate_human", "win_rate")
"""Win rates in %, the last by a judge of one's own: a column where there is one."""
MEASURES = (*COLUMNS[2:4], *WIN_RATES, *COLUMNS[6:])
UNITS = {
    "proxy": "reward-model units",
    "gold": "gold units",
    "win_rate_simulated": "%",
    "win_rate_human": "%",
    "win_rate": "%",
    "kl": "nats a response",
    "length": "characters",
    "finished": "share",
}
"""Unit of each measure."""
_BOUNDS = {"%": PERCENT, "share": SHARE, "characters": POSITIVE, "nats a response": POSITIVE}
POINTS = {"%": "points"}
"""What a difference of a unit is called, where it is not the unit itself."""


@dataclass(frozen=True)
class Curves:
    """The evaluations of all seeds on one split, as arrays.

    `values`: measure -> [S, K], S seeds in the order of `seeds`, K evaluations in the order of `steps` (the first is 0,
    SFT).
    """

    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    values: Mapping[str, NDArray[np.float64]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Curves:
        """Arrays from rows of `COLUMNS` in any order.

        Raises:
            ValueError: There are no rows, step 0 is missing, or a seed lacks a step that another has.
        """
        seeds, steps = (tuple(sorted({int(row[key]) for row in rows})) for key in ("seed", "step"))
        found = {(int(row["seed"]), int(row["step"])): row for row in rows}
        lacking = [(seed, step) for seed in seeds for step in steps if (seed, step) not in found]
        if lacking or len(found) != len(rows) or steps[:1] != (0,):
            raise ValueError(
                f"expected one row for every seed {seeds} and step {steps}, step 0 among them, "
                f"got {len(rows)} rows, without (seed, step) {lacking}"
            )
        values = {
            name: np.array([[number_of(found[seed, step].get(name)) for step in steps] for seed in seeds])
            for name in MEASURES
        }
        return cls(seeds, steps, values)

    def has(self, measure: str) -> bool:
        """Whether the measure exists at this level: any value that is not NaN."""
        return bool(np.isfinite(self.values[measure]).any())

    def at(self, measure: str, columns: Sequence[int]) -> NDArray[np.float64]:
        """[S]: each seed's value at its own evaluation number."""
        return self.values[measure][np.arange(len(self.seeds)), list(columns)]


@dataclass(frozen=True)
class Choice:
    """Which evaluation of each seed is reported, and by what measure on val it was chosen."""

    columns: tuple[int, ...]
    """[S] positions in `Curves.steps`."""
    measure: str


@dataclass(frozen=True)
class Comparison:
    """One measure on eval: SFT (step 0), the chosen step, the last step, and the paired difference chosen - SFT."""

    measure: str
    sft: Interval
    chosen: Interval
    last: Interval
    difference: float
    """Mean over the seeds of (chosen - SFT) of the same seed."""
    standard_error: float
    """Standard deviation (ddof 1) of these differences over sqrt(S); NaN for one seed."""
    last_minus_chosen: float
    """Mean over the seeds of (last - chosen)."""
    last_standard_error: float

    @property
    def ratio(self) -> float:
        """The difference in standard errors of the seeds; NaN where there is no error to divide by."""
        return self.difference / self.standard_error if self.standard_error > 0 else math.nan


def choose(val: Curves) -> Choice:
    """The step of each seed with the highest simulated win rate on val (the earliest of equals), as the paper does.

    Step 0 is not a candidate: it is SFT itself, and a choice that may fall back on it could never show that PPO did
    harm. Where the level has no simulated judge, one's own decides; without that the proxy, which cannot see
    over-optimization.

    Raises:
        ValueError: No evaluation after step 0, or no measure to choose by.
    """
    if len(val.steps) < 2:
        raise ValueError(f"expected an evaluation after step 0 to choose, got steps {val.steps}")
    for measure in ("win_rate_simulated", "win_rate", "proxy"):
        candidates = val.values[measure][:, 1:]
        if np.isfinite(candidates).any(axis=1).all():
            return Choice(tuple(int(column) + 1 for column in np.nanargmax(candidates, axis=1)), measure)
    raise ValueError("nothing to choose by: val has neither a win rate nor a proxy for every seed")


def compare(curves: Curves, choice: Choice) -> tuple[Comparison, ...]:
    """One comparison for each measure that exists at this level, in the order of the table."""
    return tuple(_comparison(curves, choice, name) for name in MEASURES if curves.has(name))


def peak_and_last(curves: Curves, measure: str) -> tuple[int, float, float]:
    """The step at which the mean over the seeds is highest, that mean, and the mean at the last step."""
    means = curves.values[measure].mean(axis=0)
    best = int(np.nanargmax(means))
    return curves.steps[best], float(means[best]), float(means[-1])


def bounds_of(measure: str) -> tuple[float, float]:
    """What a measure's mean can be, by its unit."""
    return _BOUNDS.get(UNITS[measure], UNBOUNDED)


def _comparison(curves: Curves, choice: Choice, measure: str) -> Comparison:
    sft, chosen, last = (
        curves.at(measure, columns) for columns in ([0] * len(curves.seeds), choice.columns, [-1] * len(curves.seeds))
    )
    difference, error = _paired(chosen - sft)
    fall, fall_error = _paired(last - chosen)
    before, after, end = (_interval(values, bounds_of(measure)) for values in (sft, chosen, last))
    return Comparison(measure, before, after, end, difference, error, fall, fall_error)


def _interval(values: NDArray[np.float64], bounds: tuple[float, float]) -> Interval:
    """The t-interval over seeds; without numbers where a seed has none (a mean of the others would hide it)."""
    if not np.isfinite(values).all():
        return Interval(math.nan, math.nan, math.nan, int(np.isfinite(values).sum()))
    return interval(values, bounds=bounds)


def _paired(differences: NDArray[np.float64]) -> tuple[float, float]:
    count = len(differences)
    error = float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return float(differences.mean()), error
