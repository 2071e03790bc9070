"""A request to a served model as plain data, and its key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .tokens import TokenBounds

Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class Request:
    """What is sent, and to where.

    Attributes:
        base_url: The server's address up to "/v1".
        kind: "chat" or "completion", the endpoint.
        body: The whole JSON body: model, messages or prompt, temperature, limits.
        sample: Tells draws from one body apart: a second opinion on the same prompt is another sample.
    """

    base_url: str
    kind: Kind
    body: dict[str, Any]
    sample: str = ""

    @cached_property
    def key(self) -> str:
        """SHA-256 of all of it, in hexadecimal: a request that differs in anything has another key."""
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
