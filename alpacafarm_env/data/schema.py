"""The kinds of rows AlpacaFarm's files hold, and the check that reports all faults of a file at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DataError
from ..spaces import find_surrogate

FAULTS_SHOWN = 10
"""Faults of a file that an error lists; it counts the others."""
MISSING = object()
BLANK = object()
"""Stands for a blank line of a JSON Lines file: no record, but counted, so that records have their line's number."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with one record. Records count from 1; `field` is "" when the record as a whole is meant."""

    record: int
    field: str
    found: str
    expected: str

    def __str__(self) -> str:
        where = f"record {self.record}" + (f" field {self.field!r}" if self.field else "")
        return f"{where}: expected {self.expected}, got {self.found}"


class Row(dict[str, Any]):
    """A checked record: its fields, and `number`, that of the record in its file (from 1; of JSON Lines: its line)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclass(frozen=True)
class Field:
    """A field in words and as a check, with a default if it is optional (null then counts as absent)."""

    name: str
    expected: str
    check: Callable[[Any], bool]
    default: Any = MISSING


def is_text(value: object) -> bool:
    """True for a str without lone surrogates."""
    return isinstance(value, str) and find_surrogate(value) < 0


def _is_filled_text(value: object) -> bool:
    return is_text(value) and bool(str(value).strip())


def _is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_text, value))


def is_number(value: object, low: float, high: float) -> bool:
    """True for a number in [low, high]; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


TEXT = "a string (Unicode without lone surrogates)"
"""The words for a field with the check `is_text`."""
# AlpacaEval merges the input into the instruction. Further fields are ignored.
INSTRUCTION = (
    Field("instruction", "a non-empty string", _is_filled_text),
    Field("input", TEXT, is_text, ""),
    Field("system", TEXT, is_text, ""),
)
ANSWERED = (*INSTRUCTION, Field("output", TEXT, is_text))
PAIR = (*INSTRUCTION, Field("output_1", TEXT, is_text), Field("output_2", TEXT, is_text))
DEMONSTRATION = (
    *ANSWERED,
    Field("generator", TEXT, is_text, ""),
    Field("dataset", TEXT, is_text, ""),
)
MULTISAMPLE = (*INSTRUCTION, Field("output", "a non-empty list of strings", _is_texts))
# Parquet files often store the label as a float.
PREFERENCE = (*PAIR, Field("preference", "1 or 2", lambda value: is_number(value, 1, 2) and value in (1, 2)))
KINDS = {
    "instruction": INSTRUCTION,
    "demonstration": DEMONSTRATION,
    "multisample": MULTISAMPLE,
    "preference": PREFERENCE,
}


def kind_of(records: Iterable[object]) -> str:
    """The kind of a file's rows, by the fields that any of them has. Each row is then held to it."""
    objects = [record for record in records if isinstance(record, Mapping)]
    if any(not record.keys().isdisjoint(("output_1", "output_2", "preference")) for record in objects):
        return "preference"
    outputs = [record["output"] for record in objects if "output" in record]
    if not outputs:
        return "instruction"
    num_lists = sum(isinstance(output, list | tuple) for output in outputs)
    return "multisample" if 2 * num_lists > len(outputs) else "demonstration"


def check_rows(records: Sequence[object], fields: Sequence[Field], source: str) -> list[Row]:
    """The records with exactly `fields`, defaults filled in, without blank lines; one DataError for all faulty ones."""
    rows: list[Row] = []
    faults: list[Fault] = []
    for number, record in enumerate(records, start=1):
        if record is BLANK:
            continue
        rows.append(Row(number))
        if isinstance(record, Fault):
            faults.append(replace(record, record=number))
        elif not isinstance(record, Mapping):
            faults.append(Fault(number, "", shown(record), "a JSON object"))
        else:
            for field in fields:
                value = record.get(field.name, field.default)
                if value is None and field.default is not MISSING:
                    value = field.default
                if value is MISSING or not field.check(value):
                    faults.append(Fault(number, field.name, shown(value), field.expected))
                rows[-1][field.name] = value
    raise_faults(faults, source)
    if not rows:
        raise DataError(f"{source}: expected one record or more, got none.")
    return rows


def raise_faults(faults: Sequence[Fault], source: str) -> None:
    """Raises one DataError about all faults of `source`, if there are any."""
    if not faults:
        return
    num_records = len({fault.record for fault in faults})
    lines = [str(fault) for fault in faults[:FAULTS_SHOWN]]
    if more := faults[FAULTS_SHOWN:]:
        lines.append(f"and {len(more)} more, the last in record {more[-1].record}")
    raise DataError(
        f"{source}: {num_records} faulty record{'s' * (num_records > 1)}; correct or remove them:\n  "
        + "\n  ".join(lines)
    )


def shown(value: object) -> str:
    """The repr of a found value, shortened in the middle."""
    if value is MISSING:
        return "nothing (the field is missing)"
    if value is None:
        return "null"
    text = ascii(value) if isinstance(value, str) and not is_text(value) else repr(value)
    return text if len(text) <= 60 else f"{text[:30]}...{text[-15:]}"
