"""The annotators' rows for people: tables, sentences computed from the numbers, and the figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ...annotators.analysis import COST
from ...sandbox.judges import POOL
from ..harness.plots import COLORS, titled
from ..harness.report import Table, sentences
from .rows import ALONE, FIGURES, SINGLE, SPENT, TARGETS, Target

MEMBERS: Final = tuple(annotator.name for annotator in POOL)
LEVELS: Final = ("sandbox", "recorded", "live", "people")
_SHOWN: Final = ("agreement", "bias", "variance", "prefers_first", "prefers_longer", "prefers_lists", COST, "spearman")
_OF_PEOPLE: Final = "agreement_with_judge"
_FAMILIES: Final = {"gpt4": ("o", COLORS[2]), "chatgpt": ("s", COLORS[0]), "davinci003": ("^", COLORS[1])}
_MARKS: Final = {
    "sandbox": ("o", "#000000"),
    "recorded": ("s", "#cc79a7"),
    "live": ("D", "#e69f00"),
    "people": ("^", "#56b4e9"),
}
"""Level -> marker and color of its points; no family has one of these colors."""


def is_member(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are about a single annotator of a pool."""
    pools = rows.judge[rows.figure == SPENT]  # only a live pool as a whole has it
    alone = (rows.level == "live") & ~rows.judge.isin(pools)
    alone |= (rows.level == "people") & rows.judge.str.startswith("people ")
    return alone | ((rows.level == "sandbox") & rows.judge.isin(MEMBERS))


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Figure by figure, in the order of `FIGURES`, then in their own."""
    order = {figure: place for place, figure in enumerate(dict.fromkeys([*FIGURES, *rows.figure]))}
    return rows.sort_values("figure", key=lambda figures: figures.map(order), kind="stable")


def figure_table(rows: pd.DataFrame) -> Table:
    """Rows in full, figure by figure, next to the published values."""
    # Recorded judges stand beside AlpacaEval's own table of evaluators.
    source = "AlpacaEval" if (rows.level == "recorded").all() else "paper"
    header = ("figure", "judge", "level", source, "value", "95 % interval", "seeds", "n", "tolerance", "within?")
    lines = []
    row: Any
    for row in in_order(rows).itertuples():
        target, tolerance, within = target_of(row), "–", "–"
        if target.tolerance is not None:
            exact = target.tolerance < 0.001
            tolerance = "equal" if exact else f"{'+' if target.upper_bound else '±'}{target.tolerance:.2f}"
            within = "yes" if row.within else "NO"
        seeds = f"{row.seed_min:.3f} to {row.seed_max:.3f}" if row.seeds > 1 else "–"
        paper = _paper(row) if target.upper_bound else number(row.paper)
        values = (paper, number(row.value), span(row), seeds, str(row.n), tolerance, within)
        lines.append((row.figure, row.judge, row.level, *values))
    return Table(header, lines, title=f"Level: {rows.level.iloc[0]}")


def member_table(rows: pd.DataFrame) -> Table:
    """One line for each single annotator, from its rows of one level.

    Those of a live pool are drawn, each for other pairs, and people label what they like: that number is given too.
    """
    level = rows.level.iloc[0]
    drawn = level != "sandbox"
    cells = rows.value.map(number) + (rows.n.map(" ({})".format) if drawn else "")
    table = rows.assign(cell=cells).pivot(index="judge", columns="figure", values="cell")
    # The sandbox's are free.
    shown = [name for name in (*_SHOWN, _OF_PEOPLE) if name in table and (drawn or name != COST)]
    table = table.reindex(index=rows.judge.unique(), columns=shown).fillna("–")
    lines = [(str(judge).removeprefix(f"{level} "), *line) for judge, *line in table.itertuples()]
    caption = f"{'In brackets: of how many pairs; few tell little. ' if drawn else ''}Intervals are in table.csv."
    pool, many = "" if level == "people" else " of the pool", " (of how many pairs)" if drawn else ""
    title = f"Level: {level}, each annotator{pool} by itself{many}"
    return Table(("annotator", *shown), lines, caption, title)


def tables(rows: pd.DataFrame) -> dict[str, Table]:
    """A table for each level, and one of the single annotators of its pool, "LEVEL" and "LEVEL-members"."""
    member, by_name = is_member(rows), {}
    for level in rows.level.unique():
        own = rows.level == level
        by_name[level] = figure_table(rows[own & ~member])
        if (own & member).any():
            by_name[f"{level}-members"] = member_table(rows[own & member])
    return by_name


def headline(rows: pd.DataFrame) -> str:
    """How many of the sandbox's figures are near the paper's."""
    checked = rows.within[(rows.level == "sandbox") & ~is_member(rows)].dropna()
    inside = f"{checked.astype(bool).sum()} of {len(checked)} figures of the sandbox's judges"
    return f"{inside} within tolerances set here" if len(checked) else ""


def note(levels: Iterable[str], manifest: Mapping[str, Any]) -> str:
    """The meanings of levels, of a study's manifest."""
    config, num = manifest["config"], len(manifest["seeds"])
    seeds = "1 seed" if num == 1 else f"each of {num} seeds"
    live = (manifest["facts"].get("live") or {}).get("num_pairs", 0)
    meanings = {
        "sandbox": f"a simulation, {config['num_pairs']} preference pairs, {config['num_opinions']} opinions on each "
        f"in {seeds}",
        "recorded": "stored verdicts of real judges",
        "live": f"a judge behind an API, on {live} pairs of the sandbox, {config['num_opinions']} opinions on each",
        "people": "labels that people gave to pairs of their own study",
    }
    return " ".join(f"Level {level}: {meanings[level]}." for level in LEVELS if level in levels)


def target_of(row: Any) -> Target:
    """The published value next to a row's."""
    tolerance = None if math.isnan(row.tolerance) else row.tolerance
    return Target(row.paper, tolerance, upper_bound=(row.judge, row.figure) == (SINGLE, "variance"))


def span(row: Any) -> str:
    """The interval."""
    return "–" if math.isnan(row.low) else f"{number(row.low)} to {number(row.high)}"


def number(value: float) -> str:
    """A share, or US dollars."""
    return "–" if math.isnan(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def findings(rows: pd.DataFrame) -> list[str]:
    """The sentences, one each line of the template."""
    member, row = is_member(rows), list[Any](rows.itertuples())
    shown = rows.assign(span=[*map(span, row)], published=[*map(_paper, row)], turns=[*map(_turns, row)])
    whole = shown[~member]
    by_level = {level: whole[whole.level == level] for level in LEVELS}
    recorded, live = by_level["recorded"], by_level["live"]
    return sentences(
        "annotators/findings.txt.j2",
        rows={(row.level, row.judge, row.figure): row for row in whole.itertuples()},
        checked={level: own[own.within.notna()] for level, own in by_level.items()},
        alone=rows[member & (rows.level == "sandbox") & (rows.figure == "variance")],
        single=(SINGLE, ALONE),
        papers=[TARGETS[judge]["agreement"].paper for judge in ("sim_gpt4", "sim_eval")],
        by_model=recorded.value[recorded.figure.str.startswith("agreement_with_gpt4: ")],
        pools={str(judge).removeprefix("live "): own for judge, own in live.groupby("judge", sort=False)},
        cost=COST,
        spent=SPENT,
    )


def _turns(row: Any) -> bool:
    """Whether single seeds say otherwise than all together whether a value is within its tolerance."""
    return row.seeds > 0 and {target_of(row).holds(value) for value in (row.seed_min, row.seed_max)} != {row.within}


def _paper(row: Any) -> str:
    return f"{'< ' if target_of(row).upper_bound else ''}{row.paper:.2f}"


def drawn(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the upper panel, from top to bottom: those with a published value."""
    shown = rows[~is_member(rows) & rows.paper.notna() & ~rows.figure.isin((COST, "no_verdict"))]
    return in_order(shown.sort_values("level", key=lambda levels: levels.map(LEVELS.index), kind="stable"))


def drawn_levels(rows: pd.DataFrame) -> list[str]:
    """The levels that have a point in either panel."""
    shown = {*drawn(rows).level, *_places(rows).level}
    return [level for level in LEVELS if level in shown]


def draw(rows: pd.DataFrame, note: str) -> Drawing:
    """Above: published values with tolerance, and those measured. Below: variance and agreement of every judge.

    `note` stands below; it should be about `drawn_levels` only.
    """
    shown = drawn(rows)[::-1]
    height = 1.2 + 0.25 * max(len(shown), 4)
    figure = Drawing(figsize=(8.5, height + 5.2), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(height, 4.4))
    if len(shown):
        _draw_targets(above, shown.reset_index(drop=True))
    _draw_members(below, _places(rows))
    for axis, columns in ((above, 4), (below, 2)):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)
    return titled(figure, note=note)


def _draw_targets(axis: Axes, shown: pd.DataFrame) -> None:
    tolerance = shown.tolerance.fillna(0)
    bounds = [target_of(row).upper_bound for row in shown.itertuples()]
    reach = (np.where(bounds, shown.paper, tolerance), tolerance)
    label = "published, tolerance"
    axis.errorbar(shown.paper, shown.index, xerr=reach, fmt="none", ecolor="#cccccc", elinewidth=8, label=label)
    axis.plot(shown.paper, shown.index, "|", color="#555555", markersize=12, label="published")
    for level, (mark, color) in _MARKS.items():
        own = shown[shown.level == level]
        if len(own):
            span = (own.value - own.low).clip(lower=0), (own.high - own.value).clip(lower=0)
            label = f"{level}, 95 % interval"
            axis.errorbar(own.value, own.index, xerr=span, fmt=mark, color=color, markersize=5, label=label)
    names = shown.figure + ": " + shown.judge + shown.level.map({"recorded": " (recorded)"}).fillna("")
    axis.set_yticks(shown.index, names, fontsize=8)
    axis.set(xlim=(-0.01, 1.01), xlabel="share of pairs")


def _places(rows: pd.DataFrame) -> pd.DataFrame:
    """Judge, level, variance and agreement of the points of the lower panel."""
    shown = rows[(rows.level != "recorded") & (rows.judge != SINGLE) & rows.figure.isin(("variance", "agreement"))]
    places = shown.pivot(index=["judge", "level"], columns="figure", values="value")
    order = pd.MultiIndex.from_frame(shown[["judge", "level"]].drop_duplicates())
    return places.reindex(index=order, columns=["variance", "agreement"]).dropna().reset_index()


def _draw_members(axis: Axes, places: pd.DataFrame) -> None:
    for name, level, x, y in places.itertuples(index=False):
        if name in MEMBERS:
            mark, color = _FAMILIES[name.split("_")[0]]
            axis.plot(x, y, mark, color=color, markersize=5)
            continue
        axis.plot(x, y, "D", color=_MARKS[level][1], markersize=7)
        place = (0, -14 if name in ("sim_eval", "sim_gpt4") else 8)  # these have neighbours above
        axis.annotate(name, (x, y), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    for family, (mark, color) in _FAMILIES.items():
        axis.plot([], [], mark, color=color, label=f"{family}-like, alone")
    axis.axvline(ALONE.paper, color="#888888", linestyle=":", linewidth=1, label="paper: one annotator stays left")
    axis.set(xlabel="variance: share of opinions against the judge's own majority", ylabel="agreement with the humans")
