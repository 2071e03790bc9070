"""Things of a user's own, named on the command line as `module:attribute`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from pathlib import Path
from typing import Any

from ..errors import UnknownNameError


def find_attribute(kind: str, name: str) -> Any:
    """What `module:attribute` names.

    Raises:
        UnknownNameError: There is no such module or attribute; the message begins with `kind` ("Method").
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of one's own can fail in any way
        why = f"{type(error).__name__}: {error}"
        raise UnknownNameError(f"{kind} {name!r}: expected module:attribute that can be imported, got {why}") from error


def source_mark(spec: str) -> str:
    """Marks what is one's own by a hash of its source: edited, it is another one. Nothing for names of ours."""
    if ":" not in spec:
        return ""
    module = importlib.import_module(spec.partition(":")[0])
    try:
        file = inspect.getsourcefile(module)
    except TypeError:  # a module that is part of the interpreter
        file = None
    content = Path(file).read_bytes() if file else spec.encode()
    return f" ({hashlib.sha256(content).hexdigest()[:8]})"
