"""Files of ratings and critiques: one record a rated response.

| field | value |
|---|---|
| instruction, input, output | as in AlpacaFarm's files; `input` is optional |
| rating | 1 to 7, 7 the best; null: nobody has rated it |
| critique | what was said of it, in words; optional |

Further fields, such as `annotator`, are let be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Final

from ..instructions import RATINGS, Critique, Rating
from .dataset import instruction_in
from .files import read_records, write_atomic
from .forms import fields_of
from .schema import INSTRUCTION, TEXT, Field, Row, check_rows, is_text


def _is_rating(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value in RATINGS)


RATED: Final = (
    *INSTRUCTION,
    Field("output", TEXT, is_text),
    Field("rating", f"a whole number from {RATINGS[0]} to {RATINGS[-1]}, or null", _is_rating, None),
    Field("critique", TEXT, is_text, ""),
)


def read_ratings(path: str | PathLike[str]) -> list[Rating]:
    """The ratings of a file, in its order; records without one are passed over.

    Raises:
        DataError: The file cannot be read, or records are faulty; names them.
    """
    rows = [row for row in _rows(path) if row["rating"] is not None]
    return [Rating(instruction_in(row), row["output"], int(row["rating"])) for row in rows]


def read_critiques(path: str | PathLike[str]) -> list[Critique]:
    """The critiques of a file, in its order; records without one are passed over. Errors as of `read_ratings`."""
    return [Critique(instruction_in(row), row["output"], row["critique"]) for row in _rows(path) if row["critique"]]


def write_ratings(path: str | PathLike[str], ratings: Sequence[Rating], critiques: Sequence[Critique] = ()) -> None:
    """Writes ratings as JSON Lines, each with the critique of the same response where there is one."""
    said = {(str(each.instruction), each.response): each.critique for each in critiques}
    lines = []
    for each in ratings:
        words = said.get((str(each.instruction), each.response))
        record = {**fields_of(each.instruction), "output": each.response, "rating": each.rating}
        lines.append(json.dumps(record | ({"critique": words} if words else {}), ensure_ascii=False) + "\n")
    write_atomic(Path(path).expanduser(), "".join(lines))


def _rows(path: str | PathLike[str]) -> list[Row]:
    place = Path(path).expanduser()
    return check_rows(read_records(place), RATED, str(place))
