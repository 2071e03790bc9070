"""The base of a LoRA adapter's folder: by a way that holds after a move, by absolute path, or by hub name.

adapter_config.json names a base as peft reads it from any directory: by absolute path or hub name. Of a base in a
folder, `BASE_FILE` beside it keeps the way there from the adapter's own folder, {"path": "../base"}. We go that way
first, so a tree that holds both can be moved.
"""

import json
import os
import re
from os import PathLike
from pathlib import Path
from typing import Any, Final

from .errors import CheckpointError

ADAPTER_CONFIG: Final = "adapter_config.json"
BASE_FILE: Final = "alpacafarm_base.json"
_HUB_NAME: Final = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def is_adapter(folder: str | PathLike[str]) -> bool:
    """Whether a model's folder holds an adapter in peft's format."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def adapter_base(folder: str | PathLike[str]) -> str:
    """Returns the folder or hub name of the model that a LoRA adapter builds on; CheckpointError if there is none."""
    root, way = Path(folder), None
    name = _text(root / ADAPTER_CONFIG, "base_model_name_or_path")
    if (root / BASE_FILE).is_file():
        way = os.path.normpath(root.resolve() / _text(root / BASE_FILE, "path"))
        if Path(way).is_dir():
            return way
    if not Path(name).is_dir() and (way or not may_be_hub_name(name)):
        places = " or ".join(dict.fromkeys(place for place in (way, name) if place))
        raise CheckpointError(
            f"{folder}: expected the base of this adapter at {places}, found no folder there. Move the base there, or "
            f"write its place into {root / ADAPTER_CONFIG} (base_model_name_or_path). An adapter that shall travel "
            "without its base is merged with it first: alpacafarm merge FOLDER OUT."
        )
    return name


def base_of(folder: str | PathLike[str]) -> str | PathLike[str]:
    """The base of an adapter's folder; a whole model's folder or hub name as it is."""
    return adapter_base(folder) if is_adapter(folder) else folder


def adapter_task(folder: str | PathLike[str]) -> str | None:
    """Returns the kind of model that a LoRA adapter was trained for, in peft's words, if its folder says so."""
    return read_json(Path(folder) / ADAPTER_CONFIG).get("task_type")


def name_base(config: Any, folder: Path) -> dict[str, dict[str, str]]:
    """Has peft's settings name their base for any directory; what the adapter's `folder` keeps beside, by file."""
    name = config.base_model_name_or_path
    if not name or not Path(name).is_dir():
        return {}
    base = Path(name).resolve()
    if base == folder.resolve():
        raise CheckpointError(f"{folder}: expected another folder for an adapter than that of its base.")
    config.base_model_name_or_path = str(base)
    return {BASE_FILE: {"path": Path(os.path.relpath(base, folder.resolve())).as_posix()}}


def may_be_hub_name(name: str | PathLike[str]) -> bool:
    """Whether a model's name may be meant as one of the hub, and not only as a local folder."""
    text, path = str(name), Path(name)
    beside = len(path.parts) > 1 and path.parent.is_dir()
    return isinstance(name, str) and _HUB_NAME.fullmatch(text) is not None and not beside


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; CheckpointError if the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}. Expected a JSON file.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"Cannot read {path}: expected a JSON object, got {type(content).__name__}.")
    return content


def _text(path: Path, key: str) -> str:
    """A text of a JSON object."""
    if not isinstance(value := read_json(path).get(key), str):
        raise CheckpointError(f"{path}: expected a text as {key}, got {value!r}.")
    return value
