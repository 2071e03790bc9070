"""Numbers of the over-optimization study: curves of its rows, falls of gold and win rates, what noise costs, and fits.

Errors and intervals are over seeds. Source of the fits: Gao, Schulman and Hilton 2022 (arXiv 2210.10760).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ...statistics import Interval
from ..experiment.evaluation import WIN_RATES
from ..harness.estimates import Estimate, drop, frame_of, holm, other_peaks, pivot
from ..harness.plots import band
from ..harness.study import Row
from .treatments import Treatment

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

    def only(self, seeds: Sequence[int]) -> Curves:
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


NUM_DISTANCES: Final = 201
FEWEST: Final = 3
"""Seeds that ranges are judged by. Along a whole curve two are somewhere alike by chance, however far apart."""


def distances(*curves: Curves) -> Array:
    """[J] distances sqrt(KL): evenly from 0 to the farthest that every seed of all these curves reaches; `nearest`."""
    end = min(float(root_kl(each).max(axis=1).min()) for each in curves)
    return np.union1d(np.linspace(0, end, NUM_DISTANCES), min(end, nearest(*curves)))


def nearest(*curves: Curves) -> float:
    """The distance sqrt(KL) from which on every seed of all these curves has been measured.

    Between SFT, where every gain is 0, and the first evaluation all gains are interpolated, and so are their intervals.
    """
    found = [root_kl(each) for each in curves]
    return max(float(each[np.arange(len(each)), (each > 0).argmax(axis=1)].max()) for each in found)


@dataclass(frozen=True)
class Along:
    """A difference in gold at each of J distances from SFT, from `nearest` on.

    Attributes:
        kl: [J] nats, ascending.
        values: [S, J] gold units, of the seeds.
    """

    kl: Array
    values: Array

    @property
    def end(self) -> Estimate:
        """At the largest KL."""
        return Estimate.of(self.values[:, -1])

    @property
    def reached(self) -> float:
        """The largest KL, in nats."""
        return float(self.kl[-1])

    @property
    def judged(self) -> bool:
        """Whether there are seeds enough for ranges, and all of them have left SFT."""
        return len(self.values) >= FEWEST and self.reached > 0

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Ranges of KL, in nats, in which the pointwise 95 % t-interval of the mean is above 0; none of one seed.

        One distance alone is no range.
        """
        above = np.r_[False, band(self.values)[1] > 0, False]
        first, beyond = (np.flatnonzero(each) for each in (above[1:] & ~above[:-1], above[:-1] & ~above[1:]))
        return [(float(self.kl[i]), float(self.kl[j - 1])) for i, j in zip(first, beyond, strict=True) if j - i > 1]


def fall(curves: Curves) -> Along:
    """Gold at its peak less gold at each distance beyond; each seed's peak is that of the other seeds' mean curve.

    Before a seed's peak it is 0: what a rise has still to come is no fall.
    """
    at = distances(curves)
    gold = gain_at(curves, at)
    peaks = other_peaks(gold)
    since = gold[np.arange(len(gold)), peaks][:, None] - gold
    return _along(at, np.where(np.arange(len(at)) > peaks[:, None], since, 0.0), curves)


def cost(clean: Curves, noisy: Curves) -> Along:
    """Gold by clean labels less gold by noisy ones at equal KL; both are curves of the same seeds."""
    at = distances(clean, noisy)
    return _along(at, gain_at(clean, at) - gain_at(noisy, at), clean, noisy)


def _along(at: Array, values: Array, *curves: Curves) -> Along:
    """Values [S, J] at those distances [J] where all curves have been measured."""
    measured = at >= min(at[-1], nearest(*curves))
    return Along(at[measured] ** 2, values[:, measured])


def peak(curves: Curves) -> tuple[float, Estimate]:
    """Where the mean gold is highest, in nats, and the gold gained there."""
    at = distances(curves)
    gold = gain_at(curves, at)
    highest = int(gold.mean(axis=0).argmax())
    return float(at[highest] ** 2), Estimate.of(gold[:, highest])


NOISY, CLEAN = "ann", "gpt4"
"""p_sim^ann (25 % flips), and p_sim^GPT-4 (no added noise)."""
FLIPS = ("none", "flip_175", "ann", "flip_35")
"""Treatments that differ in the share of flipped labels only."""
FITTED: Final = ("best_of_n", "ppo")
"""Methods whose curves are fitted."""


class Results:
    """The curves of table.csv's rows, and the treatments that were meant to run: `facts`, by name.

    Attributes:
        keys: Treatment and method of each curve, treatment by treatment.
        falls: How far gold has fallen at equal KL.
        ends: [S] fall of gold to the end of each seed's run.
        costs: How much less gold there is than without flips, of each share of flips and method.
        kept_falls, kept_costs: Which of them stay clear at the largest KL by Holm's method over all of their kind.
    """

    def __init__(self, rows: Sequence[Row], treatments: Iterable[Treatment]) -> None:
        self.facts = {treatment.name: treatment for treatment in treatments}
        self.curves = curves_of(rows)
        self.methods = [method for method in METHOD_WORDS if any(key[1] == method for key in self.curves)]
        names = dict.fromkeys((*self.facts, *(name for name, _ in self.curves)))
        self.keys = [(name, kind) for name in names for kind in self.methods if (name, kind) in self.curves]
        self.falls = {key: fall(self.curves[key]) for key in self.keys}
        self.ends = {key: drop(self.curves[key]["gold"]) for key in self.keys}
        pairs = {(name, kind): self.paired((FLIPS[0], kind), (name, kind)) for name, kind in self.keys}
        self.costs = {key: cost(*pair) for key, pair in pairs.items() if pair and key[0] in FLIPS[1:]}
        self.kept_falls, self.kept_costs = _kept(self.falls), _kept(self.costs)

    def title(self, name: str) -> str:
        """A treatment's title for people; its name where it has no facts."""
        return self.facts[name].title if name in self.facts else name

    def paired(self, *keys: Key) -> list[Curves] | None:
        """Curves of the seeds that all of these treatments and methods have; None where there is none."""
        if any(key not in self.curves for key in keys):
            return None
        found = [self.curves[key] for key in keys]
        common = [seed for seed in found[0].seeds if all(seed in each.seeds for each in found)]
        return [each.only(common) for each in found] if common else None

    def relative(self, key: Key) -> float:
        """The fall at equal KL as a share of what gold had gained at its peak, in percent; NaN if nothing."""
        gained = peak(self.curves[key])[1].mean
        return 100 * self.falls[key].end.mean / gained if gained > 0 else math.nan

    def deeper(self, name: str, method: str) -> tuple[Estimate, Estimate] | None:
        """How much deeper gold falls than without flips: at the largest KL that both reach, and to their runs' ends."""
        pair = self.paired((FLIPS[0], method), (name, method))
        if pair is None:
            return None
        at = distances(*pair)
        clean, noisy = (np.stack([_fall_at(curves, at), drop(curves["gold"])]) for curves in pair)
        equal, ends = map(Estimate.of, noisy - clean)
        return equal, ends

    def won(self, key: Key) -> dict[str, tuple[int, Estimate]]:
        """Win rate -> where its mean is highest, and its drop from there in points, chosen on the other seeds."""
        curves = self.curves[key]
        highest = {name: curves.places[int(curves[name].mean(axis=0).argmax())] for name in WIN_RATES}
        return {name: (place, Estimate.of(drop(curves[name]))) for name, place in highest.items()}

    def slopes(self, method: str) -> list[Estimate] | None:
        """How alpha and beta of the seeds' own fits change with 10 points of flips, paired by seed."""
        pairs = self.paired(*((name, method) for name in FLIPS)) or []
        fits = [[fit_mean(curves.only([seed])) for seed in curves.seeds] for curves in pairs]
        if not fits or any(each is None for row in fits for each in row):
            return None
        shares = [10 * self.facts[name].flip for name in FLIPS]
        return [Estimate.of(np.polyfit(shares, values, 1)[0]) for values in np.moveaxis(np.array(fits), 2, 0)]

    def fits(self) -> dict[Key, Fit]:
        """Parameters of the curves that can be fitted."""
        found = {key: fit(self.curves[key]) for key in self.keys if key[1] in FITTED}
        return {key: each for key, each in found.items() if each}


def _kept(along: Mapping[Key, Along]) -> dict[Key, bool]:
    judged = {key: each for key, each in along.items() if each.judged}
    kept = holm([each.values[:, -1] for each in judged.values()])
    return {key: own and each.end.mean > 0 for (key, each), own in zip(judged.items(), kept, strict=True)}


def _fall_at(curves: Curves, at: Array) -> Array:
    gold = gain_at(curves, at)
    since: Array = gold[np.arange(len(gold)), other_peaks(gold)] - gold[:, -1]
    return since


def reward_models(rows: Sequence[Row]) -> pd.DataFrame:
    """Means over an ensemble's members, a row a treatment and seed; accuracy and calibration error in percent."""
    measures = ["num_trained", "accuracy_gold", "accuracy_judge", "calibration_error"]
    frame = frame_of(rows) if rows else pd.DataFrame(columns=["treatment", "seed", *measures])
    frame[measures[1:]] *= 100
    return frame.groupby(["treatment", "seed"], sort=False)[measures].mean().reset_index()
