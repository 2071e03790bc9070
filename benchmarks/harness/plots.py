"""Curves over training with confidence bands across seeds, and labelled scatter plots, by matplotlib alone."""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray
from PIL import Image

from ...data.files import write_atomic
from ...statistics import UNBOUNDED, interval
from .estimates import Estimate

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
MOST_TICKS = 10
LABEL_SIZE = 8.0
SOURCE = "alpacafarm_env"
"""The mark of the figures that are written here, among a PNG's texts."""
DISTANCES = (7.0, 13.0, 20.0, 28.0, 38.0, 50.0, 64.0, 80.0)
"""Points between a mark and the nearest edge of its label, in the order in which they are tried."""
ANGLES = [2 * math.pi * turn / 16 for turn in (0, 8, 4, 12, 2, 6, 14, 10, 1, 7, 15, 9, 3, 5, 13, 11)]
"""Right, left, above, below and so on: the order in which readers look for a label."""
NEAR = 14.0
"""Beyond this many points a thin line leads from a label to its mark."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One measure of S seeds at K evaluations: `x` and `values` are [S, K], `bounds` those of `statistics.interval`.

    Seeds are drawn thin, their mean bold; the band is the 95 % t-interval of the mean. Where x differs between seeds
    (KL) the bold line stands at the mean x.
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
    level_label: str = ""
    marks: tuple[float, ...] = ()
    """Dotted vertical lines at these x, for instance the chosen steps of the seeds."""
    marks_label: str = ""
    whole_x: bool = False
    """Whether x counts something: ticks stand at values of x then."""


def looks(names: Iterable[str]) -> list[tuple[str, str]]:
    """Color and marker of what is drawn together: of `LABELLERS` its own, of others the first that are left."""
    shown = list(names)
    taken = {LABELLERS[name] for name in shown if name in LABELLERS}
    rest = cycle([place for place in range(len(COLORS)) if place not in taken] or range(len(COLORS)))
    places = [LABELLERS[name] if name in LABELLERS else next(rest) for name in shown]
    return [(COLORS[place], MARKERS[place]) for place in places]


def draw(panels: Sequence[Panel], title: str, note: str = "") -> Figure:
    """One row of panels with a title; `note`, in small print below, says by whom it was judged and n.

    Curves without a finite value (a judge that the level does not have) are left out, and the panel says so.
    """
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


def png(figure: Figure, **metadata: str) -> bytes:
    """The figure as the bytes of a PNG image, equal for equal figures (no date, no version inside)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None, **metadata})
    return buffer.getvalue()


def write_png(path: Path, figure: Figure) -> bytes:
    """Writes the figure atomically, marked for `remove_drawn`, and returns its bytes (for a report)."""
    data = png(figure, Source=SOURCE, Title=path.stem)
    write_atomic(path, data)
    return data


def remove_drawn(folder: Path) -> None:
    """Removes the figures that `write_png` has written there; other files stay, and figures copied to other names."""
    for path in folder.glob("*.png"):
        try:
            with Image.open(path) as image:
                drawn = (image.info.get("Source"), image.info.get("Title")) == (SOURCE, path.stem)
        except OSError:  # no image, so none of ours
            continue
        if drawn:
            path.unlink()


def band(values: Array, bounds: tuple[float, float] = UNBOUNDED) -> tuple[Array, Array, Array]:
    """Mean, low and high [K] of values [S, K]: 95 % t-interval over the seeds; for `bounds` see `statistics.interval`.

    All are NaN where a seed has no value; low and high with a single seed.
    """
    rows = [interval(column, bounds=bounds) if np.isfinite(column).all() else None for column in values.T]
    table = np.array([(row.mean, row.low, row.high) if row else (np.nan,) * 3 for row in rows], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _draw_panel(axis: Axes, panel: Panel) -> None:
    missing = [curve.label for curve in panel.curves if not np.isfinite(curve.values).any()]
    for (color, marker), curve in zip(looks(curve.label for curve in panel.curves), panel.curves, strict=True):
        if curve.label not in missing:
            _draw_curve(axis, curve, color, marker)
    if panel.level is not None:
        axis.axhline(panel.level, color="#888888", linestyle="--", linewidth=1, label=panel.level_label or None)
    for index, mark in enumerate(sorted(set(panel.marks))):
        axis.axvline(mark, color="#333333", linestyle=":", linewidth=1, label=panel.marks_label if index == 0 else None)
    if missing:
        axis.set_title("no value at this level: " + ", ".join(missing), fontsize=8, color="#aa0000")
    axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    if panel.whole_x:
        steps = np.unique(np.concatenate([curve.x.ravel() for curve in panel.curves]))
        axis.xaxis.set_major_locator(FixedLocator(steps.tolist(), nbins=MOST_TICKS))
    bounds = {curve.bounds for curve in panel.curves}
    if len(bounds) == 1 and np.isfinite(ends := bounds.pop()).all():  # the axis ends where a share ends
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, ends[0]), min(high, ends[1]))
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, frameon=False)


def _draw_curve(axis: Axes, curve: Curve, color: str, marker: str) -> None:
    if len(curve.values) > 1:
        for x, y in zip(curve.x, curve.values, strict=True):
            axis.plot(x, y, color=color, linewidth=0.6, alpha=0.45)
    mean, low, high = band(curve.values, curve.bounds)
    x = curve.x.mean(axis=0)
    # A band is drawn along x, so x must rise: the mean KL of two evaluations may come in either order.
    order = np.argsort(x, kind="stable")
    axis.fill_between(x[order], low[order], high[order], color=color, alpha=0.15, linewidth=0)
    # Not clipped: a line along the end of a share's axis would be half as wide.
    axis.plot(x, mean, color=color, linewidth=2, marker=marker, markersize=5, label=curve.label, clip_on=False)


class _Spot(NamedTuple):
    """A mark in pixels, with the boxes of its mark and bars."""

    x: float
    y: float
    boxes: tuple[Bbox, ...]


def place_labels(figure: Figure, axis: Axes, points: Mapping[str, tuple[Estimate, Estimate]]) -> None:
    """Writes each label next to its point where it covers no other label, no mark, bar or diagonal.

    The nearest such place; the most crowded points choose first. Where it is far, a thin line leads back to the point.
    If nothing is free within the largest distance, the place that covers least is taken.
    """
    figure.draw_without_rendering()  # fixes the layout, which the pixels depend on
    figure.set_layout_engine("none")
    scale = figure.dpi / 72
    spots = {name: _spot(axis, x, y, scale) for name, (x, y) in points.items()}
    frame = axis.get_window_extent()
    taken = [box for spot in spots.values() for box in spot.boxes] + _diagonal(axis, frame)
    crowding = {
        name: sum(sorted(math.hypot(spot.x - other.x, spot.y - other.y) for other in spots.values())[1:4])
        for name, spot in spots.items()
    }
    for name in sorted(spots, key=crowding.__getitem__):
        text = figure.text(0, 0, name, transform=None, fontsize=LABEL_SIZE, va="bottom")
        best, distance = _free_place(spots[name], text.get_window_extent(), taken, frame, scale)
        text.set_position((best.x0, best.y0))
        taken.append(best)
        if distance > NEAR:
            _lead(axis, spots[name], best)


def _free_place(spot: _Spot, size: Bbox, taken: Sequence[Bbox], frame: Bbox, scale: float) -> tuple[Bbox, float]:
    """The box of a label of this size, and how many points it is from its mark."""
    width, height, tried = size.width, size.height, []
    others, inside = np.array([other.extents for other in taken]), np.array([frame.extents])
    for distance in DISTANCES:
        for angle in ANGLES:
            dx, dy = math.cos(angle), math.sin(angle)
            x = spot.x + dx * distance * scale + (dx - 1) * width / 2
            y = spot.y + dy * distance * scale + (dy - 1) * height / 2
            box = Bbox.from_bounds(x, y, width, height)
            extents = np.array(box.extents)
            outside = width * height - float(_overlap(extents, inside)[0])
            covered = sum(_overlap(extents, others).tolist()) + outside
            if covered <= 1e-6 * width * height:
                return box, distance
            tried.append((covered, box, distance))
    _, best, distance = min(tried, key=lambda place: place[0])
    return best, distance


def _diagonal(axis: Axes, frame: Bbox) -> list[Bbox]:
    """The line of equal win rates, as boxes small enough to follow it."""
    along = np.linspace(*axis.get_xlim(), int(frame.width / 6))
    corners = axis.transData.transform(np.stack([along, along], axis=1))
    return [Bbox.from_extents(*first, *second) for first, second in pairwise(corners)]


def _lead(axis: Axes, spot: _Spot, box: Bbox) -> None:
    nearest = (min(max(spot.x, box.x0), box.x1), min(max(spot.y, box.y0), box.y1))
    line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    pixels = "figure pixels"
    axis.annotate("", (spot.x, spot.y), xytext=nearest, xycoords=pixels, textcoords=pixels, arrowprops=line)


def _spot(axis: Axes, x: Estimate, y: Estimate, scale: float) -> _Spot:
    """Mark and bars of a point, each as a box with a margin."""
    dx, dy = np.nan_to_num([x.standard_error, y.standard_error])
    corners = axis.transData.transform([(x.mean, y.mean), (x.mean - dx, y.mean - dy), (x.mean + dx, y.mean + dy)])
    (cx, cy), (x0, y0), (x1, y1) = corners.tolist()
    mark, bar = 3.5 * scale, 1.5 * scale
    boxes = (
        Bbox.from_extents(cx - mark, cy - mark, cx + mark, cy + mark),
        Bbox.from_extents(x0, cy - bar, x1, cy + bar),
        Bbox.from_extents(cx - bar, y0, cx + bar, y1),
    )
    return _Spot(cx, cy, boxes)


def _overlap(box: Array, others: Array) -> Array:
    """Area that a box [4] of x0, y0, x1, y1 shares with each of others [N, 4], in square pixels."""
    sides: Array = (np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])).clip(0)
    return sides[:, 0] * sides[:, 1]
