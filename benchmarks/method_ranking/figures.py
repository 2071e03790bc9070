"""The two figures of the method ranking: win rates with intervals, and human against simulated win rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from ..harness.agreement import FEWEST
from ..harness.estimates import Estimate
from ..harness.labels import place_labels, zero_for_nan
from ..harness.plots import COLORS, titled, write_png
from ..harness.provenance import Provenance
from ..harness.report import Figure
from ..methods.methods import Method
from ..methods.runs import FEEDBACKS
from .summary import JUDGED_BY, Summary

WORDS = {
    "simulated": "simulated: trained on and judged by simulated feedback",
    "human": "human: trained on and judged by human raters",
}
"""Feedback -> its label in a legend."""


def in_order(summary: Summary, methods: Sequence[Method], feedback: str | None = None) -> list[Method]:
    """The best win rate of a column (None: the first) first; methods without one last, in their own order."""
    order = {name: place for place, name in enumerate(summary.ranking(feedback or summary.feedbacks[0]))}
    return sorted(methods, key=lambda method: order.get(method.name, len(order)))


def write_figures(out: Path, summary: Summary, methods: Sequence[Method], where: Provenance) -> tuple[Figure, ...]:
    """Writes win_rates.png and human_against_simulated.png and returns them with captions.

    The second needs three methods that have both win rates: with fewer it is not drawn, and one that an earlier call
    left there is removed.
    """
    note = f"{where.label()} {where.judges()}"
    bars = _by_seeds(summary, "with 95 % t-intervals over seeds")
    captions = {
        "win_rates": f"Win rate of every method, best {summary.feedbacks[0]} one on top, {bars}. Hollow diamonds: the "
        "paper's win rates, of LLaMA 7B against Davinci003; other models, other judges.",
        "human_against_simulated": "Human against simulated win rate, one point a method; "
        f"{_by_seeds(summary, 'bars are one standard error over seeds')}, the dashed line is equality.",
    }
    drawn = {"win_rates": draw_win_rates, "human_against_simulated": draw_scatter}
    if len(with_both(summary, methods)) < FEWEST:
        del drawn["human_against_simulated"]
        (out / "human_against_simulated.png").unlink(missing_ok=True)
    return tuple(
        Figure(write_png(out / f"{name}.png", draw(summary, methods, note)), f"{captions[name]} {where.label()}")
        for name, draw in drawn.items()
    )


def with_both(summary: Summary, methods: Sequence[Method]) -> dict[str, tuple[Estimate, Estimate]]:
    """Title -> simulated and human win rate, of the methods that have both."""
    simulated, human = FEEDBACKS
    found = {
        method.title: (
            summary.mean(JUDGED_BY[simulated], method.name, simulated),
            summary.mean(JUDGED_BY[human], method.name, human),
        )
        for method in methods
    }
    return {title: (one, two) for title, (one, two) in found.items() if one.num and two.num}


def draw_win_rates(summary: Summary, methods: Sequence[Method], note: str) -> Drawing:
    """A row a method, the best of the first column on top: means with 95 % t-intervals, and the published values."""
    shown = [method for method in in_order(summary, methods) if _has_any(summary, method)]
    figure = Drawing(figsize=(9.4, 2.0 + 0.4 * len(shown)), dpi=150, layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(shown), dtype=np.float64)[::-1]
    for feedback in summary.feedbacks:
        index = FEEDBACKS.index(feedback)
        shift = (0.14, -0.14)[index] if len(summary.feedbacks) > 1 else 0.0
        found = [summary.mean(JUDGED_BY[feedback], method.name, feedback).interval for method in shown]
        means = np.array([each.mean for each in found])
        reach = [[zero_for_nan(end) for end in (each.mean - each.low, each.high - each.mean)] for each in found]
        axis.errorbar(
            means,
            places + shift,
            xerr=np.array(reach).T,
            fmt="o" if index == 0 else "s",
            color=COLORS[index],
            markersize=4.5,
            elinewidth=1.2,
            capsize=2.5,
            label=WORDS[feedback],
        )
        published = np.array([math.nan if (value := method.paper[index]) is None else value for method in shown])
        axis.plot(
            published,
            places + shift,
            "D",
            markerfacecolor="none",
            markeredgecolor=COLORS[index],
            markersize=5,
            alpha=0.75,
            label=f"the paper's {feedback} win rate (LLaMA 7B)",
        )
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(places, [method.title for method in shown], fontsize=9)
    axis.set(xlim=(0, 100), ylim=(-0.7, len(shown) - 0.3), xlabel="win rate against the reference (%)")
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    bars = _by_seeds(summary, "bars are 95 % t-intervals over seeds")
    titled(figure, f"Win rates of all methods; {bars}", note)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False)
    return figure


def draw_scatter(summary: Summary, methods: Sequence[Method], note: str) -> Drawing:
    """A point a method: human against simulated win rate, bars of one standard error, labels beside the points."""
    both = with_both(summary, methods)
    figure = Drawing(figsize=(8.2, 7.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    axis = figure.subplots()
    means = np.array([(one.mean, two.mean) for one, two in both.values()]).reshape(-1, 2)
    errors = [[zero_for_nan(pair[side].standard_error) for pair in both.values()] for side in (0, 1)]
    x, y = means.T
    axis.errorbar(x, y, xerr=errors[0], yerr=errors[1], fmt="o", color=COLORS[0], ecolor="#8fb8d6", markersize=5)
    if both:
        spread = np.array(errors).T
        low, high = _limits(np.stack([means - spread, means + spread]))
        axis.set(xlim=(low, high), ylim=(low, high))
        axis.plot([low, high], [low, high], color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    axis.set(
        xlabel=f"{WORDS['simulated']} (%)",
        ylabel=f"{WORDS['human']} (%)",
        aspect="equal",
    )
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    bars = _by_seeds(summary, "bars are one standard error over seeds")
    titled(figure, f"Human against simulated win rate; {bars}", note)
    place_labels(figure, axis, both)
    return figure


def _has_any(summary: Summary, method: Method) -> bool:
    return any(summary.mean(JUDGED_BY[feedback], method.name, feedback).num for feedback in FEEDBACKS)


def _by_seeds(summary: Summary, words: str) -> str:
    """What is said of the bars: one seed has none."""
    return words if len(summary.cells.seeds) > 1 else "one seed, no bars"


def _limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """Room for labels on all sides, within [0, 100] and some."""
    spread = max(float(np.ptp(values)), 10.0)
    return max(-3.0, float(values.min()) - 0.12 * spread), min(103.0, float(values.max()) + 0.12 * spread)
