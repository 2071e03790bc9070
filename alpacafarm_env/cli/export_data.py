"""A split's demonstrations, preferences or instructions as files that other libraries, and `load_dataset`, read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..data.dataset import Dataset, data_files
from ..data.files import check_folder, write_atomic, write_records
from ..data.forms import row_of
from ..data.load import load_dataset
from ..errors import DataError, blaming
from ..instructions import Demonstration, Instruction
from ..integrations.rewards import scorer
from .dataset_card import Record, dataset_card, read_card

FILES: Final = {"jsonl": ".jsonl", "parquet": ".parquet", "hub-folder": ".parquet"}
"""--to -> what the data file's name ends in."""
_SCORED: Final = {
    "output": "score",
    "output_1": "score_1",
    "output_2": "score_2",
    "completion": "score",
    "chosen": "score_chosen",
    "rejected": "score_rejected",
}
"""Field of a response -> that of its score."""


def export_split(
    form: str,
    *,
    dataset: str | Dataset,
    split: str,
    to: str,
    out: Path,
    oracle: str | Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Path]:
    """Writes a split into `out` as one data file, `SPLIT.jsonl` or `SPLIT.parquet`; returns the files.

    Args:
        form: "trl" (messages) or "alpacafarm" (instruction, input, output ...); see `data.forms`.
        dataset: As of `load_dataset`.
        split: sft gives demonstrations, preference gives preferences, unlabeled gives instructions, and val and eval
            give their references as demonstrations if they have any.
        to: "jsonl", "parquet", or "hub-folder", which is Parquet and a dataset card, README.md.
        out: The folder; other splits may be there, and a card of them is added to.
        oracle: Scores the responses if given: score, or score_chosen and score_rejected (alpacafarm: score_1 and
            score_2). A response without a verdict is an UnscoredError.
        seed: Seeds the oracle's draws.

    Raises:
        DataError: The data set has no such split, a file is there already, or pyarrow is missing (the extra "data").
    """
    found = load_dataset(dataset)
    records = split_records(found, split)
    path, card = out / f"{split}{FILES[to]}", out / "README.md"
    # What cannot be written is told before anything is scored.
    check_folder(out)
    if out.is_dir() and (there := data_files(out).get(split)) is not None:
        raise DataError(f"{there}: expected no file of the split {split!r}, got one. Give another --out.")
    before = read_card(card, found) if to == "hub-folder" else ""
    rows = [row_of(record, form) for record in records]
    if oracle is not None:
        with blaming("--oracle"):
            score = scorer(dataset=dataset, oracle=oracle, seed=seed)
        _add_scores(rows, records, score)
    out.mkdir(parents=True, exist_ok=True)
    write_records(path, rows)
    if to != "hub-folder":
        return [path]
    scores = f"by the oracle {oracle!r} (seed {seed})." if oracle else "none."
    told = dataset_card(found, split, records, form=form, fields=list(rows[0]), scores=scores, before=before)
    write_atomic(card, told)
    return [path, card]


def split_records(dataset: Dataset, split: str) -> Sequence[Record]:
    """What a split is for: see `export_split`."""
    if split == "sft":
        return dataset.demonstrations(split)
    if split == "preference":
        return dataset.preferences(split)
    asked = dataset.instructions(split)
    if split == "unlabeled":
        return asked
    try:
        references = dataset.references(split)
    except DataError:  # it has none
        return asked
    return [Demonstration(ask, text) for ask, text in zip(asked, references, strict=True)]


def _add_scores(
    rows: Sequence[dict[str, Any]],
    records: Sequence[Record],
    score: Callable[[Sequence[str], Sequence[str]], list[float]],
) -> None:
    """Gives rows a score for each of their responses."""
    asked = [each.instruction for each in records if not isinstance(each, Instruction)]
    if not asked:
        raise DataError("--oracle: expected a split with responses, got one of instructions alone. Leave it away.")
    for field in filter(_SCORED.__contains__, list(rows[0])):
        texts = [row[field] if isinstance(row[field], str) else row[field][0]["content"] for row in rows]
        for row, value in zip(rows, score(asked, texts), strict=True):
            row[_SCORED[field]] = value
