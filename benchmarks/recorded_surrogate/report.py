"""The surrogates' numbers for people: tables, figures, and sentences computed from the rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from ..harness.plots import COLORS, titled
from ..harness.report import Table, sentences
from ..harness.report_text import signed
from ..harness.verdicts import Verdict
from .data import NEAR, Judged
from .models import BASELINE, CHOSEN, SURROGATES
from .summary import JUDGE, LONGEST, NEAR_REFERENCE

TITLES: Final = {
    CHOSEN: "surrogate (boosted trees)",
    BASELINE: "logistic on length and list",
    LONGEST: "longest response",
    JUDGE: "the judge itself (the most there is)",
}
LEFT_OUT: Final = {"disjoint": "models and instructions left out", "models": "only models left out"}
"""What a protocol leaves out."""
WHO: Final = {name: surrogate.title for name, surrogate in SURROGATES.items()}
ENOUGH: Final = 2.0
"""Standard errors above the baseline that count as better."""


def texts(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns of the accuracy tables as text; "–" for what one model does not have."""

    def text(values: "pd.Series[Any]", form: str) -> "pd.Series[Any]":
        return values.map(form.format).where(values.notna())

    error = text(100 * rows.standard_error, " ± {:.1f}").fillna("")
    found = {
        "who": rows.surrogate.map(WHO),
        "accuracy": text(rows.accuracy, "{:.1%}"),
        "95 %": text(rows.accuracy_low, "{:.1%}").str.cat(text(rows.accuracy_high, "{:.1%}"), " to "),
        "AUC": text(rows.auc, "{:.3f}"),
        "95 % ": text(rows.auc_low, "{:.3f}").str.cat(text(rows.auc_high, "{:.3f}"), " to "),
        "AUC within a model": text(rows.auc_within_model, "{:.3f}"),
        "over the baseline": text(100 * rows.difference, "{:+.1f}").str.cat(error),
        "standard errors": text(rows.z, "{:+.1f}"),
        "models ahead": text(rows.models_ahead, "{:.0f}").str.cat(rows.num_models.astype(str), " of "),
        "pairs": rows.num_pairs.astype(str),
    }
    return pd.DataFrame(found).fillna("–")


def accuracy_tables(rows: pd.DataFrame) -> list[Table]:
    """A table for each protocol and group of models, a line for each surrogate."""
    tables = []
    for (protocol, group), own in rows.groupby(["protocol", "group"], sort=False):
        which, cells = "Near-reference" if group == NEAR_REFERENCE else "All", texts(own)
        tables.append(Table((*cells,), cells.to_numpy().tolist(), f"{which} models, {LEFT_OUT[str(protocol)]}"))
    return tables


def best_of_n_table(rows: pd.DataFrame) -> Table:
    """Best-of-n at n of 1, 2, 4 ... and all."""
    header = ("pool", "chosen by", "n", "win rate, %", "95 %", "over the longest, points", "own score", "characters")
    lines = []
    shown = rows.n.isin((1, 2, 4, 8, 16)) | (rows.n == rows.groupby("pool").n.transform("max"))
    for row in rows[shown].to_dict("records"):
        span, points = f"{row['low']:.1f} to {row['high']:.1f}", _points(row, "over_longest")
        words = (row["pool"], TITLES[row["chooser"]], str(row["n"]), f"{row['win_rate']:.1f}")
        lines.append((*words, span, points, f"{row['proxy']:.2f}", f"{row['length']:.0f}"))
    return Table(header, lines, "Win rate by the recorded judge of the best of n responses by left-out models")


def findings(judged: Judged, judge: str, accuracy: pd.DataFrame, best_of_n: pd.DataFrame) -> list[str]:
    """What the numbers say, in sentences."""
    reference = accuracy[accuracy.group == NEAR_REFERENCE].groupby("protocol", sort=False)
    curves = best_of_n[best_of_n.chooser != JUDGE].groupby(["pool", "chooser"], sort=False)
    return sentences(
        "recorded_surrogate/findings.txt.j2",
        judge=judge,
        num_verdicts=judged.decisive.sum(),
        shape=judged.credits.shape,
        near={judged.models[m]: 100 * judged.win_rates[m] for m in np.flatnonzero(judged.near)},
        reach=100 * NEAR,
        enough=ENOUGH,
        protocols={LEFT_OUT[str(name)]: _compared(own) for name, own in reference if own.is_baseline.any()},
        curves=[_curve(curve.to_dict("records")) for _, curve in curves],
    )


def _compared(rows: pd.DataFrame) -> dict[str, Any]:
    """The strongest baseline of a protocol; each surrogate that beats it, or the one that comes nearest."""
    told = texts(rows)
    lines: dict[Any, Any] = told.assign(beside=rows.beside.map(WHO)).to_dict("index")
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
                axis.plot(100 * row.accuracy, place, "o", color=color)
        axis.axvline(100 * shown.accuracy[shown.is_baseline].max(), color="#888888", linestyle="--", linewidth=1)
        axis.set_title(LEFT_OUT[protocol], fontsize=9)
        axis.set_yticks(range(len(names)), [WHO[name] for name in names])
        axis.tick_params(axis="y", labelsize=8)
        axis.set_xlabel("accuracy, %")
        axis.grid(axis="x", color="#eeeeee")
    title = "Right predictions on left-out models near the reference"
    return titled(figure, title, f"Grey: baselines; dashed: the best of them. Lines: 95 % over models. {note}")


def draw_best_of_n(rows: pd.DataFrame, note: str) -> Drawing:
    """Win rate by the judge, and the chooser's own score, against n."""
    pools = rows.pool.unique()
    figure = Drawing(figsize=(5.4 * len(pools), 7), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(pools), squeeze=False, sharex="col")
    for (above, below), pool in zip(axes.T, pools, strict=True):
        for color, (chooser, title) in zip(COLORS, TITLES.items(), strict=False):
            curve = rows[(rows.pool == pool) & (rows.chooser == chooser)]
            above.plot(curve.n, curve.win_rate, color=color, marker="o", markersize=3, label=title)
            above.fill_between(curve.n, curve.low, curve.high, color=color, alpha=0.15)
            if chooser in (CHOSEN, BASELINE):
                below.plot(curve.n, curve.proxy, color=color, marker="o", markersize=3)
        above.set_title(pool.replace("near_reference", "near-reference models"), fontsize=10)
        above.set_ylabel("win rate by the recorded judge, %")
        below.set(ylabel="the chooser's own score, log-odds", xlabel="n")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (above, below):
            axis.grid(color="#eeeeee")
    axes[0, 0].legend(fontsize=8, frameon=False)
    title = "Best of n responses of models that the surrogate never saw"
    return titled(figure, title, f"Bands: 95 % over instructions; mean over all subsets of n. {note}")
