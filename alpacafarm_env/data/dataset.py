"""Datasets: instructions, references, demonstrations and preferences by split, and the folder that holds them.

Everything is read and checked when a dataset is built: a faulty file is found before training, not after.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from ..errors import DataError, did_you_mean
from ..instructions import Demonstration, Instruction, Preference, system_front
from .files import SUFFIXES, read_records, stem_of
from .forms import as_row
from .schema import DEMONSTRATION, KINDS, Fault, Row, check_rows, kind_of, raise_faults, shown

SPLITS = ("sft", "preference", "unlabeled", "val", "eval")
PERMIT = "load_dataset(..., allow_overlap=True) permits it, and so does --allow-overlap of win_rate_curve and train"
FILE_SPLITS = {**{split: split for split in SPLITS}, "eval_instructions": "eval", "test": "eval", "validation": "val"}
"""Name of a file without suffixes, or of a split on the hub -> split; eval_instructions is the published bundle's."""
KIND_SPLITS = {
    "demonstration": "sft",
    "preference": "preference",
    "instruction": "unlabeled",
    "multisample": "unlabeled",
}
"""Kind of the rows -> the split they are by another name, such as train."""
TRAIN = "train"
REFERENCE_FILE = "davinci003"
"""References of the eval split in a file of their own."""


@runtime_checkable
class Dataset(Protocol):
    """The protocol of data, as environments and agents need it. `level` is "sandbox", "recorded" or "live"."""

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
    case. The same pair may stand there again, as several annotators have judged it, or models gave the same texts: a
    warning counts them. One DataError counts all faulty or repeated records of one file.
    """

    level = "live"

    def __init__(
        self, name: str, records: Mapping[str, tuple[str, Sequence[object]]], *, allow_overlap: bool = False
    ) -> None:
        self.name = name
        self._splits = {split: build_split(split, source, rows) for split, (source, rows) in records.items()}
        if not allow_overlap:
            for name, split in self._splits.items():
                if split.kind == "preference":
                    _count_repeats(split)
                else:
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
        by_text = {str(instruction): instruction for instruction in self.instructions(split)}
        return tuple(
            Preference(by_text[merged(row)], (row["output_1"], row["output_2"]), int(row["preference"]))
            for row in self._rows(split, "preference", "preferences")
        )

    def _split(self, name: str) -> Split:
        if name not in self._splits:
            raise did_you_mean("split", name, self.splits)
        return self._splits[name]

    def _rows(self, split: str, kind: str, what: str) -> tuple[Mapping[str, Any], ...]:
        chosen = self._split(split)
        if chosen.kind != kind:
            left_out = ("system", "generator", "dataset")
            fields = ", ".join(field.name for field in KINDS[kind] if field.name not in left_out)
            text = f"{what} need {kind} rows ({fields}), got {chosen.kind} rows"
            raise DataError(f"{chosen.source}: {text}. Add those fields or use another split.")
        return chosen.rows


def build_split(name: str, source: str, records: Sequence[object]) -> Split:
    """Checks the records of a split and builds its instructions; ids count from 0 in the order of the file."""
    fields = [as_row(record) for record in records]
    kind = kind_of(fields)
    rows = tuple(check_rows(fields, KINDS[kind], source))
    instructions = tuple(
        instruction_in(row, id=index, split=name, source=row.get("dataset", ""))
        for index, row in enumerate(_firsts(rows) if kind == "preference" else rows)
    )
    return Split(source, kind, rows, instructions)


def instruction_in(row: Mapping[str, Any], **place: Any) -> Instruction:
    """The instruction of a checked row; `place` is its id, split and source."""
    return Instruction(system_front(row["system"]) + row["instruction"], row["input"], system=row["system"], **place)


def merged(row: Mapping[str, Any]) -> str:
    """A row's instruction as one text, the input after a blank line: what identifies it everywhere."""
    return str(instruction_in(row))


class FolderDataset(RowDataset):
    """A folder of data files named by split: sft, preference, unlabeled, val, eval (or eval_instructions).

    `train` is sft, preference or unlabeled, as its rows are, `validation` is val, and `test` is eval. A file
    `davinci003` holds the references of eval, joined by instruction, never by position. Other files are left alone.
    Raises DataError for no folder, no split, two files for one split, faulty rows, references that do not match.
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
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        if (stem := stem_of(file)) is None or not file.is_file():
            continue
        if stem in files:
            names = f"{files[stem].name!r} and {file.name!r}"
            raise DataError(f"{path}: expected one file for {stem!r}, got {names}. Remove one.")
        files[stem] = file
    return files


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
    expected = set(map(str, instructions))
    outputs: dict[str, str] = {}
    faults = []
    for row in rows:
        text = merged(row)
        if text in outputs or text not in expected:
            problem = "an instruction that no other record has" if text in outputs else f"an instruction of {of}"
            faults.append(Fault(row.number, "instruction", shown(text), problem))
        outputs[text] = row["output"]
    raise_faults(faults, str(path))
    return outputs


def _split_records(path: Path, files: Mapping[str, Path]) -> dict[str, tuple[str, Sequence[object]]]:
    named = [files[stem] for stem in (*FILE_SPLITS, TRAIN) if stem in files]
    if not named:
        wanted = f"a file named {', '.join((*FILE_SPLITS, TRAIN))} with one of the suffixes {', '.join(SUFFIXES)}"
        raise DataError(f"{path}: expected {wanted}, got {sorted(file.name for file in path.iterdir())[:10]}.")
    return by_split(str(path), [(str(stem_of(file)), str(file), read_records(file)) for file in named])


def by_split(name: str, parts: Iterable[tuple[str, str, Sequence[object]]]) -> dict[str, tuple[str, Sequence[object]]]:
    """Split -> where its records come from, and the records, of parts with a name, a source and records.

    A name that is none of `FILE_SPLITS` leaves it to the kind of the rows. DataError for two parts of one split.
    """
    sources: dict[str, tuple[str, Sequence[object]]] = {}
    for stem, source, records in parts:
        split = FILE_SPLITS.get(stem) or KIND_SPLITS[kind_of(map(as_row, records))]
        if split in sources:
            raise DataError(
                f"{name}: expected one source of the split {split!r}, got {sources[split][0]} and {source}."
            )
        sources[split] = source, records
    return {split: sources[split] for split in SPLITS if split in sources}


def _check_repeats(name: str, split: Split) -> None:
    """A repeated instruction counts twice in every mean; several pairs or demonstrations of sft may share one."""
    outputs = ("output",) if (name, split.kind) == ("sft", "demonstration") else ()
    seen: dict[tuple[str, ...], int] = {}
    faults = []
    for row in split.rows:
        first = seen.setdefault((merged(row), *(row[field] for field in outputs)), row.number)
        if first != row.number:
            text = f"the same {'demonstration' if outputs else 'instruction'} as record {first}: {shown(merged(row))}"
            faults.append(Fault(row.number, "instruction", text, f"no repetition ({PERMIT})"))
    raise_faults(faults, split.source)


def _count_repeats(split: Split) -> None:
    """Warns of pairs, in either order, that several rows judge: each row is a label of its own."""
    preferred: dict[tuple[str, ...], set[str]] = {}
    for row in split.rows:
        texts = row["output_1"], row["output_2"]
        preferred.setdefault((merged(row), *sorted(texts)), set()).add(texts[int(row["preference"]) - 1])
    if repeated := len(split.rows) - len(preferred):
        both = sum(len(texts) > 1 for texts in preferred.values())
        text = f"{repeated} of {len(split.rows)} rows judge a pair that stands above; pairs with both labels: {both}"
        warnings.warn(f"{split.source}: {text}. Each row counts as a label of its own.", stacklevel=4)


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
