"""Seeded faults of the judge server: which there are, how often each comes, and whether the answer was billed.

A faults file is JSON or YAML: {"retry_after_date": 0.1, "cut_json": 0.03, "drip": 0.01, "drip_s": 0.2}, that is the
rate of each fault and, where they should differ from the defaults, the parameters of `Faults`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from ..annotators.strict_yaml import MAX_BYTES, hint, mistakes_error, read_yaml
from ..errors import PoolError
from ..seeding import keyed_uniforms


class Kind(NamedTuple):
    """What a fault looks like to the client, and whether the model's work was charged for all the same."""

    about: str
    billed: bool
    usable: bool = False
    """Whether the reply holds the right answer nevertheless."""


FAULTS: Final[Mapping[str, Kind]] = {
    "retry_after_seconds": Kind("status 429, Retry-After in seconds", billed=False),
    "retry_after_date": Kind("status 429, Retry-After as an HTTP date", billed=False),
    "retry_after_ms": Kind("status 429, retry-after-ms in milliseconds", billed=False),
    "retry_after_garbage": Kind("status 429, a Retry-After that says nothing", billed=False),
    "server_error": Kind("status 500", billed=False),
    "unavailable": Kind("status 503", billed=False),
    "reset": Kind("the connection is reset in the middle of the answer", billed=True),
    "cut_json": Kind("status 200, half of the JSON body", billed=True),
    "html": Kind("status 200, a page of HTML", billed=False),
    "error_in_200": Kind("status 200, an error object instead of an answer", billed=False),
    "empty_choices": Kind("status 200, a list of no choices", billed=True),
    "null_content": Kind("status 200, null where the text belongs", billed=True),
    "wrong_count": Kind("status 200, a verdict too few or too many", billed=True),
    "content_filter": Kind("status 200, no text, finish_reason content_filter", billed=True),
    "finish_length": Kind("status 200, half of the text, finish_reason length", billed=True),
    "drip": Kind("the answer arrives one byte at a time, drip_s apart", billed=True, usable=True),
    "hang": Kind("nothing arrives for hang_s, then the connection ends", billed=True),
    "absurd_usage": Kind("the answer with negative tokens or 10^12 of them", billed=True, usable=True),
    "no_usage": Kind("the answer without its count of tokens", billed=True, usable=True),
    "echo_key": Kind("status 401, the message quotes the key that was sent", billed=False),
    "redirect": Kind("status 307 to redirect_to", billed=False),
}


class Draw(NamedTuple):
    """What happens to one request: the fault, if any, and a number in [0, 1) for its details."""

    fault: str | None
    detail: float


@dataclass(frozen=True)
class Faults:
    """How often each fault comes.

    Args:
        rates: Fault (see `FAULTS`) -> share of the requests in [0, 1]; together at most 1.
        retry_s: What the Retry-After headers ask for, in seconds; a date is rounded up to a whole second.
        drip_s: Seconds between two bytes of a dripping answer.
        hang_s: Seconds until a hanging connection ends without an answer.
        redirect_to: Where a redirect points. The default is an address that exists nowhere.

    Raises:
        PoolError: Unknown faults or values out of range; the message lists all of them.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    retry_s: float = 1.0
    drip_s: float = 1.0
    hang_s: float = 600.0
    redirect_to: str = "http://elsewhere.invalid/v1/chat/completions"

    def __post_init__(self) -> None:
        parameters = {name: getattr(self, name) for name in _PARAMETERS}
        problems = _problems({**self.rates, **parameters})
        if problems:
            raise mistakes_error("faults", problems)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Reads a faults file: JSON if its name ends in .json, else YAML.

        Raises:
            PoolError: The file cannot be read, or is not a mapping of faults to rates; every problem is listed.
        """
        place = Path(path)
        content = _mapping(place)
        problems = _problems(content)
        if problems:
            raise mistakes_error(place, problems)
        parameters = {name: content[name] for name in _PARAMETERS if name in content}
        return cls({name: content[name] for name in FAULTS if name in content}, **parameters)

    def draw(self, seed: int, body: str, occurrence: int) -> Draw:
        """The fault of one request, keyed on its arguments alone.

        Args:
            seed: The server's seed.
            body: The request's body, or a digest of it.
            occurrence: How many times this body has come before.
        """
        if not any(self.rates.values()):
            return Draw(None, 0.0)
        chance, detail = (
            float(keyed_uniforms(seed, stream, [(body, str(occurrence))])[0]) for stream in ("fault", "fault detail")
        )
        for name in FAULTS:  # in this order, whatever the file's, so that equal rates give equal faults
            chance -= self.rates.get(name, 0.0)
            if chance < 0:
                return Draw(name, detail)
        return Draw(None, detail)


_PARAMETERS: Final = tuple(item.name for item in fields(Faults) if item.name != "rates")


def _mapping(path: Path) -> dict[str, Any]:
    """The file's content, a mapping with names as keys."""
    value = _json(path) if path.suffix == ".json" else read_yaml(path)
    if value is None:
        return {}  # an empty file: no faults
    if not isinstance(value, dict):
        raise PoolError(f"{path}: expected a mapping of faults to rates, got {type(value).__name__}.")
    return {str(name): rate for name, rate in value.items()}


def _json(path: Path) -> object:
    # Not as YAML, which JSON nearly is: there 1e-3 would be a text.
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PoolError(f"{path}: larger than {MAX_BYTES} bytes; expected a short JSON file.")
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise PoolError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, PoolError):
            raise
        raise PoolError(f"{path}: expected JSON. {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"the key {doubled[0]!r} stands there twice")
    return dict(pairs)


def _problems(content: Mapping[str, Any]) -> list[str]:
    """What is wrong, one sentence a field."""
    found = []
    total = 0.0
    for name, value in content.items():
        if name in FAULTS:
            if _is_number(value) and 0 <= value <= 1:
                total += value
            else:
                found.append(f"{name}: expected a rate from 0 to 1, got {value!r}.")
        elif name == "redirect_to":
            found += _address_problems(value)
        elif name in _PARAMETERS:
            if not (_is_number(value) and 0 <= value <= 86400):
                found.append(f"{name}: expected seconds from 0 to 86400, got {value!r}.")
        else:
            found.append(f"{name}: unknown fault.{hint(name, (*FAULTS, *_PARAMETERS))}")
    if total > 1 + 1e-9:
        found.append(f"The rates add up to {total:g}; expected at most 1. Lower some of them.")
    return found


def _address_problems(value: object) -> list[str]:
    try:
        parts = urlsplit(value) if isinstance(value, str) and value.isascii() and value.isprintable() else None
        if parts and parts.scheme in ("http", "https") and parts.hostname and " " not in str(value):
            return []
    except ValueError:
        pass  # brackets that hold no address: said below
    return [f"redirect_to: expected an address like http://host/v1/chat/completions, got {value!r}."]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
