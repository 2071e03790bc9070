"""Means over seeds with their error, rows as pandas frames, and how well two rankings of methods agree.

The bootstrap resamples, `RESAMPLES` times and with replacement: each method's seeds, independently of the other methods
but with one draw for both feedbacks (a method without feedback is one run in both), and the evaluation instructions,
one draw for all methods, seeds and judges. A win rate is then the mean over the drawn seeds of the mean credit on the
drawn instructions. Methods stay as they are: the interval speaks of these methods on instructions and seeds like these.
Resampling adds noise to ranks that already have it, so it leans towards lower agreement.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...seeding import keyed_rng
from ...statistics import UNBOUNDED, Interval, interval
from .study import Row

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over the seeds that have a value, with its 95 % t-interval."""

    interval: Interval
    standard_error: float
    """Standard deviation (ddof 1) over sqrt(n); NaN for fewer than two seeds."""

    @classmethod
    def of(cls, values: Array, bounds: tuple[float, float] = UNBOUNDED) -> Estimate:
        """Of values [S], one a seed, NaN where a seed failed; for `bounds` see `statistics.interval`."""
        finite = values[np.isfinite(values)]
        if not len(finite):
            return cls(Interval(math.nan, math.nan, math.nan, 0), math.nan)
        error = math.nan
        if len(finite) > 1:
            # The computed mean of equal values may be off by a rounding, which would give them a spread.
            error = float(finite.std(ddof=1) / math.sqrt(len(finite))) if np.ptp(finite) > 0 else 0.0
        return cls(interval(finite, bounds=bounds), error)

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return self.interval.mean

    @property
    def num(self) -> int:
        """Seeds that have a value."""
        return self.interval.num

    @property
    def ratio(self) -> float:
        """The mean in standard errors; NaN where there is no error to divide by."""
        return self.mean / self.standard_error if self.standard_error > 0 else math.nan

    @property
    def clear(self) -> bool:
        """Whether the 95 % t-interval leaves 0 out; never for fewer than two seeds."""
        return self.interval.low > 0 or self.interval.high < 0


def frame_of(rows: Sequence[Row] | pd.DataFrame) -> pd.DataFrame:
    """The rows of a table, None as NaN."""
    return pd.DataFrame(rows).replace({None: np.nan}).infer_objects()


def pivot(frame: pd.DataFrame, index: str | Sequence[str], columns: str, values: str) -> pd.DataFrame:
    """One row for each value of `index`, one column for each of `columns`, in the order of the frame.

    pandas alone would fill in missing combinations: ValueError for those, and for one that stands there twice.
    """
    keys = [*([index] if isinstance(index, str) else index), columns]
    counts = frame.groupby(keys, sort=False).size().unstack()
    if len(frame) and (wrong := counts[counts.ne(1).any(axis=1)]).size:
        raise ValueError(f"expected one row for each {', '.join(keys)}, got these numbers of rows:\n{wrong}")
    table = frame.pivot(index=keys[:-1], columns=columns, values=values)
    return table.reindex(index=counts.index, columns=frame[columns].unique())


def estimates(
    frame: pd.DataFrame, by: Sequence[str], measure: str, bounds: tuple[float, float] = UNBOUNDED
) -> dict[tuple[Hashable, ...], Estimate]:
    """`Estimate.of` a measure over the rows (one a seed) of each group."""
    groups = frame.groupby(list(by), sort=False, dropna=False)[measure]
    return {key: Estimate.of(group.to_numpy(dtype=np.float64), bounds) for key, group in groups}


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
    order = np.argsort(chances)
    passed = chances[order] <= level / np.arange(len(order), 0, -1)
    kept = np.zeros(len(order), dtype=bool)
    kept[order] = np.logical_and.accumulate(passed)
    return [bool(each) for each in kept]


RESAMPLES = 2_000
FEWEST = 3
"""Methods below which a rank correlation says nothing."""
TAILS = (2.5, 97.5)
"""Percentiles at the ends of a 95 % interval."""


@dataclass(frozen=True)
class Coefficient:
    """A rank correlation with its 95 % interval; NaN bounds where nothing was resampled."""

    value: float
    low: float = math.nan
    high: float = math.nan


def sampled_methods(value: float, num: int) -> Coefficient:
    """Spearman's rank correlation of `num` methods as a sample of methods like them, with its 95 % interval.

    Source: Bonett and Wright 2000, Sample size requirements for estimating Pearson, Kendall and Spearman correlations.
    """
    if num < 4 or abs(value) >= 1:
        return Coefficient(value)
    half = 1.96 * math.sqrt((1 + value**2 / 2) / (num - 3))
    return Coefficient(value, *(math.tanh(math.atanh(value) + end) for end in (-half, half)))


@dataclass(frozen=True)
class Agreement:
    """Rank correlations of two rankings of the same methods; Kendall's is tau-b, which takes ties into account."""

    spearman: Coefficient
    kendall: Coefficient
    methods: tuple[str, ...]

    @classmethod
    def read(cls, stored: Mapping[str, Any] | None) -> Self | None:
        """From its fields as JSON has them; None for none."""
        if stored is None:
            return None
        spearman, kendall = (Coefficient(**stored[name]) for name in ("spearman", "kendall"))
        return cls(spearman, kendall, tuple(stored["methods"]))


@dataclass(frozen=True)
class Bootstrap:
    """Win rates of methods in every resample. `win_rates`: name -> [R], in percent."""

    win_rates: Mapping[str, Array]

    @classmethod
    def of(cls, credits: Mapping[str, Sequence[Array]], *, seed: int, num: int = RESAMPLES) -> Bootstrap:
        """Resamples the credits of each method: a sequence of [B], one a finished seed, NaN = no verdict.

        Two calls with one seed draw the same instructions, and the same seeds of a method that has as many in both.
        """
        if not credits:
            return cls({})
        size = len(next(iter(credits.values()))[0])
        drawn = keyed_rng(seed, "method ranking", "instructions").integers(0, size, (num, size))
        # How often each instruction was drawn: with resamples as rows of weights, all means are one matrix product.
        places = (drawn + size * np.arange(num)[:, None]).ravel()
        counts = np.bincount(places, minlength=num * size).reshape(num, size).astype(np.float64)
        rates = {}
        for name, seeds in credits.items():
            table = np.stack(seeds, axis=1)
            judged = ~np.isnan(table)
            with np.errstate(invalid="ignore"):
                means = (counts @ np.where(judged, table, 0)) / (counts @ judged.astype(np.float64))
            chosen = keyed_rng(seed, "method ranking", "seeds", name).integers(0, len(seeds), (num, len(seeds)))
            rates[name] = 100 * np.take_along_axis(means, chosen, axis=1).mean(axis=1)
        return cls(rates)


def agreement(one: Mapping[str, float], two: Mapping[str, float], *bootstraps: Bootstrap) -> Agreement | None:
    """Agreement of two win rates by method, over the methods that have both; None for fewer than `FEWEST`.

    `bootstraps` are the resamples of `one`, and of `two` if it has any: without a second, `two` is taken as exact (such
    as published numbers), and without any there is no interval.
    """
    names = tuple(name for name in one if name in two)
    if len(names) < FEWEST:
        return None
    x, y = (np.array([values[name] for name in names], dtype=np.float64) for values in (one, two))
    rho, tau = correlation("spearman", x, y), correlation("kendall", x, y)
    if not bootstraps:
        return Agreement(Coefficient(rho), Coefficient(tau), names)
    num = len(next(iter(bootstraps[0].win_rates.values())))
    columns = [np.stack([bootstrap.win_rates[name] for name in names], axis=1) for bootstrap in bootstraps]
    xs, ys = columns if len(columns) == 2 else (columns[0], np.broadcast_to(y, (num, len(names))))
    bounds = [percentiles(values) for values in (spearman_rows(xs, ys), kendall_rows(xs, ys))]
    return Agreement(Coefficient(rho, *bounds[0]), Coefficient(tau, *bounds[1]), names)


def correlation(figure: str, x: Array, y: Array) -> float:
    """Correlation "r2", "spearman" or "kendall" (tau-b) of x and y [M]; NaN where one of them is constant."""
    from scipy import stats

    if np.ptp(x) == 0 or np.ptp(y) == 0:  # scipy would warn
        return math.nan
    if figure == "r2":
        return float(stats.pearsonr(x, y).statistic) ** 2
    if figure == "spearman":
        return float(stats.spearmanr(x, y).statistic)
    return float(stats.kendalltau(x, y, variant="b").statistic)


def pearson_rows(x: Array, y: Array) -> Array:
    """Pearson's correlation of each row of x and y, both [R, M]; [R], NaN where a row is constant."""
    # A constant row minus its rounded mean would be rounding errors, which correlate with anything.
    one, two = (
        np.where(np.ptp(values, axis=1, keepdims=True) > 0, values - values.mean(axis=1, keepdims=True), 0)
        for values in (x, y)
    )
    return _cosine(one, two)


def spearman_rows(x: Array, y: Array) -> Array:
    """Spearman's rank correlation of each row of x and y, both [R, M]; [R], NaN where a row is constant."""
    from scipy.stats import rankdata

    one, two = (np.asarray(rankdata(values, axis=1), dtype=np.float64) for values in (x, y))
    return pearson_rows(one, two)


def kendall_rows(x: Array, y: Array) -> Array:
    """Kendall's tau-b of each row of x and y, both [R, M]; [R], NaN where a row is constant."""
    first, second = np.triu_indices(x.shape[1], 1)
    one, two = (np.sign(values[:, first] - values[:, second]) for values in (x, y))
    return _cosine(one, two)


def percentiles(values: Array, at: Sequence[float] = TAILS) -> list[float]:
    """Percentiles, NaN left out: of the ends of the middle 95 %, or others in [0, 100]; NaN where nothing is left."""
    finite = values[~np.isnan(values)]
    if not len(finite):
        return [math.nan] * len(at)
    return [float(value) for value in np.percentile(finite, at)]


def _cosine(one: Array, two: Array) -> Array:
    """Cosine of the angle between rows; NaN where a row is zero."""
    squares = (one**2).sum(axis=1) * (two**2).sum(axis=1)
    cosines = np.full(len(one), np.nan)
    np.divide((one * two).sum(axis=1), np.sqrt(squares), out=cosines, where=squares > 0)
    return cosines
