"""Oracles and judges of a user's own, named `module:Name` as Gymnasium names environments of other modules.

A class or a function is called with the specification's keywords, and with `dataset` and `seed` if it has parameters
of these names; what it returns, or an object, is the oracle. A function of `instructions` and `responses` is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final, Self

from pydantic import ConfigDict, model_validator

from ..data import Dataset
from ..errors import AlpacaFarmError
from ..plugins import find_attribute
from .base import FunctionOracle, Kind, OracleError, PreferenceOracle, RewardOracle
from .fields import Spec, keywords_of

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
