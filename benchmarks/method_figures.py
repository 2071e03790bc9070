"""The two figures of the method ranking: win rates with intervals, and human against simulated win rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from .method_agreement import FEWEST
from .method_summary import FEEDBACKS, JUDGED_BY, Estimate, MethodFacts, Summary
from .plots import COLORS, titled, write_png
from .report import Figure
from .win_rate_report import Provenance

WORDS = {
    "simulated": "simulated: trained on and judged by simulated feedback",
    "human": "human: trained on and judged by human raters",
}
"""Feedback -> its label in a legend."""
LABEL_SIZE = 8.0
DISTANCES = (7.0, 13.0, 20.0, 28.0, 38.0, 50.0, 64.0, 80.0)
"""Points between a mark and the nearest edge of its label, as they are tried."""
NEAR = 14.0
"""Beyond this many points a thin line leads from a label to its mark."""


def in_order(summary: Summary, methods: Sequence[MethodFacts], feedback: str | None = None) -> list[MethodFacts]:
    """The best win rate of a column (None: the first) first; methods without one last, in their own order."""
    order = {name: place for place, name in enumerate(summary.ranking(feedback or summary.feedbacks[0]))}
    return sorted(methods, key=lambda method: order.get(method.name, len(order)))


def write_figures(out: Path, summary: Summary, methods: Sequence[MethodFacts], where: Provenance) -> tuple[Figure, ...]:
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


def with_both(summary: Summary, methods: Sequence[MethodFacts]) -> dict[str, tuple[Estimate, Estimate]]:
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


def draw_win_rates(summary: Summary, methods: Sequence[MethodFacts], note: str) -> Drawing:
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
        reach = [[_zero_for_nan(end) for end in (each.mean - each.low, each.high - each.mean)] for each in found]
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


def draw_scatter(summary: Summary, methods: Sequence[MethodFacts], note: str) -> Drawing:
    """A point a method: human against simulated win rate, bars of one standard error, labels beside the points."""
    both = with_both(summary, methods)
    figure = Drawing(figsize=(8.2, 7.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    axis = figure.subplots()
    means = np.array([(one.mean, two.mean) for one, two in both.values()]).reshape(-1, 2)
    errors = [[_zero_for_nan(pair[side].standard_error) for pair in both.values()] for side in (0, 1)]
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
    dx, dy = _zero_for_nan(x.standard_error), _zero_for_nan(y.standard_error)
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
    width, height = min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0)
    return float(max(width, 0.0) * max(height, 0.0))


def _has_any(summary: Summary, method: MethodFacts) -> bool:
    return any(summary.mean(JUDGED_BY[feedback], method.name, feedback).num for feedback in FEEDBACKS)


def _by_seeds(summary: Summary, words: str) -> str:
    """What is said of the bars: one seed has none."""
    return words if len(summary.cells.seeds) > 1 else "one seed, no bars"


def _limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """Room for labels on all sides, within [0, 100] and some."""
    spread = max(float(np.ptp(values)), 10.0)
    return max(-3.0, float(values.min()) - 0.12 * spread), min(103.0, float(values.max()) + 0.12 * spread)


def _zero_for_nan(value: float) -> float:
    return 0.0 if math.isnan(value) else value
