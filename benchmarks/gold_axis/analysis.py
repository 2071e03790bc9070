"""What is said of each method's curve: its peak, its fall, and both at equal KL and at equal proxy.

Errors are over seeds and instructions, crossed; methods are compared with PPO by seed and instruction. Gold at a KL, or
at a proxy, that lies between two evaluations of a seed is taken as linear between them, in the square root of KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from ..experiment.faults import FLIP
from ..experiment.fresh import OWN
from ..harness.page import records
from ..harness.stored import unpack
from ..harness.study import Row
from ..surrogates.curves import TwoWay, drop_and_peak
from ..surrogates.curves import gao as gao_fit
from ..surrogates.features import Array
from ..surrogates.predictions import Outcome, Prediction, outcomes_of
from ..surrogates.scarcity import corrected, estimate_cells, tested
from .runs import LABELLINGS, METHODS

PPO: Final = "ppo"
REACHED: Final = 0.75
"""Methods are compared at the largest KL, and the largest proxy, that this share of them reach with all seeds."""
NUM_PLACES: Final = 33
Key = tuple[str, str]
"""Labelling, method."""


@dataclass(frozen=True)
class Track:
    """A method's curves of S seeds and I instructions at K places, the first before it has learned anything."""

    places: list[int]
    samples: list[int]
    """Drawn up to each place."""
    kl: Array
    """[S, K] nats."""
    proxy: Array
    """[S, K] gained, in its spread."""
    golds: Mapping[str, Array]
    """Judge -> [S, I, K]."""

    @cached_property
    def gained(self) -> Array:
        """[S, I, K] gold gained."""
        return self.golds[OWN] - self.golds[OWN][..., :1]

    @property
    def distance(self) -> Array:
        """[S, K] square root of the KL."""
        return np.sqrt(np.maximum(self.kl, 0))

    def at(self, along: Array, wanted: Array) -> Array:
        """[S, I, J] gold gained where each seed first reaches `wanted` [J] along [S, K]; NaN beyond its reach."""
        rows = []
        for own, gained in zip(along, self.gained, strict=True):
            farther = np.r_[True, own[1:] > np.maximum.accumulate(own)[:-1]]
            rows.append([np.interp(wanted, own[farther], each, right=np.nan) for each in gained[:, farther]])
        return np.array(rows)

    def reach(self, along: Array) -> float:
        """What every seed reaches along [S, K]."""
        return float(along.max(axis=1).min())


def tracks_of(rows: Sequence[Row]) -> dict[Key, Track]:
    """The tracks of the runs' rows, labelling by labelling."""
    found = {}
    for kind in LABELLINGS:
        for method in METHODS:
            own = sorted(
                (row for row in rows if (row["kind"], row["method"]) == (kind, method)), key=lambda row: row["seed"]
            )
            if not own:
                continue
            judges = dict.fromkeys(row["judge"] for row in own)
            golds = {
                judge: np.stack([unpack(row["gold"], len(row["n"])) for row in own if row["judge"] == judge])
                for judge in judges
            }
            first = [row for row in own if row["judge"] == own[0]["judge"]]
            kl, proxy = (np.array([row[name] for row in first]) for name in ("kl", "proxy"))
            found[kind, method] = Track(first[0]["n"], first[0]["samples"], kl, proxy, golds)
    return found


def marks(tracks: Mapping[Key, Track], kind: str) -> tuple[float, float]:
    """The distance and the proxy at which the methods of a labelling are compared."""
    own = [track for (labels, _), track in tracks.items() if labels == kind]
    reached = np.array([[track.reach(track.distance), track.reach(track.proxy)] for track in own])
    distance, proxy = np.quantile(reached, 1 - REACHED, axis=0, method="lower").tolist()
    return distance, proxy


def measures(track: Track, distance: float, proxy: float) -> dict[str, Array]:
    """[S, I] each: gained at the peak, and lost from it to the run's end; lost at equal KL, gained at equal proxy.

    Those that not every seed reaches are left out.
    """
    drop, peak = drop_and_peak(track.golds[OWN])
    found = {"peak": peak, "drop": drop}
    near = 1 - 1e-9
    if track.reach(track.distance) >= near * distance > 0:
        lost, _ = drop_and_peak(track.at(track.distance, near * np.linspace(0, distance, NUM_PLACES)))
        found["fall_at_kl"] = lost
    if track.reach(track.proxy) >= near * proxy > 0:
        found["gold_at_proxy"] = track.at(track.proxy, np.array([near * proxy]))[..., 0]
    return found


def gao(track: Track) -> tuple[Array, Array]:
    """Alpha and beta [S, I] at even distances to the reach."""
    at = np.linspace(0, (1 - 1e-9) * track.reach(track.distance), NUM_PLACES)[1:]
    return gao_fit(at, track.at(track.distance, at))


def method_rows(tracks: Mapping[Key, Track]) -> list[Row]:
    """A row a labelling, method and judge: the peak with its KL and samples, what is lost, Gao's parameters."""
    rows = []
    for (kind, method), track in tracks.items():
        distance, proxy = marks(tracks, kind)
        for judge, gold in track.golds.items():
            known = gold[:, ~np.isnan(gold).any(axis=(0, 2))]
            place = int(known.mean(axis=(0, 1)).argmax())
            row: Row = {"kind": kind, "method": method, "judge": judge, "seeds": len(gold)}
            row |= {"instructions": known.shape[1], "peak_place": track.places[place]}
            row |= {"peak_kl": float(track.kl[:, place].mean()), "peak_samples": track.samples[place]}
            row |= {"end_kl": float(track.kl[:, -1].mean()), "end_proxy": float(track.proxy[:, -1].mean())}
            row |= {"mark_kl": distance**2, "mark_proxy": proxy}
            if judge == OWN:
                tables = measures(track, distance, proxy) | dict(zip(("alpha", "beta"), gao(track), strict=True))
            else:
                tables = dict(zip(("drop", "peak"), drop_and_peak(known), strict=True))
            for name in ("peak", "drop", "fall_at_kl", "gold_at_proxy", "alpha", "beta"):
                row |= estimate_cells(name, TwoWay.of(tables.get(name, np.full((1, 1), np.nan))))
            rows.append(row)
    return rows


def curve_rows(tracks: Mapping[Key, Track]) -> list[Row]:
    """A row a labelling, method and place: KL, proxy, gold with its interval, and the win rates' gain."""
    rows = []
    for (kind, method), track in tracks.items():
        for number, place in enumerate(track.places):
            row: Row = {"kind": kind, "method": method, "place": place, "samples": track.samples[number]}
            row |= {"kl": float(track.kl[:, number].mean()), "proxy": float(track.proxy[:, number].mean())}
            row |= estimate_cells("gold", TwoWay.of(track.gained[..., number]))
            for judge, gold in track.golds.items():
                if judge != OWN:
                    row[judge] = float(np.nanmean(gold[..., number] - gold[..., 0]))
            rows.append(row)
    return rows


def claims(tracks: Mapping[Key, Track]) -> list[Row]:
    """The page's family of claims, with whether each is clear by Holm.

    A method less PPO: in gold at the peak, lost at equal KL, and gained at equal proxy. And of each method, what a
    taste for length costs at the peak beyond flips.
    """
    found = {key: measures(track, *marks(tracks, key[0])) for key, track in tracks.items()}
    rows = []
    for (kind, method), own in found.items():
        base = found.get((kind, PPO), {})
        shared = [name for name in ("peak", "fall_at_kl", "gold_at_proxy") if name in own and name in base]
        rows += [_claim(name, kind, method, own[name] - base[name]) for name in shared if method != PPO]
    flips, length = list(LABELLINGS)[1:]
    for method in METHODS:
        if (flips, method) in found and (length, method) in found:
            cost = found[flips, method]["peak"] - found[length, method]["peak"]
            rows.append(_claim("cost of length", "", method, cost))
    return corrected(rows)


def _claim(what: str, kind: str, method: str, table: Array) -> Row:
    return {"claim": what, "kind": kind, "method": method} | tested(table)


PREDICTED: Final = (
    Prediction("peak", (FLIP, "grpo"), "within", "By flips GRPO gains at its peak what PPO does.", 0.1),
    Prediction("peak", (FLIP, "rloo"), "within", "So does RLOO.", 0.1),
    Prediction("peak", (FLIP, "reinforce_pp"), "within", "So does REINFORCE++.", 0.1),
    Prediction("peak", (FLIP, "online_dpo"), "within", "So does online DPO.", 0.15),
    Prediction("peak", (FLIP, "dpo"), "below", "By flips DPO gains less at its peak than PPO."),
    Prediction("peak", (FLIP, "kto"), "below", "So does KTO."),
    Prediction("peak", (FLIP, "quark"), "below", "So does Quark."),
    Prediction("peak", (FLIP, "expert_iteration"), "below", "So does expert iteration."),
    Prediction("fall_at_kl", (FLIP, "dpo"), "above", "At equal KL DPO has lost more by flips than PPO."),
    Prediction("fall_at_kl", (FLIP, "quark"), "above", "At equal KL Quark has lost more by flips."),
    Prediction("fall_at_kl", (FLIP, "expert_iteration"), "above", "At equal KL so has expert iteration."),
    Prediction("gold_at_proxy", (FLIP, "best_of_n"), "above", "At equal proxy best-of-n has more gold than PPO."),
    Prediction("cost of length", ("", "best_of_n"), "above", "A taste for length costs best-of-n more than flips."),
    Prediction("cost of length", ("", "ppo"), "above", "It costs PPO more."),
    Prediction("cost of length", ("", "grpo"), "above", "It costs GRPO more."),
    Prediction("cost of length", ("", "dpo"), "above", "It costs DPO more."),
)
"""Committed before the first run of the study, in gold's unit. Seen before were runs of the other methods of the study
of over-optimization, and of each new method one run against the shipped reward model. Runs of five methods, one seed of
25 % flips each, have set the number of steps since; no prediction was changed by them."""


def outcomes(claimed: pd.DataFrame) -> list[Outcome]:
    """What came of the predictions."""
    return outcomes_of(PREDICTED, {(row["claim"], row["kind"], row["method"]): row for row in records(claimed)})
