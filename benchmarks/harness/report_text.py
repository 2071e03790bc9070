"""How numbers, intervals and tables are written for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ...statistics import Interval
from . import report


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


def text_table(table: report.Table) -> str:
    """The table for a terminal: columns of equal width."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def settings_table(settings: Mapping[str, Any], caption: str = "") -> report.Table:
    """Names and values, nested ones as JSON."""
    rows = [
        (name, value if isinstance(value, str) else json.dumps(value, default=str)) for name, value in settings.items()
    ]
    return report.Table(("name", "value"), rows, caption)
