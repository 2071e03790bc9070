"""The protocol's figures, drawn from the rows of the table alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from ...statistics import Interval
from ..harness.estimates import Estimate
from ..harness.labels import place_labels
from ..harness.plots import COLORS, titled
from ..harness.study import Row
from .answers import RANKED
from .live import EVAL, FRESH, LIVE
from .pairs import ALL, SETS, UPSTREAM, WANTED

JUDGES: Final = {
    "sim_eval": "p_sim^eval",
    "human": "16 simulated human raters",
    "gpt4": "GPT-4",
    "claude": "Claude",
    "gpt4, models of Claude's table": "GPT-4, models of Claude's table",
}
"""Judge -> what readers call it."""


def select(rows: Sequence[Row], **wanted: str) -> list[Row]:
    """The rows whose cells are these."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def judge_name(judge: str) -> str:
    """What readers call a judge; another one by its own name."""
    return JUDGES.get(judge, judge)


def draw_sources(rows: Sequence[Row], level: str, note: str) -> Drawing:
    """A panel a judge, a line a generator, a mark a source."""
    found = select(rows, part="sources", level=level, figure="win_rate")
    judges = list(dict.fromkeys(row["judge"] for row in found))
    tallest = max(len({row["subject"] for row in select(found, judge=judge)}) for judge in judges)
    figure = Drawing(figsize=(1 + 6.2 * len(judges), 2.0 + 0.27 * tallest), dpi=150, layout="constrained")
    for axis, judge in zip(figure.subplots(1, len(judges), squeeze=False)[0], judges, strict=True):
        _draw_sources(axis, select(found, judge=judge), judge_name(judge))
    return titled(figure, f"Win rate by source; bars are one standard error ({level})", note)


def _draw_sources(axis: Axes, rows: Sequence[Row], title: str) -> None:
    whole = sorted(select(rows, other="all"), key=lambda row: float(row["value"]))
    place = {row["subject"]: number for number, row in enumerate(whole)}
    sources = [name for name in dict.fromkeys(row["other"] for row in rows) if name != "all"]
    for number, source in enumerate(sources):
        found = select(rows, other=source)
        shift = 0.6 * ((number + 0.5) / len(sources) - 0.5)
        axis.errorbar(
            [row["value"] for row in found],
            [place[row["subject"]] - shift for row in found],
            xerr=[row["standard_error"] or 0 for row in found],
            fmt="o",
            color=COLORS[number % len(COLORS)],
            markersize=3.5,
            elinewidth=0.8,
            label=f"{source} (n = {max(row['n'] for row in found)})",
        )
    values = [row["value"] for row in whole]
    axis.plot(values, list(place.values()), "|", color="black", markersize=13, label="all")
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(list(place.values()), list(place), fontsize=8)
    axis.set(ylim=(-0.7, len(whole) - 0.3), xlabel="win rate against the reference (%)")
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(axis="y", color="#eeeeee")
    axis.legend(fontsize=7, frameon=False, loc="lower right")


def draw_live(rows: Sequence[Row], note: str) -> Drawing:
    """A panel a judge: win rates on live (filled) and on fresh instructions (hollow) against those on eval."""
    found = select(rows, part="live", figure="win_rate")
    judges = list(dict.fromkeys(row["judge"] for row in found))
    figure = Drawing(figsize=(1 + 7.4 * len(judges), 8.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    labelled = []
    for axis, judge in zip(figure.subplots(1, len(judges), squeeze=False)[0], judges, strict=True):
        labelled.append((axis, _draw_live(axis, select(found, judge=judge))))
        told = {row["other"]: row for row in select(rows, part="live", figure="r2", judge=judge, subject=EVAL)}
        words = [f"r² {which} {told[which]['value']:.3f}" for which in (LIVE, FRESH) if which in told]
        axis.set_title(f"{judge_name(judge)}: {', '.join(words)}", fontsize=10, loc="left")
    figure = titled(figure, "Win rates on held-out instructions against those on the evaluation set", note)
    for axis, points in labelled:
        place_labels(figure, axis, points)
    return figure


def _draw_live(axis: Axes, rows: Sequence[Row]) -> dict[str, tuple[Estimate, Estimate]]:
    """Draws and returns the points that get a label."""
    on = {which: {row["subject"]: row for row in select(rows, other=which)} for which in (EVAL, LIVE, FRESH)}
    sets = (("o", COLORS[0], COLORS[0], LIVE), ("s", "none", COLORS[1], FRESH))
    for mark, fill, color, which in sets:
        names = list(on[which])
        one, two = ([on[side][name] for name in names] for side in (EVAL, which))
        axis.errorbar(
            [row["value"] for row in one],
            [row["value"] for row in two],
            xerr=[row["standard_error"] or 0 for row in one],
            yerr=[row["standard_error"] or 0 for row in two],
            fmt=mark, color=color, markerfacecolor=fill, markersize=5, elinewidth=0.7,
            label=f"{'live users' if which == LIVE else 'drawn anew with eval’s mixture'} (n = {two[0]['n']})",
        )  # fmt: skip
    values = [row["value"] for side in on.values() for row in side.values()]
    low, high = max(-3.0, min(values) - 8), min(103.0, max(values) + 8)
    axis.plot([low, high], [low, high], color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axis.set(xlabel="win rate on the evaluation set (%)", ylabel="win rate on the held-out set (%)")
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    labels = {name: name.removeprefix(RANKED) for name in on[LIVE]}
    return {label: (_estimate(on[EVAL][name]), _estimate(on[LIVE][name])) for name, label in labels.items()}


def draw_judges(rows: Sequence[Row], note: str) -> Drawing:
    """GPT-4's win rates against Claude's: published ones, and over them those with recorded verdicts by both."""
    found = select(rows, part="judges", figure="win_rate")
    rates: Mapping[tuple[str, str], dict[str, Row]] = {
        (judge, kind): {row["subject"]: row for row in select(found, judge=judge, other=kind)}
        for judge in ("gpt4", "claude")
        for kind in ("published", "recorded")
    }
    figure = Drawing(figsize=(9.6, 8.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    points: dict[str, tuple[Estimate, Estimate]] = {}
    for kind, color in (("published", COLORS[0]), ("recorded", COLORS[1])):
        one, two = rates["gpt4", kind], rates["claude", kind]
        both = [name for name in one if name in two]
        x, y = ([side[name] for name in both] for side in (one, two))
        axis.errorbar(
            [row["value"] for row in x],
            [row["value"] for row in y],
            xerr=[row["standard_error"] or 0 for row in x],
            yerr=[row["standard_error"] or 0 for row in y],
            fmt="o", color=color, markersize=5, elinewidth=0.8,
            label=f"{'published tables' if kind == 'published' else 'verdicts in the folder'}: {len(both)} models",
        )  # fmt: skip
        points |= {name: (_estimate(one[name]), _estimate(two[name])) for name in both}
    axis.plot([0, 100], [0, 100], color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    low = min((estimate.mean for point in points.values() for estimate in point), default=0.0)
    axis.set(xlim=(max(-3.0, low - 8), 103), ylim=(max(-3.0, low - 8), 103), aspect="equal")
    axis.set(xlabel="win rate by GPT-4 (%)", ylabel="win rate by Claude (%)")
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    figure = titled(figure, "The same models by two judges; bars are one standard error (recorded)", note)
    place_labels(figure, axis, points)
    return figure


def draw_pairs(rows: Sequence[Row], note: str) -> Drawing:
    """Share of pairs told apart against the number of instructions, a panel a judge."""
    found = select(rows, part="pairs", figure="told_apart")
    judges = list(dict.fromkeys(row["judge"] for row in found))
    columns = 2 if len(judges) > 1 else 1
    lines = math.ceil(len(judges) / columns)
    figure = Drawing(figsize=(1 + 7.0 * columns, 1 + 3.6 * lines), dpi=150, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, judge in zip(axes, judges, strict=False):
        _draw_pairs(axis, select(found, judge=judge), f"{judge_name(judge)} ({select(found, judge=judge)[0]['level']})")
    for axis in axes[len(judges) :]:
        axis.set_visible(False)
    return titled(figure, "Pairs of models told apart by a paired t-test, p < .05", note)


def _draw_pairs(axis: Axes, rows: Sequence[Row], title: str) -> None:
    subjects = [name for name in dict.fromkeys(row["subject"] for row in rows) if name != SETS]
    for number, subject in enumerate(subjects):
        curve = select(rows, subject=subject)
        x = [row["n"] for row in curve]
        color = "black" if subject == ALL else COLORS[(number - 1) % len(COLORS)]
        style = ":" if subject.startswith("same") else "-"
        low, high = ([row[end] if row[end] is not None else row["value"] for row in curve] for end in ("low", "high"))
        axis.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        label = f"{subject} ({curve[0]['models']})"
        axis.plot(x, [row["value"] for row in curve], style, color=color, linewidth=1.8, label=label)
    axis.axhline(WANTED, color="#888888", linestyle="--", linewidth=1)
    axis.axvline(UPSTREAM, color="#888888", linestyle="--", linewidth=1)
    axis.set(ylim=(-0.02, 1.02), xlabel="instructions", ylabel="share of pairs told apart")
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(color="#eeeeee")
    axis.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _estimate(row: Row) -> Estimate:
    error = row["standard_error"]
    return Estimate(Interval(row["value"], math.nan, math.nan, row["n"] or 0), math.nan if error is None else error)


def spread(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """Of rows with a win rate of one generator, the lowest and the highest; None without two."""
    known = [row for row in rows if row["value"] is not None]
    if len(known) < 2:
        return None
    order = np.argsort([row["value"] for row in known])
    return known[order[0]], known[order[-1]]
