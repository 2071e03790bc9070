"""Files of ratings and critiques: one record a rated response.

| field | value |
|---|---|
| instruction, input, output | as in AlpacaFarm's files; `input` is optional |
| rating | 1 to 7, 7 the best; null: nobody has rated it |
| critique | what was said of it, in words; optional |

Further fields, such as `annotator`, are let be.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Final

from ..instructions import RATINGS, Critique, Rating
from .dataset import instruction_in
from .files import read_records
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


def _rows(path: str | PathLike[str]) -> list[Row]:
    place = Path(path).expanduser()
    return check_rows(read_records(place), RATED, str(place))
