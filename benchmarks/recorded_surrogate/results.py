"""The surrogates' numbers, and what readers are shown of them.

Accuracy is the mean over models of each one's share of right predictions. Models are resampled, as the verdicts on one
stand or fall together. The error of a difference is the larger one of two: with models as clusters, and with models
and instructions, since all models answer the same ones (Cameron, Gelbach and Miller 2011, two-way clusters).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from ...agents.best_of_n_analysis import best_of_k
from ...seeding import keyed_rng
from ...statistics import PERCENT, UNBOUNDED, interval, mean_known
from ..harness.estimates import percentiles
from ..harness.plots import COLORS, MARKERS, titled
from ..harness.report import Table, Verdict, sentences, signed
from ..harness.study import Row
from .data import NEAR, POOLS, Array, Judged, Mask
from .models import BASELINE, BASELINES, CHOSEN, SURROGATES

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
WHO: Final = {name: surrogate.title for name, surrogate in SURROGATES.items()}
TITLES: Final = {
    **{name: WHO[name] for name in CHOOSERS},
    LONGEST: "longest response",
    JUDGE: "the judge itself (the most there is)",
}
LEFT_OUT: Final = {"disjoint": "models and instructions left out", "models": "only models left out"}
"""What a protocol leaves out."""
GAIN: Final = "over the baseline, points (standard error)"
ENOUGH: Final = 2.0
"""Standard errors above the baseline that count as better."""

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


def texts(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns of the accuracy tables as text; "–" for what one model does not have."""

    def text(values: Any, form: str) -> Any:
        return values.map(form.format).where(values.notna())

    error = text(100 * rows.standard_error, " ({:.1f})").fillna("")
    found = {
        "who": rows.surrogate.map(WHO),
        "accuracy": text(rows.accuracy, "{:.1%}"),
        "95 %": text(rows.accuracy_low, "{:.1%}").str.cat(text(rows.accuracy_high, "{:.1%}"), " to "),
        "AUC": text(rows.auc, "{:.3f}"),
        "95 % ": text(rows.auc_low, "{:.3f}").str.cat(text(rows.auc_high, "{:.3f}"), " to "),
        "AUC within a model": text(rows.auc_within_model, "{:.3f}"),
        GAIN: text(100 * rows.difference, "{:+.1f}").str.cat(error),
        "standard errors": text(rows.z, "{:+.1f}"),
        "models ahead": text(rows.models_ahead, "{:.0f}").str.cat(rows.num_models.astype(str), " of "),
        "pairs": rows.num_pairs.astype(str),
    }
    return pd.DataFrame(found).fillna("–")


def accuracy_tables(rows: pd.DataFrame, level: str) -> dict[str, Table]:
    """A table for each protocol and group of models, "PROTOCOL-GROUP", a line for each surrogate."""
    weighted = "Weighted: a model that wins a share p of its training pairs counts 4p(1 - p)"
    tables = {}
    for (protocol, group), own in rows.groupby(["protocol", "group"], sort=False):
        which, cells = "Near-reference" if group == NEAR_REFERENCE else "All", texts(own)
        caption = f"{which} models, {LEFT_OUT[str(protocol)]}; 95 % intervals over models. {weighted}. {level}"
        tables[f"{protocol}-{group}"] = Table((*cells,), cells.to_numpy().tolist(), caption)
    return tables


def best_of_n_table(rows: pd.DataFrame, level: str) -> Table:
    """Best-of-n at n of 1, 2, 4 ... and all."""
    header = ("pool", "chosen by", "n", "win rate, %", "95 %", "over the longest, points", "own score", "characters")
    lines = []
    shown = rows.n.isin((1, 2, 4, 8, 16)) | (rows.n == rows.groupby("pool").n.transform("max"))
    for row in rows[shown].to_dict("records"):
        span, points = f"{row['low']:.1f} to {row['high']:.1f}", _points(row, "over_longest")
        words = (row["pool"], TITLES[row["chooser"]], str(row["n"]), f"{row['win_rate']:.1f}")
        lines.append((*words, span, points, f"{row['proxy']:.2f}", f"{row['length']:.0f}"))
    what = "Win rate by the recorded judge of the best of n responses by left-out models"
    return Table(header, lines, f"{what}; 95 % intervals over instructions. {level}")


def findings(facts: Mapping[str, Any], accuracy: pd.DataFrame, best_of_n: pd.DataFrame) -> list[str]:
    """What the numbers say, in sentences; `facts` are those of the manifest."""
    curves = best_of_n[best_of_n.chooser != JUDGE].groupby(["pool", "chooser"], sort=False)
    return sentences(
        "recorded_surrogate/findings.txt.j2",
        **{name: facts[name] for name in ("judge", "counts", "near_reference")},
        reach=100 * NEAR,
        enough=ENOUGH,
        protocols={LEFT_OUT[str(name)]: _compared(own) for name, own in _near_reference(accuracy)},
        curves=[_curve(curve.to_dict("records")) for _, curve in curves],
    )


def headline(accuracy: pd.DataFrame) -> str:
    """The best surrogate of the first protocol beside the strongest baseline."""
    told = [_compared(rows)["claims"] for _, rows in _near_reference(accuracy)][:1]
    found = [claim.numbers for claims in told for claim in claims]
    return "; ".join(
        f"{row['who']}: {row['gain']} over {row['beside']}, ahead on {row['models ahead']} models; "
        f"n = {row['pairs']} verdicts"
        for row in found
    )


def _near_reference(accuracy: pd.DataFrame) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Protocol and rows on the near-reference models, where there is a baseline."""
    protocols = accuracy[accuracy.group == NEAR_REFERENCE].groupby("protocol", sort=False)
    return ((name, own) for name, own in protocols if own.is_baseline.any())


def _compared(rows: pd.DataFrame) -> dict[str, Any]:
    """The strongest baseline of a protocol; each surrogate that beats it, or the one that comes nearest."""
    told = texts(rows)
    gain = (
        told[GAIN].str.replace(r"^\S+", r"\g<0> points", regex=True).str.replace("(", "(standard error ", regex=False)
    )
    lines: dict[Any, Any] = told.assign(beside=rows.beside.map(WHO), gain=gain).to_dict("index")
    baseline = rows.is_baseline.astype(bool)
    tried = rows[~baseline & rows.difference.notna()]
    better = tried.z > ENOUGH  # one model alone has no z
    shown = tried[better] if better.any() else tried.nlargest(1, "difference")
    return {
        "base": lines[rows.accuracy[baseline].idxmax()],
        "claims": [Verdict("beats_its_baseline", bool(better[place]), lines[place]) for place in shown.index],
        "counts": (better.sum(), len(tried)),
        "others": told.who[tried.index[~better]].tolist(),
    }


def _curve(rows: Sequence[Mapping[Any, Any]]) -> Verdict:
    """Where the win rate of a chooser goes with n, and whether it falls from its highest."""
    start, end, peak = rows[0], rows[-1], max(rows, key=lambda row: float(row["win_rate"]))
    points = {name: _points(end, name) for name in ("gain", "after_peak", "over_longest")}
    falls = bool(end["after_peak_high"] < 0) if peak["n"] < end["n"] else None
    numbers = {"start": start, "end": end, "peak": peak, "points": points, "title": TITLES[end["chooser"]]}
    return Verdict("falls_from_its_highest", falls, numbers)


def _points(row: Mapping[Any, Any], name: str) -> str:
    value, low, high = (signed(row[key], "%") for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value} ({low} to {high})"


def draw_accuracy(rows: pd.DataFrame, note: str) -> Drawing:
    """Accuracy of everyone on the near-reference models, one panel for each protocol."""
    protocols, names = rows.protocol.unique(), rows.surrogate.unique()[::-1]
    figure = Drawing(figsize=(3.5 + 4.2 * len(protocols), 4.8), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(protocols), squeeze=False, sharex=True, sharey=True)[0]
    for axis, protocol in zip(axes, protocols, strict=True):
        shown = rows[(rows.protocol == protocol) & (rows.group == NEAR_REFERENCE)].set_index("surrogate")
        for place, name in enumerate(names):
            if name in shown.index:
                row = shown.loc[name]
                color = COLORS[6 if row.is_baseline else 0]
                axis.plot([100 * row.accuracy_low, 100 * row.accuracy_high], [place] * 2, color=color)
                axis.plot(100 * row.accuracy, place, "s" if row.is_baseline else "o", color=color)
        axis.axvline(100 * shown.accuracy[shown.is_baseline].max(), color="#888888", linestyle="--", linewidth=1)
        axis.set_title(LEFT_OUT[protocol], fontsize=9)
        axis.set_yticks(range(len(names)), [WHO[name] for name in names])
        axis.tick_params(axis="y", labelsize=8)
        axis.set_xlabel("accuracy, %")
        axis.grid(axis="x", color="#eeeeee")
    title = "Right predictions on left-out models near the reference"
    return titled(figure, title, f"Grey squares: baselines; dashed: the best of them. Lines: 95 % over models. {note}")


def draw_best_of_n(rows: pd.DataFrame, note: str) -> Drawing:
    """Win rate by the judge, and the chooser's own score, against n."""
    pools = rows.pool.unique()
    figure = Drawing(figsize=(5.4 * len(pools), 7), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(pools), squeeze=False, sharex="col")
    for (above, below), pool in zip(axes.T, pools, strict=True):
        for color, marker, (chooser, title) in zip(COLORS, MARKERS, TITLES.items(), strict=False):
            curve = rows[(rows.pool == pool) & (rows.chooser == chooser)]
            above.plot(curve.n, curve.win_rate, color=color, marker=marker, markersize=4, label=title)
            above.fill_between(curve.n, curve.low, curve.high, color=color, alpha=0.15)
            if chooser in (CHOSEN, BASELINE):
                below.plot(curve.n, curve.proxy, color=color, marker=marker, markersize=4)
        above.set_title(pool.replace("near_reference", "near-reference models"), fontsize=10)
        above.set_ylabel("win rate by the recorded judge, %")
        below.set(ylabel="the chooser's own score, log-odds", xlabel="n")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (above, below):
            axis.grid(color="#eeeeee")
    axes[0, 0].legend(fontsize=8, frameon=False)
    title = "Best of n responses of models that the surrogate never saw"
    return titled(figure, title, f"Bands: 95 % over instructions; mean over all subsets of n. {note}")
