"""Labels beside the points of a scatter plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.transforms import Bbox

from .estimates import Estimate

LABEL_SIZE = 8.0
DISTANCES = (7.0, 13.0, 20.0, 28.0, 38.0, 50.0, 64.0, 80.0)
"""Points between a mark and the nearest edge of its label, as they are tried."""
NEAR = 14.0
"""Beyond this many points a thin line leads from a label to its mark."""


@dataclass(frozen=True)
class _Spot:
    """A mark in pixels, with the boxes of its mark and bars."""

    x: float
    y: float
    boxes: tuple[Bbox, ...]


def place_labels(figure: Drawing, axis: Axes, points: Mapping[str, tuple[Estimate, Estimate]]) -> None:
    """Writes each label beside its point where it covers no other label, no mark, bar or diagonal.

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
        name: sorted(math.hypot(spot.x - other.x, spot.y - other.y) for other in spots.values())[1:4]
        for name, spot in spots.items()
    }
    for name in sorted(spots, key=lambda name: sum(crowding[name])):
        spot = spots[name]
        text = figure.text(0, 0, name, transform=None, fontsize=LABEL_SIZE, va="bottom")
        size = text.get_window_extent()
        best, distance = _free_place(spot, size.width, size.height, taken, frame, scale)
        text.set_position((best.x0, best.y0))
        taken.append(best)
        if distance > NEAR:
            _lead(axis, spot, best)


def _free_place(
    spot: _Spot, width: float, height: float, taken: Sequence[Bbox], frame: Bbox, scale: float
) -> tuple[Bbox, float]:
    """The box of a label, and how many points it is from its mark."""
    best: tuple[float, Bbox, float] | None = None
    for distance in DISTANCES:
        for turn in range(16):
            # Right, left, above, below and so on: angles in the order in which readers look for a label.
            angle = 2 * math.pi * (0, 8, 4, 12, 2, 6, 14, 10, 1, 7, 15, 9, 3, 5, 13, 11)[turn] / 16
            dx, dy = math.cos(angle), math.sin(angle)
            x = spot.x + dx * distance * scale + (dx - 1) * width / 2
            y = spot.y + dy * distance * scale + (dy - 1) * height / 2
            box = Bbox.from_bounds(x, y, width, height)
            covered = sum(_overlap(box, other) for other in taken) + (width * height - _overlap(box, frame))
            if covered <= 1e-6 * width * height:
                return box, distance
            if best is None or covered < best[0]:
                best = (covered, box, distance)
    if best is None:
        raise ValueError("expected a distance to try, got none")
    return best[1], best[2]


def _diagonal(axis: Axes, frame: Bbox) -> list[Bbox]:
    """The line of equal win rates, as boxes small enough to follow it."""
    along = np.linspace(*axis.get_xlim(), int(frame.width / 6))
    corners = axis.transData.transform(np.stack([along, along], axis=1))
    return [Bbox.from_extents(*first, *second) for first, second in pairwise(corners)]


def _lead(axis: Axes, spot: _Spot, box: Bbox) -> None:
    nearest = (min(max(spot.x, box.x0), box.x1), min(max(spot.y, box.y0), box.y1))
    axis.annotate(
        "",
        (spot.x, spot.y),
        xytext=nearest,
        xycoords="figure pixels",
        textcoords="figure pixels",
        arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
    )


def _spot(axis: Axes, x: Estimate, y: Estimate, scale: float) -> _Spot:
    """Mark and bars of a point, each as a box with a margin."""
    dx, dy = np.nan_to_num([x.standard_error, y.standard_error])
    corners = axis.transData.transform([(x.mean, y.mean), (x.mean - dx, y.mean - dy), (x.mean + dx, y.mean + dy)])
    (cx, cy), (x0, y0), (x1, y1) = ((float(a), float(b)) for a, b in corners)
    mark, bar = 3.5 * scale, 1.5 * scale
    boxes = (
        Bbox.from_extents(cx - mark, cy - mark, cx + mark, cy + mark),
        Bbox.from_extents(x0, cy - bar, x1, cy + bar),
        Bbox.from_extents(cx - bar, y0, cx + bar, y1),
    )
    return _Spot(cx, cy, boxes)


def _overlap(one: Bbox, two: Bbox) -> float:
    """Area that two boxes share, in square pixels."""
    shared = Bbox.intersection(one, two)
    return 0.0 if shared is None else float(shared.width * shared.height)
