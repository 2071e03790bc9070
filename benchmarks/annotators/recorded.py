"""GPT-4's stored verdicts on the same pairs, four by each of two prompts, as real judges beside the simulated ones.

Read from the subfolder `extras` of a folder of recorded judgements; what is not there has no rows. prefers_longer and
prefers_lists take the first verdict on a pair, and its definitions of longer and list, as the released analysis does.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Final

import numpy as np

from ...data.dataset import data_files
from ...data.files import read_records
from ...data.schema import TEXT, Field, check_rows, is_text
from ...errors import DataError
from ..harness.study import Row
from .targets import Target, rows_of
from .votes import Array, Pairs, agreement, bias, disagreement, likings, majority, self_agreement

LEVEL: Final = "recorded"
CROSS: Final = "crossannotations_gpt4_4seeds"
HUMAN: Final = "human_crossannotations_sample16"
TABLE: Final = "evaluators_leaderboard.csv.gz"
JUDGES: Final = ("gpt4_b1", "gpt4_b5")
NUM_VOTES: Final = 4
EQUAL: Final = 1e-9
"""Tolerance of what must be the same computation on the same pairs."""
PUBLISHED: Final = {
    "gpt4_b1": ("gpt4", None),
    "gpt4_b5": ("alpaca_farm_greedy_gpt4", None),
    "longest": ("longest", EQUAL),
}
"""Recorded judge -> its nearest row of the published table, and its tolerance. The two of GPT-4 are later runs, the
second with another prompt, so they only stand beside."""
# Not its prefers_lists: it counts lists in 111 of the pairs, by a rule that is not told; the definition here finds 53.
_COLUMNS: Final = {
    "variance": ("Variance", 100.0),
    "prefers_longer": ("Proba. prefer longer", 1.0),
    "prefers_1": ("Proba. prefer 1", 1.0),
}


def _is_votes(value: object) -> bool:
    return isinstance(value, list) and len(value) == NUM_VOTES and all(vote in (0, 1) for vote in value)


_TEXTS = tuple(Field(name, TEXT, is_text) for name in ("instruction", "output_1", "output_2"))
_INPUT = Field("input", TEXT, is_text, "")
_VOTES = tuple(Field(f"preference_{judge}", f"{NUM_VOTES} numbers, each 0 or 1", _is_votes) for judge in JUDGES)
_LABEL = Field("preference", "0 or 1", lambda value: value in (0, 1))


def cross_rows(folder: Path) -> list[Row]:
    """The rows of the repeated verdicts, of "longest", and of the human labels where they are there.

    Raises:
        DataError: A file is faulty.
    """
    files = data_files(folder / "extras") if (folder / "extras").is_dir() else {}
    if CROSS not in files:
        return []
    pairs, votes = read_cross(files[CROSS])
    targets, by_length = published_targets(folder / "extras" / TABLE), longest(pairs)
    rows: list[Row] = []
    for judge, found in {**votes, "longest": by_length}.items():
        own = {"variance": 1 - self_agreement(found), "disagreement": disagreement(found)}
        own |= {**likings(found[:1], pairs), "prefers_1": 1 - found.mean(axis=0)}
        rows += rows_of(judge, [own], LEVEL, targets.get(judge))
    for judge, found in votes.items():
        figure = {f"agreement_with_{judge}": agreement(found, 2 * by_length[0] - 1)}
        rows += rows_of("longest", [figure], LEVEL)
    return rows + (human_rows(files[HUMAN], pairs, votes) if HUMAN in files else [])


def read_cross(path: Path) -> tuple[Pairs, dict[str, Array]]:
    """The n pairs, and each judge's votes [4, n]: 1 for output_2, 0 for output_1.

    Raises:
        DataError: The file is faulty.
    """
    rows = check_rows(read_records(path), (*_TEXTS, _INPUT, *_VOTES), str(path))
    texts = tuple(f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"] for row in rows)
    a, b = (tuple(row[name] for row in rows) for name in ("output_1", "output_2"))
    votes = {judge: np.array([row[f"preference_{judge}"] for row in rows], dtype=np.float64).T for judge in JUDGES}
    return Pairs(texts, a, b, published=True), votes


def longest(pairs: Pairs) -> Array:
    """Equal votes [4, n] for the longer response: 0 where output_1 is strictly longer, else 1."""
    vote = [float(len(a) <= len(b)) for a, b in zip(pairs.a, pairs.b, strict=True)]
    return np.tile(np.array(vote), (NUM_VOTES, 1))


def human_rows(path: Path, pairs: Pairs, votes: Mapping[str, Array]) -> list[Row]:
    """What the human labels say of each other, and the judges' agreement with their majority, on the labelled pairs.

    Raises:
        DataError: The file is faulty, or labels pairs that are not among these.
    """
    labels: dict[int, list[float]] = {}
    places = {key: place for place, key in enumerate(zip(pairs.instructions, pairs.a, pairs.b, strict=True))}
    for row in check_rows(read_records(path), (*_TEXTS, _LABEL), str(path)):
        place = places.get((row["instruction"], row["output_1"], row["output_2"]))
        if place is None:
            raise DataError(
                f"{path}: record {row.number}: expected a pair of {CROSS}, got another one. "
                "Take both files from the same copy of the data."
            )
        labels.setdefault(place, []).append(row["preference"])
    human = np.array(list(zip_longest(*labels.values(), fillvalue=np.nan)), dtype=np.float64)
    itself, side = self_agreement(human), majority(human)
    rows = rows_of("human", [{"agreement": itself, "variance": 1 - itself}], LEVEL)
    for judge, found in votes.items():
        told = found[:, list(labels)]
        rows += rows_of(judge, [{"agreement": agreement(told, side), "bias": bias(told, side)}], LEVEL)
    return rows


def published_targets(path: Path) -> dict[str, dict[str, Target]]:
    """Recorded judge -> figure -> what the published table says of its nearest relative; {} without the table.

    Raises:
        DataError: The file is no such table.
    """
    if not path.is_file():
        return {}
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            table = {row[""]: row for row in csv.DictReader(file)}
        return {
            judge: {
                figure: Target(float(table[name][column]) / unit, tolerance)
                for figure, (column, unit) in _COLUMNS.items()
            }
            for judge, (name, tolerance) in PUBLISHED.items()
        }
    except (OSError, EOFError, KeyError, ValueError) as error:
        columns = ", ".join(column for column, _ in _COLUMNS.values())
        raise DataError(
            f"{path}: expected a gzip CSV table of judges with the columns {columns}, got {error!r}."
        ) from error
