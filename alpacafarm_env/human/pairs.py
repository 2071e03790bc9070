"""The pairs that people compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..cli.annotation_files import FIELDS as ANNOTATION
from ..cli.annotation_files import PAIR, read_rows
from ..data.dataset import instruction_in
from ..data.schema import Fault, Field, raise_faults, shown
from .task import Task

FIELDS: Final = ("preference", "raw_preference", "annotator", "shown_first", "seconds", "answered_at")
"""What an exported label adds to its pair, see `export`."""
JUDGED: Final = ("judge_preference", "judge")
"""Fields of an exported label for the verdict that its pair came with, and whose it is."""


@dataclass(frozen=True)
class Pair(Task):
    """Two outputs to one instruction; grades are 1: output_1 is clearly better, 2: slightly, 3 and 4: output_2."""

    @property
    def better(self) -> int:
        """1 or 2: the output that the pair's own verdict prefers; 0 for a tie or none."""
        return side(self.record.get(JUDGED[0]))

    def agrees(self, grade: int) -> bool:
        """Whether a grade is for the output that the pair's own verdict prefers."""
        return 1 + (grade > 2) == self.better


def side(preference: float | None) -> int:
    """1 or 2: the output that a preference in [1, 2] is for; 0 for none or a tie, 1.5 (in older files 0)."""
    return 0 if preference in (None, 0, 1.5) else 1 + (preference > 1.5)


def load_pairs(path: Path) -> list[Pair]:
    """The pairs of a file of records: instruction, input (optional), output_1, output_2, preference (optional).

    A preference in [1, 2] is a judge's own verdict, which people are compared with and never shown. Pairs of identical
    outputs are left out: nobody needs to be asked.

    Raises:
        DataError: The file cannot be read, records are faulty, or a pair is there twice; names them.
    """
    return [pair for _, pair in _read(path, VERDICT) if pair.outputs[0] != pair.outputs[1]]


def load_qualification(path: Path) -> list[Pair]:
    """The pairs of a file with the answers that are right: a preference of 1 or 2 for each.

    Raises:
        DataError: As of `load_pairs`, or a pair has no right answer, or identical outputs.
    """
    pairs, wanted = _read(path, _KEY), "two different outputs"
    same = [number for number, pair in pairs if pair.outputs[0] == pair.outputs[1]]
    raise_faults([Fault(number, "output_2", "the same as output_1", wanted) for number in same], str(path))
    return [pair for _, pair in pairs]


def _read(path: Path, verdict: Field) -> list[tuple[int, Pair]]:
    """The pairs of a file and their records' numbers."""
    found, seen, faults = [], dict[tuple[str, ...], int](), []
    for row, record in zip(*read_rows(path, (*PAIR, verdict, JUDGE)), strict=True):
        ask, outputs = instruction_in(row), (row["output_1"], row["output_2"])
        first = seen.setdefault((ask, *sorted(outputs)), row.number)
        if first != row.number:
            told = f"the pair of record {first}: {shown(ask)}"
            faults.append(Fault(row.number, "instruction", told, "each pair once"))
        kept = {name: value for name, value in record.items() if name not in (*ANNOTATION, *FIELDS, *JUDGED)}
        said = row[verdict.name], row[JUDGE.name]
        judged = {} if said[0] is None else dict(zip(JUDGED, said, strict=True))
        found.append((row.number, Pair(ask, outputs, {**kept, **judged})))
    raise_faults(faults, str(path))
    return found


def _is_verdict(value: object) -> bool:
    # Files before 2024 have 0 for identical outputs.
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and (1 <= value <= 2 or value == 0)


VERDICT: Final = Field("preference", "a number from 1 (output_1) to 2 (output_2), or null", _is_verdict, None)
JUDGE: Final = Field("annotator", "a name", lambda value: isinstance(value, str | None), None)
_KEY: Final = Field("preference", "the right answer, 1 or 2", lambda value: _is_verdict(value) and side(value) > 0)
