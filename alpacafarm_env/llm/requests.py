"""A request to a served model as plain data, its key, and what it costs: at most before it is sent, and by its reply.

How many tokens it can take follows from the request, whatever a server reports.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import Field, TypeAdapter, ValidationError

from ..errors import PoolError

Kind = Literal["chat", "completion", "tokens"]
"""The last is a completion whose answer is token ids: it may have no text."""
Usage = tuple[int | None, int | None]
"""Tokens of the prompt and of the completion; None where unknown."""
_Dollars = Annotated[float, Field(strict=True, ge=0, le=1e6)]
SHIPPED_PRICES = Path(__file__).with_name("prices.yaml")
_BYTES_PER_TOKEN = 8
"""Most bytes of text per token on average: English has four to five, Chinese three to six. Only runs of one character
have more; such a text is charged too much, never too little."""


@dataclass(frozen=True)
class Request:
    """A request: its content, and where it goes.

    Attributes:
        base_url: The server's address up to "/v1".
        kind: The endpoint, and what of its reply is the answer.
        body: The whole JSON body: model, messages or prompt, temperature, limits.
        sample: Distinguishes draws from one body: a second opinion on the same prompt is another sample.
    """

    base_url: str
    kind: Kind
    body: dict[str, Any]
    sample: str = ""

    @cached_property
    def key(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        return content_key({"base_url": self.base_url, "kind": self.kind, "body": self.body, "sample": self.sample})

    @cached_property
    def bounds(self) -> TokenBounds:
        """The fewest and the most tokens it can take."""
        return TokenBounds.of(self.body)

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.body["model"])


def content_key(content: Any) -> str:
    """SHA-256 of JSON-able content in its canonical form, in hexadecimal."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True)
class TokenBounds:
    """The fewest and the most tokens of a request."""

    fewest_prompt: int  # one per `_BYTES_PER_TOKEN` bytes of its texts, at least 1
    most_prompt: int  # the bytes of the whole body: a token is at least one byte
    most_completion: float  # the body's own limit, over all choices; `math.inf`: it sets none

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The bounds of a request's body."""
        size = len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        return cls(max(1, _text_bytes(body) // _BYTES_PER_TOKEN), size, _most_completion(body))

    def believable(self, reported: tuple[object, object]) -> Usage:
        """The reported tokens, None for each count that the request cannot have taken."""
        prompt, completion = reported
        return (
            prompt if _within(prompt, 1, self.most_prompt) else None,
            completion if _within(completion, 0, self.most_completion) else None,
        )


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens of the prompt and of the completion (hidden reasoning included), read at `source`.

    `as_of` is the month ("2026-03") it was read.
    """

    input_usd: float
    output_usd: float
    as_of: str = ""
    source: str = "given by the user"


@dataclass(frozen=True)
class Prices:
    """Prices by exact model name: a dated snapshot need not have its model's price (gpt-4o-2024-05-13 has not)."""

    models: Mapping[str, Price]

    @classmethod
    def load(cls, overrides: Mapping[str, Sequence[float]] | None = None) -> Self:
        """The package's own prices.

        Args:
            overrides: Your own, {"model": [input, output]} in US dollars per million tokens; they take precedence.

        Raises:
            PoolError: An override is no pair of numbers from 0 to 1e6; the message lists all that are not.
        """
        import yaml

        try:
            pairs = TypeAdapter(dict[str, tuple[_Dollars, _Dollars]]).validate_python(dict(overrides or {}))
        except ValidationError as error:
            raise PoolError(f"The prices given: expected [input, output] in USD per million tokens: {error}") from None
        own = {model: Price(*pair) for model, pair in pairs.items()}
        shipped = yaml.safe_load(SHIPPED_PRICES.read_text("utf-8"))
        for model, row in shipped.items():
            own.setdefault(model, Price(*row.pop("usd_per_million"), **row))
        return cls(own)

    def cost(self, model: str, prompt_tokens: float, completion_tokens: float) -> float | None:
        """US dollars for so many tokens; None if no price is known."""
        price = self.models.get(model)
        if price is None:
            return None
        return (prompt_tokens * price.input_usd + completion_tokens * price.output_usd) / 1e6

    def upper_bound(self, request: Request) -> float | None:
        """The most a request can cost, in US dollars; None if no price is known or the request sets no limit."""
        bounds = request.bounds
        if math.isinf(bounds.most_completion):
            return None
        return self.cost(request.model, bounds.most_prompt, bounds.most_completion)

    def charge(self, request: Request, reported: tuple[object, object]) -> float | None:
        """The charge for an answered request, in US dollars; None as in `upper_bound`.

        The reported (prompt tokens, completion tokens) if believable, with `fewest_prompt` as a floor for the prompt;
        else the upper bound. A request without a limit is charged what was reported.
        """
        prompt, completion = request.bounds.believable(reported)
        if prompt is None or completion is None:
            return self.upper_bound(request)
        return self.cost(request.model, max(prompt, request.bounds.fewest_prompt), completion)


def _text_bytes(body: Mapping[str, Any]) -> int:
    texts = [body.get("prompt"), *(message.get("content") for message in body.get("messages", ()))]
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if isinstance(text, str))


def _most_completion(body: Mapping[str, Any]) -> float:
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not limits or not all(_within(limit, 0, math.inf) for limit in limits):
        return math.inf
    choices = [int(body[name]) for name in ("n", "best_of") if _within(body.get(name), 1, math.inf)]
    return int(max(limits)) * max([1, *choices])


def _within(value: object, least: float, most: float) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most
