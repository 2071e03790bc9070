"""Means over seeds with their error, rows as pandas frames, and how well two rankings of methods agree.

The bootstrap resamples, `RESAMPLES` times and with replacement: each method's seeds, independently of the other methods
but with one draw for both feedbacks (a method without feedback is one run in both), and the evaluation instructions,
one draw for all methods, seeds and judges. A win rate is then the mean over the drawn seeds of the mean credit on the
drawn instructions. Methods stay as they are: the interval speaks of these methods on instructions and seeds like these.
Resampling adds noise to ranks that already have it, so it leans towards lower agreement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...seeding import keyed_rng
from ...statistics import UNBOUNDED, Interval, interval
from .study import Row

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate(Interval):
    """A mean over the seeds that have a value, with its 95 % t-interval."""

    standard_error: float
    """Standard deviation (ddof 1) over sqrt(n); NaN for fewer than two seeds."""

    @classmethod
    def of(cls, values: Array | pd.Series[float], bounds: tuple[float, float] = UNBOUNDED) -> Self:
        """Of values [S], one a seed, NaN where a seed failed; for `bounds` see `statistics.interval`."""
        finite = np.asarray(values, dtype=np.float64)
        finite = finite[np.isfinite(finite)]
        if not len(finite):
            return cls(math.nan, math.nan, math.nan, 0, math.nan)
        error = math.nan
        if len(finite) > 1:
            # The computed mean of equal values may be off by a rounding, which would give them a spread.
            error = float(finite.std(ddof=1) / math.sqrt(len(finite))) if np.ptp(finite) > 0 else 0.0
        return cls(**vars(interval(finite, bounds=bounds)), standard_error=error)

    @property
    def ratio(self) -> float:
        """The mean in standard errors; NaN where there is no error to divide by."""
        return self.mean / self.standard_error if self.standard_error > 0 else math.nan

    @property
    def clear(self) -> bool:
        """Whether the 95 % t-interval leaves 0 out; never for fewer than two seeds."""
        return self.low > 0 or self.high < 0


def frame_of(rows: Sequence[Row] | pd.DataFrame) -> pd.DataFrame:
    """The rows of a table, None as NaN."""
    return pd.DataFrame(rows).replace({None: np.nan}).infer_objects()


def other_peaks(values: Array) -> NDArray[np.int64]:
    """[S]: for each seed, where along K the mean of the OTHER seeds of [S, K] is highest; its own if alone."""
    others = values.sum(axis=0) - values if len(values) > 1 else values
    peaks: NDArray[np.int64] = others.argmax(axis=1)
    return peaks


def drop(values: Array) -> Array:
    """[S] drop of values [S, K] from their peak to the end, each seed's peak chosen on the mean curve of the others.

    A maximum of noisy numbers is too high (the winner's curse), so a curve that only wobbles "falls" from its highest
    point; here the noise that chose the peak is not the noise in the value at it. The mean is therefore right where the
    true curve has a peak, 0 where it is flat, and at most 0 where it rises to the end. The seeds share parts of their
    choice, so sd / sqrt(S) is too small where nothing falls: in simulations of flat noise 2 standard errors were
    exceeded in 10 % of studies of 5 seeds instead of the nominal 6 %, and the 95 % t-interval in 5 %.
    """
    fallen: Array = values[np.arange(len(values)), other_peaks(values)] - values[:, -1]
    return fallen


def holm(values: Sequence[Array], level: float = 0.05) -> list[bool]:
    """Which means of a family are not 0, by t-tests whose chance of a single false one among all is `level`.

    Args:
        values: Of each member of the family [S], one a seed.
        level: Of the family.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    from scipy import stats

    means = [Estimate.of(each) for each in values]
    chances = np.array(
        [2 * stats.t.sf(abs(each.ratio), each.num - 1) if each.standard_error > 0 else each.mean == 0 for each in means]
    )
    return rejected(chances, level)


def rejected(chances: Sequence[float] | Array, level: float = 0.05) -> list[bool]:
    """Which hypotheses of a family Holm's procedure rejects, by their p-values; never one whose p-value is NaN."""
    values = np.where(np.isnan(chances), 1.0, chances)
    order = np.argsort(values, kind="stable")
    passed = values[order] <= level / np.arange(len(order), 0, -1)
    kept = np.zeros(len(order), dtype=bool)
    kept[order] = np.logical_and.accumulate(passed)
    return [bool(each) for each in kept]


RESAMPLES = 2_000
FEWEST = 3
"""Methods below which a rank correlation says nothing."""
TAILS = (2.5, 97.5)
"""Percentiles at the ends of a 95 % interval."""


def sampled_methods(rho: Interval) -> Interval:
    """Spearman's rank correlation of `num` methods, with its 95 % interval for a sample of methods like them.

    Source: Bonett and Wright 2000, Sample size requirements for estimating Pearson, Kendall and Spearman correlations.
    """
    if rho.num < 4 or abs(rho.mean) >= 1:
        return Interval(rho.mean, math.nan, math.nan, rho.num)
    half = 1.96 * math.sqrt((1 + rho.mean**2 / 2) / (rho.num - 3))
    low, high = (math.tanh(math.atanh(rho.mean) + end) for end in (-half, half))
    return Interval(rho.mean, low, high, rho.num)


def resampled(credits: Mapping[str, Sequence[Array]], *, seed: int, num: int = RESAMPLES) -> dict[str, Array]:
    """Win rates [num] of each method in every resample, in percent.

    Two calls with one seed draw the same instructions, and the same seeds of a method that has as many in both.

    Args:
        credits: Of each method, a sequence of [B], one a finished seed; NaN = no verdict.
        seed: Keys the draws.
        num: How many resamples are drawn.
    """

    @cache
    def counts_of(size: int) -> Array:
        """How often each instruction was drawn, a row a resample: all means are one matrix product."""
        drawn = keyed_rng(seed, "method ranking", "instructions").integers(0, size, (num, size))
        places = (drawn + size * np.arange(num)[:, None]).ravel()
        return np.bincount(places, minlength=num * size).reshape(num, size).astype(np.float64)

    rates: dict[str, Array] = {}
    for name, seeds in credits.items():
        table = np.stack(seeds, axis=1)
        counts, judged = counts_of(len(table)), ~np.isnan(table)
        with np.errstate(invalid="ignore"):
            means = (counts @ np.where(judged, table, 0)) / (counts @ judged.astype(np.float64))
        chosen = keyed_rng(seed, "method ranking", "seeds", name).integers(0, len(seeds), (num, len(seeds)))
        rates[name] = 100 * np.take_along_axis(means, chosen, axis=1).mean(axis=1)
    return rates


def agreement(
    one: Mapping[str, float], two: Mapping[str, float], *resamples: Mapping[str, Array]
) -> dict[str, Interval] | None:
    """Spearman's and Kendall's rank correlation of two win rates, over the methods that have both; None for too few.

    `resamples` are those of `one`, and of `two` if it has any: without a second, `two` is taken as exact (such as
    published numbers), and without any there is no interval. `num` counts the methods: `FEWEST` or more.
    """
    names = [name for name in one if name in two]
    if len(names) < FEWEST:
        return None
    exact = [np.array([[values[name] for name in names]], dtype=np.float64) for values in (one, two)]
    drawn = [np.stack([rates[name] for name in names], axis=1) for rates in resamples]
    ends = {figure: [math.nan, math.nan] for figure in ("spearman", "kendall")}
    if drawn:
        x, y = drawn if len(drawn) == 2 else (drawn[0], np.broadcast_to(exact[1], drawn[0].shape))
        ends = {figure: percentiles(correlations(figure, x, y)) for figure in ends}
    means = {figure: float(correlations(figure, *exact)[0]) for figure in ends}
    return {figure: Interval(means[figure], low, high, len(names)) for figure, (low, high) in ends.items()}


def correlations(figure: str, x: Array, y: Array) -> Array:
    """A correlation of each row of x and y, both [R, M]; [R], NaN where a row is constant.

    It is "spearman", "kendall" (tau-b, which takes ties into account) or, for "r2", Pearson's r with its sign.
    """
    from scipy.stats import rankdata

    # The mean of a constant row is rounded: what is left of the row would correlate with anything.
    varied = (np.ptp(x, axis=1) > 0) & (np.ptp(y, axis=1) > 0)
    rows = np.full(len(x), np.nan)
    one, two = (rankdata(each, axis=1) if figure == "spearman" else each for each in (x[varied], y[varied]))
    method: Literal["kendall", "pearson"] = "kendall" if figure == "kendall" else "pearson"
    rows[varied] = pd.DataFrame(one).corrwith(pd.DataFrame(two), axis=1, method=method)
    return rows


def correlation(figure: str, x: Array, y: Array) -> float:
    """A correlation of x and y [M], "r2" as r^2; NaN where one of them is constant."""
    value = float(correlations(figure, x[None], y[None])[0])
    return value**2 if figure == "r2" else value


def percentiles(values: Array, at: Sequence[float] = TAILS) -> list[float]:
    """Percentiles, NaN left out: of the ends of the middle 95 %, or others in [0, 100]; NaN where nothing is left."""
    finite = values[~np.isnan(values)]
    return [float(value) for value in np.percentile(finite, at)] if len(finite) else [math.nan] * len(at)
