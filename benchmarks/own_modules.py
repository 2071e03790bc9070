"""Things of a user's own, named on the command line as `module:attribute`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnknownNameError


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
    """Marks what is one's own by a hash of source and attribute: edited, it is another one. "" for names of ours."""
    name, _, attribute = spec.partition(":")
    if not attribute:
        return ""
    module = importlib.import_module(name)
    try:
        file = inspect.getsourcefile(module)
    except TypeError:  # a module that is part of the interpreter
        file = None
    content = Path(file).read_bytes() if file else name.encode()
    return f" ({hashlib.sha256(content + attribute.encode()).hexdigest()[:8]})"


def refuse_edited(spec: str, mark: str) -> None:
    """Keeps the results of a study that is running to one source, that whose mark it took at its start.

    Raises:
        CheckpointError: The file has been edited since.
    """
    if source_mark(spec) != mark:
        raise CheckpointError(
            f"{spec} was edited while the study ran: expected what it began with. Call again: what was edited is run "
            "anew, and all else goes on."
        )
