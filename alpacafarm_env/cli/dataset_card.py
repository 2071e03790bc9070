"""The dataset card of an exported folder: YAML for the hub and its `load_dataset`, and where the data come from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ..data.dataset import Dataset
from ..errors import DataError
from ..instructions import Demonstration, Instruction, Preference

Record = Instruction | Demonstration | Preference
_LEVELS: Final = {
    "sandbox": (
        "sandbox: a simulation. Instructions, responses, annotators and the true reward are a small procedural "
        "world's; nothing here is evidence about real models or people."
    ),
    "recorded": "recorded: published responses of real models.",
    "live": "live: data of one's own, read from files or the hub.",
}
_SIZES: Final = (("n<1K", 1_000), ("1K<n<10K", 10_000), ("10K<n<100K", 100_000), ("100K<n<1M", 1_000_000))
_HEAD: Final = """
# {name}

From the data set `{name}` by `alpacafarm export`.

**Level:** {level}
"""
_SPLIT: Final = """
## {split}

{rows} of {instructions} instructions.

- **Responses and judge:** {origin}
- **Scores:** {scores}
- **Format:** {format}, with the fields {fields}. Texts are as in the source, character for character.

```python
from datasets import load_dataset  # that of alpacafarm_env.data gives the same records, of all splits

rows = load_dataset("THIS_FOLDER", "{split}", split="{split}")
```
"""


def dataset_card(
    dataset: Dataset,
    split: str,
    records: Sequence[Record],
    *,
    form: str,
    fields: Sequence[str],
    scores: str,
    before: str = "",
) -> str:
    """The README.md of a folder for the hub; `before` is the one that is there, of other splits.

    Splits are configurations, as their fields differ.
    """
    head, body = _parts(before)
    for name, values in _about(dataset, split, records, form).items():
        head[name] = [*head.get(name, []), *(value for value in values if value not in head.get(name, []))]
    head["pretty_name"] = name_of(dataset)
    kind = "pairs" if isinstance(records[0], Preference) else "demonstrations"
    kind = "prompts" if isinstance(records[0], Instruction) else kind
    texts = {str(each if isinstance(each, Instruction) else each.instruction) for each in records}
    origins: Mapping[str, str] = getattr(dataset, "origins", {})
    section = _SPLIT.format(
        split=split,
        rows=f"{len(records):,} {kind}",
        instructions=f"{len(texts):,}",
        origin=origins.get(split, "as in the source, which does not say."),
        scores=scores,
        format={"trl": "TRL's, as messages", "alpacafarm": "AlpacaFarm's"}[form],
        fields=", ".join(f"`{field}`" for field in fields),
    )
    body = body or _HEAD.format(name=name_of(dataset), level=_LEVELS.get(dataset.level, dataset.level))
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n{body}{section}"


def read_card(path: Path, dataset: Dataset) -> str:
    """The card to add to, "" where there is none; DataError for a file that is none of this data set."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and _parts(text)[0].get("pretty_name") != name_of(dataset):
        raise DataError(f"{path}: expected no file, or a card of {name_of(dataset)}'s splits. Give another --out.")
    return text


def name_of(dataset: Dataset) -> str:
    """The data set's name for others: of a folder, its last part."""
    return Path(dataset.name).resolve().name if Path(dataset.name).exists() else dataset.name


def _about(dataset: Dataset, split: str, records: Sequence[Record], form: str) -> dict[str, list[Any]]:
    files = [{"split": split, "path": f"{split}.parquet"}]
    return {
        "configs": [{"config_name": split, "data_files": files}],
        "size_categories": [next((name for name, top in _SIZES if len(records) < top), "n>1M")],
        "task_categories": ["text-generation"],
        "tags": ["alpacafarm-env", dataset.level, *(["trl"] if form == "trl" else [])],
    }


def _parts(card: str) -> tuple[dict[str, Any], str]:
    """A card's YAML, {} if it is none of ours, and the text below."""
    _, *parts = card.split("---\n", 2)
    try:
        head = yaml.safe_load(parts[0]) if len(parts) == 2 else None
    except yaml.YAMLError:
        head = None
    return (head, parts[1]) if isinstance(head, dict) else ({}, "")
