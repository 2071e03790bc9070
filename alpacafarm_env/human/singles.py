"""The responses that people rate one by one, from 1 (worst) to 7 (best)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..cli.annotation_files import read_rows
from ..data.dataset import instruction_in
from ..data.files import read_records
from ..data.schema import INSTRUCTION, TEXT, Fault, Field, is_text, raise_faults
from ..instructions import RATINGS
from .pairs import JUDGE
from .task import Task

FIELDS: Final = ("rating", "critique", "annotator", "seconds", "answered_at")
"""What an exported rating adds to its response, see `export`."""
JUDGED: Final = ("judge_rating", "judge")
"""Fields of an exported rating for the one that its response came with, and whose it is."""
NEAR: Final = 1
"""Points by which two ratings may differ and still agree."""


@dataclass(frozen=True)
class Single(Task):
    """One output to an instruction; a grade is a rating."""

    def agrees(self, grade: int) -> bool:
        """Whether a rating is within `NEAR` of the response's own."""
        return near(grade, self.record.get(JUDGED[0]))


def near(rating: float, other: float | None) -> bool:
    """Whether two ratings agree; False for none."""
    return other is not None and abs(rating - other) <= NEAR


def are_single(path: Path) -> bool:
    """Whether the records of a file have single responses, and no pairs.

    Raises:
        DataError: It cannot be read.
    """
    fields = {name for record in read_records(path) if isinstance(record, Mapping) for name in record}
    return "output" in fields and fields.isdisjoint(("output_1", "output_2"))


def load_singles(path: Path) -> list[Single]:
    """The responses of a file of records: instruction, input (optional), output, rating (optional).

    A rating from 1 to 7 is a judge's own, which people are compared with and never shown.

    Raises:
        DataError: The file cannot be read, records are faulty, or a response is there twice; names them.
    """
    return _read(path, _RATING)


def load_qualification(path: Path) -> list[Single]:
    """The responses of a file with the ratings that are right: one for each.

    Raises:
        DataError: As of `load_singles`, or a response has no right rating.
    """
    return _read(path, _KEY)


def _read(path: Path, rating: Field) -> list[Single]:
    fields = (*INSTRUCTION, Field("output", TEXT, is_text), rating, JUDGE)
    found, seen, faults = [], dict[tuple[str, str], int](), []
    for row, record in zip(*read_rows(path, fields), strict=True):
        ask = instruction_in(row)
        first = seen.setdefault((ask, row["output"]), row.number)
        if first != row.number:
            faults.append(Fault(row.number, "output", f"the response of record {first}", "each response once"))
        own = {name: value for name, value in record.items() if name not in (*FIELDS, *JUDGED)}
        said = row[rating.name], row[JUDGE.name]
        judged = {} if said[0] is None else dict(zip(JUDGED, said, strict=True))
        found.append(Single(ask, (row["output"],), {**own, **judged}))
    raise_faults(faults, str(path))
    return found


_WHICH: Final = f"a number from {RATINGS[0]} to {RATINGS[-1]}"


def _is_rating(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and RATINGS[0] <= value <= RATINGS[-1]


_RATING: Final = Field("rating", f"{_WHICH}, or null", lambda value: value is None or _is_rating(value), None)
_KEY: Final = Field("rating", f"the right one, {_WHICH}", _is_rating)
