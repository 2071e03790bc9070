"""A request to a served model as plain data, its key, and how many tokens it can take whatever a server reports."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, TypeGuard

Kind = Literal["chat", "completion", "tokens"]
"""The last is a completion whose answer is token ids: it may have no text."""
Usage = tuple[int | None, int | None]
"""Tokens of the prompt and of the completion; None where unknown."""
_BYTES_PER_TOKEN = 8
"""Most bytes of text per token on average: English has four to five, Chinese three to six. Only runs of one character
have more; such a text is charged too much, never too little."""


@dataclass(frozen=True)
class Request:
    """What is sent, and where to.

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
    most_completion: float  # the body's own limit, over all choices and prompts; `math.inf`: it sets none

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

    def doubts(self, reported: tuple[object, object]) -> str:
        """What is impossible in a reported usage, with the numbers; "" if nothing is."""
        spans = {"prompt": (self.fewest_prompt, self.most_prompt), "completion": (0, self.most_completion)}
        return ", ".join(
            f"{str(count)[:40]} {name} tokens where {least:,} to {most:,} can be"
            for (name, (least, most)), count in zip(spans.items(), reported, strict=True)
            if count is not None and not _within(count, least, most)
        )


def _text_bytes(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    texts = [message.get("content") for message in body.get("messages") or () if isinstance(message, dict)]
    texts += prompt if isinstance(prompt, list) else [prompt]
    parts = [part.get("text") for text in texts if isinstance(text, list) for part in text if isinstance(part, dict)]
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in [*texts, *parts] if isinstance(text, str))


def _most_completion(body: Mapping[str, Any]) -> float:
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not limits or not all(_within(limit, 0, math.inf) for limit in limits):
        return math.inf
    prompts = body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    choices = [int(body[name]) for name in ("n", "best_of") if _within(body.get(name), 1, math.inf)]
    return int(max(limits)) * max([1, *choices]) * several


def _within(value: object, least: float, most: float) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most
