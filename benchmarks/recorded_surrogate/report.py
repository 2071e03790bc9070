"""The surrogates' numbers for people: tables, sentences computed from them, figures, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from ..harness import plots, report
from ..harness.report import settings_table, text_table
from ..harness.study import Row, Study, versions, write_csv
from . import data as recorded_surrogate_data
from .data import NEAR, Judged
from .models import BASELINE, CHOSEN, find_surrogate
from .summary import BEST_OF_N_COLUMNS, COLUMNS, GROUPS, JUDGE, LONGEST, MODEL_COLUMNS

TITLES: Final = {
    CHOSEN: "surrogate (boosted trees)",
    BASELINE: "logistic on length and list",
    LONGEST: "longest response",
    JUDGE: "the judge itself (the most there is)",
}
ENOUGH: Final = 2.0
"""Standard errors above the baseline that count as better."""


@dataclass(frozen=True)
class Results:
    """All rows of a study."""

    judged: Judged
    judge: str
    accuracy: Sequence[Row]
    models: Sequence[Row]
    best_of_n: Sequence[Row]
    costs: Mapping[str, float]
    """Cell -> CPU seconds."""


def write(study: Study, results: Results) -> None:
    """Prints and writes everything."""
    said = findings(results)
    tables = [
        accuracy_table(results.accuracy, protocol, group)
        for protocol in dict.fromkeys(row["protocol"] for row in results.accuracy)
        for group in GROUPS
    ]
    tables = [table for table in tables if table.rows]
    drawn = best_of_n_table(results.best_of_n)
    for table in [*tables, drawn]:
        print(f"{table.caption}\n{text_table(table)}\n")
    print(*said, sep="\n")
    study.write_table(results.accuracy, COLUMNS)
    write_csv(study.out / "models.csv", results.models, MODEL_COLUMNS)
    write_csv(study.out / "best_of_n.csv", results.best_of_n, BEST_OF_N_COLUMNS)
    note = f"Level recorded: {results.judge}, {int(results.judged.decisive.sum())} verdicts."
    figures = []
    if any(row["group"] == GROUPS[0] for row in results.accuracy):
        png = plots.write_png(study.out / "accuracy.png", draw_accuracy(results.accuracy, note))
        figures.append(report.Figure(png, f"Accuracy on the left-out near-reference models, 95 % over models. {note}"))
    if results.best_of_n:
        png = plots.write_png(study.out / "best_of_n.png", draw_best_of_n(results.best_of_n, note))
        figures.append(report.Figure(png, f"Above the judge's verdicts, below the chooser's own score. {note}"))
    costs = [(cell, f"{seconds:.1f}") for cell, seconds in results.costs.items()]
    sections = [
        report.Section("What the numbers say", said, None, figures),
        *(report.Section(table.caption, [], table) for table in tables),
        report.Section("Best of n left-out models", [], drawn),
        report.Section("How it is tested", (recorded_surrogate_data.__doc__ or "").replace("`", "").split("\n\n")),
        report.Section("What it cost", [], report.Table(("cell", "CPU seconds"), costs)),
        report.Section("Configuration and versions", [], settings_table({**study.config, **versions()})),
    ]
    report.write_report(study.out / "report.html", "Reward models learned from recorded verdicts", sections)
    near = [model for model, is_near in zip(results.judged.models, results.judged.near, strict=True) if is_near]
    study.note(
        level="recorded", judge=results.judge, near_reference=near, findings=said, cpu_seconds=dict(results.costs)
    )


def accuracy_table(rows: Sequence[Row], protocol: str, group: str) -> report.Table:
    """One line for each surrogate of a protocol and group of models."""
    header = (
        "who",
        "accuracy",
        "95 %",
        "AUC",
        "95 % ",
        "AUC within a model",
        "over the baseline",
        "standard errors",
        "models ahead",
        "pairs",
    )
    lines = []
    for row in rows:
        if (row["protocol"], row["group"]) != (protocol, group):
            continue
        gap = row["difference"] is not None
        lines.append(
            (
                find_surrogate(row["surrogate"]).title,
                _text(row["accuracy"], ".1%"),
                _span(row, "accuracy", ".1%"),
                _text(row["auc"], ".3f"),
                _span(row, "auc", ".3f"),
                _text(row["auc_within_model"], ".3f"),
                _gap(row) if gap else "–",
                _text(row["z"], "+.1f"),
                f"{row['models_ahead']} of {row['num_models']}" if gap else "–",
                str(row["num_pairs"]),
            )
        )
    left_out = "models and instructions left out" if protocol == "disjoint" else "only models left out"
    which = "near-reference models" if group == GROUPS[0] else "all models"
    return report.Table(header, lines, f"{which.capitalize()}, {left_out}")


def best_of_n_table(rows: Sequence[Row]) -> report.Table:
    """Best-of-n at n of 1, 2, 4 ... and all."""
    last = {row["pool"]: max(other["n"] for other in rows if other["pool"] == row["pool"]) for row in rows}
    shown = [row for row in rows if row["n"] in (1, 2, 4, 8, 16) or row["n"] == last[row["pool"]]]
    lines = [
        (
            row["pool"],
            TITLES[row["chooser"]],
            str(row["n"]),
            f"{row['win_rate']:.1f}",
            f"{row['low']:.1f} to {row['high']:.1f}",
            _points(row, "over_longest"),
            f"{row['proxy']:.2f}",
            f"{row['length']:.0f}",
        )
        for row in shown
    ]
    header = ("pool", "chosen by", "n", "win rate, %", "95 %", "over the longest, points", "own score", "characters")
    return report.Table(header, lines, "Win rate by the recorded judge of the best of n responses by left-out models")


def findings(results: Results) -> list[str]:
    """What the numbers say, in sentences computed from them."""
    judged = results.judged
    near = [
        (f"{name} {100 * rate:.0f} %")
        for name, rate, is_near in zip(judged.models, judged.win_rates, judged.near, strict=True)
        if is_near
    ]
    said = [
        f"{results.judge}: {int(judged.decisive.sum())} decisive verdicts on {len(judged.models)} models and "
        f"{len(judged.instructions)} instructions. Near the reference (a win rate within {100 * NEAR:.0f} points of "
        f"50 %): {', '.join(near) or 'none'}."
    ]
    for protocol in dict.fromkeys(row["protocol"] for row in results.accuracy):
        said += _accuracy_findings(results.accuracy, protocol)
    for pool in dict.fromkeys(row["pool"] for row in results.best_of_n):
        said += _best_of_n_findings([row for row in results.best_of_n if row["pool"] == pool], pool)
    return said


def _accuracy_findings(rows: Sequence[Row], protocol: str) -> list[str]:
    near = {row["surrogate"]: row for row in rows if (row["protocol"], row["group"]) == (protocol, GROUPS[0])}
    if not any(row["is_baseline"] for row in near.values()):
        return []
    base = max((row for row in near.values() if row["is_baseline"]), key=lambda row: float(row["accuracy"]))
    tried = [row for row in near.values() if not row["is_baseline"] and row["difference"] is not None]
    where = "Models and instructions left out" if protocol == "disjoint" else "Only models left out"
    said = [
        f"{where}: the strongest baseline on the near-reference models is "
        f"{find_surrogate(base['surrogate']).title!r} with {base['accuracy']:.1%} and AUC {_text(base['auc'], '.3f')}."
    ]
    better = [row for row in tried if row["z"] is not None and row["z"] > ENOUGH]
    for row in better or sorted(tried, key=lambda row: -float(row["difference"]))[:1]:
        verdict = "above" if row in better else "not above"
        said.append(
            f"{where}: {find_surrogate(row['surrogate']).title!r} has {row['accuracy']:.1%} and AUC "
            f"{_text(row['auc'], '.3f')}, {_gap(row)} points, {_text(row['z'], '.1f')} standard errors, {verdict} "
            f"{find_surrogate(row['beside']).title!r} by more than {ENOUGH:.0f}; it is ahead on {row['models_ahead']} "
            f"of {row['num_models']} models."
        )
    others = [find_surrogate(row["surrogate"]).title for row in tried if row not in better]
    if tried:
        but = f"; not: {'; '.join(others)}" if others else ""
        said.append(f"{where}: {len(better)} of {len(tried)} surrogates tried are better than their baseline{but}.")
    return said


def _best_of_n_findings(rows: Sequence[Row], pool: str) -> list[str]:
    said = []
    for chooser in (CHOSEN, BASELINE, LONGEST):
        curve = [row for row in rows if row["chooser"] == chooser]
        start, end = curve[0], curve[-1]
        peak = max(curve, key=lambda row: float(row["win_rate"]))
        text = (
            f"Best of n ({pool}), by {TITLES[chooser]}: the win rate goes from {start['win_rate']:.1f} % to "
            f"{end['win_rate']:.1f} % at n = {end['n']}, {_points(end, 'gain')} points; its own score from "
            f"{start['proxy']:.2f} to {end['proxy']:.2f}"
        )
        if peak["n"] < end["n"]:
            fell = "falls" if end["after_peak_high"] < 0 else "does not clearly fall"
            text += f"; from its highest, {peak['win_rate']:.1f} % at n = {peak['n']}, it {fell}, "
            text += f"{_points(end, 'after_peak')} points"
        if chooser != LONGEST:
            text += f"; over the longest of {end['n']}: {_points(end, 'over_longest')} points"
        said.append(f"{text}.")
    return said


def _points(row: Row, name: str) -> str:
    # Rounded first: -0.04 is 0.0, not -0.0.
    value, low, high = (f"{round(row[key], 1) + 0.0:+.1f}" for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value} ({low} to {high})"


def _text(value: float | None, form: str) -> str:
    return "–" if value is None or np.isnan(value) else format(value, form)


def _span(row: Row, name: str, form: str) -> str:
    """The interval; one model has none."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "–" if low is None else f"{_text(low, form)} to {_text(high, form)}"


def _gap(row: Row) -> str:
    """Points over the baseline, with their standard error where there is one."""
    error = row["standard_error"]
    return f"{100 * row['difference']:+.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def draw_accuracy(rows: Sequence[Row], note: str) -> Drawing:
    """Accuracy of everyone on the near-reference models, one panel for each protocol."""
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    figure = Drawing(figsize=(3.5 + 4.2 * len(protocols), 4.8), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(protocols), squeeze=False, sharex=True, sharey=True)[0]
    names = list(dict.fromkeys(row["surrogate"] for row in rows))[::-1]
    for axis, protocol in zip(axes, protocols, strict=True):
        shown = {row["surrogate"]: row for row in rows if (row["protocol"], row["group"]) == (protocol, GROUPS[0])}
        for place, name in enumerate(names):
            if name in shown:
                row, color = shown[name], plots.COLORS[6 if shown[name]["is_baseline"] else 0]
                if row["accuracy_low"] is not None:
                    axis.plot([100 * row["accuracy_low"], 100 * row["accuracy_high"]], [place] * 2, color=color)
                axis.plot(100 * row["accuracy"], place, "o", color=color)
        best = max((row["accuracy"] for row in shown.values() if row["is_baseline"]), default=np.nan)
        axis.axvline(100 * best, color="#888888", linestyle="--", linewidth=1)
        axis.set_title(
            "models and instructions left out" if protocol == "disjoint" else "only models left out", fontsize=9
        )
        axis.set_yticks(range(len(names)), [find_surrogate(name).title for name in names])
        axis.tick_params(axis="y", labelsize=8)
        axis.set_xlabel("accuracy, %")
        axis.grid(axis="x", color="#eeeeee")
    title = "Right predictions on left-out models near the reference"
    return plots.titled(figure, title, f"Grey: baselines; dashed: the best of them. Lines: 95 % over models. {note}")


def draw_best_of_n(rows: Sequence[Row], note: str) -> Drawing:
    """Win rate by the judge, and the chooser's own score, against n."""
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    figure = Drawing(figsize=(5.4 * len(pools), 7), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(pools), squeeze=False, sharex="col")
    for column, pool in enumerate(pools):
        above, below = axes[:, column]
        for color, chooser in zip(plots.COLORS, TITLES, strict=False):
            curve = [row for row in rows if (row["pool"], row["chooser"]) == (pool, chooser)]
            n = [row["n"] for row in curve]
            above.plot(
                n, [row["win_rate"] for row in curve], color=color, marker="o", markersize=3, label=TITLES[chooser]
            )
            above.fill_between(
                n, [row["low"] for row in curve], [row["high"] for row in curve], color=color, alpha=0.15
            )
            if chooser in (CHOSEN, BASELINE):
                below.plot(n, [row["proxy"] for row in curve], color=color, marker="o", markersize=3)
        above.set_title(pool.replace("near_reference", "near-reference models"), fontsize=10)
        above.set_ylabel("win rate by the recorded judge, %")
        below.set_ylabel("the chooser's own score, log-odds")
        below.set_xlabel("n")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in (above, below):
            axis.grid(color="#eeeeee")
    axes[0, 0].legend(fontsize=8, frameon=False)
    title = "Best of n responses of models that the surrogate never saw"
    return plots.titled(figure, title, f"Bands: 95 % over instructions; mean over all subsets of n. {note}")
