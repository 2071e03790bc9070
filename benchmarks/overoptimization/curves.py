"""The rows of the over-optimization study as curves, and what is computed of one: its peak, drop, gains and fits.

Errors and intervals are over seeds. Source of the fits: Gao, Schulman and Hilton 2022 (arXiv 2210.10760).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...statistics import Interval
from ..harness.estimates import Estimate, frame_of, pivot
from ..harness.study import Row

MEASURES = ("kl_exact", "proxy", "gold", "win_rate_simulated", "win_rate_human", "length", "disagreement")
COLUMNS = ("treatment", "method", "seed", "step", "n", *MEASURES)
"""Columns of table.csv: one row an evaluation of a treatment, method and seed."""
METHOD_WORDS: Final = {
    "ppo": "PPO",
    "quark": "Quark",
    "expert_iteration": "expert iteration",
    "dpo": "DPO",
    "best_of_n": "best-of-n",
}
FORMS: Final = {"best_of_n": "d(a - b d)", "ppo": "d(a - b log d)"}
"""Method -> form of R(d), the gold gained over SFT at distance d = sqrt(KL), natural logarithm (Gao et al. 2022)."""
FEWEST_POINTS = 3  # after the start: fewer are fitted by any two parameters

Array = NDArray[np.float64]
Key = tuple[str, str]  # treatment and method


def place_text(method: str, place: object) -> str:
    """For instance "step 10", "round 2" or "n = 16"."""
    return {"best_of_n": f"n = {place}", "expert_iteration": f"round {place}"}.get(method, f"step {place}")


def position(method: str) -> str:
    """The column that says how far optimization has gone."""
    return "n" if method == "best_of_n" else "step"


@dataclass(frozen=True)
class Curves:
    """Measures of one treatment and method along optimization."""

    seeds: Sequence[int]
    places: Sequence[int]
    """[K] steps (of expert iteration rounds) from 0, or n from 1; the first is the SFT policy."""
    measures: Mapping[str, Array]
    """Name -> [S, K]: kl_exact in nats a response, proxy and disagreement (std over an ensemble's members) in
    reward-model units, gold in gold units, win rates in percent, length in characters; NaN where there is none."""

    def __getitem__(self, measure: str) -> Array:
        return self.measures[measure]

    def only(self, seeds: Sequence[int]) -> "Curves":
        """The curves of some seeds."""
        rows = [self.seeds.index(seed) for seed in seeds]
        return Curves(seeds, self.places, {name: values[rows] for name, values in self.measures.items()})

    @property
    def disagree(self) -> bool:
        """Whether the reward is an ensemble's, whose members can disagree."""
        return bool(np.isfinite(self["disagreement"]).all() and self["disagreement"].any())


def curves_of(rows: Sequence[Row]) -> dict[Key, Curves]:
    """(treatment, method) -> its curves, in the order in which they first come."""
    found = {}
    for (treatment, method), group in frame_of(rows).groupby(["treatment", "method"], sort=False):
        column = position(str(method))
        ordered = group.astype({column: int}).sort_values(["seed", column])
        gold = pivot(ordered, "seed", column, "gold")
        measures = {name: ordered[name].to_numpy(dtype=np.float64).reshape(gold.shape) for name in MEASURES}
        found[str(treatment), str(method)] = Curves(gold.index.tolist(), list(map(int, gold.columns)), measures)
    return found


def rises(estimate: Estimate) -> bool:
    """Whether the 95 % t-interval of a mean is above 0; never for one seed.

    For 2 to 60 seeds this is stricter than a mean of more than two standard errors.
    """
    return estimate.interval.low > 0


def other_peaks(values: Array) -> NDArray[np.int64]:
    """[S]: for each seed, where along K the mean of the OTHER seeds of [S, K] is highest; its own if alone."""
    others = values.sum(axis=0) - values if len(values) > 1 else values
    peaks: NDArray[np.int64] = others.argmax(axis=1)
    return peaks


def change_after(values: Array, peaks: NDArray[np.int64]) -> Array:
    """[S] values [S, K] at the end less those at each seed's own peak [S]."""
    change: Array = values[:, -1] - values[np.arange(len(values)), peaks]
    return change


def drop(gold: Array) -> Array:
    """[S] drop of gold [S, K] from its peak to the end, each seed's peak chosen on the mean curve of the other seeds.

    A maximum of noisy numbers is too high (the winner's curse), so a curve that only wobbles "falls" from its highest
    point; here the noise that chose the peak is not the noise in the gold at it. The mean is therefore right where the
    true curve has a peak, 0 where it is flat, and at most 0 where it rises to the end. The seeds share parts of their
    choice, so sd / sqrt(S) is too small where nothing falls: in simulations of flat noise 2 standard errors were
    exceeded in 10 % of studies of 5 seeds instead of the nominal 6 %, and the t-interval of `rises` in 5 %.
    """
    return -change_after(gold, other_peaks(gold))


class Story:
    """What gold and the proxy do along the curves of one treatment and method.

    Attributes: mean gold is highest at the place `top`, at KL `kl`; `start`, `peak` and `end` of gold; `drop` from the
    peak to the end, for each seed `drops` [S]; `proxy_after` and `proxy_gain`: the proxy's change since the peak and
    since the start. `rising`: no seed falls, and these peaks are the end. `falls`: gold clearly falls.
    """

    def __init__(self, curves: Curves) -> None:
        gold, proxy = curves["gold"], curves["proxy"]
        highest = int(gold.mean(axis=0).argmax())
        self.top, self.last = curves.places[highest], curves.places[-1]
        self.kl = float(curves["kl_exact"][:, highest].mean())
        self.start, self.peak, self.end = (Estimate.of(gold[:, place]) for place in (0, highest, -1))
        peaks = other_peaks(gold)
        self.drops = drop(gold)
        self.drop = Estimate.of(self.drops)
        self.falls = rises(self.drop)
        self.rising = bool((peaks == len(curves.places) - 1).all())
        self.proxy_after = Estimate.of(change_after(proxy, peaks))
        self.proxy_gain = Estimate.of(proxy[:, -1] - proxy[:, 0])


def root_kl(curves: Curves) -> Array:
    """[S, K] distances d = sqrt(KL) in sqrt(nats); an estimate of KL a little below 0 counts as 0."""
    roots: Array = np.sqrt(np.maximum(curves["kl_exact"], 0))
    return roots


def gain_at(curves: Curves, at: ArrayLike, measure: str = "gold") -> Array:
    """[S, J] gain over the start when each seed first reaches distances d [J]; NaN for one that it does not reach.

    Between evaluations the measure is taken as linear in the distance.
    """
    wanted, values = np.asarray(at, dtype=np.float64), curves[measure]
    rows = []
    for distances, gains in zip(root_kl(curves), values - values[:, :1], strict=True):
        farther = _farther(distances)
        reached = wanted <= distances.max() * (1 + 1e-12)  # the last one, up to rounding
        rows.append(np.where(reached, np.interp(wanted, distances[farther], gains[farther]), np.nan))
    return np.array(rows)


def shared_distances(curves: Curves) -> Array:
    """[J] distances d > 0 at which the seeds are averaged: those of the seed that gets least far.

    At one step seeds are unequally far, and a mean over them is at no distance, while R is a function of d. For
    best-of-n, whose KL is known, that is every n.
    """
    distances = root_kl(curves)
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
    b: Interval
    r_squared: float
    """1 - sum of squared residuals / sum of squares about the mean, over the points after the start."""
    num_points: int
    measured: float
    """The largest d of the mean curve."""

    @property
    def peak(self) -> tuple[float, float] | None:
        """d* = a / (2b) or exp(a / b - 1), and R(d*); None if farther than twice the measured distance: a guess."""
        a, b = self.a.mean, self.b.mean
        if b <= 0:  # it rises for ever
            return None
        distance = a / (2 * b) if self.form == FORMS["best_of_n"] else math.exp(min(a / b, 100) - 1)
        return (distance, float(self.at(distance))) if 0 < distance <= 2 * self.measured else None

    def at(self, distance: ArrayLike) -> Array:
        """R at distances d >= 0 of any shape."""
        gains: Array = _basis(np.asarray(distance, dtype=np.float64), self.form) @ np.array([self.a.mean, self.b.mean])
        return gains


def _basis(distance: Array, form: str) -> Array:
    """[..., 2]: the columns d and -d^2, or d and -d log d (0 at d = 0), of which R is a sum with weights a, b."""
    from scipy.special import xlogy

    return np.stack([distance, -(distance**2 if form == FORMS["best_of_n"] else xlogy(distance, distance))], axis=-1)


def fit(curves: Curves, form: str) -> Fit | None:
    """Least-squares fit to the mean curve: gold less that at the start, seeds averaged at `shared_distances`.

    Intervals resample the seeds by leaving out one at a time: with pseudo-values S theta - (S - 1) theta_(-s), theta
    +- t(.975, S - 1) sd / sqrt(S). For best-of-n, where all seeds have the same KL, this is exactly the t-interval over
    the seeds' own fits. Percentiles of a bootstrap are far too narrow for five seeds.

    None for fewer than three points after the start, where these do not tell a and b apart, or where gold is the same
    at all of them.
    """
    if (found := _fit_mean(curves, form)) is None:
        return None
    whole, r_squared = found
    seeds, count, distances = curves.seeds, len(curves.seeds), shared_distances(curves)
    groups = [[each for each in seeds if each != seed] for seed in seeds] if count > 1 else []
    others = [_fit_mean(curves.only(group), form) for group in groups]
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
