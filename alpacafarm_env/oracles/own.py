"""Oracles and judges of a user's own, named `module:Name` as Gymnasium names environments of other modules.

A class or a function is called with the specification's keywords, and with `dataset` and `seed` if it has parameters
of these names; what it returns, or an object, is the oracle. A function of `instructions` and `responses` is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from os import PathLike
from types import NoneType
from typing import Any, Final, Literal

from ..errors import AlpacaFarmError, did_you_mean
from ..plugins import find_attribute
from .base import FunctionOracle, OracleError, PreferenceOracle, RewardOracle

Kind = Literal["oracle", "judge"]
_TYPES: Final[Mapping[str, type]] = {
    "bool": bool,
    "int": Integral,
    "float": Real,
    "str": str,
    "None": NoneType,
    "Path": PathLike,
    "PathLike[str]": PathLike,
}
"""What an annotation's words mean for a value that may come from JSON."""
_PROTOCOLS: Final[Mapping[Kind, tuple[type, str]]] = {
    "oracle": (RewardOracle, "score"),
    "judge": (PreferenceOracle, "compare"),
}


def is_own(name: object) -> bool:
    """Whether a specification's name is `module:Name`, and no JSON given as text."""
    return isinstance(name, str) and ":" in name and not name.lstrip().startswith("{")


def is_object(found: object, kind: Kind) -> bool:
    """Whether an object, and no class, has what the protocol asks for: `isinstance` looks at the names alone."""
    protocol, method = _PROTOCOLS[kind]
    if isinstance(found, type) or not isinstance(found, protocol):
        return False
    return isinstance(getattr(found, "name", None), str) and callable(getattr(found, method))


def as_object(found: Any, kind: Kind) -> Any:
    """An object of that kind as it is, a function as an oracle that asks it; None for anything else."""
    if is_object(found, kind):
        return found
    function = callable(found) and not (isinstance(found, type) or hasattr(found, "score") or hasattr(found, "compare"))
    return FunctionOracle(found) if function and kind == "oracle" else None


def parts_of(spec: Mapping[str, Any]) -> list[Any]:
    """The parts of a mapping that specify other oracles or judges."""
    if spec.keys() & {"reward_model", "pool", "human"}:
        return []
    if "ensemble" in spec:
        return list(spec["ensemble"])
    return [spec[key] for key in ("name", "judge", "rating") if key in spec]


def own_names(spec: object) -> list[str]:
    """Every `module:Name` of a specification, those of its members and judges too."""
    if isinstance(spec, Mapping):
        return [name for part in parts_of(spec) for name in own_names(part)]
    return [spec] if isinstance(spec, str) and is_own(spec) else []


def only_compares(name: str) -> bool:
    """Whether `module:Name` is a judge or its class, and no oracle; of a function nobody knows before it is called."""
    found = find_attribute("Oracle", name)
    return hasattr(found, "compare") and not hasattr(found, "score")


def plan_own(kind: Kind, spec: str | Mapping[str, Any], **given: Any) -> Callable[[], Any]:
    """Checks `module:Name`, or {"name": it, and keywords}, and returns what makes it; `given`: `dataset` and `seed`.

    Raises UnknownNameError or TypeError for what can be no oracle or judge, or wrong keywords; what is returned raises
    TypeError for what is none, OracleError for an error within the call.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name")
    who = f"{kind.capitalize()} {name!r}"
    found = find_attribute(kind.capitalize(), name)
    if is_object(found, kind):
        if options:
            raise TypeError(f"{who} is an object and takes no keywords, got {', '.join(options)}.")
        return lambda: found
    if not callable(found) or (isinstance(found, type) and not callable(getattr(found, _PROTOCOLS[kind][1], None))):
        raise _no_such(kind, name, found)
    check_options(found, options)
    signature = inspect.signature(found)
    if kind == "oracle" and [*signature.parameters][:2] == ["instructions", "responses"]:
        return lambda: FunctionOracle(partial(found, **options), name=name.partition(":")[2])
    arguments = {key: value for key, value in given.items() if key in signature.parameters} | options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise TypeError(f"{who}: {error}.") from error

    def make() -> Any:
        try:
            returned = found(**arguments)
        except AlpacaFarmError:
            raise
        except Exception as error:
            raise OracleError(f"{who} raised {type(error).__name__}: {error}") from error
        if (made := as_object(returned, kind)) is None:
            raise _no_such(kind, name, returned)
        return made

    return make


def check_options(build: Callable[..., Any], given: Mapping[str, Any], *fixed: str) -> None:
    """Refuses keywords of a user's that `build` does not take; `fixed` are not for users.

    Raises UnknownNameError for the name of one, TypeError for a value that is not as the parameter is annotated.
    """
    parameters = inspect.signature(build).parameters
    options = [name for name in parameters if name not in fixed]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in given:
            if key not in options:
                raise did_you_mean("option", key, options)
    for key in given.keys() & parameters.keys():
        _check_type(key, given[key], parameters[key].annotation)


def _check_type(key: str, value: object, annotation: Any) -> None:
    """Refuses another type than that of an annotation such as `float | None`; what is not of `_TYPES` is left alone."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    names = text.split(" | ")
    if not all(name in _TYPES for name in names):
        return
    types = tuple(_TYPES[name] for name in names)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):  # bool is an int to Python
        raise TypeError(f"Option {key!r}: expected {' or '.join(names)}, got {value!r:.60}.")


def _no_such(kind: Kind, name: str, found: object) -> TypeError:
    method = _PROTOCOLS[kind][1]
    hint = f" It compares pairs: give {{'judge': {name!r}}}." if kind == "oracle" and hasattr(found, "compare") else ""
    return TypeError(
        f"{kind.capitalize()} {name!r}: expected an object with name (a text) and {method} (a method), or a class or "
        f"function that makes one, got {found!r}.{hint}"
    )
