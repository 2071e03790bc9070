"""What people write: names in any case, and numbers of the environment."""

import os
from collections.abc import Iterable

from .errors import WorldError, did_you_mean


def match_name(kind: str, name: str, options: Iterable[str]) -> str:
    """The option that is called so, whatever the case, and whether with hyphens or underscores.

    Raises:
        UnknownNameError: There is none; names the closest and all.
    """
    names = list(options)
    plain = {_plain(each): each for each in names}
    if (key := _plain(name)) not in plain:
        raise did_you_mean(kind, name, names)
    return name if name in names else plain[key]


def environment_number(variable: str, default: int) -> int:
    """A whole number that torchrun leaves in the environment, such as WORLD_SIZE; WorldError if it is none."""
    text = os.environ.get(variable) or str(default)
    if not text.strip().isdecimal():
        raise WorldError(f"{variable}: expected a whole number, as torchrun sets it, got {text!r}. Unset it.")
    return int(text)


def _plain(name: str) -> str:
    return name.strip().casefold().replace("-", "_")
