"""Drawings of the over-optimization study that are no plain curves: drops, reward models, fits, warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..harness.estimates import Estimate
from ..harness.plots import COLORS, band, titled
from ..harness.study import Row
from .claims import FLIPS
from .curves import METHOD_WORDS, METHODS, Curves
from .fits import FORMS, Array, drop, gain_at, peak, shared_distances
from .results import Results
from .trends import by_seed, warning_place

FITTED = ("none", "ann", "gpt4", "human")
"""Treatments whose fits are drawn."""
MARKERS = ("o", "s")


def draw_drops(results: Results, title: str, note: str) -> Drawing:
    """Mean drop with its 95 % t-interval against the share of flips, a colour a method; small dots are seeds."""
    figure = _figure(1)
    axis = figure.subplots()
    for place, method in enumerate(results.methods):
        found = [(results.facts[name].flip, results.get(name, method)) for name in FLIPS if name in results.facts]
        points = [(100 * flip, drop(curves["gold"])) for flip, curves in found if curves is not None]
        if not points:
            continue
        x = np.array([flip for flip, _ in points]) + 0.6 * (place - 0.5)  # side by side, so that bars can be told apart
        _bars(axis, x, [fallen.estimate for _, fallen in points], place, METHOD_WORDS[method])
        for at, (_, fallen) in zip(x, points, strict=True):
            axis.plot(np.full(len(fallen.per_seed), at + 0.35), fallen.per_seed, ".", color=COLORS[place], alpha=0.5)
    axis.axhline(0, color="#888888", linestyle="--", linewidth=1)
    axis.set(xlabel="flipped labels (%)", ylabel="drop from peak to end (gold units)")
    return _finish(figure, title, f"Peak chosen on the other seeds. Small dots: seeds. {note}")


def draw_reward_models(results: Results, rows: Sequence[Row], title: str, note: str) -> Drawing:
    """Two panels against the share of flips: accuracy against gold and against the judge; calibration error."""
    figure = _figure(2)
    left, right = figure.subplots(1, 2)
    names = [name for name in FLIPS if any(row["treatment"] == name for row in rows) and name in results.facts]
    flips = np.array([100 * results.facts[name].flip for name in names])
    shown = (
        (left, "accuracy_gold", "against gold"),
        (left, "accuracy_judge", "against the labels' judge"),
        (right, "calibration_error", "calibration error"),
    )
    for place, (axis, measure, label) in enumerate(shown):
        found = [Estimate.of(100 * by_seed(rows, name, measure)) for name in names]
        shift = 0.3 * (2 * place - 1) if axis is left else 0.0
        _bars(axis, flips + shift, found, place, label)
    left.set(xlabel="flipped labels (%)", ylabel="pairs ordered alike (%)")
    right.set(xlabel="flipped labels (%)", ylabel="mean |confidence − agreement| (points)")
    right.set_ylim(bottom=0)
    return _finish(figure, title, note)


def draw_fits(results: Results, title: str, note: str) -> Drawing:
    """A panel a treatment: gold gained against sqrt(KL) by both methods on the same axes, with fits.

    Dashed in the form of Gao et al. for the method, dotted in that for the other.
    """
    names = [name for name in FITTED if any(results.get(name, method) for method in METHODS)]
    columns = min(len(names), 2)
    rows = -(-len(names) // columns)
    figure = Drawing(figsize=(1.2 + 4.6 * columns, 0.8 + 3.4 * rows), dpi=150, layout="constrained")
    # One scale for all, or gains could not be compared.
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        for place, method in enumerate(METHODS):
            if (curves := results.get(name, method)) is not None:
                _draw_fit(axis, results, curves, place)
        axis.set_title(results.title(name), fontsize=10)
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.set(xlabel="√KL from SFT (√nats)", ylabel="gold gained over SFT (gold units)")
    for axis in axes.flat[len(names) :]:
        axis.remove()
    return _finish(
        figure, title, f"Seeds averaged at equal √KL. Dashed: the method's form; dotted: the other's. {note}"
    )


def _draw_fit(axis: Axes, results: Results, curves: Curves, place: int) -> None:
    color, x = COLORS[place], np.r_[0.0, shared_distances(curves["kl_exact"])]  # where the fit has its points
    mean, low, high = band(gain_at(curves["kl_exact"], curves["gold"], x))
    axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    words = METHOD_WORDS[curves.method]
    axis.plot(x, mean, color=color, linestyle="", marker=MARKERS[place], markersize=4.5, label=words)
    for form in FORMS.values():
        if (found := results.fit(curves.treatment, curves.method, form)) is not None:
            along, line = np.linspace(0, found.measured, 201), "--" if form == FORMS[curves.method] else ":"
            label = f"{form}, R² {found.r_squared:.2f}"
            axis.plot(along, found.at(along), color=color, linestyle=line, linewidth=1.6, label=label)


def draw_warnings(results: Results, shown: Sequence[Curves], title: str, note: str) -> Drawing:
    """A column an ensemble: gold above with its peak (dashed), disagreement below with the first warning (dotted)."""
    figure = Drawing(figsize=(1.2 + 4.2 * len(shown), 6.4), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False, sharex="col", sharey="row")
    for column, curves in enumerate(shown):
        label, x = curves.along
        top, first = peak(curves["gold"]), warning_place(curves["disagreement"])
        for row, (measure, color) in enumerate((("gold", COLORS[0]), ("disagreement", COLORS[1]))):
            axis = axes[row, column]
            mean, low, high = band(curves[measure])
            axis.plot(x, curves[measure].T, color=color, linewidth=0.6, alpha=0.45)
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            axis.plot(x, mean, color=color, linewidth=2, marker=MARKERS[row], markersize=3.5)
            axis.axvline(x[top], color=COLORS[0], linestyle="--", linewidth=1.2, label=f"peak: {curves.place(top)}")
            if first is not None:
                words = f"warning: {curves.place(first)}"
                axis.axvline(x[first], color=COLORS[1], linestyle=":", linewidth=1.8, label=words)
            _plain(axis)
        axes[0, column].set_title(results.title(curves.treatment), fontsize=10)
        axes[1, column].set_xlabel(label)
        axes[0, column].legend(fontsize=8, frameon=False, title=None if first is not None else "no warning")
    axes[0, 0].set_ylabel("gold reward (gold units)")
    axes[1, 0].set_ylabel("members' disagreement, std\n(reward-model units)")
    words = "Warning: the first evaluation at which disagreement less that at the start has a 95 % t-interval above 0."
    return titled(figure, title, f"{words} {note}")


def _bars(axis: Axes, x: Array, found: Sequence[Estimate], place: int, label: str) -> None:
    half = [0.0 if math.isnan(each.interval.high) else each.interval.high - each.mean for each in found]
    means = [each.mean for each in found]
    marker, color = MARKERS[place % len(MARKERS)], COLORS[place]
    axis.errorbar(x, means, yerr=half, color=color, marker=marker, markersize=5, capsize=3, linewidth=1.5, label=label)


def _figure(columns: int) -> Drawing:
    return Drawing(figsize=(1.2 + 4.6 * columns if columns > 1 else 7.2, 4.4), dpi=150, layout="constrained")


def _finish(figure: Drawing, title: str, note: str) -> Drawing:
    for axis in figure.axes:
        _plain(axis)
        axis.legend(fontsize=8, frameon=False)
    return titled(figure, title, note)


def _plain(axis: Axes) -> None:
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
