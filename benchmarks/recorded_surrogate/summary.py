"""Accuracy and AUC on left-out models next to the baselines, and what best-of-n by a surrogate is truly worth.

Accuracy is the mean over models of each one's share of right predictions. Models are resampled, as the verdicts on one
stand or fall together. The error of a difference is the larger one of two: with models as clusters, and with models
and instructions, since all models answer the same ones (Cameron, Gelbach and Miller 2011, two-way clusters).
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ...agents.best_of_n_analysis import best_of_k
from ...seeding import keyed_rng
from ...statistics import PERCENT, UNBOUNDED, interval
from ..harness.agreement import percentiles
from ..harness.estimates import mean_known
from ..harness.study import Row
from .data import POOLS, Array, Judged, Mask
from .models import BASELINE, BASELINES, CHOSEN

BEST_OF_N_COLUMNS: Final = (
    *("pool", "chooser", "n", "win_rate", "low", "high", "proxy", "proxy_low", "proxy_high", "length"),
    *("gain", "gain_low", "gain_high", "over_longest", "over_longest_low", "over_longest_high"),
    *("after_peak", "after_peak_low", "after_peak_high", "num_instructions"),
)
NUM_RESAMPLES: Final = 1_000
LONGEST: Final = "longest"
JUDGE: Final = "judge"
CHOOSERS: Final = (CHOSEN, BASELINE)
NEAR_REFERENCE: Final = POOLS[-1]

Scores = Mapping[tuple[str, str], Array]
"""(protocol or pool, surrogate) -> scores [M, N], NaN where not tested."""


def accuracy_rows(judged: Judged, scores: Scores) -> list[Row]:
    """A row for each protocol, group of models and surrogate, next to the strongest baseline on the same pairs."""
    rows = []
    for (protocol, name), found in scores.items():
        rivals = {rival: scores[protocol, rival] for rival in BASELINES if (protocol, rival) in scores}
        for group, members in {NEAR_REFERENCE: judged.near, "all": np.ones_like(judged.near)}.items():
            tested = judged.decisive & ~np.isnan(found) & members[:, None]
            if tested.any():
                row: Row = {"protocol": protocol, "group": group, "surrogate": name, "is_baseline": name in BASELINES}
                row |= _quality(judged, found, tested, f"{protocol} {group}")
                rows.append(row | _beside(judged, found, rivals, tested, name))
    return rows


def model_rows(judged: Judged, scores: Scores) -> list[Row]:
    """A row for each protocol, surrogate and model."""
    rows: list[Row] = []
    for (protocol, name), found in scores.items():
        tested, right = judged.decisive & ~np.isnan(found), hits(judged, found)
        for m in np.flatnonzero(tested.any(axis=1)):
            keep = tested[m]
            row: Row = {"protocol": protocol, "surrogate": name, "generator": judged.models[m]}
            row |= {"near_reference": bool(judged.near[m]), "win_rate": 100 * float(judged.win_rates[m])}
            row |= {"num_pairs": int(keep.sum()), "accuracy": float(right[m, keep].mean())}
            rows.append(row | {"auc": auc(found[m, keep], judged.credits[m, keep])})
    return rows


def hits(judged: Judged, scores: Array) -> Array:
    """[M, N] 1 where the sign of the score is the verdict."""
    return np.asarray((scores > 0) == (judged.credits == 1), dtype=np.float64)


def auc(scores: Array, labels: Array, weights: Array | None = None) -> float:
    """Chance that a pair that was won scores higher than one that was lost, ties counting half; NaN for one kind.

    Whole and half numbers until the one division, where scikit-learn adds up rounded areas.
    """
    weight = np.ones(len(scores)) if weights is None else weights
    _, level = np.unique(scores, return_inverse=True)
    won, lost = (np.bincount(level, weights=weight * side) for side in (labels, 1 - labels))
    total = won.sum() * lost.sum()
    return float((won * (np.cumsum(lost) - lost / 2)).sum() / total) if total > 0 else float("nan")


def two_way_error(values: Array, tested: Mask) -> float:
    """Standard error of the mean over models (rows) of the mean over instructions of `values` [M, N] where tested.

    By hand, since the two-way clusters of statsmodels have another correction for few clusters, or give no error.
    """
    kept = tested.any(axis=1)
    values, tested, count = values[kept], tested[kept], int(kept.sum())
    if count < 2:
        return float("nan")
    share = tested / tested.sum(axis=1, keepdims=True) / count
    parts = np.where(tested, share * (values - (share * np.where(tested, values, 0)).sum()), 0)
    by_model = count / (count - 1) * (parts.sum(axis=1) ** 2).sum()
    both = by_model + (parts.sum(axis=0) ** 2).sum() - (parts**2).sum()
    return float(np.sqrt(max(by_model, both)))


def _quality(judged: Judged, scores: Array, tested: Mask, key: str) -> Row:
    kept = np.flatnonzero(tested.any(axis=1))
    count, right = len(kept), _by_model(hits(judged, scores), tested)
    flat, labels = scores[tested], judged.credits[tested]
    spread: dict[str, Sequence[float | None]] = {"accuracy": (None, None), "auc": (None, None)}
    if count > 1:  # one model resampled is always itself, which is no interval of width 0
        rng, place = keyed_rng(0, "recorded_surrogate", key), np.searchsorted(kept, np.nonzero(tested)[0])
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=NUM_RESAMPLES)
        areas = np.array([auc(flat, labels, counts[place].astype(np.float64)) for counts in drawn])
        spread = {"accuracy": percentiles(drawn @ right / count), "auc": percentiles(areas)}
    row: Row = {"num_models": count, "num_pairs": int(tested.sum())}
    for name, value in {"accuracy": float(right.mean()), "auc": auc(flat, labels)}.items():
        row |= {name: value, f"{name}_low": spread[name][0], f"{name}_high": spread[name][1]}
    within = np.array([auc(scores[m, tested[m]], judged.credits[m, tested[m]]) for m in kept])
    return row | {"auc_within_model": float(mean_known(within))}


def _beside(judged: Judged, scores: Array, rivals: Mapping[str, Array], tested: Mask, name: str) -> Row:
    """The difference to the most accurate baseline on the very pairs tested."""
    mean = {rival: float(np.mean(_by_model(hits(judged, found), tested))) for rival, found in rivals.items()}
    best = max(mean, key=mean.__getitem__, default=name)
    if best == name:
        return dict.fromkeys(("beside", "difference", "standard_error", "z", "models_ahead"))
    gap = hits(judged, scores) - hits(judged, rivals[best])
    each, error = _by_model(gap, tested), two_way_error(gap, tested)
    row: Row = {"beside": best, "difference": float(np.mean(each))}
    row |= {"standard_error": None if np.isnan(error) else error, "z": row["difference"] / error if error > 0 else None}
    return row | {"models_ahead": int((each > 0).sum())}


def _by_model(values: Array, tested: Mask) -> Array:
    return np.array([row[keep].mean() for row, keep in zip(values, tested, strict=True) if keep.any()])


def best_of_n_rows(judged: Judged, scores: Scores) -> list[Row]:
    """A row for each pool, chooser and n: the judge's recorded win rate, and the chooser's own score, of its choice.

    The mean is over all subsets of n candidates. An instruction counts where every candidate of the pool has a verdict;
    with fewer than two there are no rows.
    """
    rows: list[Row] = []
    for title, pools in {"all models, in two halves": POOLS[:2], NEAR_REFERENCE: POOLS[2:]}.items():
        if all((pool, name) in scores for pool in pools for name in CHOOSERS):
            found = {chooser: choose(judged, scores, pools, chooser) for chooser in (*CHOOSERS, LONGEST, JUDGE)}
            if found[JUDGE].shape[2] > 1:
                for chooser, chosen in found.items():
                    rows += _chooser_rows(title, chooser, chosen, found[LONGEST][0])
    return rows


def choose(judged: Judged, scores: Scores, pools: Sequence[str], chooser: str) -> Array:
    """Credit, chooser's own score and length of its choice among n = 1 .. K, [3, K, N]; the mean over the pools."""
    members = [np.flatnonzero(judged.members(pool)) for pool in pools]
    kept = np.flatnonzero(~np.isnan(judged.credits[np.concatenate(members)]).any(axis=0))
    sizes = list(range(1, min(map(len, members)) + 1))
    known = {LONGEST: judged.lengths, JUDGE: judged.credits}
    tables = []
    for pool, models in zip(pools, members, strict=True):
        own = known[chooser] if chooser in known else scores[pool, chooser]
        credit, reward, length = (table[np.ix_(models, kept)].T for table in (judged.credits, own, judged.lengths))
        tables.append([best_of_k(reward, values, sizes) for values in (credit, reward, length)])
    return np.asarray(np.mean(tables, axis=0))


def _chooser_rows(pool: str, chooser: str, chosen: Array, longest: Array) -> list[Row]:
    rows: list[Row] = []
    credit = chosen[0]
    peak = int(credit.mean(axis=1).argmax())
    for k, (now, proxy, length) in enumerate(zip(*chosen, strict=True)):
        row = {"pool": pool, "chooser": chooser, "n": k + 1, **_span("win_rate", 100 * now, PERCENT)}
        row |= {"low": row["win_rate_low"], "high": row["win_rate_high"], **_span("proxy", proxy)}
        for name, other in {"gain": credit[0], "over_longest": longest[k], "after_peak": credit[peak]}.items():
            row |= _span(name, 100 * (now - other))
        rows.append(row | {"length": float(length.mean()), "num_instructions": len(now)})
    return rows


def _span(name: str, values: Array, bounds: tuple[float, float] = UNBOUNDED) -> Row:
    found = interval(values.tolist(), bounds=bounds)
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
