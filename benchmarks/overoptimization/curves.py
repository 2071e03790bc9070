"""The rows of the over-optimization study as curves, and what is computed of one: its peak, drop, gains and fits.

Curves are of one reward treatment and method: measure -> frame [S, K] of S seeds and K places, which are PPO steps from
0 or n from 1, so that the first is the SFT policy. kl_exact in nats a response, proxy in reward-model units, gold in
gold units, win rates in percent, length in characters, disagreement (std over an ensemble's members) in reward-model
units; NaN where a measure does not exist.

Errors and intervals are over seeds, the instructions being the same for all of them.
Sources: Gao, Schulman and Hilton 2022 (arXiv 2210.10760) for the forms in d = sqrt(KL); Coste et al. 2023 (arXiv
2310.02743) for ensembles and drops under label noise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ...statistics import Interval
from ..harness.estimates import Estimate, frame_of, pivot
from ..harness.study import Row

MEASURES = ("kl_exact", "proxy", "gold", "win_rate_simulated", "win_rate_human", "length", "disagreement")
COLUMNS = ("treatment", "method", "seed", "step", "n", *MEASURES)
"""Columns of table.csv: one row an evaluation of a treatment, method and seed."""
REQUIRED = ("kl_exact", "proxy", "gold")
"""Measures without which a curve says nothing: NaN is refused."""
METHOD_WORDS: Final = {"ppo": "PPO", "best_of_n": "best-of-n"}
POSITION: Final = {"ppo": "step", "best_of_n": "n"}
"""Method -> the column that says how far optimization has gone."""
FORMS: Final = {"best_of_n": "d(a - b d)", "ppo": "d(a - b log d)"}
"""Method -> form of R(d), the gold gained over SFT at distance d = sqrt(KL), natural logarithm (Gao et al. 2022)."""
FEWEST_POINTS = 3
"""Points after the start below which two parameters fit anything."""

Array = NDArray[np.float64]
Key = tuple[str, str]
"""Treatment and method."""
Curves = dict[str, pd.DataFrame]


def place_text(method: str, place: object) -> str:
    """For instance "step 10" or "n = 16"."""
    return f"step {place}" if method == "ppo" else f"n = {place}"


def curves_of(rows: Sequence[Row]) -> dict[Key, Curves]:
    """(treatment, method) -> its curves, in the order in which they first come.

    Raises:
        ValueError: There are no rows or of an unknown method; a seed has no row of a place that another has, or two; a
            curve has no start (step 0 or n = 1), or a kl_exact, proxy or gold that is not a finite number.
    """
    if not rows:
        raise ValueError("expected at least one row of the over-optimization study, got none")
    found = {}
    for (treatment, method), unsorted in frame_of(rows).groupby(["treatment", "method"], sort=False):
        column, start = POSITION.get(str(method), ""), 0 if method == "ppo" else 1
        places = unsorted.get(column, pd.Series([math.nan]))
        if places.isna().any() or places.min() != start:
            raise ValueError(f"{treatment}, {method}: expected a method of {tuple(POSITION)} and places from its start")
        if (gaps := unsorted[~np.isfinite(unsorted[[*REQUIRED]]).all(axis=1)]).size:
            raise ValueError(f"expected finite {', '.join(REQUIRED)}, got\n{gaps[['treatment', 'seed', column]]}")
        group = unsorted.astype({column: int}).sort_values(["seed", column])
        tables = {name: pivot(group, "seed", column, name).astype(float) for name in MEASURES}
        found[str(treatment), str(method)] = tables
    return found


def only(curves: Curves, seeds: Sequence[Hashable]) -> Curves:
    """The curves of some seeds."""
    return {name: table.loc[list(seeds)] for name, table in curves.items()}


def disagrees(curves: Curves) -> bool:
    """Whether the reward is an ensemble's, whose members can disagree."""
    spread = curves["disagreement"].to_numpy()
    return bool(np.isfinite(spread).all() and spread.any())


# ------------------------------------------------------------------------------------------------------ peak and drop


def rises(estimate: Estimate) -> bool:
    """Whether the 95 % t-interval of a mean is above 0; never for one seed, which has none (NaN).

    For 2 to 60 seeds this is stricter than a mean of more than two standard errors.
    """
    return estimate.interval.low > 0


def other_peaks(values: pd.DataFrame) -> pd.Series[int]:
    """[S]: for each seed, the place at which the mean of the OTHER seeds of [S, K] is highest; its own if alone."""
    others = values.sum() - values if len(values) > 1 else values
    return others.idxmax(axis=1)


def change_after(values: pd.DataFrame, places: pd.Series[int]) -> Array:
    """[S] values [S, K] at the end less those at each seed's own place [S]."""
    found: Array = values.iloc[:, -1].to_numpy() - [values.at[seed, place] for seed, place in places.items()]
    return found


def drop(gold: pd.DataFrame) -> Array:
    """[S] drop of gold [S, K] from its peak to the end, each seed's peak chosen on the mean curve of the other seeds.

    drop_s = gold_s[k_s] - gold_s[K], k_s = argmax_k of the mean of gold_t[k] over t != s. A maximum of noisy numbers
    is too high (the winner's curse), so a curve that only wobbles "falls" from its highest point; here the noise that
    chose k_s is not the noise at gold_s[k_s]. The mean is therefore right where the true curve has a peak, 0 where it
    is flat, and at most 0 where it rises to the end. With one seed the peak is its own, and there is no error.

    The drops of the seeds share parts of their choice, so sd / sqrt(S) is too small where nothing falls: in simulations
    of flat noise (14 evaluations) 2 standard errors were exceeded in 10 % of studies of 5 seeds instead of the nominal
    6 %. With the t-interval, which `rises` asks, it is 5 % (3 seeds: 4 %, 10 seeds: 7 %), and less for curves that
    rise or for noise that lasts over evaluations.
    """
    return -change_after(gold, other_peaks(gold))


class Story:
    """What gold and the proxy do along the curves of one treatment and method.

    Attributes: `top` is where the mean of gold is highest, `kl` the mean KL there; `start`, `peak` and `end` are of
    gold, `drop` is its fall from the peak to the end, `drops` [S] that of each seed, `proxy_after` what the proxy gains
    meanwhile and `proxy_gain` from the start on. Without a fall of any seed (`rising`) these ends are one.
    """

    def __init__(self, curves: Curves) -> None:
        gold, proxy = curves["gold"], curves["proxy"]
        places = [int(place) for place in gold.columns]
        self.top, self.last = places[int(gold.mean().argmax())], places[-1]
        self.kl = float(curves["kl_exact"][self.top].mean())
        self.start, self.peak, self.end = (
            Estimate.of(gold[place].to_numpy()) for place in (gold.columns[0], self.top, self.last)
        )
        peaks = other_peaks(gold)
        self.drops = drop(gold)
        self.drop = Estimate.of(self.drops)
        self.rising = bool((peaks == self.last).all())
        self.proxy_after = Estimate.of(change_after(proxy, peaks))
        self.proxy_gain = Estimate.of((proxy.iloc[:, -1] - proxy.iloc[:, 0]).to_numpy())

    @property
    def falls(self) -> bool:
        """Whether gold clearly falls, as `rises` decides."""
        return rises(self.drop)


# ---------------------------------------------------------------------------------------------------- gains and fits


def root_kl(kl: pd.DataFrame | Array) -> Array:
    """Distances d = sqrt(KL) in sqrt(nats); an estimate of KL that comes out a little below 0 counts as 0."""
    roots: Array = np.sqrt(np.maximum(np.asarray(kl, dtype=np.float64), 0))
    return roots


def gain_at(curves: Curves, at: ArrayLike, measure: str = "gold") -> Array:
    """Gain over the start when each seed first reaches given distances, [S, J]; NaN for one that it does not reach.

    Between evaluations the measure is taken as linear in the distance.

    Args:
        curves: Of S seeds.
        at: [J] distances d = sqrt(KL), 0 or more.
        measure: What is gained.
    """
    wanted, values = np.asarray(at, dtype=np.float64), curves[measure].to_numpy()
    rows = []
    for distances, gains in zip(root_kl(curves["kl_exact"]), values - values[:, :1], strict=True):
        farther = _farther(distances)
        reached = wanted <= distances.max() * (1 + 1e-12)  # the last one, up to rounding
        rows.append(np.where(reached, np.interp(wanted, distances[farther], gains[farther]), np.nan))
    return np.array(rows)


def shared_distances(curves: Curves) -> Array:
    """[J] distances d > 0 at which the seeds are averaged: those of the seed that gets least far.

    At one step seeds are unequally far, and a mean over them is at no distance; R is a function of d. So seeds are
    averaged at equal d, up to the farthest that all of them reach. For best-of-n, whose KL is known, that is every n.
    """
    distances = root_kl(curves["kl_exact"])
    nearest = distances[distances.max(axis=1).argmin()]
    found: Array = nearest[_farther(nearest)][1:]
    return found


def _farther(distances: Array) -> NDArray[np.bool_]:
    """[K], which evaluations are farther than all before them: KL is an estimate and may step back."""
    farther: NDArray[np.bool_] = np.r_[True, distances[1:] > np.maximum.accumulate(distances)[:-1]]
    return farther


@dataclass(frozen=True)
class Fit:
    """R(d) = d(a - b d) or d(a - b log d) of a mean curve; R in gold units, d in sqrt(nats)."""

    form: str
    a: Interval
    """Gold units per sqrt(nat)."""
    b: Interval
    """Gold units per nat (best-of-n), or per sqrt(nat) (PPO)."""
    r_squared: float
    """1 - sum of squared residuals / sum of squares about the mean, over the points after the start; 1 at most."""
    num_points: int
    measured: float
    """The largest d of the mean curve."""

    @property
    def has_peak(self) -> bool:
        """Whether the fitted curve peaks within twice the distance that was measured; farther is a guess."""
        return 0 < self.peak_distance <= 2 * self.measured

    @property
    def peak_distance(self) -> float:
        """d* = a / (2b), or exp(a / b - 1); infinite where b <= 0: the fitted curve rises for ever."""
        a, b = self.a.mean, self.b.mean
        if b <= 0:
            return math.inf
        if self.form == FORMS["best_of_n"]:
            return a / (2 * b)
        return math.exp(a / b - 1) if a / b < 100 else math.inf

    @property
    def peak_gain(self) -> float:
        """R* = R(d*); infinite where there is no peak."""
        return float(self.at(self.peak_distance)) if math.isfinite(self.peak_distance) else math.inf

    def at(self, distance: ArrayLike) -> Array:
        """R at distances d >= 0 of any shape."""
        gains: Array = _basis(np.asarray(distance, dtype=np.float64), self.form) @ np.array([self.a.mean, self.b.mean])
        return gains


def _basis(distance: Array, form: str) -> Array:
    """[..., 2]: the columns d and -d^2, or d and -d log d (0 at d = 0), of which R is a sum with weights a, b."""
    from scipy.special import xlogy

    return np.stack([distance, -(distance**2 if form == FORMS["best_of_n"] else xlogy(distance, distance))], axis=-1)


def fit(curves: Curves, form: str) -> Fit | None:
    """Least-squares fit to the mean curve: the mean over seeds of gold less that at the start, at `shared_distances`.

    Intervals resample the seeds by leaving out one at a time: with pseudo-values S theta - (S - 1) theta_(-s), theta
    +- t(.975, S - 1) sd / sqrt(S). For best-of-n, where all seeds have the same KL, this is exactly the t-interval over
    the seeds' own fits. Percentiles of a bootstrap, the usual choice, are far too narrow for five seeds.

    Args:
        curves: Of S seeds.
        form: One of `FORMS`.

    Returns:
        None for fewer than three points after the start, where these do not tell a and b apart, or where gold is the
        same at all of them: there is nothing to explain.
    """
    if (found := _fit_mean(curves, form)) is None:
        return None
    whole, r_squared = found
    seeds, distances = curves["gold"].index, shared_distances(curves)
    count = len(seeds)
    others = [_fit_mean(only(curves, list(seeds.drop(seed))), form) for seed in seeds] if count > 1 else []
    half = np.full(2, math.nan)
    if others and all(others):
        pseudo = count * whole - (count - 1) * np.array([each[0] for each in others if each])
        half = np.array([(each.high - each.low) / 2 for each in (Estimate.of(x).interval for x in pseudo.T)])
    ends = np.stack([whole, whole - half, whole + half], axis=1).tolist()
    a, b = (Interval(mean, low, high, count) for mean, low, high in ends)
    return Fit(form, a, b, r_squared, len(distances), float(distances[-1]))


def _fit_mean(curves: Curves, form: str) -> tuple[Array, float] | None:
    """The fit (a, b) [2] of the mean curve, and R^2."""
    distances = shared_distances(curves)
    x, y = _basis(distances, form), gain_at(curves, distances).mean(axis=0)
    if len(y) < FEWEST_POINTS or not np.ptp(y) > 0:
        return None
    solution, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    return (solution, 1 - float(((y - x @ solution) ** 2).sum() / ((y - y.mean()) ** 2).sum())) if rank == 2 else None
