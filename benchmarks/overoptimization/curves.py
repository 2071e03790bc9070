"""The rows of the over-optimization study as curves, and what is computed of one: its peak, drop, gains and fit.

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
    """R(d) = d(alpha - beta d) of a mean curve: gold units gained over SFT at d = sqrt(KL) in sqrt(nats)."""

    alpha: Interval
    beta: Interval


def fit(curves: Curves) -> Fit | None:
    """Least-squares fit of Gao et al.'s form to the mean curve, seeds averaged at `shared_distances`.

    They give it to best-of-n, and d(alpha - beta log d) to reinforcement learning. It is one form for all methods here,
    so that their parameters can be compared. How well it fits is not said: the points of a mean curve follow each other
    so closely that a high R^2 says little.

    Intervals resample the seeds by leaving out one at a time: with pseudo-values S theta - (S - 1) theta_(-s), theta
    +- t(.975, S - 1) sd / sqrt(S). For best-of-n, where all seeds have the same KL, this is exactly the t-interval over
    the seeds' own fits. Percentiles of a bootstrap are far too narrow for five seeds.

    None for fewer than three points after the start, where these do not tell the two apart, or where gold is the same
    at all of them.
    """
    whole, seeds, count = fit_mean(curves), curves.seeds, len(curves.seeds)
    if whole is None:
        return None
    groups = [[each for each in seeds if each != seed] for seed in seeds] if count > 1 else []
    others = [fit_mean(curves.only(group)) for group in groups]
    half = np.full(2, math.nan)
    if others and all(each is not None for each in others):
        pseudo = count * whole - (count - 1) * np.array(others)
        half = np.array([(each.high - each.low) / 2 for each in (Estimate.of(x).interval for x in pseudo.T)])
    ends = np.stack([whole, whole - half, whole + half], axis=1).tolist()
    return Fit(*(Interval(mean, low, high, count) for mean, low, high in ends))


def fit_mean(curves: Curves) -> Array | None:
    """[alpha, beta] of the mean curve."""
    distances = shared_distances(curves)
    x, y = np.stack([distances, -(distances**2)], axis=1), gain_at(curves, distances).mean(axis=0)
    if len(y) < FEWEST_POINTS or not np.ptp(y) > 0:
        return None
    solution, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    return solution if rank == 2 else None
