"""A dataset over rows that are in memory: checked once, then served by split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ..errors import DataError, did_you_mean
from ..instructions import Demonstration, Instruction, Preference
from .schema import KINDS, Fault, Row, check_rows, kind_of, raise_faults, shown

SPLITS = ("sft", "preference", "unlabeled", "val", "eval")
PERMIT = "load_dataset(..., allow_overlap=True) permits it, and so does --allow-overlap of win_rate_curve and train"


@dataclass(frozen=True)
class Split:
    """The checked rows of one split, their kind, and their instructions (one a row)."""

    source: str
    kind: str
    rows: tuple[Row, ...]
    instructions: tuple[Instruction, ...]


class RowDataset:
    """A dataset over checked rows, one list a split.

    Args:
        name: How reports name it.
        records: Split -> (where the records come from, the records).
        allow_overlap: By default an instruction that stands in two splits, or twice in one, is an error, because a
            policy would be evaluated on what it was trained on. True turns that check off. Several demonstrations of
            sft, or several pairs, may share an instruction in any case; the same one twice may not.

    Raises:
        DataError: A faulty or a repeated record; one error counts all of one file.
    """

    level = "live"

    def __init__(
        self, name: str, records: Mapping[str, tuple[str, Sequence[object]]], *, allow_overlap: bool = False
    ) -> None:
        self.name = name
        self._splits = {split: build_split(split, source, found) for split, (source, found) in records.items()}
        if not allow_overlap:
            for name, split in self._splits.items():
                _check_repeats(name, split)
            _check_overlap(self._splits)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # never changes, and `gymnasium.make` copies its keywords

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(split.rows)}" for name, split in self._splits.items())
        return f"{type(self).__name__}({self.name!r}, {sizes})"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits there are."""
        return tuple(self._splits)

    @property
    def contents(self) -> dict[str, str]:
        """Split -> a hash of its rows, for data that lies in no folder of one's own."""
        return {
            name: f"sha256:{hashlib.sha256(json.dumps(split.rows, default=dict).encode()).hexdigest()}"
            for name, split in self._splits.items()
        }

    def instructions(self, split: str) -> tuple[Instruction, ...]:
        """The instructions of a split in file order (a preference split names each once, at its first pair)."""
        return self._split(split).instructions

    def references(self, split: str) -> tuple[str, ...]:
        """The outputs that stand beside the instructions."""
        return tuple(row["output"] for row in self._rows(split, "demonstration", "references"))

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        """The instructions with their outputs."""
        rows = self._rows(split, "demonstration", "demonstrations")
        return tuple(
            Demonstration(instruction, row["output"])
            for instruction, row in zip(self.instructions(split), rows, strict=True)
        )

    def preferences(self, split: str = "preference") -> tuple[Preference, ...]:
        """The pairs of a split, one for each row."""
        rows = self._rows(split, "preference", "preferences")
        by_text = {str(instruction): instruction for instruction in self.instructions(split)}
        return tuple(
            Preference(by_text[merged(row)], (row["output_1"], row["output_2"]), int(row["preference"])) for row in rows
        )

    def samples(self, split: str) -> tuple[tuple[str, ...], ...]:
        """The several responses of each instruction of a multisample split (what AlpacaFarm annotates in pairs)."""
        return tuple(tuple(row["output"]) for row in self._rows(split, "multisample", "samples"))

    def _split(self, name: str) -> Split:
        if name not in self._splits:
            raise did_you_mean("split", name, self.splits)
        return self._splits[name]

    def _rows(self, split: str, kind: str, what: str) -> tuple[Mapping[str, Any], ...]:
        found = self._split(split)
        if found.kind != kind:
            fields = ", ".join(field.name for field in KINDS[kind] if field.name not in ("generator", "dataset"))
            raise DataError(
                f"{found.source}: {what} need {kind} rows ({fields}), got {found.kind} rows. "
                "Add those fields or use another split."
            )
        return found.rows


def build_split(name: str, source: str, records: Sequence[object]) -> Split:
    """Checks the records of a split and builds its instructions; ids count from 0 in the order of the file."""
    kind = kind_of(records)
    rows = tuple(check_rows(records, KINDS[kind], source))
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows if kind == "preference" else ():
        first.setdefault(merged(row), row)
    instructions = tuple(
        Instruction(row["instruction"], row["input"], id=index, split=name, source=row.get("dataset", ""))
        for index, row in enumerate(first.values() if kind == "preference" else rows)
    )
    return Split(source, kind, rows, instructions)


def merged(row: Mapping[str, Any]) -> str:
    """A row's instruction as one text, the input after a blank line: what identifies it everywhere."""
    return str(Instruction(row["instruction"], row["input"]))


def _check_repeats(name: str, split: Split) -> None:
    """A repeated row counts twice in every mean; several pairs or SFT's demonstrations of an instruction do not."""
    told_apart = {"preference": ("output_1", "output_2"), "demonstration": ("output",) if name == "sft" else ()}
    outputs = told_apart.get(split.kind, ())
    seen: dict[tuple[str, ...], int] = {}
    faults = []
    for row in split.rows:
        first = seen.setdefault((merged(row), *(row[field] for field in outputs)), row.number)
        if first != row.number:
            what = f"the same {'pair' if len(outputs) > 1 else 'demonstration' if outputs else 'instruction'}"
            faults.append(
                Fault(
                    row.number,
                    "instruction",
                    f"{what} as record {first}: {shown(merged(row))}",
                    f"no repetition ({PERMIT})",
                )
            )
    raise_faults(faults, split.source)


def _check_overlap(splits: Mapping[str, Split]) -> None:
    seen: dict[str, tuple[str, int]] = {}
    for split in splits.values():
        faults = []
        for row in _firsts(split.rows):
            source, first = seen.setdefault(merged(row), (split.source, row.number))
            if source != split.source:
                faults.append(
                    Fault(
                        row.number,
                        "instruction",
                        f"that of record {first} of {source}: {shown(merged(row))}",
                        f"no instruction of another split ({PERMIT})",
                    )
                )
        raise_faults(faults, split.source)


def _firsts(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows, each instruction once."""
    firsts: dict[str, Row] = {}
    for row in rows:
        firsts.setdefault(merged(row), row)
    return firsts.values()
