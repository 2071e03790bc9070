"""Numbers of the over-optimization study: falls of gold and win rates, what noise costs, Gao et al.'s parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd

from ..harness.estimates import Estimate, drop, frame_of, holm, other_peaks
from ..harness.study import Row
from .curves import METHOD_WORDS, Array, Curves, Fit, Key, curves_of, fit, fit_mean, gain_at
from .ranges import Along, cost, distances, fall, peak
from .treatments import Treatment

NOISY, CLEAN = "ann", "gpt4"
"""p_sim^ann (25 % flips), and p_sim^GPT-4 (no added noise)."""
FLIPS = ("none", "flip_175", "ann", "flip_35")
"""Treatments that differ in the share of flipped labels only."""
FITTED: Final = ("best_of_n", "ppo")
"""Methods whose curves are fitted."""
WIN_RATES: Final = ("win_rate_simulated", "win_rate_human")


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
        """Of a treatment, for people; its name where it has no facts."""
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
