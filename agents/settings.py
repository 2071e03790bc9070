"""Settings of agents: frozen dataclasses that refuse a bad value by the name of its field."""

import math
from dataclasses import dataclass, fields
from types import NoneType
from typing import Literal, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every int, float, bool and Literal is checked against its type; floats must be finite."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))  # a field's own type is a text under `from __future__ import annotations`
        for field in fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            kinds = get_args(hint) or (hint,)
            if value is None and NoneType in kinds:
                continue
            for choices in (get_args(kind) for kind in (hint, *kinds) if get_origin(kind) is Literal):
                self.require(value in choices, field.name, f"one of {choices}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self.require(int not in kinds or (number and isinstance(value, int)), field.name, "an integer")
            self.require(float not in kinds or (number and math.isfinite(value)), field.name, "a finite number")
            self.require(bool not in kinds or isinstance(value, bool), field.name, "True or False")

    @classmethod
    def paper(cls) -> Self:
        """The settings of the paper that the class names; usually its defaults."""
        return cls()

    def require(self, holds: bool, field: str, expected: str) -> None:
        """Raise a ValueError that names the field, what it may be and what it is."""
        if not holds:
            raise ValueError(f"{type(self).__name__}.{field} must be {expected}, got {getattr(self, field)!r}")

    def at_least(self, least: int, *names: str) -> None:
        """Require fields, where they are not None, to be `least` or more."""
        for name in names:
            self.require(getattr(self, name) is None or getattr(self, name) >= least, name, f"{least} or more")

    def above_0(self, *names: str) -> None:
        """Require fields, where they are not None, to be above 0."""
        for name in names:
            self.require(getattr(self, name) is None or getattr(self, name) > 0, name, "above 0")
