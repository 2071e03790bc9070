"""What all specifications of `registry` are: pydantic models, whose further keys are a function's or class's keywords.

A user's own oracles and judges are named `module:Name`, as Gymnasium names environments of other modules. A class or a
function is called with the specification's keywords, and with `dataset` and `seed` if it has parameters of these names;
what it returns, or an object, is the oracle. A function of `instructions` and `responses` is one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Literal, Self, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator

from ..data import Dataset
from ..errors import AlpacaFarmError, FieldError, did_you_mean
from ..plugins import find_attribute
from ..pretrained import file_states
from .base import FunctionOracle, Kind, OracleError, PreferenceOracle, RewardOracle

_FILES: Final = {"reward_model", "human", "policy"}
"""Keys of files and folders."""
_SIMPLE: Final = (bool, int, float, str, NoneType, Path)
"""Types of values that may come from JSON; what is annotated otherwise is not checked here."""


class Spec(BaseModel):
    """A specification. `_make` builds the oracle or the raters, `_judge` the judge, of a dataset and a seed.

    Its content is the keys that were given and the state of what they name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        for key in given.keys() - cls.model_fields if cls.model_config["extra"] == "forbid" else ():
            raise did_you_mean("option", key, cls.model_fields)
        return {key: value.item() if isinstance(value, np.generic) else value for key, value in given.items()}

    def _given(self, **defaults: Any) -> dict[str, Any]:
        """The keys that were given, over `defaults`."""
        values = {**self.__dict__, **(self.model_extra or {})}
        return defaults | {key: value for key, value in values.items() if key in self.model_fields_set}

    def _state(self) -> list[Any]:
        return [file_states(getattr(self, key)) for key in _FILES & self.model_fields_set]

    def make(self, dataset: Any, seed: int) -> Any:
        """Makes the oracle: the same for the same content, dataset and seed, or a new one if it holds objects."""
        try:
            place = id(dataset), seed, json.dumps(self, default=_content, sort_keys=True)
        except TypeError:
            return self._make(dataset, seed)
        if place not in _made:
            _made[place] = dataset, self, self._make(dataset, seed)
        return _made[place][-1]

    def _make(self, dataset: Any, seed: int) -> Any:
        raise NotImplementedError


# The dataset and the specification, which holds what a user's names stand for, are kept, so that no others have their
# ids.
_made: Final[dict[tuple[int, int, str], tuple[Any, Spec, Any]]] = {}


def _content(value: object) -> Any:
    if isinstance(value, Spec):
        return type(value).__name__, value._given(), value._state()
    if isinstance(value, PathLike):
        return str(fspath(value))
    raise TypeError


class Taking(Spec):
    """A specification with the keywords of the function or class that it `takes`, but for those that are `fixed`."""

    model_config = ConfigDict(extra="allow")
    takes: ClassVar[str]
    fixed: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _check_keywords(self) -> Self:
        keywords_of(find_attribute("Option", self.takes), *self.fixed).model_validate(self.model_extra)
        return self

    def _call(self, *arguments: Any, but: str = "", **defaults: Any) -> Any:
        given = self._given(**defaults)
        given.pop(but, None)
        return find_attribute("Option", self.takes)(*arguments, **given)


def keywords_of(build: Callable[..., Any], *fixed: str) -> type[Spec]:
    """A specification whose fields are a function's or a class's keywords, as annotated, but for those `fixed`."""
    try:
        parameters = inspect.signature(build, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 -- code of a user's: a name may be there for type checkers alone
        parameters = inspect.signature(build).parameters.values()
    fields: dict[str, Any] = {}
    for each in parameters:
        if each.name not in fixed and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            hint = each.annotation
            kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
            simple = all(kind in _SIMPLE or get_origin(kind) is Literal for kind in kinds)
            fields[each.name] = (hint if simple else Any, ... if each.default is each.empty else each.default)
    extra = "allow" if any(each.kind is each.VAR_KEYWORD for each in parameters) else "forbid"
    return create_model("Keywords", __base__=Spec, __cls_kwargs__={"extra": extra}, **fields)


def field_error(error: ValidationError, path: str, spec: Any) -> Exception:
    """The error about the first faulty field: one of ours as it was raised, or a FieldError."""
    faults: list[Any] = error.errors()
    fault, value = faults[0], spec
    for key in fault["loc"]:  # keys and places, but tags of unions too
        if (isinstance(value, Mapping) and key in value) or (isinstance(value, list) and isinstance(key, int)):
            path, value = f"{path}.{key}", value[key]
    if inner := fault.get("ctx", {}).get("error"):
        ours: Exception = field_error(inner, path, value) if isinstance(inner, ValidationError) else inner
        return ours
    if fault["type"] == "missing":
        return FieldError(f"{path}.{fault['loc'][-1]}", "expected a value, got none")
    expected = [each["msg"].removeprefix("Input should be ") for each in faults if each["input"] is fault["input"]]
    return FieldError(path, f"expected {' or '.join(dict.fromkeys(expected))}, got {fault['input']!r:.60}")


METHODS: Final[Mapping[Kind, str]] = {"oracle": "score", "judge": "compare"}
_PROTOCOLS: Final[Mapping[Kind, type]] = {"oracle": RewardOracle, "judge": PreferenceOracle}


def is_own(name: object) -> bool:
    """Whether a specification's name is `module:Name`, and no JSON given as text."""
    return isinstance(name, str) and ":" in name and not name.lstrip().startswith("{")


def is_object(value: object, kind: Kind) -> bool:
    """Whether an object, and no class, has what the protocol asks for: `isinstance` looks at the names alone."""
    if isinstance(value, type) or not isinstance(value, _PROTOCOLS[kind]):
        return False
    return isinstance(getattr(value, "name", None), str) and callable(getattr(value, METHODS[kind]))


def as_object(value: Any, kind: Kind) -> Any:
    """An object of that kind as it is, a function as an oracle that asks it; None for anything else."""
    if is_object(value, kind):
        return value
    function = callable(value) and not (isinstance(value, type) or hasattr(value, "score") or hasattr(value, "compare"))
    return FunctionOracle(value) if function and kind == "oracle" else None


def only_compares(name: str) -> bool:
    """Whether `module:Name` is a judge or its class, and no oracle; of a function nobody knows before it is called."""
    value = find_attribute("Oracle", name)
    return hasattr(value, "compare") and not hasattr(value, "score")


def parts_of(spec: Mapping[str, Any]) -> list[Any]:
    """The parts of a mapping that specify other oracles or judges."""
    if spec.keys() & {"reward_model", "pool", "human"}:
        return []
    if "ensemble" in spec:
        return list(spec["ensemble"])
    return [spec[key] for key in ("name", "judge", "rating") if key in spec]


class Own(Spec):
    """A user's own `module:Name`, and its keywords."""

    model_config = ConfigDict(extra="allow")
    name: str
    kind: ClassVar[Kind] = "oracle"
    _value: Any = None

    @model_validator(mode="after")
    def _look_up(self) -> Self:
        value = self._value = find_attribute(self.kind.capitalize(), self.name)
        if is_object(value, self.kind):
            if self.model_extra:
                raise TypeError(f"{self.name!r} is an object and takes no keywords, got {', '.join(self.model_extra)}.")
            return self
        if not callable(value) or (isinstance(value, type) and not hasattr(value, METHODS[self.kind])):
            raise self._no_such(value)
        keywords_of(value, *self._batch()).model_validate(self._arguments(None, 0))
        return self

    def _state(self) -> list[Any]:
        return [id(self._value)]

    def _batch(self) -> list[str]:
        """The parameters of a function that scores, [] for what makes an oracle."""
        names = [*inspect.signature(self._value).parameters][:2]
        return names if self.kind == "oracle" and names == ["instructions", "responses"] else []

    def _arguments(self, dataset: Any, seed: int) -> dict[str, Any]:
        place = {"dataset": dataset, "seed": seed}
        wanted = place.keys() & inspect.signature(self._value).parameters
        return {key: place[key] for key in wanted} | (self.model_extra or {})

    def _make(self, dataset: Dataset, seed: int) -> Any:
        if is_object(self._value, self.kind):
            return self._value
        arguments = self._arguments(dataset, seed)
        if self._batch():
            return FunctionOracle(partial(self._value, **arguments), name=self.name.partition(":")[2])
        try:
            made = self._value(**arguments)
        except AlpacaFarmError:
            raise
        except Exception as error:
            text = f"{self.kind.capitalize()} {self.name!r} raised {type(error).__name__}: {error}"
            raise OracleError(text) from error
        if (oracle := as_object(made, self.kind)) is None:
            raise self._no_such(made)
        return oracle

    def _no_such(self, value: object) -> TypeError:
        compares = self.kind == "oracle" and hasattr(value, "compare")
        hint = f" It compares pairs: give {{'judge': {self.name!r}}}." if compares else ""
        return TypeError(
            f"{self.kind.capitalize()} {self.name!r}: expected an object with name (a text) and {METHODS[self.kind]} "
            f"(a method), or a class or function that makes one, got {value!r}.{hint}"
        )


class OwnJudge(Own):
    """A user's own judge."""

    kind = "judge"
    _judge = Own._make
