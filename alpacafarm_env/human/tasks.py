"""The tasks of people: pairs of outputs, compared, or single ones, rated from 1 (worst) to 7 (best)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..cli.annotations import FIELDS as ANNOTATION
from ..cli.annotations import read_rows
from ..data.dataset import instruction_in
from ..data.files import read_records
from ..data.schema import INSTRUCTION, TEXT, Fault, Field, is_number, is_text, raise_faults
from ..instructions import RATINGS, Instruction

NEAR: Final = 1
"""Points by which two ratings may differ and still agree."""
SKIPPED: Final = ("reason", "annotator", "answered_at")
"""Fields that an exported skipped task adds to its record."""
_JUDGE: Final = Field("annotator", "a name", lambda value: isinstance(value, str | None), None)


@dataclass(frozen=True)
class Form:
    """How a kind of task is read and written."""

    outputs: tuple[str, ...]
    added: tuple[str, ...]
    """Fields that an exported label adds to its record, see `labels`."""
    judged: tuple[str, str]
    """Fields of an exported label for the verdict that its record came with, and whose it is."""
    verdict: Field
    """A judge's own verdict, which people are compared with and never shown."""
    key: Field
    """The right one, of a qualification set."""


def side(preference: float | None) -> int:
    """1 or 2: the output that a preference in [1, 2] is for; 0 for none or a tie, 1.5 (in older files 0)."""
    return 0 if preference in (None, 0, 1.5) else 1 + (preference > 1.5)


def _is_preference(value: object) -> bool:
    return value is None or value == 0 or is_number(value, 1, 2)  # files before 2024 have 0 for identical outputs


def _is_rating(value: object) -> bool:
    return is_number(value, RATINGS[0], RATINGS[-1])


PAIRS: Final = Form(
    ("output_1", "output_2"),
    ("preference", "raw_preference", "annotator", "shown_first", "seconds", "answered_at"),
    ("judge_preference", "judge"),
    Field("preference", "a number from 1 (output_1) to 2 (output_2), or null", _is_preference, None),
    Field("preference", "the right answer, 1 or 2", lambda value: _is_preference(value) and side(value) > 0),
)
SINGLES: Final = Form(
    ("output",),
    ("rating", "critique", "annotator", "seconds", "answered_at"),
    ("judge_rating", "judge"),
    Field("rating", "a number from 1 to 7, or null", lambda value: value is None or _is_rating(value), None),
    Field("rating", "the right one, a number from 1 to 7", _is_rating),
)


def form_of(record: Mapping[str, Any]) -> Form:
    """The form of an exported record."""
    return SINGLES if "output" in record else PAIRS


def agrees(record: Mapping[str, Any], grade: int) -> bool | None:
    """Whether a grade agrees with the verdict that a record came with; None without one, or for a tie.

    A grade of a pair is 1: output_1 is clearly better, 2: slightly, 3 and 4: output_2. One of a single response is a
    rating, which agrees within `NEAR`.
    """
    form = form_of(record)
    verdict = record.get(form.judged[0])
    if form is SINGLES:
        return None if verdict is None else abs(grade - verdict) <= NEAR
    return 1 + (grade > 2) == side(verdict) if side(verdict) else None


@dataclass(frozen=True)
class Task:
    """An instruction, and one output or two; `record` is what is exported, the verdict that it came with included."""

    instruction: Instruction
    outputs: tuple[str, ...]
    record: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """Identifies it in the database by its texts, whatever else its file says."""
        texts = [str(self.instruction), *self.outputs]
        return hashlib.sha256(json.dumps(texts, ensure_ascii=True).encode()).hexdigest()


def read_form(path: Path) -> Form:
    """Which form the records of a file have.

    Raises:
        DataError: It cannot be read.
    """
    fields = {name for record in read_records(path) if isinstance(record, Mapping) for name in record}
    return SINGLES if "output" in fields and fields.isdisjoint(PAIRS.outputs) else PAIRS


def load_tasks(path: Path, form: Form, *, key: bool = False) -> list[Task]:
    """The tasks of a file of records: instruction, input (optional), the form's outputs, and perhaps a verdict.

    Pairs of identical outputs are left out: nobody needs to be asked.

    Args:
        path: The file.
        form: `PAIRS` or `SINGLES`.
        key: It is a qualification set: each has the verdict that is right, and outputs that differ.

    Raises:
        DataError: The file cannot be read, records are faulty, or a task is there twice; names them.
    """
    verdict = form.key if key else form.verdict
    fields = (*INSTRUCTION, *(Field(name, TEXT, is_text) for name in form.outputs), verdict, _JUDGE)
    dropped = {*form.added, *form.judged, *(ANNOTATION if form is PAIRS else ())}
    tasks, seen, faults = [], dict[tuple[str, ...], int](), []
    for row, record in zip(*read_rows(path, fields), strict=True):
        instruction, outputs = instruction_in(row), tuple(row[name] for name in form.outputs)
        same = len(set(outputs)) < len(outputs)
        first = seen.setdefault((instruction, *sorted(outputs)), row.number)
        if first != row.number:
            faults.append(Fault(row.number, form.outputs[0], f"what record {first} has", "each once"))
        if same and key:
            faults.append(Fault(row.number, form.outputs[1], "the same as output_1", "two different outputs"))
        own = {name: value for name, value in record.items() if name not in dropped}
        said = row[verdict.name], row[_JUDGE.name]
        judged = {} if said[0] is None else dict(zip(form.judged, said, strict=True))
        if not same:
            tasks.append(Task(instruction, outputs, {**own, **judged}))
    raise_faults(faults, str(path))
    return tasks
