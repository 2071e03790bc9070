"""The recorded part of the protocol: GPT-4's and Claude's verdicts on real models, and the published leaderboards.

Of the models that both judged the folder may hold few: their rank correlation is told as it is, with n. The published
tables in `extras` have more models that both judged, but no verdicts: their win rates are resampled as normal variables
with their published standard errors, independent of each other.
"""

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
from ..harness.agreement import FEWEST
from ..harness.study import Row
from .pairs import pair_rows
from .statistics import Array, agreement_rows, correlation_rows, make_row, rate_row, source_rows

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
    stored = read_all(dataset)
    tables = {judge: published(path) for judge, path in table_files(dataset).items()}
    sources = read_sources(dataset)
    rows = []
    for judge, credits in stored.items():
        rows += source_rows(LEVEL, judge, {name: [row] for name, row in credits.items()}, sources, resamples)
        rows += pair_rows(LEVEL, judge, [credits], repeats=repeats)
    rows += leaderboard_rows(stored, tables, resamples)
    early = {name: row for name, row in stored[_short(dataset.judge)].items() if name in tables.get(CLAUDE, {})}
    if len(early) >= FEWEST:
        rows += pair_rows(LEVEL, EARLY, [early], repeats=repeats)
    return rows


def read_all(dataset: RecordedDataset) -> dict[str, dict[str, Array]]:
    """Judge -> model -> credits aligned with the instructions: the folder's own judge's, and Claude's if there.

    Raises:
        DataError: A file is faulty.
    """
    found = {_short(dataset.judge): {name: dataset.judgements(name) for name in dataset.judged}}
    extras = dataset.path / "extras"
    file = data_files(extras).get("preferences_claude") if extras.is_dir() else None
    if file is not None:
        found[CLAUDE] = read_credits(file, places(dataset))
    return found


def places(dataset: RecordedDataset) -> dict[int, int]:
    """Index of an instruction in the folder's files -> its place among the instructions."""
    path = _instruction_file(dataset)
    return {row["index"]: place for place, row in enumerate(check_rows(read_records(path), (INDEX,), str(path)))}


def read_sources(dataset: RecordedDataset) -> list[str]:
    """Of each instruction the set it was taken from, "" where the file does not say."""
    path = _instruction_file(dataset)
    return [row["dataset"] for row in check_rows(read_records(path), (_SOURCE,), str(path))]


def read_credits(path: Path, places: Mapping[int, int]) -> dict[str, Array]:
    """Model -> credits [B], NaN = no verdict.

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


def table_files(dataset: RecordedDataset) -> dict[str, Path]:
    """Judge -> its published leaderboard in extras, where there is one."""
    paths = {_short(dataset.judge): f"leaderboard_{dataset.judge}.csv.gz", CLAUDE: "leaderboard_claude.csv.gz"}
    found = {judge: dataset.path / "extras" / name for judge, name in paths.items()}
    return {judge: path for judge, path in found.items() if path.is_file()}


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
        rows += [rate_row("judges", LEVEL, judge, name, "recorded", row) for name, row in credits.items()]
    for judge, table in tables.items():
        for name, (rate, error) in table.items():
            rows.append(
                make_row(
                    "judges", LEVEL, judge, "win_rate", name, "published", rate,
                    bounds=(max(0.0, rate - 1.96 * error), min(100.0, rate + 1.96 * error)), standard_error=error,
                )
            )  # fmt: skip
    for one, two in combinations(stored, 2):
        names = (f"{one} recorded", f"{two} recorded")
        first, second = ({name: [row] for name, row in stored[judge].items()} for judge in (one, two))
        rows += agreement_rows(
            "judges", LEVEL, TOGETHER, names, first, second, figures=FIGURES, same=True, resamples=resamples
        )
    boards = {(judge, "recorded"): recorded_rates(credits) for judge, credits in stored.items()}
    boards |= {(judge, "published"): table for judge, table in tables.items()}
    for a, b in combinations(boards, 2):
        if a[0] == b[0]:
            rows += own_table_rows(a[0], boards[a], boards[b])
        elif "published" in (a[1], b[1]):
            rows += table_rows((" ".join(a), " ".join(b)), boards[a], boards[b], resamples)
    return rows


def recorded_rates(credits: Mapping[str, Array]) -> Rates:
    """Win rates with standard errors from verdicts, of the models that have two or more."""
    found = {name: win_rate(row) for name, row in credits.items()}
    return {name: (each.win_rate, each.standard_error) for name, each in found.items() if each.num_total > 1}


def table_rows(names: tuple[str, str], one: Rates, two: Rates, resamples: int) -> list[Row]:
    """Agreement of two tables; then without models whose row is a copy of another model's."""
    copies = copied(one) | copied(two)
    both = [name for name in one if name in two]
    rows = _table_rows(names, one, two, both, resamples)
    clean = [name for name in both if name not in copies]
    if len(clean) < len(both):
        rows += _table_rows((names[0], f"{names[1]}, without rows that are equal"), one, two, clean, resamples)
    return rows


def copied(table: Rates) -> set[str]:
    """Models whose win rate and standard error are those of another one to every digit: one row may be a copy."""
    values = list(table.values())
    return {name for name, rates in table.items() if values.count(rates) > 1}


def own_table_rows(judge: str, recorded: Rates, table: Rates) -> list[Row]:
    """How far a judge's recorded win rates are from its published ones, in points: they are the same verdicts."""
    both = [name for name in recorded if name in table]
    if not both:
        return []
    largest = max(abs(recorded[name][0] - table[name][0]) for name in both)
    return [make_row("judges", LEVEL, judge, "largest_difference", "recorded", "published", largest, models=len(both))]


def _table_rows(names: tuple[str, str], one: Rates, two: Rates, both: Sequence[str], resamples: int) -> list[Row]:
    if len(both) < FEWEST:
        return []
    columns, drawn = [], []
    for label, table in zip(names, (one, two), strict=True):
        rates, errors = np.array([table[name] for name in both]).T
        normal = keyed_rng(0, "published tables", label).standard_normal((resamples, len(both)))
        columns.append(rates)
        drawn.append(rates + errors * normal)
    return correlation_rows(
        "judges", LEVEL, TOGETHER, names, (columns[0], columns[1]), (drawn[0], drawn[1]), figures=FIGURES, n=None
    )


def _instruction_file(dataset: RecordedDataset) -> Path:
    files = data_files(dataset.path)
    return files.get("eval_instructions") or files["eval"]


def _short(judge: str) -> str:
    return judge.removeprefix("alpaca_eval_")
