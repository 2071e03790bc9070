"""The recorded part of the protocol: GPT-4's and Claude's verdicts on real models, and the published leaderboards."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from ...data import RecordedDataset
from ...data.dataset import data_files
from ...data.files import read_records
from ...data.recorded import INDEX, JUDGEMENT
from ...data.schema import TEXT, Field, check_rows, is_text
from ...errors import DataError
from ...seeding import keyed_rng
from ...statistics import win_rate
from ..harness.estimates import FEWEST
from ..harness.study import Row
from .pairs import pair_rows
from .statistics import Array, agreement_rows, correlation_rows, make_row, placed, rate_row, source_rows

LEVEL: Final = "recorded"
CLAUDE: Final = "claude"
FIGURES: Final = ("spearman", "kendall", "r2")
TOGETHER: Final = "GPT-4 and Claude"
EARLY: Final = "gpt4, models of Claude's table"
"""Models that Claude's published table has too: the leaderboard as it was when upstream said what 300 tell apart."""
_SOURCE = Field("dataset", TEXT, is_text, "")
Rates = dict[str, tuple[float, float]]
"""Model -> win rate in percent and its standard error."""


def rows_of(dataset: RecordedDataset, *, repeats: int, resamples: int) -> list[Row]:
    """All rows of the recorded level.

    Raises:
        DataError: A file is faulty.
    """
    files = data_files(dataset.path)
    path = files.get("eval_instructions") or files["eval"]
    questions = check_rows(read_records(path), (INDEX, _SOURCE), str(path))
    short, extras = dataset.judge.removeprefix("alpaca_eval_"), dataset.path / "extras"
    stored = {short: {name: dataset.judgements(name) for name in dataset.judged}}
    if extras.is_dir() and (file := data_files(extras).get("preferences_claude")):
        stored[CLAUDE] = read_credits(file, {row["index"]: place for place, row in enumerate(questions)})
    boards = {short: f"leaderboard_{dataset.judge}.csv.gz", CLAUDE: "leaderboard_claude.csv.gz"}
    tables = {judge: published(extras / name) for judge, name in boards.items() if (extras / name).is_file()}
    sources = [row["dataset"] for row in questions]
    rows = []
    for judge, credits in stored.items():
        alone = {name: [row] for name, row in credits.items()}
        rows += placed("sources", LEVEL, judge, source_rows(alone, sources, resamples))
        rows += placed("pairs", LEVEL, judge, pair_rows([credits], repeats))
    rows += leaderboard_rows(stored, tables, resamples)
    early = {name: row for name, row in stored[short].items() if name in tables.get(CLAUDE, {})}
    if len(early) >= FEWEST:
        rows += placed("pairs", LEVEL, EARLY, pair_rows([early], repeats))
    return rows


def read_credits(path: Path, places: Mapping[int, int]) -> dict[str, Array]:
    """Model -> credits [B] aligned with the instructions, NaN = no verdict.

    Args:
        path: A file of judgements.
        places: Index of an instruction in the folder's files -> its place among the instructions.

    Raises:
        DataError: The file is faulty, judges something twice, or an instruction that is not there.
    """
    found: dict[str, Array] = {}
    seen: set[tuple[str, int]] = set()
    for row in check_rows(read_records(path), JUDGEMENT, str(path)):
        key = (row["generator"], row["index"])
        if key in seen or row["index"] not in places:
            wrong = "one judgement of a model and index" if key in seen else "the index of an instruction"
            raise DataError(f"{path}: record {row.number}: expected {wrong}, got {key!r}.")
        seen.add(key)
        column = found.setdefault(row["generator"], np.full(len(places), np.nan))
        column[places[row["index"]]] = math.nan if row["preference"] is None else row["preference"]
    return found


def published(path: Path) -> Rates:
    """A published leaderboard, without the reference itself (a win rate of 50 without error).

    Raises:
        DataError: The file is no leaderboard.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            table = {row[""]: (float(row["win_rate"]), float(row["standard_error"])) for row in csv.DictReader(file)}
    except (OSError, EOFError, KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{path}: expected a gzip CSV table of models with the columns win_rate and standard_error, got {error!r}."
        ) from error
    return {name: rates for name, rates in table.items() if rates[1] > 0}


def leaderboard_rows(
    stored: Mapping[str, Mapping[str, Array]], tables: Mapping[str, Rates], resamples: int
) -> list[Row]:
    """Win rates of both judges, and how their rankings agree: on verdicts, on published tables, on both."""
    rows = []
    for judge, credits in stored.items():
        told = [rate_row(name, "recorded", row) for name, row in credits.items()]
        rows += placed("judges", LEVEL, judge, told)
    for judge, table in tables.items():
        for name, (rate, error) in table.items():
            bounds = (max(0.0, rate - 1.96 * error), min(100.0, rate + 1.96 * error))
            told = [make_row("win_rate", name, "published", rate, bounds, standard_error=error)]
            rows += placed("judges", LEVEL, judge, told)
    for names in combinations(stored, 2):
        first, second = ({name: [row] for name, row in stored[judge].items()} for judge in names)
        which = (f"{names[0]} recorded", f"{names[1]} recorded")
        told = agreement_rows(which, first, second, FIGURES, same=True, resamples=resamples)
        rows += placed("judges", LEVEL, TOGETHER, told)
    boards = {(judge, "recorded"): recorded_rates(credits) for judge, credits in stored.items()}
    boards |= {(judge, "published"): table for judge, table in tables.items()}
    for (a, one), (b, two) in combinations(boards.items(), 2):
        both = [name for name in one if name in two]
        if a[0] == b[0] and both:
            # They are the same verdicts: how far are the win rates apart, in points?
            largest = max(abs(one[name][0] - two[name][0]) for name in both)
            told = [make_row("largest_difference", "recorded", "published", largest, models=len(both))]
            rows += placed("judges", LEVEL, a[0], told)
        elif a[0] != b[0] and "published" in (a[1], b[1]):
            told = table_rows((" ".join(a), " ".join(b)), one, two, resamples)
            rows += placed("judges", LEVEL, TOGETHER, told)
    return rows


def recorded_rates(credits: Mapping[str, Array]) -> Rates:
    """Win rates with standard errors from verdicts, of the models that have two or more."""
    found = {name: win_rate(row) for name, row in credits.items()}
    return {name: (each.win_rate, each.standard_error) for name, each in found.items() if each.num_total > 1}


def table_rows(names: tuple[str, str], one: Rates, two: Rates, resamples: int) -> list[Row]:
    """Agreement of two tables; then without models whose row is a copy of another model's.

    Win rates are resampled as normal variables with their published standard errors, independent of each other.
    """
    copies = copied(one) | copied(two)
    both = [name for name in one if name in two]
    clean = [name for name in both if name not in copies]
    kept: dict[str, Sequence[str]] = {names[1]: both}
    if len(clean) < len(both):
        kept[f"{names[1]}, without rows that are equal"] = clean
    rows = []
    for label, models in kept.items():
        values, drawn = [], []
        for name, table in zip((names[0], label), (one, two), strict=True):
            rates, errors = np.array([table[model] for model in models]).reshape(-1, 2).T
            normal = keyed_rng(0, "published tables", name).standard_normal((resamples, len(models)))
            values.append(rates)
            drawn.append(rates + errors * normal)
        rows += correlation_rows((names[0], label), values, drawn, FIGURES) if len(models) >= FEWEST else []
    return rows


def copied(table: Rates) -> set[str]:
    """Models whose win rate and standard error are those of another one to every digit: one row may be a copy."""
    values = list(table.values())
    return {name for name, rates in table.items() if values.count(rates) > 1}
