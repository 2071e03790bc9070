"""Curves over training with confidence bands across seeds, and labelled scatter plots, by matplotlib alone."""

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ...data.files import write_atomic
from ...statistics import UNBOUNDED, interval

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""One a color, for those who cannot tell colors apart, and in print."""
LABELLERS = {
    **dict.fromkeys(("none", "sim_eval", "win rate by p_sim^eval"), 0),
    **dict.fromkeys(("ann", "sim_ann", "simulated", "reward_model", "proxy reward"), 1),
    **dict.fromkeys(("gpt4", "sim_gpt4"), 2),
    **dict.fromkeys(("human", "raters", "win rate by human raters"), 3),
    "flip_35": 4,
    "flip_175": 5,
    **dict.fromkeys(("gold", "reward_model_clean", "gold reward"), 6),
}
"""Treatment, judge or measure -> its place among the colors, by whose labels it is: one in all figures."""
LABEL_SIZE = 8.0
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One measure of S seeds at K evaluations: `x` [K], `values` [S, K], `bounds` those of `statistics.interval`.

    Seeds are drawn thin, their mean bold; the band is the 95 % t-interval of the mean.
    """

    label: str
    x: Array
    values: Array
    bounds: tuple[float, float] = UNBOUNDED


@dataclass(frozen=True)
class Panel:
    """One pair of axes: labels with units, its curves, and marks."""

    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    level: float | None = None
    """A dashed horizontal line, for instance 50 % where neither side is preferred."""
    marks: Sequence[float] = ()
    """Dotted vertical lines at these x, for instance the chosen steps of the seeds."""


def looks(names: Iterable[str]) -> list[tuple[str, str]]:
    """Color and marker of what is drawn together: of `LABELLERS` its own, of others the first that are left."""
    shown = list(names)
    taken = {LABELLERS[name] for name in shown if name in LABELLERS}
    rest = cycle([place for place in range(len(COLORS)) if place not in taken] or range(len(COLORS)))
    places = [LABELLERS[name] if name in LABELLERS else next(rest) for name in shown]
    return [(COLORS[place], MARKERS[place]) for place in places]


def draw(panels: Sequence[Panel], title: str, note: str = "") -> Figure:
    """One row of panels with a title; `note`, in small print below, says by whom it was judged and n."""
    # Figure, not pyplot: no global state, no backend to choose, nothing to close.
    figure = Figure(figsize=(1.2 + 4.6 * len(panels), 4.4), dpi=150, layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axis, panel)
    return titled(figure, title, note)


def titled(figure: Figure, title: str = "", note: str = "") -> Figure:
    """Finishes a drawn figure and returns it: no frames, the title above, the note in small print below."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    if note:
        lines = textwrap.fill(note, int(15 * figure.get_figwidth()))
        figure.supxlabel(lines, fontsize=8, color="#555555", x=0.01, ha="left")
    return figure


def png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG image, equal for equal figures (no date, no version inside)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def write_png(path: Path, figure: Figure) -> bytes:
    """Writes the figure atomically, and returns its bytes (for a report)."""
    data = png(figure)
    write_atomic(path, data)
    return data


def band(values: Array, bounds: tuple[float, float] = UNBOUNDED) -> tuple[Array, Array, Array]:
    """Mean, low and high [K] of values [S, K]: 95 % t-interval over the seeds; for `bounds` see `statistics.interval`.

    All are NaN where a seed has no value; low and high with a single seed.
    """
    rows = [interval(column, bounds=bounds) if np.isfinite(column).all() else None for column in values.T]
    table = np.array([(row.mean, row.low, row.high) if row else (np.nan,) * 3 for row in rows], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _draw_panel(axis: Axes, panel: Panel) -> None:
    for (color, marker), curve in zip(looks(curve.label for curve in panel.curves), panel.curves, strict=True):
        _draw_curve(axis, curve, color, marker)
    if panel.level is not None:
        axis.axhline(panel.level, color="#888888", linestyle="--", linewidth=1)
    for mark in set(panel.marks):
        axis.axvline(mark, color="#333333", linestyle=":", linewidth=1)
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid(axis)
    axis.legend(fontsize=8, frameon=False)


def _draw_curve(axis: Axes, curve: Curve, color: str, marker: str) -> None:
    if len(curve.values) > 1:
        axis.plot(curve.x, curve.values.T, color=color, linewidth=0.6, alpha=0.45)
    mean, low, high = band(curve.values, curve.bounds)
    axis.fill_between(curve.x, low, high, color=color, alpha=0.15, linewidth=0)
    axis.plot(curve.x, mean, color=color, linewidth=2, marker=marker, markersize=5, label=curve.label)


def grid(axis: Axes, which: Literal["both", "x"] = "both") -> None:
    """Light lines below all that is drawn."""
    axis.grid(axis=which, color="#eeeeee")
    axis.set_axisbelow(True)


def place_labels(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Writes the names of points in a column beside the axes, by height, each tied to its point by a thin line.

    In a column no label covers another one, however close the points are.
    """
    low, high = axis.get_ylim()
    by_height = sorted(points, key=lambda name: points[name][1])
    line: dict[str, Any] = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkB": 3}
    heights = np.linspace(low, high, len(by_height) + 2)[1:-1]
    for name, height in zip(by_height, heights.tolist(), strict=True):
        place: dict[str, Any] = {"xytext": (1.02, height), "textcoords": axis.get_yaxis_transform(), "va": "center"}
        axis.annotate(name, points[name], **place, fontsize=LABEL_SIZE, arrowprops=line)
