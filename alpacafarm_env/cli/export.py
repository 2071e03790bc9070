"""Prompts and rewards in the forms that verl and OpenRLHF read, for who outgrows a node.

- verl 0.9: `prompts.parquet` (data_source, prompt, ability, reward_model, extra_info, as its `RLHFDataset`
  reads them) and `reward.py`, whose `compute_score` its `NaiveRewardManager` calls for each response.
- OpenRLHF 0.11: `prompts.jsonl` (input, label, datasource, as its `PromptDataset` reads them). Its rewards come from
  `python -m alpacafarm_env serve`.

A prompt is the instruction as the user's message; the trained model's own chat template makes the rest of it, which
models that this package saved have.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..data.files import check_folder, write_records
from ..data.forms import messages_of
from ..data.load import load_dataset
from ..errors import DataError, blaming
from ..instructions import Instruction
from ..oracles.base import shorten
from ..oracles.registry import check_oracle, make_oracle

FORMATS: Final = ("verl", "openrlhf")
_REWARD: Final = '''"""The reward of {about}, for verl: reward.custom_reward_function.path={path}

Each process of verl's that gives rewards needs the package alpacafarm_env, and what the oracle reads.
"""

from functools import partial

from alpacafarm_env.integrations import verl

compute_score = partial(verl.compute_score, dataset={dataset!r}, oracle={oracle!r}, seed={seed!r})
'''


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


def export(form: str, *, dataset: str, split: str, oracle: str | Mapping[str, Any], out: Path, seed: int) -> list[Path]:
    """Writes a split's prompts, and for verl the reward function, into a folder; returns the files.

    Raises:
        DataError: The data set has no such split, a file is there already, or pyarrow is missing (the extra "data").
    """
    found = load_dataset(dataset)
    asked = found.instructions(split)
    with blaming("--oracle"):
        make_oracle(oracle, dataset=found, seed=seed)  # what it lacks is told now, not by another framework
    known = str(Path(dataset).resolve()) if Path(dataset).exists() else dataset
    source = f"alpacafarm_env/{found.name}"
    names = ("prompts.parquet", "reward.py") if form == "verl" else ("prompts.jsonl",)
    paths = [out.absolute() / name for name in names]
    check_folder(out)
    for path in paths:
        if path.exists():
            raise DataError(f"{path}: expected a new file, got one that is there. Give another --out.")
    out.mkdir(parents=True, exist_ok=True)
    if form == "verl":
        write_records(paths[0], [_verl_row(text, i, source, split) for i, text in enumerate(asked)])
        about = f"the split {split} of {found.name}"
        given = {"about": about, "path": paths[1], "dataset": known, "oracle": oracle, "seed": seed}
        paths[1].write_text(_REWARD.format(**given), encoding="utf-8")
    else:
        rows = [{"input": str(text), "label": str(text), "datasource": source} for text in asked]
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
