"""What a study is made from, known by its content: other weights or data in the same folder are another study."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ... import sandbox
from ...data import RecordedDataset, RowDataset, load_dataset
from ...folders import Content, hash_folder, hash_model
from ...sandbox.dataset import ASSETS

Sources = Mapping[str, Callable[[], Content]]
"""What users call a source ("--policy") -> its content as it is now."""


def data_content(name: str, *, allow_overlap: bool = False) -> Content:
    """The content of a dataset: "sandbox", a folder, or a hub name.

    Raises:
        DataError: There is no such dataset.
    """
    if name == "sandbox":
        return hash_folder(ASSETS / "data")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return hash_folder(folder)
    dataset = load_dataset(name, allow_overlap=allow_overlap)
    return dataset.contents if isinstance(dataset, RowDataset) else {}


def sandbox_sources() -> Sources:
    """All that the package ships."""
    models = {"policy": sandbox.POLICY, "reward model": sandbox.REWARD_MODEL, "clean": sandbox.REWARD_MODEL_CLEAN}
    return {
        "the sandbox's data": partial(data_content, "sandbox"),
        **{f"the sandbox's {name}": partial(hash_model, folder) for name, folder in models.items()},
    }


def contents(sources: Sources) -> dict[str, Content]:
    """The content of each source as it is now."""
    return {name: content() for name, content in sources.items()}


def changed(before: Mapping[str, Content], now: Mapping[str, Content]) -> list[str]:
    """Which files of which sources differ: "model.safetensors of --policy"."""
    return [
        f"{file} of {name}"
        for name in sorted({*before, *now})
        for file in sorted({*before.get(name, {}), *now.get(name, {})})
        if before.get(name, {}).get(file) != now.get(name, {}).get(file)
    ]


def judgements_digest(dataset: RecordedDataset) -> str:
    """Hash of every file of the folder that `annotators` reads as recorded judgements, hexadecimal."""
    found = hashlib.sha256(dataset.sha256.encode())
    for file in sorted((dataset.path / "extras").glob("*")):
        if file.name.startswith(("crossannotations_", "human_", "preferences_claude", "evaluators_")):
            found.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()
