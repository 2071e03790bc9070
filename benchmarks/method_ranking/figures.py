"""The two figures of the method ranking: win rates with intervals, and human against simulated win rates."""

from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from ..experiment.runs import FEEDBACKS
from ..harness.estimates import FEWEST
from ..harness.page import Drawn
from ..harness.plots import COLORS, looks, place_labels, titled
from ..harness.report import Provenance
from .summary import Summary

WORDS = {
    "simulated": "simulated: trained on and judged by simulated feedback",
    "human": "human: trained on and judged by human raters",
}
"""Feedback -> its label in a legend."""


def draw_figures(summary: Summary, where: Provenance) -> dict[str, Drawn]:
    """human_against_simulated, for three methods or more that have both win rates, and win_rates, with captions."""
    best = f"Win rate of every method, best {summary.feedbacks[0]} one on top"
    diamonds = "Hollow diamonds: the paper's win rates, of LLaMA 7B against Davinci003; other models and judges"
    rates = f"{best}, {_bars(summary, 'with 95 % t-intervals')}. {diamonds}."
    figures = {}
    if len(summary.with_both()) >= FEWEST:
        what, bars = (
            "Human against simulated win rate, one point a method",
            _bars(summary, "bars are one standard error"),
        )
        figures["human_against_simulated"] = (draw_scatter, f"{what}; {bars}, the dashed line is equality.")
    figures["win_rates"] = (draw_win_rates, rates)
    errors = "bars: one standard error" if len(summary.seeds) > 1 else ""
    labels = dict.fromkeys(figures, where.label()) | {"human_against_simulated": where.label(interval=errors)}
    return {
        name: Drawn(draw(summary, f"{labels[name]} {where.judges()}"), f"{told} {labels[name]}")
        for name, (draw, told) in figures.items()
    }


def draw_win_rates(summary: Summary, note: str) -> Drawing:
    """A row per method, the best of the first column on top: means with 95 % t-intervals, and the published values."""
    measured = {name for feedback in FEEDBACKS for name in summary.column(feedback)}
    shown = [method for method in summary.in_order() if method.name in measured]
    figure = Drawing(figsize=(9.4, 2.0 + 0.4 * len(shown)), dpi=150, layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(shown), dtype=np.float64)[::-1]
    for feedback in summary.feedbacks:
        index = FEEDBACKS.index(feedback)
        (color, _), y = looks([feedback])[0], places + ((0.14, -0.14)[index] if len(summary.feedbacks) > 1 else 0.0)
        found = [summary.win_rate(method.name, feedback).interval for method in shown]
        means, low, high = np.array([(each.mean, each.low, each.high) for each in found]).reshape(-1, 3).T
        error = np.nan_to_num([means - low, high - means])
        bars: dict[str, Any] = {
            "fmt": "os"[index],
            "markersize": 4.5,
            "elinewidth": 1.2,
            "capsize": 2.5,
            "label": WORDS[feedback],
        }
        axis.errorbar(means, y, xerr=error, color=color, **bars)
        paper = np.array([method.paper[index] for method in shown], dtype=np.float64)
        hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": color, "markersize": 5, "alpha": 0.75}
        axis.plot(paper, y, "D", label=f"the paper's {feedback} win rate (LLaMA 7B)", **hollow)
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(places, [method.title for method in shown], fontsize=9)
    axis.set(xlim=(0, 100), ylim=(-0.7, len(shown) - 0.3), xlabel="win rate against the reference (%)")
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    titled(figure, f"Win rates of {len(shown)} methods; {_bars(summary, 'bars are 95 % t-intervals')}", note)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False)
    return figure


def draw_scatter(summary: Summary, note: str) -> Drawing:
    """A point per method: human against simulated win rate, bars of one standard error, labels next to the points."""
    both = summary.with_both()
    figure = Drawing(figsize=(8.2, 7.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    axis = figure.subplots()
    means = np.array([(one.mean, two.mean) for one, two in both.values()])
    errors = np.nan_to_num([(one.standard_error, two.standard_error) for one, two in both.values()])
    (x, y), (dx, dy) = means.T, errors.T
    axis.errorbar(x, y, xerr=dx, yerr=dy, fmt="o", color=COLORS[0], ecolor="#8fb8d6", markersize=5)
    ends = np.array([means - errors, means + errors])
    margin = 0.12 * max(float(np.ptp(ends)), 10.0)  # room for labels on all sides, within [0, 100] and some
    low, high = max(-3.0, float(ends.min()) - margin), min(103.0, float(ends.max()) + margin)
    axis.plot([low, high], [low, high], color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    simulated, human = (f"{WORDS[feedback]} (%)" for feedback in FEEDBACKS)
    axis.set(xlabel=simulated, ylabel=human, aspect="equal", xlim=(low, high), ylim=(low, high))
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    titled(figure, f"Human against simulated win rate; {_bars(summary, 'bars are one standard error')}", note)
    place_labels(figure, axis, both)
    return figure


def _bars(summary: Summary, words: str) -> str:
    return f"{words} over seeds" if len(summary.seeds) > 1 else "one seed, no bars"
