"""Raw replies of chat and completion servers, read strictly: what is no answer is an error, never an empty text.

Raw bodies are what the ledger keeps, so that reading them again with newer code costs nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import exp, log
from typing import Any

from ..errors import InvalidReplyError
from .refusals import refused_text
from .requests import Kind

LONGEST_REPLY = 8 * 2**20
"""Bytes of the longest body that is read, after decompression."""


class FinalReplyError(InvalidReplyError):
    """A reply that would not be better another time: filtered, or nothing said within the limit on tokens."""


@dataclass(frozen=True)
class Reply:
    """What a model answered.

    Attributes:
        text: The answer; never empty or blank.
        finish_reason: Why it ended ("stop", "length" ...), None if the server does not say.
        logprobs: For each token of the answer the log-probabilities of the likeliest tokens in its place; None if the
            server sent none, or none that can be.
        prompt_tokens: Tokens read, as the server counts; None if that count cannot be.
        completion_tokens: Tokens written; None if that count cannot be.
    """

    text: str
    finish_reason: str | None = None
    logprobs: tuple[dict[str, float], ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def read_reply(kind: Kind, raw: str) -> Reply:
    """Read the body of a reply with status 200.

    Args:
        kind: "chat" or "completion", the endpoint that was asked.
        raw: The whole body.

    Raises:
        InvalidReplyError: It is not a JSON object, holds an error, no choice or no text. A `FinalReplyError` if asking
            again would not help.
    """
    body = _json(raw)
    if not isinstance(body, dict):
        raise InvalidReplyError(f"The reply is JSON but no object: {_shown(raw)}")
    if body.get("error"):
        refused = refused_text(json.dumps(body["error"]), body["error"])
        if refused:
            raise FinalReplyError(f"{refused}. The server said: {_shown(body['error'])}")
        raise InvalidReplyError(f"The reply holds an error: {_shown(body['error'])}")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise InvalidReplyError(f"The reply has no choice, hence no answer: {_shown(raw)}")
    choice = choices[0]
    part = choice.get("message") if kind == "chat" else choice
    text = part.get("content" if kind == "chat" else "text") if isinstance(part, dict) else None
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise FinalReplyError("The server's filter stopped the answer (finish_reason='content_filter')")
    if not isinstance(text, str) or not text.strip():
        problem = f"The answer has no text but {_shown(text)}, with finish_reason={reason!r}"
        if reason == "length":
            raise FinalReplyError(f"{problem}: the limit on tokens is too low for this model")
        raise InvalidReplyError(problem)
    if not _is_utf8(text):
        raise InvalidReplyError(f"The answer holds half a character (a lone surrogate): {_shown(text)}")
    prompt, completion = read_usage(body)
    logprobs = _logprobs(kind, choice.get("logprobs"))
    return Reply(text, reason if isinstance(reason, str) else None, logprobs, prompt, completion)


def read_usage(body: Any) -> tuple[int | None, int | None]:
    """Tokens read and written according to a reply's JSON; None for each that is missing or cannot be."""
    usage = body.get("usage") if isinstance(body, dict) else None
    counts = (usage.get(name) for name in ("prompt_tokens", "completion_tokens")) if isinstance(usage, dict) else ()
    found = [count if type(count) is int and count >= 0 else None for count in counts] or [None, None]
    return found[0], found[1]


def told_usage(raw: str) -> tuple[object, object]:
    """What a raw body says of the tokens read and written, as it stands there; None where it says nothing."""
    try:
        usage = _json(raw)["usage"]
        return usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (InvalidReplyError, AttributeError, LookupError, TypeError):
        return None, None


def raw_usage(raw: str) -> tuple[int | None, int | None]:
    """`read_usage` of a raw body that may be anything."""
    try:
        return read_usage(_json(raw))
    except InvalidReplyError:
        return None, None


def _json(raw: str) -> Any:
    body, problem = None, ""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        problem = str(error)[:80]
    if problem:  # raised out here: the decoder's own error holds the whole text
        raise InvalidReplyError(f"The reply is not JSON, or was cut off ({problem}): {_shown(raw)}")
    return body


def _logprobs(kind: Kind, given: Any) -> tuple[dict[str, float], ...] | None:
    """Both endpoints' layouts as one: a dict for each token."""
    if not isinstance(given, dict):
        return None
    rows: list[dict[str, float]] = []
    tokens = given.get("content") if kind == "chat" else given.get("top_logprobs")
    for token in tokens if isinstance(tokens, list) else ():
        pairs = _pairs(kind, token)
        if not pairs or not all(isinstance(name, str) and _is_logprob(value) for name, value in pairs):
            return None
        row: dict[str, float] = {}
        for name, value in pairs:  # tokens of other bytes may have equal text: their probabilities add up
            row[name] = _log_sum(row[name], float(value)) if name in row else min(float(value), 0.0)
        rows.append(row)
    return tuple(rows) or None


def _pairs(kind: Kind, token: Any) -> list[tuple[Any, Any]]:
    if not isinstance(token, dict):
        return []
    if kind == "completion":
        return list(token.items())
    top = token.get("top_logprobs") or [token]
    entries = top if isinstance(top, list) and all(isinstance(entry, dict) for entry in top) else []
    return [(entry.get("token"), entry.get("logprob")) for entry in entries]


def _is_logprob(value: Any) -> bool:
    """Negative infinity is a probability of 0; a little above 0 is rounding."""
    return (type(value) is float or (type(value) is int and value > -(10**9))) and value <= 1e-3


def _log_sum(first: float, second: float) -> float:
    total = exp(first) + exp(second)
    return min(log(total), 0.0) if total > 0 else max(first, second)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return ascii(text) if len(text) <= 200 else f"{text[:200]!a}..."
