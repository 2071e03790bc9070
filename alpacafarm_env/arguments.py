"""Types of command line arguments for argparse, and numbers of the environment."""

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Final

from .errors import WorldError


def whole_number(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`, or of `least` or more."""

    def read(text: str) -> int:
        value = int(text) if text.strip().isdecimal() else least - 1
        if value < least or (most is not None and value > most):
            kind = "a positive int" if least == 1 else f"an int of {least} or more"
            raise ArgumentTypeError(f"expected {f'an int of {least} to {most}' if most else kind}, got {text!r}")
        return value

    return read


SEED: Final = whole_number(0, 2**63 - 1)
"""Seeds: those that a database and a server's JSON can hold."""


def real_number(low: float = 0.0, high: float = math.inf) -> Callable[[str], float]:
    """Finite numbers from `low` to `high`."""

    def read(text: str) -> float:
        value = _float(text)
        if not (low <= value <= high and math.isfinite(value)):
            top = "or more" if math.isinf(high) else f"to {high:g}"
            raise ArgumentTypeError(f"expected a number of {low:g} {top}, got {text!r}")
        return value

    return read


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def environment_number(variable: str, default: int) -> int:
    """A whole number that torchrun leaves in the environment, such as WORLD_SIZE; WorldError if it is none."""
    text = os.environ.get(variable) or str(default)
    if not text.strip().isdecimal():
        raise WorldError(f"{variable}: expected a whole number, as torchrun sets it, got {text!r}. Unset it.")
    return int(text)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
