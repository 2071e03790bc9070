"""The annotators' figure: every measured value beside the paper's, and each annotator's variance and agreement."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..harness.plots import titled
from .report import LEVELS, MEMBERS, in_order, is_member, target_of
from .targets import ALONE, COST, SINGLE

_FAMILIES: Final = {"gpt4": "#0072b2", "chatgpt": "#009e73", "davinci003": "#d55e00"}
_MARKS: Final = {"sandbox": ("o", "#000000"), "recorded": ("s", "#cc79a7"), "live": ("D", "#e69f00")}
"""Level -> how its points look; no color of a family is among them."""


def drawn(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the left panel, from top to bottom: what has a value of the paper or the published table."""
    told = rows[~is_member(rows) & rows.paper.notna() & ~rows.figure.isin((COST, "no_verdict"))]
    return in_order(told.sort_values("level", key=lambda levels: levels.map(LEVELS.index), kind="stable"))


def draw(rows: pd.DataFrame, note: str) -> Drawing:
    """Left: published values with tolerance, and those measured. Right: every annotator alone, and the pools.

    Args:
        rows: The table's.
        note: Stands below; it should be about `drawn_levels` only.
    """
    told = drawn(rows)[::-1]
    figure = Drawing(figsize=(13, 2.4 + 0.3 * max(len(told), 8)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    if len(told):
        _draw_targets(left, told.reset_index(drop=True))
    _draw_members(right, _places(rows))
    return titled(figure, note=note)


def drawn_levels(rows: pd.DataFrame) -> list[str]:
    """The levels that have a point in either panel."""
    found = {*drawn(rows).level, *_places(rows).level}
    return [level for level in LEVELS if level in found]


def _draw_targets(axis: Axes, told: pd.DataFrame) -> None:
    tolerance = told.tolerance.fillna(0)
    bounds = [target_of(row).upper_bound for row in told.itertuples()]
    reach = (np.where(bounds, told.paper, tolerance), tolerance)
    label = "published, tolerance"
    axis.errorbar(told.paper, told.index, xerr=reach, fmt="none", ecolor="#cccccc", elinewidth=8, label=label)
    axis.plot(told.paper, told.index, "|", color="#555555", markersize=12, label="published")
    for level, (mark, color) in _MARKS.items():
        own = told[told.level == level]
        if len(own):
            span = (own.value - own.low).clip(lower=0), (own.high - own.value).clip(lower=0)
            label = f"{level}, 95 % interval"
            axis.errorbar(own.value, own.index, xerr=span, fmt=mark, color=color, markersize=5, label=label)
    names = told.figure + ": " + told.judge + told.level.map({"recorded": " (recorded)"}).fillna("")
    axis.set_yticks(told.index, names, fontsize=8)
    axis.set(xlim=(-0.01, 1.01), xlabel="share of pairs")
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _places(rows: pd.DataFrame) -> pd.DataFrame:
    """Judge, level, variance and agreement of the points of the right panel."""
    found = rows[(rows.level != "recorded") & (rows.judge != SINGLE) & rows.figure.isin(("variance", "agreement"))]
    places = found.pivot(index=["judge", "level"], columns="figure", values="value")
    order = pd.MultiIndex.from_frame(found[["judge", "level"]].drop_duplicates())
    return places.reindex(index=order, columns=["variance", "agreement"]).dropna().reset_index()


def _draw_members(axis: Axes, places: pd.DataFrame) -> None:
    for name, level, x, y in places.itertuples(index=False):
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
