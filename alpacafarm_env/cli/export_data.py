"""A split's demonstrations, preferences or instructions as files that other libraries, and `load_dataset`, read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ..data.dataset import Dataset
from ..data.files import write_atomic, write_records
from ..data.forms import row_of
from ..data.load import load_dataset
from ..errors import DataError
from ..instructions import Demonstration, Instruction, Preference
from ..integrations.rewards import scorer
from .export import new_files

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
_LEVELS: Final = {
    "sandbox": (
        "sandbox: a simulation. Instructions, responses, annotators and the true reward are a small procedural "
        "world's; nothing here is evidence about real models or people."
    ),
    "recorded": "recorded: published responses of real models.",
    "live": "live: data of one's own, read from files or the hub.",
}
_SIZES: Final = (("n<1K", 1_000), ("1K<n<10K", 10_000), ("10K<n<100K", 100_000), ("100K<n<1M", 1_000_000))
_CARD: Final = """---
{head}---

# {name}: {split}

{rows} of {instructions} instructions, from the data set `{name}` by `python -m alpacafarm_env export`.

- **Level:** {level}
- **Responses and judge:** {origin}
- **Scores:** {scores}
- **Format:** {format}, with the fields {fields}. Texts are as in the source, character for character.

```python
from datasets import load_dataset  # or load_dataset of alpacafarm_env.data, which gives the same records

rows = load_dataset("THIS_FOLDER", split="{split}")
```
"""

Record = Instruction | Demonstration | Preference


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
        out: The folder; files of other splits may be there.
        oracle: Scores the responses if given: score, or score_chosen and score_rejected (alpacafarm: score_1 and
            score_2). A response without a verdict is an UnscoredError.
        seed: Seeds the oracle's draws.

    Raises:
        DataError: The data set has no such split, a file is there already, or pyarrow is missing (the extra "data").
    """
    found = load_dataset(dataset)
    records = split_records(found, split)
    rows = [row_of(record, form) for record in records]
    if oracle is not None:
        _add_scores(rows, records, scorer(dataset=dataset, oracle=oracle, seed=seed))
    path = out / f"{split}{FILES[to]}"
    card = [out / "README.md"] if to == "hub-folder" else []
    new_files([path, *card])
    write_records(path, rows)
    for place in card:
        about = {"scores": f"by the oracle {oracle!r} (seed {seed})." if oracle else "none."}
        write_atomic(place, dataset_card(found, split, records, form=form, fields=list(rows[0]), **about))
    return [path, *card]


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


def dataset_card(
    dataset: Dataset, split: str, records: Sequence[Record], *, form: str, fields: Sequence[str], scores: str
) -> str:
    """The README.md of a folder for the hub: YAML for its viewer, and where the data come from in words."""
    kind = "pairs" if isinstance(records[0], Preference) else "demonstrations"
    kind = "prompts" if isinstance(records[0], Instruction) else kind
    texts = {str(each if isinstance(each, Instruction) else each.instruction) for each in records}
    head = {
        "configs": [{"config_name": "default", "data_files": [{"split": split, "path": f"{split}.parquet"}]}],
        "size_categories": [next((name for name, top in _SIZES if len(records) < top), "n>1M")],
        "task_categories": ["text-generation"],
        "tags": ["alpacafarm-env", dataset.level, *(["trl"] if form == "trl" else [])],
    }
    name = Path(dataset.name).resolve().name if Path(dataset.name).is_dir() else dataset.name
    origins: Mapping[str, str] = getattr(dataset, "origins", {})
    return _CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        name=name,
        split=split,
        rows=f"{len(records):,} {kind}",
        instructions=f"{len(texts):,}",
        level=_LEVELS.get(dataset.level, dataset.level),
        origin=origins.get(split, "as in the source, which does not say."),
        scores=scores,
        format={"trl": "TRL's, as messages", "alpacafarm": "AlpacaFarm's"}[form],
        fields=", ".join(f"`{field}`" for field in fields),
    )


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
