"""The annotators' rows for people: tables, sentences computed from the numbers, and the figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ...annotators.analysis import COST
from ...sandbox.judges import POOL
from ..harness.plots import COLORS, titled
from ..harness.report import Table, sentences
from .judges import ALONE, SINGLE, SPENT, TARGETS

MEMBERS: Final = tuple(annotator.name for annotator in POOL)
LEVELS: Final = ("sandbox", "recorded", "live", "people")
_OF_MEMBERS: Final = (
    *("agreement", "bias", "variance", "prefers_first", "prefers_longer", "prefers_lists", COST, "spearman"),
    "agreement_with_judge",
)
_ORDER: Final = (
    *("agreement", "bias", "variance", "disagreement", "prefers_first", "prefers_longer", "prefers_lists", COST),
    *("spearman", "no_verdict", SPENT, "prefers_1"),
)
"""Of figures in the tables; agreement_with_X and kappa_with_X of recorded judges come after them."""
_FAMILIES: Final = {"gpt4": ("o", COLORS[2]), "chatgpt": ("s", COLORS[0]), "davinci003": ("^", COLORS[1])}
_MARKS: Final = dict(zip(LEVELS, (("o", "#000000"), ("s", "#cc79a7"), ("D", "#e69f00"), ("^", "#56b4e9")), strict=True))
"""Level -> marker and color of its points; no family has one of these colors."""


def is_member(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are about a single annotator of a pool."""
    whole = rows.judge[rows.figure == SPENT]  # only a live judge as a whole has it
    alone = (rows.level == "live") & ~rows.judge.isin(whole)
    alone |= (rows.level == "people") & rows.judge.str.startswith("people ")
    return alone | ((rows.level == "sandbox") & rows.judge.isin(MEMBERS))


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Figure by figure, in the order of `_ORDER`, then in their own."""
    order = {figure: place for place, figure in enumerate(dict.fromkeys([*_ORDER, *rows.figure]))}
    return rows.sort_values("figure", key=lambda figures: figures.map(order), kind="stable")


def number(value: float) -> str:
    """A share, or US dollars."""
    return "–" if math.isnan(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def spans(low: pd.Series[float], high: pd.Series[float]) -> pd.Series[str]:
    """Intervals as text."""
    return (low.map(number) + " to " + high.map(number)).where(low.notna(), "–")


def is_bound(rows: pd.DataFrame) -> pd.Series[bool]:
    """Of which rows the published value is an upper bound."""
    return (rows.judge == SINGLE) & (rows.figure == "variance")


def figure_table(rows: pd.DataFrame) -> Table:
    """Rows in full, figure by figure, next to the published values."""
    rows = in_order(rows)
    bound, level = is_bound(rows), rows.level.iloc[0]
    tolerance = bound.map({True: "+", False: "±"}) + rows.tolerance.map("{:.2f}".format)
    columns = {
        "figure": rows.figure,
        "judge": rows.judge,
        "level": rows.level,
        # Recorded judges stand beside AlpacaEval's own table of evaluators.
        "AlpacaEval" if level == "recorded" else "paper": rows.paper.map(number).mask(bound, f"< {ALONE.paper:.2f}"),
        "value": rows.value.map(number),
        "95 % interval": spans(rows.low, rows.high),
        "seeds": spans(rows.seed_min, rows.seed_max).where(rows.seeds > 1, "–"),
        "n": rows.n.astype(str),
        "tolerance": tolerance.mask(rows.tolerance < 0.001, "equal").where(rows.tolerance.notna(), "–"),
        "within?": rows.within.map({True: "yes", False: "NO"}).fillna("–"),
    }
    return Table(tuple(columns), list(zip(*columns.values(), strict=True)), title=f"Level: {level}")


def member_table(rows: pd.DataFrame) -> Table:
    """One line for each single annotator, from its rows of one level.

    Those of a live pool are drawn, each for other pairs, and people label what they like: that number is given too.
    """
    level = rows.level.iloc[0]
    drawn = level != "sandbox"
    cells = rows.value.map(number) + (rows.n.map(" ({})".format) if drawn else "")
    table = rows.assign(cell=cells).pivot(index="judge", columns="figure", values="cell")
    # The sandbox's are free.
    shown = [name for name in _OF_MEMBERS if name in table and (drawn or name != COST)]
    table = table.reindex(index=rows.judge.unique(), columns=shown).fillna("–")
    lines = [(str(judge).removeprefix(f"{level} "), *line) for judge, *line in table.itertuples()]
    caption = f"{'In brackets: of how many pairs; few tell little. ' if drawn else ''}Intervals are in table.csv."
    return Table(("annotator", *shown), lines, caption, f"Level: {level}, each annotator by itself")


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
    return f"{inside} near the paper's, within the error that these have themselves" if len(checked) else ""


def note(rows: pd.DataFrame, manifest: Mapping[str, Any]) -> str:
    """The meanings of the rows' levels, of a study's manifest."""
    config, num = manifest["config"], len(manifest["seeds"])
    opinions, live = f"{config['num_opinions']} opinions on each", manifest["facts"].get("live") or {"num_pairs": 0}
    meanings = {
        "sandbox": f"a simulation, {config['num_pairs']} preference pairs, {opinions} in "
        + ("1 seed" if num == 1 else f"each of {num} seeds"),
        "recorded": "stored verdicts of real judges",
        "live": f"a judge of one's own, on {live['num_pairs']} pairs of the sandbox, {opinions}",
        "people": "labels that people gave to pairs of their own study",
    }
    return " ".join(f"Level {level}: {meaning}." for level, meaning in meanings.items() if (rows.level == level).any())


def findings(rows: pd.DataFrame) -> list[str]:
    """The sentences, one each line of the template."""
    member = is_member(rows)
    paper = rows.paper.map("{:.2f}".format)
    shown = rows.assign(span=spans(rows.low, rows.high), published=paper.mask(is_bound(rows), "< " + paper))
    by_level = {level: shown[(shown.level == level) & ~member] for level in LEVELS}
    recorded, live = by_level["recorded"], by_level["live"]
    return sentences(
        "annotators/findings.txt.j2",
        rows={(row.level, row.judge, row.figure): row for row in shown[~member].itertuples()},
        checked={level: own[own.within.notna()] for level, own in by_level.items()},
        alone=rows[member & (rows.level == "sandbox") & (rows.figure == "variance")],
        single=(SINGLE, ALONE),
        papers=[TARGETS[judge]["agreement"].paper for judge in ("sim_gpt4", "sim_eval")],
        by_model=recorded.value[recorded.figure.str.startswith("agreement_with_gpt4: ")],
        judges={str(judge).removeprefix("live "): own for judge, own in live.groupby("judge", sort=False)},
        cost=COST,
        spent=SPENT,
    )


def draw(rows: pd.DataFrame, note: str) -> Drawing:
    """Above: published values with tolerance, and those measured. Below: variance and agreement of every judge."""
    shown = rows[~is_member(rows) & rows.paper.notna() & (rows.figure != COST)]
    shown = in_order(shown.sort_values("level", key=lambda levels: levels.map(LEVELS.index), kind="stable"))
    height = 1.2 + 0.25 * max(len(shown), 4)
    figure = Drawing(figsize=(8.5, height + 5.2), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(height, 4.4))
    if len(shown):
        _draw_targets(above, shown[::-1].reset_index(drop=True))
    _draw_judges(below, rows)
    for axis, columns in ((above, 4), (below, 2)):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)
    return titled(figure, note=note)


def _draw_targets(axis: Axes, shown: pd.DataFrame) -> None:
    tolerance = shown.tolerance.fillna(0)
    reach, label = (tolerance.mask(is_bound(shown), shown.paper), tolerance), "published, tolerance"
    axis.errorbar(shown.paper, shown.index, xerr=reach, fmt="none", ecolor="#cccccc", elinewidth=8, label=label)
    axis.plot(shown.paper, shown.index, "|", color="#555555", markersize=12, label="published")
    for level, own in shown.groupby("level"):
        mark, color = _MARKS[str(level)]
        ends = (own.value - own.low).clip(lower=0), (own.high - own.value).clip(lower=0)
        label = f"{level}, 95 % interval"
        axis.errorbar(own.value, own.index, xerr=ends, fmt=mark, color=color, markersize=5, label=label)
    axis.set_yticks(shown.index, shown.figure + ": " + shown.judge, fontsize=8)
    axis.set(xlim=(-0.01, 1.01), xlabel="share of pairs")


def _draw_judges(axis: Axes, rows: pd.DataFrame) -> None:
    shown = rows[(rows.level != "recorded") & (rows.judge != SINGLE) & rows.figure.isin(("variance", "agreement"))]
    places = shown.pivot(index=["judge", "level"], columns="figure", values="value")
    for (name, level), y, x in places.reindex(columns=["agreement", "variance"]).dropna().itertuples():
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
