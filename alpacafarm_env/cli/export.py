"""A split as files: data for TRL and `load_dataset`, prompts and rewards for verl and OpenRLHF.

- trl, alpacafarm: demonstrations, preferences or instructions, as JSON Lines, Parquet or a folder for the hub.
- verl 0.9: `prompts.parquet` (data_source, prompt, ability, reward_model, extra_info, as its `RLHFDataset`
  reads them) and `reward.py`, whose `compute_score` its `NaiveRewardManager` calls for each response.
- OpenRLHF 0.11: `prompts.jsonl` (input, label, datasource, as its `PromptDataset` reads them). Its rewards come from
  `alpacafarm serve`.

A prompt is the instruction as the user's message; the trained model's own chat template makes the rest of it, which
models that this package saved have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ..data.dataset import Dataset, data_files
from ..data.files import check_folder, write_atomic, write_records
from ..data.forms import messages_of, row_of
from ..data.load import load_dataset
from ..errors import DataError, blaming
from ..instructions import Demonstration, Instruction, Preference
from ..integrations import scorer
from ..oracles import check_oracle, make_oracle
from ..oracles.base import shorten

Record = Instruction | Demonstration | Preference

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
_REWARD: Final = '''"""The reward of {about}, for verl: reward.custom_reward_function.path={path}

Each process of verl's that gives rewards needs the package alpacafarm_env, and what the oracle reads.
"""

from functools import partial

from alpacafarm_env import integrations

compute_score = partial(integrations.compute_score, dataset={dataset!r}, oracle={oracle!r}, seed={seed!r})
'''

_HEAD: Final = """---
pretty_name: {name}
tags: [alpacafarm-env, {level}]
"""
_BODY: Final = """---
# {name}

From the data set `{name}` by `alpacafarm export`.

**Level:** {level}{note}
"""
_SIMULATION: Final = (
    ", a simulation: instructions, responses, annotators and the true reward are a small procedural world's, and no "
    "evidence about real models or people"
)


def read_oracle(text: str) -> Any:
    """An oracle as the command line names it: a name, or a mapping as JSON.

    Raises:
        DataError: It begins like JSON and is none, or says nothing that is an oracle.
        UnknownNameError: There is no such oracle.
    """
    spec: Any = text
    if text.lstrip().startswith("{"):
        try:
            spec = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"--oracle: expected a name or JSON, got {shorten(text)}: {error}.") from error
    with blaming("--oracle"):
        check_oracle(spec)
    if isinstance(spec, dict) and "reward_model" in spec and Path(spec["reward_model"]).is_dir():
        spec["reward_model"] = str(Path(spec["reward_model"]).resolve())  # it is read from another working folder
    return spec


def export_prompts(
    form: str, *, dataset: str, split: str, oracle: str | Mapping[str, Any], out: Path, seed: int
) -> list[Path]:
    """Writes a split's prompts, and for verl the reward function, into a folder; returns the files.

    Raises:
        DataError: The data set has no such split, a file is there already, or pyarrow is missing (the extra "data").
    """
    data = load_dataset(dataset)
    instructions = data.instructions(split)
    with blaming("--oracle"):
        make_oracle(oracle, dataset=data, seed=seed)  # what it lacks is said now, not by another framework
    source = f"alpacafarm_env/{data.name}"
    names = ("prompts.parquet", "reward.py") if form == "verl" else ("prompts.jsonl",)
    paths = [out.absolute() / name for name in names]
    check_folder(out)
    for path in paths:
        if path.exists():
            raise DataError(f"{path}: expected a new file, got one that is there. Give another --out.")
    out.mkdir(parents=True, exist_ok=True)
    if form == "verl":
        write_records(paths[0], [_verl_row(text, i, source, split) for i, text in enumerate(instructions)])
        place = str(Path(dataset).resolve()) if Path(dataset).exists() else dataset
        about = f"the split {split} of {data.name}"
        reward = _REWARD.format(about=about, path=paths[1], dataset=place, oracle=oracle, seed=seed)
        paths[1].write_text(reward, encoding="utf-8")
    else:
        rows = [{"input": str(text), "label": str(text), "datasource": source} for text in instructions]
        write_records(paths[0], rows)
    return paths


def _verl_row(instruction: Instruction, index: int, source: str, split: str) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": messages_of(instruction),
        "ability": "instruction_following",
        # "rule": verl asks the reward function in validation too. There is no single right answer.
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": index, "split": split, "instruction": str(instruction)},
    }


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
        to: "jsonl", "parquet", or "hub-folder", which is Parquet and a card, README.md, of the folder's splits.
        out: The folder; other splits may be there.
        oracle: Scores the responses if given: score, or score_chosen and score_rejected (alpacafarm: score_1 and
            score_2). A response without a verdict is an UnscoredError.
        seed: Seeds the oracle's draws.

    Raises:
        DataError: The data set has no such split, a file is there already, or pyarrow is missing (the extra "data").
    """
    data = load_dataset(dataset)
    records = split_records(data, split)
    path, card = out / f"{split}{FILES[to]}", out / "README.md"
    # What cannot be written is refused before anything is scored.
    check_folder(out)
    if out.is_dir() and (there := data_files(out).get(split)) is not None:
        raise DataError(f"{there}: expected no file of the split {split!r}, got one. Give another --out.")
    name = Path(data.name).resolve().name if Path(data.name).exists() else data.name
    head = _HEAD.format(name=name, level=data.level)
    if to == "hub-folder" and card.exists() and not card.read_text(encoding="utf-8").startswith(head):
        raise DataError(f"{card}: expected no file, or a card of {name}'s splits. Give another --out.")
    rows = [row_of(record, form) for record in records]
    if oracle is not None:
        with blaming("--oracle"):
            score = scorer(dataset=dataset, oracle=oracle, seed=seed)
        _add_scores(rows, records, score)
    out.mkdir(parents=True, exist_ok=True)
    write_records(path, rows)
    if to != "hub-folder":
        return [path]
    # Splits are configurations, as their fields differ.
    configs = [
        {"config_name": each, "data_files": [{"split": each, "path": file.name}]}
        for each, file in data_files(out).items()
    ]
    body = _BODY.format(name=name, level=data.level, note=_SIMULATION if data.level == "sandbox" else "")
    write_atomic(card, head + yaml.safe_dump({"configs": configs}, sort_keys=False) + body)
    return [path, card]


def split_records(dataset: Dataset, split: str) -> Sequence[Record]:
    """A split's records, of the kind that `export_split` says."""
    if split == "sft":
        return dataset.demonstrations(split)
    if split == "preference":
        return dataset.preferences(split)
    instructions = dataset.instructions(split)
    if split == "unlabeled":
        return instructions
    try:
        references = dataset.references(split)
    except DataError:  # it has none
        return instructions
    return [Demonstration(instruction, text) for instruction, text in zip(instructions, references, strict=True)]


def _add_scores(
    rows: Sequence[dict[str, Any]],
    records: Sequence[Record],
    score: Callable[[Sequence[str], Sequence[str]], list[float]],
) -> None:
    """Gives rows a score for each of their responses."""
    instructions = [each.instruction for each in records if not isinstance(each, Instruction)]
    if not instructions:
        raise DataError("--oracle: expected a split with responses, got one of instructions alone. Leave it away.")
    for field in filter(_SCORED.__contains__, list(rows[0])):
        texts = [row[field] if isinstance(row[field], str) else row[field][0]["content"] for row in rows]
        for row, value in zip(rows, score(instructions, texts), strict=True):
            row[_SCORED[field]] = value
