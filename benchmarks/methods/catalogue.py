"""The methods by name: the rows of the paper's table, their variants, and one's own."""

from __future__ import annotations

from ...errors import UnknownNameError, did_you_mean
from ...plugins import find_attribute
from .ablations import ABLATIONS
from .methods import METHODS, Method

__all__ = ["ABLATIONS", "METHODS", "find_method"]


def find_method(name: str) -> Method:
    """A method by its name, or any `Method` by `module:attribute`.

    Raises:
        UnknownNameError: There is no such method, module or attribute, or it is no `Method`.
    """
    if ":" not in name:
        by_name = {method.name: method for method in (*METHODS, *ABLATIONS)}
        if name not in by_name:
            raise did_you_mean("method", name, by_name)
        return by_name[name]
    found = find_attribute("Method", name)
    if not isinstance(found, Method):
        raise UnknownNameError(f"Method {name!r}: expected a Method, got {type(found).__name__}")
    return found
