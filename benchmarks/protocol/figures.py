"""The protocol's figures, drawn from the rows of the table alone."""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from ...statistics import Interval
from ..harness.estimates import Estimate
from ..harness.plots import COLORS, place_labels, titled
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
Points = dict[str, tuple[Estimate, Estimate]]


def judge_name(judge: Any) -> str:
    """What readers call a judge; another one by its own name."""
    return JUDGES.get(judge, str(judge))


def draw_sources(rows: pd.DataFrame, level: str, note: str) -> Drawing:
    """A panel a judge, a line a generator, a mark a source."""
    judges = rows[(rows.part == "sources") & (rows.level == level) & (rows.figure == "win_rate")].groupby(
        "judge", sort=False
    )
    tallest = judges.subject.nunique().max()
    figure = Drawing(figsize=(1 + 6.2 * len(judges), 2.0 + 0.27 * tallest), dpi=150, layout="constrained")
    for axis, (judge, own) in zip(figure.subplots(1, len(judges), squeeze=False)[0], judges, strict=True):
        whole = own[own.other == "all"].sort_values("value", kind="stable")
        places = pd.Series(range(len(whole)), index=whole.subject)
        sources = own[own.other != "all"].groupby("other", sort=False)
        for number, (source, found) in enumerate(sources):
            shift = 0.6 * ((number + 0.5) / len(sources) - 0.5)
            axis.errorbar(
                found.value, found.subject.map(places) - shift, xerr=found.standard_error.fillna(0), fmt="o",
                color=COLORS[number % len(COLORS)], markersize=3.5, elinewidth=0.8,
                label=f"{source} (n = {found.n.max():.0f})",
            )  # fmt: skip
        axis.plot(whole.value, places, "|", color="black", markersize=13, label="all")
        axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
        axis.set_yticks(places, places.index, fontsize=8)
        axis.set(ylim=(-0.7, len(whole) - 0.3), xlabel="win rate against the reference (%)")
        axis.set_title(judge_name(judge), fontsize=10, loc="left")
        axis.grid(axis="y", color="#eeeeee")
        axis.legend(fontsize=7, frameon=False, loc="lower right")
    return titled(figure, f"Win rate by source; bars are one standard error ({level})", note)


def draw_live(rows: pd.DataFrame, note: str) -> Drawing:
    """A panel a judge: win rates on live (filled) and on fresh instructions (hollow) against those on eval."""
    live = rows[rows.part == "live"]
    told = live[(live.figure == "r2") & (live.subject == EVAL)].set_index(["judge", "other"]).value
    judges = live[live.figure == "win_rate"].groupby("judge", sort=False)
    figure = Drawing(figsize=(1 + 7.4 * len(judges), 8.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    labelled = []
    for axis, (judge, own) in zip(figure.subplots(1, len(judges), squeeze=False)[0], judges, strict=True):
        on = {which: each.set_index("subject") for which, each in own.groupby("other")}
        for mark, fill, color, which, who in (
            ("o", COLORS[0], COLORS[0], LIVE, "live users"),
            ("s", "none", COLORS[1], FRESH, "drawn anew with eval’s mixture"),
        ):
            style = {"fmt": mark, "color": color, "markerfacecolor": fill, "elinewidth": 0.7}
            label = f"{who} (n = {on[which].n.iloc[0]:.0f})"
            _draw_rates(axis, on[EVAL].loc[on[which].index], on[which], label, **style)
        ends = max(-3.0, own.value.min() - 8), min(103.0, own.value.max() + 8)
        _finish(axis, ends, ends, "win rate on the evaluation set (%)", "win rate on the held-out set (%)")
        labelled.append((axis, _points(on[EVAL].loc[on[LIVE].index], on[LIVE])))
        words = [f"r² {which} {told[judge, which]:.3f}" for which in (LIVE, FRESH) if (judge, which) in told.index]
        axis.set_title(f"{judge_name(judge)}: {', '.join(words)}", fontsize=10, loc="left")
    figure = titled(figure, "Win rates on held-out instructions against those on the evaluation set", note)
    for axis, points in labelled:
        place_labels(figure, axis, points)
    return figure


def draw_judges(rows: pd.DataFrame, note: str) -> Drawing:
    """GPT-4's win rates against Claude's: published ones, and over them those with recorded verdicts by both."""
    found = rows[(rows.part == "judges") & (rows.figure == "win_rate")]
    figure = Drawing(figsize=(9.6, 8.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    points: Points = {}
    for kind, color, what in (
        ("published", COLORS[0], "published tables"),
        ("recorded", COLORS[1], "verdicts in the folder"),
    ):
        x, y = (
            found[(found.judge == judge) & (found.other == kind)].set_index("subject") for judge in ("gpt4", "claude")
        )
        x = x.loc[x.index.isin(y.index)]
        y = y.loc[x.index]
        _draw_rates(axis, x, y, f"{what}: {len(x)} models", fmt="o", color=color, elinewidth=0.8)
        points |= _points(x, y)
    low = min((estimate.mean for point in points.values() for estimate in point), default=0.0)
    _finish(axis, (0, 100), (max(-3.0, low - 8), 103), "win rate by GPT-4 (%)", "win rate by Claude (%)")
    figure = titled(figure, "The same models by two judges; bars are one standard error (recorded)", note)
    place_labels(figure, axis, points)
    return figure


def _draw_rates(axis: Axes, x: pd.DataFrame, y: pd.DataFrame, label: str, **style: Any) -> None:
    """Win rates of the same generators, with one standard error each way."""
    xerr, yerr = (side.standard_error.fillna(0) for side in (x, y))
    axis.errorbar(x.value, y.value, xerr=xerr, yerr=yerr, markersize=5, label=label, **style)


def _finish(axis: Axes, line: tuple[float, float], limits: tuple[float, float], x: str, y: str) -> None:
    axis.plot(line, line, color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    axis.set(xlim=limits, ylim=limits, aspect="equal", xlabel=x, ylabel=y)
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def _points(x: pd.DataFrame, y: pd.DataFrame) -> Points:
    """Label -> where it belongs."""

    def estimate(row: Any) -> Estimate:
        return Estimate(Interval(row.value, math.nan, math.nan, 0), row.standard_error)

    places = zip(x.itertuples(), y.itertuples(), strict=True)
    return {str(one.Index).removeprefix(RANKED): (estimate(one), estimate(two)) for one, two in places}


def draw_pairs(rows: pd.DataFrame, note: str) -> Drawing:
    """Share of pairs told apart against the number of instructions, a panel a judge."""
    judges = rows[(rows.part == "pairs") & (rows.figure == "told_apart")].groupby("judge", sort=False)
    columns = 2 if len(judges) > 1 else 1
    lines = math.ceil(len(judges) / columns)
    figure = Drawing(figsize=(1 + 7.0 * columns, 1 + 3.6 * lines), dpi=150, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, (judge, own) in zip(axes, judges, strict=False):
        for number, (subject, curve) in enumerate(own[own.subject != SETS].groupby("subject", sort=False)):
            color = "black" if subject == ALL else COLORS[(number - 1) % len(COLORS)]
            low, high = (curve[end].fillna(curve.value) for end in ("low", "high"))
            axis.fill_between(curve.n, low, high, color=color, alpha=0.12, linewidth=0)
            style = {"linestyle": ":" if str(subject).startswith("same") else "-", "color": color, "linewidth": 1.8}
            axis.plot(curve.n, curve.value, label=f"{subject} ({curve.models.iloc[0]:.0f})", **style)
        axis.axhline(WANTED, color="#888888", linestyle="--", linewidth=1)
        axis.axvline(UPSTREAM, color="#888888", linestyle="--", linewidth=1)
        axis.set(ylim=(-0.02, 1.02), xlabel="instructions", ylabel="share of pairs told apart")
        axis.set_title(f"{judge_name(judge)} ({own.level.iloc[0]})", fontsize=10, loc="left")
        axis.grid(color="#eeeeee")
        axis.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axis in axes[len(judges) :]:
        axis.set_visible(False)
    return titled(figure, "Pairs of models told apart by a paired t-test, p < .05", note)
