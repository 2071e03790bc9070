"""Any dataset by its name: the sandbox, a folder, recorded or not, the hub."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from ..errors import DataError, UnknownNameError, did_you_mean
from .dataset import Dataset, FolderDataset
from .hub import HubDataset
from .recorded import RecordedDataset, is_recorded


def load_dataset(name: str | os.PathLike[str] | Dataset, *, allow_overlap: bool = False) -> Dataset:
    """The dataset of a name: "sandbox", a folder (recorded if it holds judgements), or a hub name "owner/name".

    Each is read once a process. Build `HubDataset` yourself to give a revision; a dataset is returned as it is.

    Args:
        name: Of the dataset, or the dataset itself.
        allow_overlap: See `RowDataset`; the sandbox and recorded folders have nothing to allow.

    Raises:
        DataError: No such folder, or what the dataset's class raises.
        UnknownNameError: The name is none of the three.
    """
    if not isinstance(name, str | os.PathLike):
        if isinstance(name, Dataset):
            return name
        raise DataError(f"expected a dataset's name, folder or object, got {name!r}.")
    text = os.fspath(name)
    if text == "sandbox":
        from ..sandbox import SANDBOX  # which is a `data.dataset.Dataset`: loading that loads this package first

        return SANDBOX
    if Path(text).expanduser().is_dir():
        return _load_folder(Path(text).expanduser().resolve(), allow_overlap)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", text):
        return _load_hub(text, allow_overlap)
    if re.search(r"[/\\~]|^\.", text):
        raise DataError(f"{text}: expected a folder with data files, got no such folder.")
    raise UnknownNameError(f"{did_you_mean('dataset', text, ['sandbox'])} There is no folder of that name either.")


@cache
def _load_folder(path: Path, allow_overlap: bool) -> Dataset:
    return RecordedDataset(path) if is_recorded(path) else FolderDataset(path, allow_overlap=allow_overlap)


@cache
def _load_hub(name: str, allow_overlap: bool) -> Dataset:
    return HubDataset(name, allow_overlap=allow_overlap)


DATA_VARIABLE = "ALPACAFARM_DATA"


def recorded_dataset(name: str | None) -> RecordedDataset:
    """The data folder of `--data` or of the environment variable.

    Raises:
        DataError: Neither is given, or the folder holds no recorded judgements.
    """
    folder = name or os.environ.get(DATA_VARIABLE)
    if not folder:
        raise DataError(f"expected a data folder: give --data, or set {DATA_VARIABLE}.")
    dataset = load_dataset(folder)
    if not isinstance(dataset, RecordedDataset):
        raise DataError(
            f"{folder}: expected a folder with recorded judgements (preferences_<judge>), got a dataset of "
            f"the level {dataset.level!r}."
        )
    return dataset
