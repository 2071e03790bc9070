"""The annotators' rows for people: tables, and sentences computed from the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import pandas as pd

from ...sandbox.judges import POOL
from ..harness.report import Table, Verdict, sentences
from .sandbox import Question
from .targets import ALONE, COST, FIGURES, SINGLE, SPENT, Target

MEMBERS: Final = tuple(annotator.name for annotator in POOL)
LEVELS: Final = ("sandbox", "recorded", "live")
_SHOWN: Final = ("agreement", "bias", "variance", "prefers_first", "prefers_longer", "prefers_lists", COST, "spearman")


def is_member(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are about one annotator of a pool by itself."""
    pools = rows.judge[rows.figure == SPENT]  # what was spent is told of a live pool as a whole
    alone = (rows.level == "live") & ~rows.judge.isin(pools)
    return alone | ((rows.level == "sandbox") & rows.judge.isin(MEMBERS))


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Figure by figure, in the order of `FIGURES`, then in their own."""
    order = {figure: place for place, figure in enumerate(dict.fromkeys([*FIGURES, *rows.figure]))}
    return rows.sort_values("figure", key=lambda figures: figures.map(order), kind="stable")


def figure_table(rows: pd.DataFrame) -> Table:
    """Rows in full, figure by figure, each beside the published value."""
    header = ("figure", "judge", "level", "paper", "value", "95 % interval", "seeds", "n", "tolerance", "within?")
    row: Any
    lines = []
    for row in in_order(rows).itertuples():
        target = target_of(row)
        tolerance, within = "–", "–"
        if target.tolerance is not None:
            equal = target.tolerance < 0.001
            tolerance = "equal" if equal else f"{'+' if target.upper_bound else '±'}{target.tolerance:.2f}"
            within = "yes" if row.within else "NO"
        seeds = f"{row.seed_min:.3f} to {row.seed_max:.3f}" if row.seeds > 1 else "–"
        paper = target.text() if target.upper_bound else number(row.paper)
        lines.append(
            (
                row.figure,
                row.judge,
                row.level,
                paper,
                number(row.value),
                span(row),
                seeds,
                str(row.n),
                tolerance,
                within,
            )
        )
    return Table(header, lines)


def member_table(rows: pd.DataFrame) -> Table:
    """One line for each annotator of a pool by itself, from its rows of one level.

    Where a figure is about other pairs for each annotator (a live pool draws them), it says of how many.
    """
    live = rows.level.iloc[0] == "live"
    shown = [
        name for name in _SHOWN if (rows.figure == name).any() and (live or name != COST)
    ]  # the sandbox's are free
    cells = rows.value.map(number) + (rows.n.map(" ({})".format) if live else "")
    table = rows.assign(cell=cells).pivot(index="judge", columns="figure", values="cell")
    table = table.reindex(index=rows.judge.unique(), columns=shown).fillna("–")
    lines = [(str(judge).removeprefix("live "), *line) for judge, *line in table.itertuples()]
    counted = "In brackets: of how many pairs; few tell little. " if live else ""
    return Table(("annotator", *shown), lines, f"{counted}Intervals are in table.csv.")


def note(levels: Iterable[str], question: Question, num_live: int) -> str:
    """What the levels are."""
    seeds = "1 seed" if question.num_seeds == 1 else f"each of {question.num_seeds} seeds"
    said = {
        "sandbox": f"a simulation, {len(question.pairs)} preference pairs, {question.num_opinions} opinions on each in "
        f"{seeds}",
        "recorded": "stored verdicts of real judges",
        "live": f"a judge behind an API, on {num_live} pairs of the sandbox, {question.num_opinions} opinions on each",
    }
    return " ".join(f"Level {level}: {said[level]}." for level in LEVELS if level in levels)


def target_of(row: Any) -> Target:
    """What a row's value stands beside."""
    tolerance = None if math.isnan(row.tolerance) else row.tolerance
    return Target(row.paper, tolerance, (row.judge, row.figure) == (SINGLE, "variance"))


def span(row: Any) -> str:
    """The interval."""
    return "–" if math.isnan(row.low) else f"{number(row.low)} to {number(row.high)}"


def number(value: float) -> str:
    """A share, or US dollars."""
    return "–" if math.isnan(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def findings(rows: pd.DataFrame) -> list[str]:
    """What the numbers say, one sentence each."""
    whole, alone = (
        rows[~is_member(rows)],
        rows[is_member(rows) & (rows.level == "sandbox") & (rows.figure == "variance")],
    )
    simulated, recorded = (whole[whole.level == level] for level in ("sandbox", "recorded"))
    live = whole[whole.level == "live"].groupby("judge", sort=False)
    return sentences(
        "annotators/findings.txt.j2",
        sandbox=_near(simulated),
        orders=_unknown_orders(whole),
        alone=alone,
        single=ALONE,
        table=_near(recorded),
        recorded={(row.judge, row.figure): row for row in recorded.itertuples()},
        by_model=recorded.value[recorded.figure.str.startswith("agreement_with_gpt4: ")],
        pools={str(judge).removeprefix("live "): (_near(own), _by_figure(own)) for judge, own in live},
        cost=COST,
        spent=SPENT,
    )


def _near(rows: pd.DataFrame) -> Verdict:
    """Whether what has a tolerance is within it: in all seeds together, and in each alone; None where nothing has."""
    told: list[Any] = list(rows[rows.within.notna()].itertuples())
    outside = [
        {"row": row, "span": span(row), "paper": target_of(row).text(), "off": abs(row.value - row.paper)}
        for row in told
        if not row.within
    ]
    turns = [row for row in told if row.seeds > 0 and not _same_in_every_seed(row)]
    wide = [row.figure for row in told if row.high - row.low > 2 * row.tolerance]
    numbers: dict[str, Any] = {"count": len(told), "outside": outside, "turns": turns, "wide": wide}
    numbers["seeds"] = told[0].seeds if told else 0
    return Verdict("near_the_published_figures", not outside if told else None, numbers)


def _same_in_every_seed(row: Any) -> bool:
    return all(target_of(row).holds(value) == row.within for value in (row.seed_min, row.seed_max))


def _unknown_orders(rows: pd.DataFrame) -> list[tuple[Any, int, int]]:
    """Judges whose `prefers_first` is about fewer pairs than they have verdicts on, with both numbers."""
    known: dict[Any, Any] = {(row.judge, row.level, row.figure): row.n for row in rows.itertuples()}
    first = {key[:2]: num for key, num in known.items() if key[2] == "prefers_first"}
    asked = {key: known.get((*key, "agreement"), num) for key, num in first.items()}
    return [(key[0], num, asked[key]) for key, num in first.items() if num < asked[key]]


def _by_figure(rows: pd.DataFrame) -> dict[Any, Any]:
    return {row.figure: row for row in rows.itertuples()}
