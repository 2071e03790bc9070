"""How many tokens a request can take, whatever a server reports of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

Usage = tuple[int | None, int | None]
"""Tokens of the prompt and of the completion; None where it is not known."""
_BYTES_PER_TOKEN = 8
"""Bytes of text that a token holds at most on average. English takes four to five, and Chinese three to six. Only runs
of one character, such as blanks, take more; such a text is then charged too much, which no budget minds."""


@dataclass(frozen=True)
class TokenBounds:
    """The fewest and the most tokens of a request.

    Attributes:
        fewest_prompt: One for `_BYTES_PER_TOKEN` bytes of its texts, at least 1.
        most_prompt: A token is at least one byte: the bytes of the whole body.
        most_completion: The body's own limit, over all choices and prompts; None: it sets none.
    """

    fewest_prompt: int
    most_prompt: int
    most_completion: int | None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The bounds of a request's body."""
        size = len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        return cls(max(1, _text_bytes(body) // _BYTES_PER_TOKEN), size, _most_completion(body))

    def believable(self, usage: Usage) -> Usage:
        """The tokens that a server reported, None for each count that the request cannot have taken."""
        prompt, completion = usage
        return (
            prompt if _within(prompt, 1, self.most_prompt) else None,
            completion if _within(completion, 0, self._completion_limit) else None,
        )

    def doubts(self, reported: tuple[object, object]) -> str:
        """What cannot be in a reported usage, with both numbers; "" where all of it can, or nothing was reported.

        Args:
            reported: (prompt tokens, completion tokens) as they stand in the reply, of whatever type.
        """
        spans = {"prompt": (self.fewest_prompt, self.most_prompt), "completion": (0, self._completion_limit)}
        return ", ".join(
            f"{str(count)[:40]} {name} tokens where {least:,} to {most:,} can be"
            for (name, (least, most)), count in zip(spans.items(), reported, strict=True)
            if count is not None and not _within(count, least, most)
        )

    @property
    def _completion_limit(self) -> float:
        return math.inf if self.most_completion is None else self.most_completion


def _text_bytes(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    texts = [message.get("content") for message in body.get("messages") or () if isinstance(message, dict)]
    texts += prompt if isinstance(prompt, list) else [prompt]
    parts = [part.get("text") for text in texts if isinstance(text, list) for part in text if isinstance(part, dict)]
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in [*texts, *parts] if isinstance(text, str))


def _most_completion(body: Mapping[str, Any]) -> int | None:
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not limits or not all(_within(limit, 0, math.inf) for limit in limits):
        return None
    prompts = body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    return int(max(limits)) * max(_count(body.get("n")), _count(body.get("best_of"))) * several


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 1 else 1


def _within(value: object, least: float, most: float) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
