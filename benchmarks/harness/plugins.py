"""Things of a user's own, named on the command line as `module:attribute`."""

from __future__ import annotations

import hashlib
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

from ...errors import CheckpointError, UnknownNameError

_SOURCES: Final[WeakKeyDictionary[ModuleType, tuple[object, str]]] = WeakKeyDictionary()
"""Module -> its spec, which a reload replaces, and a hash of the source that it was made from.

Its file may be another one by now.
"""


def find_attribute(kind: str, name: str) -> Any:
    """What `module:attribute` names.

    Raises:
        UnknownNameError: There is no such module or attribute; the message begins with `kind` ("Method").
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(_loaded(module), attribute)
    except Exception as error:  # a module of one's own can fail in any way
        why = f"{type(error).__name__}: {error}"
        raise UnknownNameError(f"{kind} {name!r}: expected module:attribute that can be imported, got {why}") from error


def source_hash(spec: str) -> str:
    """Marks what is one's own by a hash of its attribute and of the source that this process has loaded.

    Edited, it is another one. "" for names of ours.
    """
    name, _, attribute = spec.partition(":")
    if not attribute:
        return ""
    return f" ({hashlib.sha256((_SOURCES[_loaded(name)][1] + attribute).encode()).hexdigest()[:8]})"


def check_unchanged(spec: str, mark: str) -> None:
    """Keeps a cell to the source that its study began with, also where another process has loaded it later.

    Raises:
        CheckpointError: This process has another one than that of `mark`.
    """
    if source_hash(spec) != mark:
        raise CheckpointError(
            f"{spec} was edited after the study began: expected what it began with. Call the command again: what was "
            "edited is run anew, and all else goes on."
        )


def _loaded(name: str) -> ModuleType:
    module = sys.modules.get(name)
    if module is None or module not in _SOURCES or _SOURCES[module][0] is not module.__spec__:
        source = _source(name)
        module = importlib.import_module(name)
        _SOURCES[module] = module.__spec__, source
    return module


def _source(name: str) -> str:
    if name in sys.modules:  # a script that is run, __main__, has a file and no spec
        origin = getattr(sys.modules[name], "__file__", None)
    else:
        spec = find_spec(name)
        origin = spec.origin if spec is not None else None
    file = Path(origin) if origin else None
    # What is part of the interpreter has no file.
    return hashlib.sha256(file.read_bytes() if file is not None and file.is_file() else name.encode()).hexdigest()
