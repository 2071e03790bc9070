"""How numbers, intervals and tables are written for people."""

from __future__ import annotations

import math

from ...statistics import Interval


def decimals(unit: str) -> int:
    """Digits after the point that are worth reading."""
    return {"%": 1, "characters": 0}.get(unit, 2)


def number(value: float, unit: str = "") -> str:
    """A number for people; "–" for NaN."""
    return "–" if math.isnan(value) else f"{_rounded(value, unit):.{decimals(unit)}f}"


def signed(value: float, unit: str = "") -> str:
    """A difference for people, with its sign; "–" for NaN."""
    return "–" if math.isnan(value) else f"{_rounded(value, unit):+.{decimals(unit)}f}"


def interval_text(value: Interval, unit: str) -> str:
    """For instance "47.1 [45.0, 49.2]"; the mean alone for one seed."""
    mean = number(value.mean, unit)
    return mean if math.isnan(value.low) else f"{mean} [{number(value.low, unit)}, {number(value.high, unit)}]"


def _rounded(value: float, unit: str) -> float:
    return round(value, decimals(unit)) + 0.0  # the sum turns a negative zero into a positive one


SIMULATION = (
    "Sandbox: a simulation. Instructions, judges, human raters and gold are programs; nothing here is evidence about "
    "GPT-4, Davinci003 or people."
)
