"""Datasets: instructions, references, demonstrations and preferences by split, from a folder or the Hugging Face hub.

A split is a file named after it (sft, preference, unlabeled, val, eval) in any format of `files`, with rows of any
kind of `schema`. Everything is read and checked when the dataset is built, so a faulty file is found before training,
not after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..errors import DataError
from ..instructions import Demonstration, Instruction, Preference
from .files import SUFFIXES, read_records, stem_of
from .rows import SPLITS, RowDataset, merged
from .schema import DEMONSTRATION, Fault, check_rows, raise_faults, shown

FILE_SPLITS = {**{split: split for split in SPLITS}, "eval_instructions": "eval"}
"""File name without suffixes -> split. The last is the published evaluation bundle's name."""
REFERENCE_FILE = "davinci003"
"""References of the eval split in a file of their own, joined by instruction."""


@runtime_checkable
class Dataset(Protocol):
    """What environments and agents need of data. `level` is "sandbox", "recorded" or "live"."""

    name: str
    level: str

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits this dataset has."""

    def instructions(self, split: str) -> tuple[Instruction, ...]:
        """The instructions of a split, always in the same order.

        Raises:
            UnknownNameError: The dataset has no such split.
        """

    def references(self, split: str) -> tuple[str, ...]:
        """The response to beat for each of `instructions(split)`.

        Raises:
            DataError: The split has none.
        """

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        """Instructions with the response to imitate."""

    def preferences(self, split: str = "preference") -> tuple[Preference, ...]:
        """Instructions with two responses and which one was preferred."""


class FolderDataset(RowDataset):
    """A folder of data files named by split: sft, preference, unlabeled, val, eval (or eval_instructions).

    If `davinci003` stands beside them, its outputs are the references of eval, joined by instruction, never by
    position.

    Args:
        path: The folder. Files of other names are left alone.
        allow_overlap: See `RowDataset`.

    Raises:
        DataError: No such folder, no split in it, two files for one split, faulty rows, references that do not match.
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
    """The data files of a folder by their name without suffixes.

    Raises:
        DataError: No such folder, or two files that differ only in format (which one is meant?).
    """
    if not path.is_dir():
        raise DataError(f"{path}: expected a folder with data files, got no such folder.")
    found: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        stem = stem_of(file)
        if stem is None or not file.is_file():
            continue
        if stem in found:
            raise DataError(
                f"{path}: expected one file for {stem!r}, got {found[stem].name!r} and {file.name!r}. Remove one."
            )
        found[stem] = file
    return found


def read_outputs(path: Path, instructions: Sequence[str], *, of: str = "the eval split") -> tuple[str, ...]:
    """The outputs of a file, joined to `instructions` by their text; `of` says in errors where those are from.

    Raises:
        DataError: A faulty row, an instruction twice, one that is not among `instructions`, or one that is missing.
    """
    rows = check_rows(read_records(path), DEMONSTRATION, str(path))
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
    absent = [text for text in map(str, instructions) if text not in outputs]
    if absent:
        raise DataError(
            f"{path}: expected an output for each of the {len(known)} instructions of {of}, got none for "
            f"{len(absent)}: {', '.join(map(shown, absent[:5]))}{', ...' * (len(absent) > 5)}."
        )
    return tuple(outputs[str(text)] for text in instructions)


def _split_records(path: Path, files: Mapping[str, Path]) -> dict[str, tuple[str, Sequence[object]]]:
    records: dict[str, tuple[str, Sequence[object]]] = {}
    for stem, split in FILE_SPLITS.items():
        if stem not in files:
            continue
        if split in records:
            raise DataError(
                f"{path}: expected one file for the split {split!r}, got {records[split][0]} and {files[stem]}."
            )
        records[split] = (str(files[stem]), read_records(files[stem]))
    if not records:
        names = ", ".join(FILE_SPLITS)
        raise DataError(
            f"{path}: expected a file named {names} with one of the suffixes {', '.join(SUFFIXES)}, "
            f"got {sorted(file.name for file in path.iterdir())[:10]}."
        )
    return records
