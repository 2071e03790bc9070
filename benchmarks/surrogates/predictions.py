"""Predictions that were committed before a study's runs: what came of them, and their table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pandas as pd

from ...statistics import Interval
from ..harness.page import records
from ..harness.report import Table, interval_text, number
from ..harness.study import Row

JUDGES: Final = {"sim_eval": "p_sim^eval", "human": "human raters"}


@dataclass(frozen=True)
class Prediction:
    """What was said of one claim before its runs."""

    claim: str
    at: tuple[Any, ...]
    """Which claim of that name."""
    expected: Literal["above", "below", "within"]
    """Above 0, below 0, or within `bound` of it."""
    text: str
    bound: float = 0.0


Outcome = tuple[Prediction, Row, str]
"""A prediction, its claim's row, and what came of it."""


def outcomes_of(predicted: Sequence[Prediction], rows: Mapping[tuple[Any, ...], Row]) -> list[Outcome]:
    """What came of predictions, by the rows of claims, (claim, *at) each; one without a claim is left out."""
    found = [(each, rows.get((each.claim, *each.at))) for each in predicted]
    return [(each, row, outcome_of(row, each.expected, each.bound)) for each, row in found if row is not None]


def outcome_of(row: Row, expected: str, bound: float) -> str:
    """What came of a prediction of a claim, by its row of a family: "held", "failed" or "open".

    A direction ("above" or "below" 0) has held where the claim is clear by Holm on that side, and failed where it is on
    the other. "within" a bound has held where the smallest such bound is no larger, and failed where the 95 %
    interval lies outside.
    """
    if expected == "within":
        held, failed = row["within"] <= bound, max(row["low"], -row["high"]) > bound
    else:
        right = (row["mean"] > 0) == (expected == "above")
        held, failed = row["holm"] and right, row["holm"] and not right
    return "held" if held else "failed" if failed else "open"


def ends(row: Mapping[str, Any] | pd.Series, name: str = "", missing: str = "") -> str:
    """A mean with its interval, if it has an error, of the columns of `scarcity.estimate_cells`; or `missing`."""
    start, value = f"{name}_" if name else "", row[name or "mean"]
    low, high = (math.nan if row[f"{start}error"] == 0 else row[f"{start}{end}"] for end in ("low", "high"))
    return missing if value != value else interval_text(Interval(value, low, high, 0), "")


def win_rate_table(rows: pd.DataFrame, setting: Callable[[Mapping[str, Any]], dict[str, str]], note: str) -> Table:
    """The paper's measure, by the simulated judge and by the human raters; a line for each `setting` of the rows."""
    lines: dict[str, dict[str, str]] = {}
    for row in records(rows):
        told, who = setting(row), JUDGES[row["judge"]]
        line = lines.setdefault(str(told), told)
        line |= {f"gained at the peak, {who}": ends(row, "peak"), f"lost after it, {who}": ends(row, "drop")}
    return Table.of([*lines.values()], f"In points of the win rate. {note}", "By win rate")


def claim_cells(row: Mapping[str, Any] | pd.Series, mean: str = "mean") -> dict[str, str]:
    """A claim's mean, under this name, its p-value and whether it stays clear."""
    chance = "–" if math.isnan(row["chance"]) else f"{row['chance']:.2g}"
    return {mean: ends(row), "p": chance, "Holm": "clear" if row["holm"] else "no"}


def prediction_table(told: Sequence[Outcome], size: int) -> Table:
    """What was predicted beside what came out."""
    signs = {"above": "above 0", "below": "below 0"}
    rows = [
        {
            "predicted before the runs": each.text,
            "that is": signs.get(each.expected, f"within {each.bound:g}"),
            "measured": ends(row),
            "within, at 5 %": number(row["within"]) if each.expected == "within" else "",
            "outcome": outcome,
        }
        for each, row, outcome in told
    ]
    caption = (
        f"A direction has held where it is clear by Holm among all {size} claims, and failed where the other one is; a "
        "bound has held where two one-sided tests, which are not corrected, find the value within it, and failed where "
        "the interval lies outside. Open: neither. In units of gold."
    )
    return Table.of(rows, caption, "Predictions and outcomes")
