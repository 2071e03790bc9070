"""Curves over training with confidence bands across seeds, drawn by matplotlib without a display."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from numpy.typing import NDArray

from ...data.files import write_atomic
from ...statistics import UNBOUNDED, interval

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""

MOST_TICKS = 10

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One measure of several seeds.

    `x` and `values` are [S, K]: S seeds, K evaluations. Seeds are drawn thin, their mean bold; the band is the 95 %
    t-interval of the mean over the seeds. Where x differs between seeds (KL) the bold line stands at the mean x.
    """

    label: str
    x: Array
    values: Array
    bounds: tuple[float, float] = UNBOUNDED
    """What a mean can be, see `statistics.interval`."""

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.x.shape != self.values.shape or not self.values.size:
            raise ValueError(
                f"curve {self.label!r}: expected x and values of one shape [seeds, evaluations], "
                f"got {self.x.shape} and {self.values.shape}"
            )


@dataclass(frozen=True)
class Panel:
    """One pair of axes: labels with units, its curves, and marks."""

    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    level: float | None = None
    """A dashed horizontal line, for instance 50 % where neither side is preferred."""
    level_label: str = ""
    marks: tuple[float, ...] = ()
    """Dotted vertical lines at these x, for instance the chosen steps of the seeds."""
    marks_label: str = ""
    whole_x: bool = False
    """Whether x counts something: ticks stand at values of x then."""


def draw(panels: Sequence[Panel], title: str, note: str = "") -> Figure:
    """One row of panels. `title` says what is shown; `note`, in small print below, by whom it was judged and n.

    Curves that hold no finite value (a judge that the level does not have) are left out, and said so on the panel.
    """
    # Figure, not pyplot: no global state, no backend to choose, nothing to close.
    figure = Figure(figsize=(1.2 + 4.6 * len(panels), 4.4), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
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
    """Writes the figure beside `path`, renames it, and returns its bytes (for a report)."""
    data = png(figure)
    write_atomic(path, data)
    return data


def band(values: Array, bounds: tuple[float, float] = UNBOUNDED) -> tuple[Array, Array, Array]:
    """Mean, low and high [K] of values [S, K]: 95 % t-interval over the seeds; NaN where a seed has no value.

    `bounds` are those of `statistics.interval`.

    With one seed there is no interval: low and high are NaN.
    """
    rows = [interval(column, bounds=bounds) if np.isfinite(column).all() else None for column in values.T]
    table = np.array([(row.mean, row.low, row.high) if row else (np.nan,) * 3 for row in rows], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _draw_panel(axis: Axes, panel: Panel) -> None:
    missing = [curve.label for curve in panel.curves if not np.isfinite(curve.values).any()]
    for color, curve in zip(COLORS, panel.curves, strict=False):
        if curve.label not in missing:
            _draw_curve(axis, curve, color)
    if panel.level is not None:
        axis.axhline(panel.level, color="#888888", linestyle="--", linewidth=1, label=panel.level_label or None)
    for index, mark in enumerate(sorted(set(panel.marks))):
        axis.axvline(mark, color="#333333", linestyle=":", linewidth=1, label=panel.marks_label if index == 0 else None)
    if missing:
        axis.set_title("no value at this level: " + ", ".join(missing), fontsize=8, color="#aa0000")
    axis.set_xlabel(panel.xlabel)
    axis.set_ylabel(panel.ylabel)
    if panel.whole_x:
        steps = np.unique(np.concatenate([curve.x.ravel() for curve in panel.curves]))
        axis.xaxis.set_major_locator(FixedLocator(steps.tolist(), nbins=MOST_TICKS))
    _cut_at_bounds(axis, panel.curves)
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, frameon=False)


def _cut_at_bounds(axis: Axes, curves: Sequence[Curve]) -> None:
    """Ends the y axis where a share or percentage ends."""
    (low, high), bounds = axis.get_ylim(), {curve.bounds for curve in curves}
    if len(bounds) == 1 and np.isfinite(ends := bounds.pop()).all():
        axis.set_ylim(max(low, ends[0]), min(high, ends[1]))


def _draw_curve(axis: Axes, curve: Curve, color: str) -> None:
    if len(curve.values) > 1:
        for x, y in zip(curve.x, curve.values, strict=True):
            axis.plot(x, y, color=color, linewidth=0.6, alpha=0.45)
    mean, low, high = band(curve.values, curve.bounds)
    x = curve.x.mean(axis=0)
    # A band is drawn along x, so x must rise: the mean KL of two evaluations may come in either order.
    order = np.argsort(x, kind="stable")
    axis.fill_between(x[order], low[order], high[order], color=color, alpha=0.15, linewidth=0)
    # Not clipped: a line along the end of a share's axis would be half as wide.
    axis.plot(x, mean, color=color, linewidth=2, marker="o", markersize=3.5, label=curve.label, clip_on=False)
