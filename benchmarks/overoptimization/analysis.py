"""Numbers of the over-optimization study: curves of its rows, falls of gold and win rates, what noise costs, and fits.

Errors and intervals are over seeds. Source of the fits: Gao, Schulman and Hilton 2022 (arXiv 2210.10760).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ...statistics import PERCENT, UNBOUNDED, Interval
from ..experiment.evaluation import WIN_RATES
from ..experiment.treatments import BY_NAME
from ..harness.estimates import Estimate, drop, frame_of, holm, other_peaks
from ..harness.plots import band
from ..harness.study import Row

MEASURES: Final = ("kl_exact", "proxy", "gold", "win_rate_simulated", "win_rate_human", "length", "disagreement")
"""In nats a response, reward-model units, gold units, percent, characters, and standard deviation over members."""
COLUMNS: Final = ("treatment", "method", "seed", "step", "n", *MEASURES)
"""Columns of table.csv: one row an evaluation of a treatment, method and seed."""
METHOD_WORDS: Final = {
    "ppo": "PPO",
    "quark": "Quark",
    "expert_iteration": "expert iteration",
    "dpo": "DPO",
    "best_of_n": "best-of-n",
}
CLEAN: Final = "none"
NOISY: Final = "ann"
"""p_sim^ann (25 % flips)."""
FLIPS: Final = (CLEAN, "flip_175", NOISY, "flip_35")
"""Treatments that differ in the share of flipped labels only."""
FITTED: Final = ("best_of_n", "ppo")
"""Methods whose curves are fitted."""
FEWEST_POINTS: Final = 3  # after the start: fewer are fitted by any two parameters
NUM_DISTANCES: Final = 201
FEWEST: Final = 3
"""Seeds that ranges are judged by. Along a whole curve two are somewhere alike by chance, however far apart."""

Array = NDArray[np.float64]
Key = tuple[str, str]  # treatment and method


def position(method: str) -> str:
    """The column that says how far optimization has gone."""
    return "n" if method == "best_of_n" else "step"


@dataclass(frozen=True)
class Curves:
    """Measures of one treatment and method along optimization, [S, K] each: S seeds at K places from the SFT policy on.

    A place is a step, a round of expert iteration, or an n of best-of-n.
    """

    table: pd.DataFrame
    """A row a seed, a column a (measure, place)."""

    def __getitem__(self, measure: str) -> Array:
        return np.asarray(self.table[measure], dtype=np.float64)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def places(self) -> list[int]:
        """[K], ascending."""
        return [int(place) for place in self.table["gold"]]

    def only(self, seeds: Iterable[int]) -> Curves:
        """The curves of some seeds."""
        return Curves(self.table.loc[list(seeds)])


def curves_of(rows: Sequence[Row] | pd.DataFrame) -> dict[Key, Curves]:
    """(treatment, method) -> its curves, by the sweep and `METHOD_WORDS`; ValueError for a row twice."""
    tables = {}
    for (treatment, method), group in frame_of(rows).groupby(["treatment", "method"], sort=False):
        table = group.pivot(index="seed", columns=position(str(method)), values=[*MEASURES])
        tables[str(treatment), str(method)] = Curves(table)
    names = dict.fromkeys((*BY_NAME, *(name for name, _ in tables)))
    return {(name, kind): tables[name, kind] for name in names for kind in METHOD_WORDS if (name, kind) in tables}


def root_kl(curves: Curves) -> Array:
    """[S, K] distances d = sqrt(KL) in sqrt(nats); an estimate of KL a little below 0 counts as 0."""
    return np.sqrt(np.maximum(curves["kl_exact"], 0))


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
    return np.asarray(nearest[_farther(nearest)][1:])


def _farther(distances: Array) -> NDArray[np.bool_]:
    """[K], which evaluations are farther than all before them: KL is an estimate and may step back."""
    farther: NDArray[np.bool_] = np.r_[True, distances[1:] > np.maximum.accumulate(distances)[:-1]]
    return farther


def fit(curves: Curves) -> list[Interval] | None:
    """Alpha and beta of R(d) = d(alpha - beta d), gold units gained over SFT at d = sqrt(KL) in sqrt(nats).

    A least-squares fit of Gao et al.'s form to the mean curve, seeds averaged at `shared_distances`. They give it to
    best-of-n, and d(alpha - beta log d) to reinforcement learning. It is one form for all methods here, so that their
    parameters can be compared. How well it fits is not said: the points of a mean curve follow each other so closely
    that a high R^2 says little.

    Intervals resample the seeds by leaving out one at a time: with pseudo-values S theta - (S - 1) theta_(-s), theta
    +- t(.975, S - 1) sd / sqrt(S). For best-of-n, where all seeds have the same KL, this is exactly the t-interval over
    the seeds' own fits. Percentiles of a bootstrap are far too narrow for five seeds.

    None for fewer than three points after the start, where these do not tell the two apart, or where gold is the same
    at all of them.
    """
    whole, seeds, count = fit_mean(curves), curves.table.index, len(curves)
    if whole is None:
        return None
    others = [fit_mean(curves.only(seeds.drop(seed))) for seed in seeds] if count > 1 else []
    half = np.full(2, math.nan)
    if others and all(each is not None for each in others):
        pseudo = count * whole - (count - 1) * np.array(others)
        half = np.array([(each.high - each.low) / 2 for each in map(Estimate.of, pseudo.T)])
    ends = np.stack([whole, whole - half, whole + half], axis=1).tolist()
    return [Interval(mean, low, high, count) for mean, low, high in ends]


def fit_mean(curves: Curves) -> Array | None:
    """[alpha, beta] of the mean curve."""
    distances = shared_distances(curves)
    x, y = np.stack([distances, -(distances**2)], axis=1), gain_at(curves, distances).mean(axis=0)
    if len(y) < FEWEST_POINTS or not np.ptp(y) > 0:
        return None
    solution, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    return solution if rank == 2 else None


def distances(*curves: Curves) -> Array:
    """[J] distances sqrt(KL): evenly from 0 to the farthest that every seed of all these curves reaches; `nearest`."""
    end = min(float(root_kl(each).max(axis=1).min()) for each in curves)
    return np.union1d(np.linspace(0, end, NUM_DISTANCES), min(end, nearest(*curves)))


def nearest(*curves: Curves) -> float:
    """The distance sqrt(KL) from which on every seed of all these curves has been measured.

    Between SFT, where every gain is 0, and the first evaluation all gains are interpolated, and so are their intervals.
    """
    roots = [root_kl(each) for each in curves]
    return max(float(each[np.arange(len(each)), (each > 0).argmax(axis=1)].max()) for each in roots)


@dataclass(frozen=True)
class Along:
    """A difference in gold at each of J distances from SFT, from `nearest` on.

    Attributes:
        kl: [J] nats, ascending.
        values: [S, J] gold units, of the seeds.
    """

    kl: Array
    values: Array

    @classmethod
    def of(cls, at: Array, values: Array, *curves: Curves) -> Along:
        """Values [S, J] at those distances [J] where all curves have been measured."""
        measured = at >= min(at[-1], nearest(*curves))
        return cls(at[measured] ** 2, values[:, measured])

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


@dataclass(frozen=True)
class Fall:
    """How gold and the win rates fall under one method by one treatment."""

    along: Along
    """Gold at its peak less gold at each distance beyond; 0 before: what a rise has still to come is no fall."""
    peak: float
    """Where the mean gold is highest, in nats."""
    gained: Estimate
    """The gold gained there."""
    proxy: Estimate
    """What the proxy has gained at the largest KL."""
    to_ends: Estimate
    """Gold's fall by step, to the end of each seed's run."""
    last: Array
    """[S] nats at which the runs end."""
    won: Mapping[str, tuple[int, Estimate]]
    """Win rate -> the place at which its mean is highest, and its drop to the run's end in points."""

    @classmethod
    def of(cls, curves: Curves) -> Fall:
        """Each seed's peak is that of the other seeds' mean curve."""
        at = distances(curves)
        gold = gain_at(curves, at)
        peaks, highest = other_peaks(gold), int(gold.mean(axis=0).argmax())
        since = np.where(np.arange(len(at)) > peaks[:, None], gold[np.arange(len(gold)), peaks][:, None] - gold, 0.0)
        tops = {name: curves.places[int(curves[name].mean(axis=0).argmax())] for name in WIN_RATES}
        return cls(
            Along.of(at, since, curves),
            float(at[highest] ** 2),
            Estimate.of(gold[:, highest]),
            Estimate.of(gain_at(curves, at[-1:], "proxy")[:, 0]),
            Estimate.of(drop(curves["gold"])),
            curves["kl_exact"][:, -1],
            {name: (place, Estimate.of(drop(curves[name]))) for name, place in tops.items()},
        )

    @property
    def share(self) -> float:
        """The fall at the largest KL as a share of what gold had gained at its peak, in percent; NaN if nothing."""
        return 100 * self.along.end.mean / self.gained.mean if self.gained.mean > 0 else math.nan


@dataclass(frozen=True)
class Cost:
    """How much less gold there is by flipped labels, and how much deeper it falls, both paired by seed."""

    along: Along
    """Gold by clean labels less gold by flipped ones at equal KL."""
    deeper: Estimate
    """At the largest KL that both reach."""
    to_ends: Estimate
    """To the ends of their runs."""

    @classmethod
    def of(cls, clean: Curves, noisy: Curves) -> Cost:
        """Both are curves of the same seeds."""
        at = distances(clean, noisy)
        golds = [gain_at(each, at) for each in (clean, noisy)]
        less, more = (gold[np.arange(len(gold)), other_peaks(gold)] - gold[:, -1] for gold in golds)
        ends = drop(noisy["gold"]) - drop(clean["gold"])
        return cls(Along.of(at, golds[0] - golds[1], clean, noisy), Estimate.of(more - less), Estimate.of(ends))


class Results:
    """All that is said of the rows of table.csv.

    Attributes:
        curves: Treatment and method -> its curves, treatment by treatment.
        methods: Those that ran.
        falls: Of each of them.
        costs: Of each share of flips and method that was also run without flips.
        eased: What `NOISY` costs beside each treatment that has as many flips, and more labels, models or a penalty.
        kept_falls, kept_costs, kept_eased: Which of them stay clear at the largest KL by Holm's method over their kind.
        fits: Parameters of the curves that can be fitted.
    """

    def __init__(self, rows: Sequence[Row] | pd.DataFrame) -> None:
        self.curves = curves_of(rows)
        self.methods = [method for method in METHOD_WORDS if any(key[1] == method for key in self.curves)]
        self.falls = {key: Fall.of(curves) for key, curves in self.curves.items()}
        pairs = {key: self.paired((CLEAN, key[1]), key) for key in self.curves if key[0] in FLIPS[1:]}
        self.costs = {key: Cost.of(*pair) for key, pair in pairs.items() if pair}
        flipped = {name for name, each in BY_NAME.items() if each.flip == BY_NAME[NOISY].flip} - {NOISY}
        like = [key for key in self.curves if key[0] in flipped]
        beside = {key: self.paired(key, (NOISY, key[1])) for key in like}
        self.eased = {key: Cost.of(*pair) for key, pair in beside.items() if pair}
        self.kept_falls, self.kept_costs, self.kept_eased = kept(self.falls), kept(self.costs), kept(self.eased)
        fits = {key: fit(curves) for key, curves in self.curves.items() if key[1] in FITTED}
        self.fits = {key: each for key, each in fits.items() if each}

    def paired(self, *keys: Key) -> list[Curves]:
        """Curves of the seeds that all of these treatments and methods have; none where there is none."""
        given = [self.curves[key] for key in keys if key in self.curves]
        if len(given) < len(keys):
            return []
        common = [seed for seed in given[0].table.index if all(seed in each.table.index for each in given)]
        return [each.only(common) for each in given] if common else []

    def transferred(self, name: str) -> Estimate | None:
        """Win rate by human raters of PPO by a labeller less that of PPO by `NOISY`, in points, paired by seed."""
        pair = self.paired((name, "ppo"), (NOISY, "ppo"))
        return Estimate.of(np.subtract(*(chosen(each, WIN_RATES[1]) for each in pair))) if pair else None

    def slopes(self, method: str) -> list[Estimate] | None:
        """How alpha and beta of the seeds' own fits change with 10 points of flips, paired by seed."""
        pairs = self.paired(*((name, method) for name in FLIPS))
        fits = [[fit_mean(curves.only([seed])) for seed in curves.table.index] for curves in pairs]
        if not fits or any(each is None for row in fits for each in row):
            return None
        shares = [10 * BY_NAME[name].flip for name in FLIPS]
        return [Estimate.of(np.polyfit(shares, values, 1)[0]) for values in np.moveaxis(np.array(fits), 2, 0)]


def kept(measured: Mapping[Key, Any]) -> dict[Key, bool]:
    """Whether each fall or cost that is judged is above 0 at the largest KL, among all of its kind."""
    judged = {key: each.along for key, each in measured.items() if each.along.judged}
    clear = holm([each.values[:, -1] for each in judged.values()])
    return {key: own and each.end.mean > 0 for (key, each), own in zip(judged.items(), clear, strict=True)}


def transfer(curves: Curves) -> dict[str, Estimate]:
    """Measures of the step that p_sim^eval would choose, each seed's by the other seeds' win rates."""
    return {name: Estimate.of(chosen(curves, name)) for name in ("kl_exact", "gold", *WIN_RATES)}


def chosen(curves: Curves, measure: str) -> Array:
    """[S] a measure at that step; gold as its gain."""
    values, rows = curves[measure], np.arange(len(curves))
    picked = values[rows, other_peaks(curves["win_rate_simulated"])]
    return np.asarray(picked - values[:, 0] if measure == "gold" else picked)


def reward_models(rows: pd.DataFrame) -> dict[str, dict[str, Estimate]]:
    """Treatment -> measures of its reward models (an ensemble's mean) over seeds, in percent but labels."""
    bounds = dict.fromkeys(("accuracy_gold", "accuracy_judge", "calibration_error"), PERCENT)
    measures = {"num_trained": UNBOUNDED, "scale": UNBOUNDED, **bounds}
    rows = rows.assign(scale=rows.get("scale", math.nan))
    seeds = rows.groupby(["treatment", "seed"], sort=False)[[*measures]].mean()
    seeds[[*bounds]] *= 100
    means = {
        str(name): {measure: Estimate.of(own[measure], ends) for measure, ends in measures.items()}
        for name, own in seeds.groupby("treatment", sort=False)
    }
    return {name: means[name] for name in dict.fromkeys((*BY_NAME, *means)) if name in means}
