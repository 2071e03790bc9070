"""User plug-ins, named as `module:attribute`: oracles, judges, methods, treatments."""

import hashlib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

from .errors import CheckpointError, UnknownNameError

_SOURCES: Final[WeakKeyDictionary[ModuleType, str]] = WeakKeyDictionary()
"""A hash of each module's source when it was loaded: its file may be edited while a study runs what is loaded."""


def find_attribute(kind: str, name: str) -> Any:
    """The object named `module:attribute`; UnknownNameError, beginning with `kind` ("Method"), if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(_load(module), attribute)
    except Exception as error:  # a module of one's own can fail in any way
        why = f"{type(error).__name__}: {error}"
        raise UnknownNameError(f"{kind} {name!r}: expected module:attribute that can be imported, got {why}") from error


def source_hash(name: str) -> str:
    """A hash of `module:attribute` and of the file it was loaded from; modules that it imports are not watched."""
    module, _, attribute = name.partition(":")
    return f"sha256:{hashlib.sha256((_SOURCES[_load(module)] + attribute).encode()).hexdigest()}"


def source_mark(name: str) -> str:
    """The beginning of that hash, for the names of cells: " (1f2e3d4c)"; "" for our own names, which have no colon."""
    return f" ({source_hash(name).removeprefix('sha256:')[:8]})" if ":" in name else ""


def check_unchanged(name: str, mark: str) -> None:
    """Raises CheckpointError if a cell's source, loaded perhaps later by another process, is not its study's."""
    if source_mark(name) != mark:
        raise CheckpointError(
            f"{name} was edited after the study began: expected what it began with. Call the command again: what was "
            "edited is run anew, and all else goes on."
        )


def _load(name: str) -> ModuleType:
    module = import_module(name)
    if module not in _SOURCES:
        file = Path(getattr(module, "__file__", None) or "")  # what is part of the interpreter has none
        _SOURCES[module] = hashlib.sha256(file.read_bytes() if file.is_file() else name.encode()).hexdigest()
    return module
