"""The sources of a study, known by their content: other weights or data in the same folder are another study."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ... import sandbox
from ...data import RecordedDataset, RowDataset, load_dataset
from ...folders import Content, hash_folder, hash_model
from ...sandbox.dataset import ASSETS

Sources = Mapping[str, Callable[[], Content]]
"""The name of a source ("--policy") -> its present content."""


def data_content(name: str, *, allow_overlap: bool = False) -> Content:
    """The content of a dataset: "sandbox", a folder, or a hub name; DataError if there is none."""
    if name == "sandbox":
        return hash_folder(ASSETS / "data")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return hash_folder(folder)
    dataset = load_dataset(name, allow_overlap=allow_overlap)
    return dataset.contents if isinstance(dataset, RowDataset) else {}


def sandbox_sources() -> Sources:
    """Everything the package ships."""
    models = {"policy": sandbox.POLICY, "reward model": sandbox.REWARD_MODEL, "clean": sandbox.REWARD_MODEL_CLEAN}
    return {
        "the sandbox's data": partial(data_content, "sandbox"),
        **{f"the sandbox's {name}": partial(hash_model, folder) for name, folder in models.items()},
    }


def judgements_digest(dataset: RecordedDataset) -> str:
    """Hash of every file of the folder that `annotators` reads as recorded judgements, hexadecimal."""
    prefixes = ("crossannotations_", "human_", "preferences_claude", "evaluators_")
    return extras_digest(dataset.path, dataset.sha256, prefixes)


def extras_digest(folder: Path, before: str, prefixes: tuple[str, ...]) -> str:
    """Hash of a digest and of the files in the subfolder `extras` whose names begin so, hexadecimal."""
    digest = hashlib.sha256(before.encode())
    for file in sorted((folder / "extras").glob("*")):
        if file.name.startswith(prefixes):
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
