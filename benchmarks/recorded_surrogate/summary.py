"""Accuracy and AUC on left-out models beside the baselines, and what best-of-n by a surrogate is truly worth.

Accuracy is the mean over models of each model's share of right predictions. Models are the unit that is resampled: the
verdicts of one model stand or fall together. The error of a difference is the larger one of two: over models alone, and
over models and instructions both (Cameron, Gelbach and Miller 2011, two-way clusters), for all models answer the same
instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...agents.best_of_n_analysis import best_of_k
from ...seeding import keyed_rng
from ...statistics import PERCENT, UNBOUNDED, interval
from ..harness.agreement import percentiles
from ..harness.estimates import mean_known
from ..harness.study import Row
from .data import Array, Judged, Mask
from .models import BASELINE, CHOSEN, SURROGATES, find_surrogate

COLUMNS: Final = (
    *("protocol", "group", "surrogate", "is_baseline", "num_models", "num_pairs"),
    *("accuracy", "accuracy_low", "accuracy_high", "auc", "auc_low", "auc_high", "auc_within_model"),
    *("beside", "difference", "standard_error", "z", "models_ahead"),
)
MODEL_COLUMNS: Final = (
    *("protocol", "surrogate", "generator", "near_reference", "win_rate", "num_pairs", "accuracy", "auc"),
)
BEST_OF_N_COLUMNS: Final = (
    *("pool", "chooser", "n", "win_rate", "low", "high", "proxy", "proxy_low", "proxy_high", "length"),
    *("gain", "gain_low", "gain_high", "over_longest", "over_longest_low", "over_longest_high"),
    *("after_peak", "after_peak_low", "after_peak_high", "num_instructions"),
)
NUM_RESAMPLES: Final = 1_000
LONGEST: Final = "longest"
JUDGE: Final = "judge"
CHOOSERS: Final = (CHOSEN, BASELINE)
GROUPS: Final = ("near_reference", "all")

Scores = Mapping[tuple[str, str], Array]
"""(protocol or pool, surrogate) -> scores [M, N], NaN where not tested."""


def accuracy_rows(judged: Judged, scores: Scores) -> list[Row]:
    """A row for each protocol, group of models and surrogate, each beside the strongest baseline on the same pairs."""
    rows = []
    for (protocol, name), found in scores.items():
        for group in GROUPS:
            tested = judged.decisive & ~np.isnan(found)
            tested &= (judged.near if group == GROUPS[0] else np.ones(len(judged.models), bool))[:, None]
            if not tested.any():
                continue
            baselines = [s.name for s in SURROGATES if s.baseline and (protocol, s.name) in scores]
            rivals = {baseline: scores[protocol, baseline] for baseline in baselines}
            rows.append(
                {
                    "protocol": protocol,
                    "group": group,
                    "surrogate": name,
                    "is_baseline": find_surrogate(name).baseline,
                    **_quality(judged, found, tested, f"{protocol} {group}"),
                    **_beside(judged, found, rivals, tested, name),
                }
            )
    return rows


def model_rows(judged: Judged, scores: Scores) -> list[Row]:
    """A row for each protocol, surrogate and model."""
    rows = []
    for (protocol, name), found in scores.items():
        tested, right = judged.decisive & ~np.isnan(found), hits(judged, found)
        for m in np.flatnonzero(tested.any(axis=1)):
            keep = tested[m]
            rows.append(
                {
                    "protocol": protocol,
                    "surrogate": name,
                    "generator": judged.models[m],
                    "near_reference": bool(judged.near[m]),
                    "win_rate": 100 * float(judged.win_rates[m]),
                    "num_pairs": int(keep.sum()),
                    "accuracy": float(right[m, keep].mean()),
                    "auc": auc(found[m, keep], judged.credits[m, keep]),
                }
            )
    return rows


def hits(judged: Judged, scores: Array) -> Array:
    """[M, N] 1 where the sign of the score is the verdict."""
    return np.asarray((scores > 0) == (judged.credits == 1), dtype=np.float64)


def auc(scores: Array, labels: Array, weights: Array | None = None) -> float:
    """Chance that a pair that was won scores higher than one that was lost, ties counting half; NaN for one kind."""
    weight = np.ones(len(scores)) if weights is None else weights
    _, level = np.unique(scores, return_inverse=True)
    won, lost = (np.bincount(level, weights=weight * side) for side in (labels, 1 - labels))
    total = won.sum() * lost.sum()
    return float((won * (np.cumsum(lost) - lost / 2)).sum() / total) if total > 0 else float("nan")


def two_way_error(values: Array, tested: Mask) -> float:
    """Standard error of the mean over models (rows) of the mean over instructions of `values` [M, N] where tested.

    The larger one of the error with models as clusters and with models and instructions as clusters.
    """
    kept = tested.any(axis=1)
    values, tested = values[kept], tested[kept]
    count = len(values)
    if count < 2:
        return float("nan")
    share = tested / tested.sum(axis=1, keepdims=True) / count
    parts = np.where(tested, share * (values - (share * np.where(tested, values, 0)).sum()), 0)
    by_model = count / (count - 1) * (parts.sum(axis=1) ** 2).sum()
    both = by_model + (parts.sum(axis=0) ** 2).sum() - (parts**2).sum()
    return float(np.sqrt(max(by_model, both)))


def _quality(judged: Judged, scores: Array, tested: Mask, key: str) -> Row:
    kept = np.flatnonzero(tested.any(axis=1))
    right = _by_model(hits(judged, scores), tested)
    within = np.array([auc(scores[m, tested[m]], judged.credits[m, tested[m]]) for m in kept])
    place = np.searchsorted(kept, np.nonzero(tested)[0])
    flat, labels = scores[tested], judged.credits[tested]
    row: Row = {
        "num_models": len(kept),
        "num_pairs": int(tested.sum()),
        "accuracy": float(right.mean()),
        "auc": auc(flat, labels),
        "auc_within_model": float(mean_known(within)),
    }
    if len(kept) < 2:  # a model resampled is itself each time, which is no interval of width 0
        return row | dict.fromkeys(("accuracy_low", "accuracy_high", "auc_low", "auc_high"))
    drawn = keyed_rng(0, "recorded_surrogate", key).multinomial(
        len(kept), np.full(len(kept), 1 / len(kept)), size=NUM_RESAMPLES
    )
    row["accuracy_low"], row["accuracy_high"] = percentiles(drawn @ right / len(kept))
    spread = [auc(flat, labels, counts[place].astype(np.float64)) for counts in drawn]
    row["auc_low"], row["auc_high"] = percentiles(np.array(spread))
    return row


def _beside(judged: Judged, scores: Array, rivals: Mapping[str, Array], tested: Mask, name: str) -> Row:
    """The difference to the most accurate baseline on the very pairs tested."""
    mean = {rival: np.mean(_by_model(hits(judged, found), tested)) for rival, found in rivals.items()}
    best = max(mean, key=lambda rival: float(mean[rival])) if mean else None
    if best is None or best == name:
        return dict.fromkeys(("beside", "difference", "standard_error", "z", "models_ahead"))
    gap = hits(judged, scores) - hits(judged, rivals[best])
    each, error = _by_model(gap, tested), two_way_error(gap, tested)
    difference = float(np.mean(each))
    return {
        "beside": best,
        "difference": difference,
        "standard_error": None if np.isnan(error) else error,
        "z": difference / error if error > 0 else None,
        "models_ahead": int((each > 0).sum()),
    }


def _by_model(values: Array, tested: Mask) -> Array:
    return np.array([row[keep].mean() for row, keep in zip(values, tested, strict=True) if keep.any()])


@dataclass(frozen=True)
class Chosen:
    """What is chosen of n = 1 .. K candidates, of each instruction: [K, N] each."""

    credit: Array
    proxy: Array
    length: Array


def best_of_n_rows(judged: Judged, scores: Scores) -> list[Row]:
    """A row for each pool, chooser and n: the judge's recorded win rate, and the chooser's own score, of its choice.

    An instruction counts where every candidate of the pool has a verdict; with fewer than two there are no rows. The
    mean is over all subsets of n candidates.
    """
    rows: list[Row] = []
    for title, pools in (("all models, in two halves", ("half 0", "half 1")), ("near_reference", ("near_reference",))):
        if any((pool, name) not in scores for pool in pools for name in CHOOSERS):
            continue
        found = {chooser: choose(judged, scores, pools, chooser) for chooser in (*CHOOSERS, LONGEST, JUDGE)}
        if found[JUDGE].credit.shape[1] < 2:  # instructions on which every candidate has a verdict
            continue
        for chooser, chosen in found.items():
            rows += _chooser_rows(title, chooser, chosen, found[LONGEST])
    return rows


def choose(judged: Judged, scores: Scores, pools: tuple[str, ...], chooser: str) -> Chosen:
    """The choices of one chooser from the pools, averaged over them."""
    members = [np.flatnonzero(judged.members(pool)) for pool in pools]
    kept = np.flatnonzero(~np.isnan(judged.credits[np.concatenate(members)]).any(axis=0))
    sizes = range(1, min(map(len, members)) + 1)
    tables: list[tuple[Array, ...]] = []
    for pool, models in zip(pools, members, strict=True):
        table = {LONGEST: judged.lengths, JUDGE: judged.credits}.get(chooser)
        rewards = (scores[pool, chooser] if table is None else table)[np.ix_(models, kept)].T
        worth = (judged.credits[np.ix_(models, kept)].T, rewards, judged.lengths[np.ix_(models, kept)].T)
        tables.append(tuple(best_of_k(rewards, values, list(sizes)) for values in worth))
    return Chosen(*(np.mean(parts, axis=0) for parts in zip(*tables, strict=True)))


def _chooser_rows(pool: str, chooser: str, chosen: Chosen, longest: Chosen) -> list[Row]:
    rows = []
    peak = int(chosen.credit.mean(axis=1).argmax())
    for k in range(len(chosen.credit)):
        differences = {
            "gain": chosen.credit[k] - chosen.credit[0],
            "over_longest": chosen.credit[k] - longest.credit[k],
            "after_peak": chosen.credit[k] - chosen.credit[peak],
        }
        row = {"pool": pool, "chooser": chooser, "n": k + 1, **_span("win_rate", 100 * chosen.credit[k], PERCENT)}
        row |= {"low": row.pop("win_rate_low"), "high": row.pop("win_rate_high")} | _span("proxy", chosen.proxy[k])
        for name, values in differences.items():
            row |= _span(name, 100 * values)
        rows.append(row | {"length": float(chosen.length[k].mean()), "num_instructions": chosen.credit.shape[1]})
    return rows


def _span(name: str, values: Array, bounds: tuple[float, float] = UNBOUNDED) -> Row:
    found = interval(values.tolist(), bounds=bounds)
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
