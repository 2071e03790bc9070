"""The annotators' figure: every measured value beside the paper's, and each annotator's variance and agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..harness.plots import titled
from ..harness.study import Row
from .report import LEVELS, MEMBERS, target_of, whole
from .targets import ALONE, COST, FIGURES, SINGLE

_FAMILIES: Final = {"gpt4": "#0072b2", "chatgpt": "#009e73", "davinci003": "#d55e00"}
_MARKS: Final = {"sandbox": ("o", "#000000"), "recorded": ("s", "#cc79a7"), "live": ("D", "#e69f00")}
"""Level -> how its points look; no color of a family is among them."""
_LEFT_OUT: Final = (COST, "no_verdict")
_WIDTH: Final = 13


def drawn(rows: Sequence[Row]) -> list[Row]:
    """The rows of the left panel, from top to bottom: what has a value of the paper or the published table."""
    order = [*FIGURES, *(row["figure"] for row in rows)]
    told = [row for row in whole(rows) if row["paper"] is not None and row["figure"] not in _LEFT_OUT]
    return sorted(told, key=lambda row: (order.index(row["figure"]), LEVELS.index(row["level"])))


def draw(rows: Sequence[Row], note: str) -> Drawing:
    """Left: published values with tolerance, and those measured. Right: every annotator alone, and the pools.

    Args:
        rows: The table's.
        note: Stands below; it should be about `drawn_levels` only.
    """
    told = drawn(rows)[::-1]
    figure = Drawing(figsize=(_WIDTH, 2.4 + 0.3 * max(len(told), 8)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    if told:
        _draw_targets(left, told)
    _draw_members(right, rows)
    return titled(figure, note=note)


def drawn_levels(rows: Sequence[Row]) -> list[str]:
    """The levels that have a point in either panel."""
    found = {row["level"] for row in drawn(rows)} | {level for _, level in _places(rows)}
    return [level for level in LEVELS if level in found]


def _draw_targets(axis: Axes, told: Sequence[Row]) -> None:
    places = np.arange(len(told))
    paper: Any = np.array([row["paper"] for row in told])
    tolerance: Any = np.array([row["tolerance"] or 0.0 for row in told])
    below = [row["paper"] if target_of(row).upper_bound else row["tolerance"] or 0.0 for row in told]
    reach = (below, tolerance)
    axis.errorbar(paper, places, xerr=reach, fmt="none", ecolor="#cccccc", elinewidth=8, label="published, tolerance")
    axis.plot(paper, places, "|", color="#555555", markersize=12, label="published")
    for level, (mark, color) in _MARKS.items():
        chosen = [place for place, row in enumerate(told) if row["level"] == level]
        if not chosen:
            continue
        value, low, high = (np.array([told[place][key] for place in chosen]) for key in ("value", "low", "high"))
        span = np.maximum([value - low, high - value], 0)
        label = f"{level}, 95 % interval"
        axis.errorbar(value, chosen, xerr=span, fmt=mark, color=color, markersize=5, label=label)
    axis.set_yticks(places, [_name(row) for row in told], fontsize=8)
    axis.set(xlim=(-0.01, 1.01), xlabel="share of pairs")
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _name(row: Row) -> str:
    return f"{row['figure']}: {row['judge']}{' (recorded)' * (row['level'] == 'recorded')}"


def _places(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """(judge, level) -> (variance, agreement) of the right panel."""
    found = {(row["judge"], row["level"], row["figure"]): row["value"] for row in rows if row["level"] != "recorded"}
    judges = dict.fromkeys((judge, level) for judge, level, _ in found if judge != SINGLE)
    return {
        (judge, level): (found[judge, level, "variance"], found[judge, level, "agreement"])
        for judge, level in judges
        if (judge, level, "variance") in found and (judge, level, "agreement") in found
    }


def _draw_members(axis: Axes, rows: Sequence[Row]) -> None:
    for (name, level), (x, y) in _places(rows).items():
        if name in MEMBERS:
            axis.plot(x, y, "o", color=_FAMILIES[name.split("_")[0]], markersize=5)
            continue
        axis.plot(x, y, "D", color=_MARKS[level][1], markersize=7)
        below = name in ("sim_eval", "sim_gpt4")  # their neighbours are written above
        place = (0, -14 if below else 8)
        axis.annotate(name, (x, y), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    for family, color in _FAMILIES.items():
        axis.plot([], [], "o", color=color, label=f"{family}-like, alone")
    axis.axvline(ALONE.paper, color="#888888", linestyle=":", linewidth=1, label="paper: one annotator stays left")
    axis.set(xlabel="variance: share of opinions against the judge's own majority", ylabel="agreement with the humans")
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
