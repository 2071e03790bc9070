"""What people write: names in any case, and numbers of the environment."""

import os
from collections.abc import Iterable
from typing import Final

from .errors import WorldError, did_you_mean

FAMILIES: Final = {"ann": "sim_ann", "eval": "sim_eval", "greedy": "sim_gpt4"}
"""Families of judges: as people write them -> as tables and draws name them, which is read too."""


def match_name(kind: str, name: object, options: Iterable[str]) -> str:
    """The option that is called so, whatever the case, and whether with hyphens or underscores.

    Raises:
        UnknownNameError: There is none; names the closest and all.
    """
    names = list(options)
    plain = {_plain(each): each for each in names}
    if not isinstance(name, str) or (key := _plain(name)) not in plain:
        raise did_you_mean(kind, name, names)
    return name if name in names else plain[key]


def match_family(kind: str, name: object, options: Iterable[str]) -> str:
    """As `match_name`, of names among which are families of judges: those as tables name them.

    Raises:
        UnknownNameError: There is none; names the closest and all.
    """
    names = list(options)
    stored = {each: FAMILIES.get(each, each) for each in names}
    return name if isinstance(name, str) and name in stored.values() else stored[match_name(kind, name, names)]


def environment_number(variable: str, default: int) -> int:
    """A whole number that torchrun leaves in the environment, such as WORLD_SIZE; WorldError if it is none."""
    text = os.environ.get(variable) or str(default)
    if not text.strip().isdecimal():
        raise WorldError(f"{variable}: expected a whole number, as torchrun sets it, got {text!r}. Unset it.")
    return int(text)


def _plain(name: str) -> str:
    return name.strip().casefold().replace("-", "_")
