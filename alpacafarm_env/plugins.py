"""User plug-ins, named as `module:attribute`: oracles, judges, methods, treatments."""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

from .errors import CheckpointError, UnknownNameError

_SOURCES: Final[WeakKeyDictionary[ModuleType, str]] = WeakKeyDictionary()
"""Module -> a hash of its source when it was loaded: its file may be edited while a study runs what is loaded."""


def find_attribute(kind: str, name: str) -> Any:
    """What `module:attribute` names.

    Raises:
        UnknownNameError: There is no such module or attribute; the message begins with `kind` ("Method").
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(_load(module), attribute)
    except Exception as error:  # a module of one's own can fail in any way
        why = f"{type(error).__name__}: {error}"
        raise UnknownNameError(f"{kind} {name!r}: expected module:attribute that can be imported, got {why}") from error


def source_hash(name: str) -> str:
    """Knows `module:attribute` by its name in the module and by the file that was loaded, "sha256:" and a hash of both.

    Modules that it imports are not watched.
    """
    module, _, attribute = name.partition(":")
    return f"sha256:{hashlib.sha256((_SOURCES[_load(module)] + attribute).encode()).hexdigest()}"


def source_mark(name: str) -> str:
    """The beginning of that hash, for the names of cells: " (1f2e3d4c)"; "" for names of ours, without a colon."""
    return f" ({source_hash(name).removeprefix('sha256:')[:8]})" if ":" in name else ""


def check_unchanged(name: str, mark: str) -> None:
    """Keeps a cell to the source that its study began with, also where another process has loaded it later.

    Raises:
        CheckpointError: It is another one than that of `mark`.
    """
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
