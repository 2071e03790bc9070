"""Replies of a server: an answer, read strictly, or why there is none and what to do about it.

What is no answer is an error, never an empty text. The ledger keeps raw bodies, so that newer code can read them again
at no cost.
"""

import email.utils
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from math import inf
from typing import Any, Final, Literal

import numpy as np

from ..errors import InvalidReplyError
from .endpoint import Endpoint
from .requests import Kind, Usage

_MOST_CHARS: Final = 500
"""Characters of a server's own words in a message."""
_PASSES: Final = (408, 409, 425, 429)
_MAYBE_BILLED: Final = (408, 502, 504, 520, 522, 524)
"""Statuses by which a gateway gives up on a server that may have gone on and billed."""
_NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "LocalProtocolError")
_OF_A_TEXT: Final = (400, 403, 413, 422)
"""Statuses of what is too long or filtered, and of settings that the model does not take. Servers share no codes or
words that tell one from the other; `Client` takes it for the settings if nothing is answered."""
_QUOTA: Final = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_NO_API: Final = "there is no OpenAI-compatible server: it does not take such requests; check base_url ({base_url})"
_CLOSING: Final = {
    401: "the server refused the key; put the right one into the environment variable {key_variable}, or name another "
    "variable (api_key_env=, --api-key-env)",
    402: "the quota or the credit of this key is used up; see the account at {host}",
    404: "the server has no model {model!r}, or base_url is wrong (it mostly ends in /v1)",
    405: _NO_API,
    501: _NO_API,
}
_MOVED: Final = (
    "the server redirects elsewhere, which is not followed, as the key is for this address alone; check base_url"
)
_REFUSED: Final = (
    "The text is too long or filtered, the key may not use this model, or the model does not take the request's "
    "settings: a file of models can leave some out (omit: [temperature, top_p]) and rename the limit "
    "(max_tokens_field: max_completion_tokens), see alpacafarm_env/annotators/config.py; for an APIPolicy see "
    "agents/api_policy.py"
)


class FinalReplyError(InvalidReplyError):
    """A reply that would not be better another time: filtered, or nothing said within the limit on tokens."""


@dataclass(frozen=True)
class Reply:
    """An answer of a model; fields that the server did not send, or sent in an invalid form, are None.

    Attributes:
        text: The answer; never blank, but where it is asked for as token ids.
        finish_reason: Why it ended ("stop", "length" ...).
        logprobs: For each token of the answer the log-probabilities of the likeliest tokens in its place.
        prompt_tokens, completion_tokens: As the server counts.
    """

    text: str
    finish_reason: str | None = None
    logprobs: tuple[dict[str, float], ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def read_reply(kind: Kind, raw: str) -> Reply:
    """Read the whole body of a reply with status 200.

    Raises:
        InvalidReplyError: It is not a JSON object, holds an error, no choice or no text. A `FinalReplyError` if asking
            again would not help.
    """
    body = _json(raw)
    if not isinstance(body, dict):
        raise InvalidReplyError(f"The reply is JSON but no object: {_shown(raw)}")
    if error := body.get("error"):
        final = isinstance(error, dict) and error.get("code") in _OF_A_TEXT  # OpenRouter's
        raise (FinalReplyError if final else InvalidReplyError)(f"The reply holds an error: {_shown(error)}")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise InvalidReplyError(f"The reply has no choice, hence no answer: {_shown(raw)}")
    reason = choices[0].get("finish_reason")
    return Reply(
        _text(kind, choices[0]),
        reason if isinstance(reason, str) else None,
        _logprobs(kind, choices[0].get("logprobs")),
        *_counts(body.get("usage")),
    )


def reported_usage(raw: str) -> tuple[object, object]:
    """The prompt and completion tokens in a raw body, of whatever type; None where there are none."""
    try:
        usage = json.loads(raw)["usage"]
        return usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return None, None


def _json(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        problem = str(error)[:80]
    # Raised out here: the decoder's own error holds the whole text.
    raise InvalidReplyError(f"The reply is not JSON, or was cut off ({problem}): {_shown(raw)}")


def _text(kind: Kind, choice: dict[str, Any]) -> str:
    if kind == "tokens":
        return str(choice.get("text", ""))
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
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidReplyError(f"The answer holds half a character (a lone surrogate): {_shown(text)}")
    return text


def _counts(usage: Any) -> Usage:
    counts = [usage.get(f"{name}_tokens") if isinstance(usage, dict) else None for name in ("prompt", "completion")]
    prompt, completion = [count if type(count) is int and count >= 0 else None for count in counts]
    return prompt, completion


def _logprobs(kind: Kind, given: Any) -> tuple[dict[str, float], ...] | None:
    """Both endpoints' layouts as one: a dict per token."""
    if kind == "tokens" or not isinstance(given, dict):
        return None
    rows: list[dict[str, float]] = []
    tokens = given.get("content") if kind == "chat" else given.get("top_logprobs")
    for token in tokens if isinstance(tokens, list) else ():
        pairs = _pairs(kind, token)
        if not pairs or not all(isinstance(name, str) and _is_logprob(value) for name, value in pairs):
            return None
        row: dict[str, float] = {}
        for name, value in pairs:  # tokens of different bytes may have equal text: their probabilities add up
            row[name] = min(float(np.logaddexp(row.get(name, -inf), float(value))), 0.0)
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


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return ascii(text) if len(text) <= 200 else f"{text[:200]!a}..."


@dataclass(frozen=True)
class Failure:
    """Why an attempt brought no reply.

    Attributes:
        message: For people; without the key.
        kind: "passing": asking again may help; "text": this request is refused, others may pass; "closed": no request
            will be answered.
        status: The HTTP status, if there was one.
        billed: Whether it may have been billed.
        retry_after_s: Seconds the server asks to wait before the next request; 0 if it does not say.
    """

    message: str
    kind: Literal["passing", "text", "closed"] = "passing"
    status: int | None = None
    billed: bool = True
    retry_after_s: float = 0.0


def explain(error: Exception, endpoint: Endpoint, model: str) -> Failure:
    """The meaning of an `openai.OpenAIError`, or an InvalidReplyError from reading a reply, and what to do."""
    status: int | None = getattr(error, "status_code", None)
    if status is None:
        return _unanswered(error, endpoint)
    words, body = str(getattr(error, "message", error)), getattr(error, "body", None)
    if isinstance(body, str | dict) and body and not (isinstance(body, dict) and body.get("message")):
        words = f"{words} {body}"  # it is in the message of some versions only
    words = endpoint.redact(words)[:_MOST_CHARS]
    code = body.get("code") or body.get("type") if isinstance(body, dict) else None
    if code in _QUOTA or getattr(error, "code", None) in _QUOTA:
        closing = _CLOSING[402]
    elif (status in _PASSES or status >= 500) and status not in _CLOSING:
        headers = getattr(getattr(error, "response", None), "headers", {})
        return Failure(f"status {status}: {words}", "passing", status, status in _MAYBE_BILLED, retry_after(headers))
    elif status >= 400 and status not in _CLOSING:
        return Failure(f"status {status}: {words.rstrip('.')}. {_REFUSED}", "text", status, billed=False)
    else:
        closing = _CLOSING.get(status, _MOVED)
    names = {"base_url": endpoint.base_url, "host": endpoint.host, "key_variable": endpoint.api_key_env}
    return Failure(f"{closing.format(model=model, **names)}. The server said: {words}", "closed", status, billed=False)


def _unanswered(error: Exception, endpoint: Endpoint) -> Failure:
    """No status: the connection failed or broke, or the body was not read to its end."""
    cause = error.__cause__
    for ours in (error, cause):  # from reading the body; openai 2 wraps it
        if isinstance(ours, InvalidReplyError):
            kind: Any = "text" if isinstance(ours, FinalReplyError) else "passing"
            return Failure(endpoint.redact(str(ours)), kind, 200)
    name = type(cause or error).__name__
    words = endpoint.redact(f"{error} {cause or ''}".strip())[:_MOST_CHARS]
    return Failure(f"{words} ({name}, {endpoint.base_url})", billed=name not in _NOT_SENT)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float:
    """Seconds that a server asks to wait, 0 or more; 0 if it does not say, or says nonsense.

    Reads "retry-after-ms" (milliseconds) and "retry-after" (seconds, whole or not, or an HTTP date, RFC 9110 section
    10.2.3); of two, the longer. A date counts from the server's own "date" if it sends one, as clocks differ; else from
    `now`, in seconds since 1970 (None: the clock).
    """
    text = headers.get("retry-after", "").strip()
    waits = [_number(headers.get("retry-after-ms", "")) / 1000, _number(text)]
    until = _date(text)
    if until is not None:
        sent = _date(headers.get("date", ""))
        waits.append(until - (sent if sent is not None else time.time() if now is None else now))
    return max(0.0, *waits)


def _number(text: str) -> float:
    """The digits' value; 0 for anything else ("nan", "-5", "soon"). More digits than a float holds are a long time."""
    text = text.strip()
    return min(float(text), 1e300) if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text, re.ASCII) else 0.0


def _date(text: str) -> float | None:
    try:
        moment = email.utils.parsedate_to_datetime(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
