"""Seeded faults of the judge server: which there are, how often each comes, and whether the answer was billed.

A faults file is JSON or YAML: {"retry_after_date": 0.1, "cut_json": 0.03, "drip": 0.01, "drip_s": 0.2}, that is the
rate of each fault and, where they differ from the defaults, the parameters of `Faults`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, create_model

from ..annotators.strict_yaml import Strict, check, mistakes_error, read_yaml
from ..errors import PoolError
from ..seeding import keyed_uniforms


class Kind(NamedTuple):
    """What a fault looks like to the client, whether the work was charged, and whether the reply holds the answer."""

    about: str
    billed: bool
    usable: bool = False


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
    """What happens to one request: a fault or none, and a number in [0, 1) for its details."""

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
        redirect_to: Where a redirect points. The default exists nowhere.

    Raises:
        PoolError: Unknown faults or values out of range; the message lists all of them.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    retry_s: float = 1.0
    drip_s: float = 1.0
    hang_s: float = 600.0
    redirect_to: str = "http://elsewhere.invalid/v1/chat/completions"

    def __post_init__(self) -> None:
        _check({**self.rates, **{name: getattr(self, name) for name in PARAMETERS}}, "faults")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Reads a faults file: JSON if its name ends in .json, else YAML.

        Raises:
            PoolError: The file cannot be read, or is not a mapping of faults to rates; every mistaken field is listed.
        """
        place = Path(path)
        content: Any = _json(place) if place.suffix == ".json" else read_yaml(place)
        content = {} if content is None else content  # an empty file
        _check(content, place)
        parameters = {name: content[name] for name in PARAMETERS if name in content}
        return cls({name: content[name] for name in FAULTS if name in content}, **parameters)

    def draw(self, seed: int, body: str, occurrence: int) -> Draw:
        """The fault of one request, keyed on the server's seed, the body's digest, and how often it came before."""
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


PARAMETERS: Final = {item.name: item.default for item in fields(Faults) if item.name != "rates"}


def _address(value: str) -> str:
    try:
        parts = urlsplit(value) if value.isascii() and value.isprintable() and " " not in value else None
        if parts and parts.scheme in ("http", "https") and parts.hostname:
            return value
    except ValueError:
        pass  # brackets that hold no address
    raise ValueError(f"expected an address like http://host/v1/chat/completions, got {value!r}.")


_RATE: Final = (Annotated[float, Field(ge=0, le=1)], 0.0)
_SECONDS: Final = (Annotated[float, Field(ge=0, le=86400)], 0.0)
_File: Final = create_model(
    "_File",
    __base__=Strict,
    **dict.fromkeys(FAULTS, _RATE),  # type: ignore[call-overload]
    **dict.fromkeys(("retry_s", "drip_s", "hang_s"), _SECONDS),
    redirect_to=(Annotated[str, AfterValidator(_address)], ""),
)


def _check(content: Any, where: object) -> None:
    check(_File, content, where)
    total = sum(rate for name, rate in content.items() if name in FAULTS)
    if total > 1 + 1e-9:
        raise mistakes_error(where, [f"The rates add up to {total:g}; expected at most 1. Lower some of them."])


def _json(path: Path) -> object:
    # Not as YAML, which JSON nearly is: there 1e-3 would be a text.
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise PoolError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, RecursionError) as error:
        raise PoolError(f"{path}: expected JSON. {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {name!r} stands there twice")
    return dict(pairs)
