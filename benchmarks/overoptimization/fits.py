"""What is computed from one treatment's curves of over-optimization: peaks, drops, fits, gains at equal KL.

Arrays are [S, K]: S seeds, K evaluations along optimization, the first the SFT policy. Errors and intervals are over
seeds, the instructions being the same for all of them.
Sources: Gao, Schulman and Hilton 2022 (arXiv 2210.10760) for the forms in d = sqrt(KL); Coste et al. 2023 (arXiv
2310.02743) for ensembles and drops under label noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...statistics import Interval
from ..harness.estimates import Estimate

FORMS: Final = {"best_of_n": "d(a - b d)", "ppo": "d(a - b log d)"}
"""Method -> form of R(d), the gold gained over SFT at distance d = sqrt(KL), natural logarithm (Gao et al. 2022)."""
FEWEST_POINTS = 3
"""Points after the start below which two parameters fit anything."""

Array = NDArray[np.float64]


# ------------------------------------------------------------------------------------------------------ peak and drop


def peak(values: Array) -> int:
    """Position of the highest point of the mean curve of values [S, K], the earliest of equals."""
    return int(values.mean(axis=0).argmax())


def other_peaks(values: Array) -> NDArray[np.intp]:
    """[S]: for each seed, where the mean curve of the OTHER seeds of values [S, K] is highest; its own if alone."""
    others = values.sum(axis=0) - values if len(values) > 1 else values
    places: NDArray[np.intp] = others.argmax(axis=1)
    return places


@dataclass(frozen=True)
class Drop:
    """How far each seed's gold fell from the peak to the end. `per_seed` [S] in gold units, `peaks` [S] positions."""

    per_seed: Array
    peaks: NDArray[np.intp]

    @property
    def estimate(self) -> Estimate:
        """Mean, standard error and 95 % t-interval over the seeds."""
        return Estimate.of(self.per_seed)

    @property
    def clear(self) -> bool:
        """Whether gold fell, as `rises` decides."""
        return rises(self.estimate)


def drop(gold: Array) -> Drop:
    """Drop of gold [S, K] from its peak to the end, each seed's peak chosen on the mean curve of the other seeds.

    drop_s = gold_s[k_s] - gold_s[K], k_s = argmax_k of the mean of gold_t[k] over t != s. A maximum of noisy numbers
    is too high (the winner's curse), so a curve that only wobbles "falls" from its highest point; here the noise that
    chose k_s is not the noise at gold_s[k_s]. The mean is therefore right where the true curve has a peak, 0 where it
    is flat, and at most 0 where it rises to the end. With one seed the peak is its own, and there is no error.

    The drops of the seeds share parts of their choice, so sd / sqrt(S) is too small where nothing falls: in simulations
    of flat noise (14 evaluations) 2 standard errors were exceeded in 10 % of studies of 5 seeds instead of the nominal
    6 %. With the t-interval, which `Drop.clear` asks, it is 5 % (3 seeds: 4 %, 10 seeds: 7 %), and less for curves that
    rise or for noise that lasts over evaluations.
    """
    peaks = other_peaks(gold)
    return Drop(gold[np.arange(len(gold)), peaks] - gold[:, -1], peaks)


def change_after(values: Array, places: NDArray[np.intp]) -> Estimate:
    """Of values [S, K] at the end less those at each seed's own place [S]: the proxy's rise after the gold peak."""
    return Estimate.of(values[:, -1] - values[np.arange(len(values)), places])


def rises(estimate: Estimate) -> bool:
    """Whether the 95 % t-interval of a mean is above 0; never for one seed, which has none (NaN).

    For 2 to 60 seeds this is stricter than a mean of more than two standard errors.
    """
    return estimate.interval.low > 0


# --------------------------------------------------------------------------------------------------------------- fits


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
        """R* = a^2 / (4b), or b exp(a / b - 1); infinite where there is no peak."""
        distance = self.peak_distance
        if not math.isfinite(distance):
            return math.inf
        return distance * self.a.mean / 2 if self.form == FORMS["best_of_n"] else distance * self.b.mean

    def at(self, distance: ArrayLike) -> Array:
        """R at distances d >= 0 of any shape."""
        gains: Array = basis(np.asarray(distance, dtype=np.float64), self.form) @ np.array([self.a.mean, self.b.mean])
        return gains


def basis(distance: Array, form: str) -> Array:
    """[..., 2]: the columns d and -d^2, or d and -d log d (0 at d = 0), of which R is a sum with weights a, b."""
    if form not in FORMS.values():
        raise ValueError(f"form: expected one of {tuple(FORMS.values())}, got {form!r}")
    with np.errstate(divide="ignore", invalid="ignore"):
        bend = distance**2 if form == FORMS["best_of_n"] else np.where(distance > 0, distance * np.log(distance), 0.0)
    return np.stack([distance, -bend], axis=-1)


def shared_distances(kl: Array) -> Array:
    """[J] distances d > 0 at which the seeds of kl [S, K] are averaged: those of the seed that gets least far.

    At one step seeds are unequally far, and a mean over them is at no distance; R is a function of d. So seeds are
    averaged at equal d, up to the farthest that all of them reach. For best-of-n, whose KL is known, that is every n.
    """
    distances = np.sqrt(np.maximum(kl[np.maximum(kl, 0).max(axis=1).argmin()], 0))
    found: Array = distances[_farther(distances)][1:]
    return found


def fit(kl: Array, gold: Array, form: str) -> Fit | None:
    """Least-squares fit to the mean curve: the mean over seeds of gold less that at the start, at `shared_distances`.

    Intervals resample the seeds by leaving out one at a time: with pseudo-values S theta - (S - 1) theta_(-s), theta
    +- t(.975, S - 1) sd / sqrt(S). For best-of-n, where all seeds have the same KL, this is exactly the t-interval over
    the seeds' own fits. Percentiles of a bootstrap, the usual choice, are far too narrow for five seeds.

    Args:
        kl: [S, K] nats; [:, 0] is the start.
        gold: [S, K] gold units.
        form: One of `FORMS`.

    Returns:
        None for fewer than three points after the start, where these do not tell a and b apart, or where gold is the
        same at all of them: there is nothing to explain.
    """
    found = _fit_mean(kl, gold, form)
    if found is None:
        return None
    whole, r_squared, num = found
    count = len(kl)
    intervals = [Interval(float(value), math.nan, math.nan, count) for value in whole]
    alone = count == 1
    left_out = [] if alone else [_fit_mean(np.delete(kl, s, 0), np.delete(gold, s, 0), form) for s in range(count)]
    if left_out and all(each is not None for each in left_out):
        others = np.array([each[0] for each in left_out if each is not None])
        pseudo = count * whole - (count - 1) * others
        spread = [Estimate.of(column).interval for column in pseudo.T]
        intervals = [
            Interval(float(value), float(value) - half, float(value) + half, count)
            for value, half in zip(whole, [(each.high - each.low) / 2 for each in spread], strict=True)
        ]
    return Fit(form, intervals[0], intervals[1], r_squared, num, float(shared_distances(kl)[-1]))


def _fit_mean(kl: Array, gold: Array, form: str) -> tuple[Array, float, int] | None:
    """The fit (a, b) [2], R^2 and the number of points after the start, of the mean curve."""
    distance = shared_distances(kl)
    x, y = basis(distance, form), gain_at(kl, gold, distance).mean(axis=0)
    if len(y) < FEWEST_POINTS or np.linalg.matrix_rank(x) < 2 or not np.ptp(y) > 0:
        return None
    solution = np.asarray(np.linalg.lstsq(x, y, rcond=None)[0], dtype=np.float64)
    total = float(((y - y.mean()) ** 2).sum())
    residual = float(((y - x @ solution) ** 2).sum())
    return solution, 1 - residual / total, len(y)


# ------------------------------------------------------------------------------------------------------ KL efficiency


def gain_at(kl: Array, measure: Array, at: ArrayLike) -> Array:
    """Gain over the start when each seed first reaches given distances, [S, J]; NaN for one that it does not reach.

    Between evaluations the measure is taken as linear in the distance.

    Args:
        kl: [S, K] nats.
        measure: [S, K], gold for instance.
        at: [J] distances d = sqrt(KL), 0 or more.
    """
    wanted = np.asarray(at, dtype=np.float64)
    rows = []
    for distances, values in zip(np.sqrt(np.maximum(kl, 0)), measure - measure[:, :1], strict=True):
        farther = _farther(distances)
        reached = wanted <= distances.max() * (1 + 1e-12)  # the last one, up to rounding
        rows.append(np.where(reached, np.interp(wanted, distances[farther], values[farther]), np.nan))
    return np.array(rows)


def _farther(distances: Array) -> NDArray[np.bool_]:
    """[K], which evaluations are farther than all before them: KL is an estimate and may step back."""
    farther: NDArray[np.bool_] = np.r_[True, distances[1:] > np.maximum.accumulate(distances)[:-1]]
    return farther


def reach(kl: Array) -> float:
    """The KL, in nats, that every seed of kl [S, K] reaches."""
    return float(np.maximum(kl, 0).max(axis=1).min())
