"""Datasets: instructions, references, demonstrations and preferences by split, and the folder that holds them.

Everything is read and checked when a dataset is built: a faulty file is found before training, not after.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from ..errors import DataError, did_you_mean
from ..instructions import Demonstration, Instruction, Preference
from .files import SUFFIXES, read_records, stem_of
from .forms import as_row
from .schema import DEMONSTRATION, KINDS, Fault, Row, check_rows, kind_of, raise_faults, shown

SPLITS = ("sft", "preference", "unlabeled", "val", "eval")
PERMIT = "load_dataset(..., allow_overlap=True) permits it, and so does --allow-overlap of win_rate_curve and train"
FILE_SPLITS = {**{split: split for split in SPLITS}, "eval_instructions": "eval"}
"""File name without suffixes -> split. The last is the published evaluation bundle's name."""
REFERENCE_FILE = "davinci003"
"""References of the eval split in a file of their own."""


@runtime_checkable
class Dataset(Protocol):
    """What environments and agents need of data. `level` is "sandbox", "recorded" or "live"."""

    name: str
    level: str

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits this dataset has."""

    def instructions(self, split: str) -> tuple[Instruction, ...]:
        """The instructions of a split, always in the same order; UnknownNameError if there is no such split."""

    def references(self, split: str) -> tuple[str, ...]:
        """The response to beat for each of `instructions(split)`; DataError if the split has none."""

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        """Instructions with the response to imitate."""

    def preferences(self, split: str = "preference") -> tuple[Preference, ...]:
        """Instructions with two responses and which one was preferred."""


@dataclass(frozen=True)
class Split:
    """The checked rows of one split, their kind, and their instructions."""

    source: str
    kind: str
    rows: tuple[Row, ...]
    instructions: tuple[Instruction, ...]


class RowDataset:
    """A dataset over checked rows: `records` are, by split, where they come from and the records.

    An instruction in two splits, or twice in one, is an error, as a policy would be evaluated on what it was trained
    on; `allow_overlap` permits it. Several demonstrations of sft, or several pairs, may share an instruction in any
    case; the same one twice may not. One DataError counts all faulty or repeated records of one file.
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
        """The splits this dataset has."""
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
        """The outputs of a split."""
        return tuple(row["output"] for row in self._rows(split, "demonstration", "references"))

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        """The instructions with their outputs."""
        rows = self._rows(split, "demonstration", "demonstrations")
        return tuple(Demonstration(x, row["output"]) for x, row in zip(self.instructions(split), rows, strict=True))

    def preferences(self, split: str = "preference") -> tuple[Preference, ...]:
        """The pairs of a split, one for each row."""
        known = {str(instruction): instruction for instruction in self.instructions(split)}
        return tuple(
            Preference(known[merged(row)], (row["output_1"], row["output_2"]), int(row["preference"]))
            for row in self._rows(split, "preference", "preferences")
        )

    def _split(self, name: str) -> Split:
        if name not in self._splits:
            raise did_you_mean("split", name, self.splits)
        return self._splits[name]

    def _rows(self, split: str, kind: str, what: str) -> tuple[Mapping[str, Any], ...]:
        found = self._split(split)
        if found.kind != kind:
            fields = ", ".join(field.name for field in KINDS[kind] if field.name not in ("generator", "dataset"))
            text = f"{what} need {kind} rows ({fields}), got {found.kind} rows"
            raise DataError(f"{found.source}: {text}. Add those fields or use another split.")
        return found.rows


def build_split(name: str, source: str, records: Sequence[object]) -> Split:
    """Checks the records of a split and builds its instructions; ids count from 0 in the order of the file."""
    found = [as_row(record) for record in records]
    kind = kind_of(found)
    rows = tuple(check_rows(found, KINDS[kind], source))
    instructions = tuple(
        Instruction(row["instruction"], row["input"], id=index, split=name, source=row.get("dataset", ""))
        for index, row in enumerate(_firsts(rows) if kind == "preference" else rows)
    )
    return Split(source, kind, rows, instructions)


def merged(row: Mapping[str, Any]) -> str:
    """A row's instruction as one text, the input after a blank line: what identifies it everywhere."""
    return str(Instruction(row["instruction"], row["input"]))


class FolderDataset(RowDataset):
    """A folder of data files named by split: sft, preference, unlabeled, val, eval (or eval_instructions).

    A file `davinci003` holds the references of eval, joined by instruction, never by position. Other files are left
    alone. Raises DataError for no folder, no split, two files for one split, faulty rows, references that do not match.
    """

    def __init__(self, path: str | Path, *, allow_overlap: bool = False) -> None:
        self.path = Path(path).expanduser()
        files = data_files(self.path)
        super().__init__(str(path), _split_records(self.path, files), allow_overlap=allow_overlap)
        self._eval_references: tuple[str, ...] | None = None
        if REFERENCE_FILE in files and "eval" in self._splits:
            self._eval_references = read_outputs(files[REFERENCE_FILE], self.instructions("eval"))

    def references(self, split: str) -> tuple[str, ...]:
        """The response to beat: `davinci003` for eval if that file is there, else the split's own outputs."""
        if split == "eval" and self._eval_references is not None:
            return self._eval_references
        return super().references(split)


def data_files(path: Path) -> dict[str, Path]:
    """The data files of a folder by their name without suffixes; DataError if two differ only in format."""
    if not path.is_dir():
        raise DataError(f"{path}: expected a folder with data files, got no such folder.")
    found: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if (stem := stem_of(file)) is None or not file.is_file():
            continue
        if stem in found:
            names = f"{found[stem].name!r} and {file.name!r}"
            raise DataError(f"{path}: expected one file for {stem!r}, got {names}. Remove one.")
        found[stem] = file
    return found


def read_outputs(
    path: Path, instructions: Sequence[str], *, of: str = "the eval split", hint: str = ""
) -> tuple[str, ...]:
    """The outputs of a file, joined to `instructions` by their text; errors say that those are `of` there.

    Raises DataError as `join_outputs` does, and for an instruction without an output, with a `hint`.
    """
    outputs = join_outputs(path, instructions, of=of)
    if absent := [text for text in map(str, instructions) if text not in outputs]:
        raise DataError(
            f"{path}: expected an output for each of the {len(instructions)} instructions of {of}, got none for "
            f"{len(absent)}: {', '.join(map(shown, absent[:5]))}{', ...' * (len(absent) > 5)}.{hint}"
        )
    return tuple(outputs[str(text)] for text in instructions)


def join_outputs(path: Path, instructions: Sequence[str], *, of: str) -> dict[str, str]:
    """The outputs of a file by their instructions' text.

    Raises DataError for a faulty row, or an instruction that is there twice or not one of `instructions`.
    """
    rows = check_rows([as_row(record) for record in read_records(path)], DEMONSTRATION, str(path))
    known = set(map(str, instructions))
    outputs: dict[str, str] = {}
    faults = []
    for row in rows:
        text = merged(row)
        if text in outputs or text not in known:
            problem = "an instruction that no other record has" if text in outputs else f"an instruction of {of}"
            faults.append(Fault(row.number, "instruction", shown(text), problem))
        outputs[text] = row["output"]
    raise_faults(faults, str(path))
    return outputs


def _split_records(path: Path, files: Mapping[str, Path]) -> dict[str, tuple[str, Sequence[object]]]:
    records: dict[str, tuple[str, Sequence[object]]] = {}
    for stem in filter(files.__contains__, FILE_SPLITS):
        split, file = FILE_SPLITS[stem], files[stem]
        if split in records:
            raise DataError(f"{path}: expected one file for the split {split!r}, got {records[split][0]} and {file}.")
        records[split] = (str(file), read_records(file))
    if not records:
        wanted = f"a file named {', '.join(FILE_SPLITS)} with one of the suffixes {', '.join(SUFFIXES)}"
        raise DataError(f"{path}: expected {wanted}, got {sorted(file.name for file in path.iterdir())[:10]}.")
    return records


def _check_repeats(name: str, split: Split) -> None:
    """A repeated row counts twice in every mean; several pairs or SFT's demonstrations of an instruction do not."""
    told_apart = {"preference": ("output_1", "output_2"), "demonstration": ("output",) if name == "sft" else ()}
    outputs = told_apart.get(split.kind, ())
    seen: dict[tuple[str, ...], int] = {}
    faults = []
    for row in split.rows:
        first = seen.setdefault((merged(row), *(row[field] for field in outputs)), row.number)
        if first != row.number:
            what = "pair" if len(outputs) > 1 else "demonstration" if outputs else "instruction"
            text = f"the same {what} as record {first}: {shown(merged(row))}"
            faults.append(Fault(row.number, "instruction", text, f"no repetition ({PERMIT})"))
    raise_faults(faults, split.source)


def _check_overlap(splits: Mapping[str, Split]) -> None:
    seen: dict[str, tuple[str, int]] = {}
    for split in splits.values():
        faults = []
        for row in _firsts(split.rows):
            source, first = seen.setdefault(merged(row), (split.source, row.number))
            if source != split.source:
                text = f"that of record {first} of {source}: {shown(merged(row))}"
                faults.append(Fault(row.number, "instruction", text, f"no instruction of another split ({PERMIT})"))
        raise_faults(faults, split.source)


def _firsts(rows: Iterable[Row]) -> Iterable[Row]:
    """Rows, each instruction once."""
    firsts: dict[str, Row] = {}
    for row in rows:
        firsts.setdefault(merged(row), row)
    return firsts.values()
