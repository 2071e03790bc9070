"""Replies of a server: an answer, read strictly, or why there is none and what to do about it.

What is no answer is an error, never an empty text. The ledger keeps raw bodies, so that newer code can read them again
at no cost.
"""

import email.utils
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, Field, InstanceOf, TypeAdapter, ValidationError

from ..errors import InvalidReplyError
from ..spaces import find_surrogate
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


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message | None = None
    text: str | None = None
    finish_reason: Any = None
    logprobs: Any = None


class _Body(BaseModel):
    choices: Any = None
    usage: Any = None
    error: Any = None


_Logprob = Annotated[float, Field(strict=True, le=1e-3)]
"""Negative infinity is a probability of 0; a little above 0 is rounding."""


class _Top(BaseModel):
    token: InstanceOf[str]  # perhaps a part of a character
    logprob: _Logprob


class _Token(_Top):
    top_logprobs: list[_Top] | None = None


_CHAT = TypeAdapter(list[_Token])
_COMPLETION = TypeAdapter(list[Annotated[dict[InstanceOf[str], _Logprob], Field(min_length=1)]])


def read_reply(kind: Kind, raw: str) -> Reply:
    """Read the whole body of a reply with status 200.

    Raises:
        InvalidReplyError: It is not a JSON object, holds an error, no choice or no text. A `FinalReplyError` if asking
            again would not help.
    """
    choice = None
    try:
        body = _Body.model_validate(json.loads(raw))
        if not body.error and isinstance(body.choices, list) and body.choices:
            choice = _Choice.model_validate(body.choices[0])  # alone: a fault of another costs no second request
    except (ValueError, RecursionError) as error:  # pydantic's too, also of a lone surrogate
        problem = str(error.errors()[0]["msg"] if isinstance(error, ValidationError) else error)[:80]
    else:
        if body.error:
            final = isinstance(body.error, dict) and body.error.get("code") in _OF_A_TEXT  # OpenRouter's
            raise (FinalReplyError if final else InvalidReplyError)(f"The reply holds an error: {_shown(body.error)}")
        if choice is not None:
            reason = choice.finish_reason if isinstance(choice.finish_reason, str) else None
            return Reply(_text(kind, choice), reason, _logprobs(kind, choice.logprobs), *_counts(body.usage))
        problem = "it has no choice, hence no answer"
    # Raised out here: the other error holds the whole text.
    raise InvalidReplyError(f"The reply is no whole answer in JSON ({problem}): {_shown(raw)}")


def reported_usage(raw: str) -> tuple[object, object]:
    """The prompt and completion tokens in a raw body, of whatever type; None where there are none."""
    try:
        usage = json.loads(raw)["usage"]
        return usage.get("prompt_tokens"), usage.get("completion_tokens")
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return None, None


def _text(kind: Kind, choice: _Choice) -> str:
    if kind == "tokens":
        return choice.text or ""
    text = (choice.message and choice.message.content) if kind == "chat" else choice.text
    if choice.finish_reason == "content_filter":
        raise FinalReplyError("The server's filter stopped the answer (finish_reason='content_filter')")
    if not text or not text.strip():
        problem = f"The answer has no text but {text!r}, with finish_reason={choice.finish_reason!r:.50}"
        if choice.finish_reason == "length":
            raise FinalReplyError(f"{problem}: the limit on tokens is too low for this model")
        raise InvalidReplyError(problem)
    if find_surrogate(text) >= 0:
        raise InvalidReplyError(f"The answer holds half a character (a lone surrogate): {_shown(text)}")
    return text


def _counts(usage: Any) -> Usage:
    counts = [usage.get(f"{name}_tokens") if isinstance(usage, dict) else None for name in ("prompt", "completion")]
    prompt, completion = [count if type(count) is int and count >= 0 else None for count in counts]
    return prompt, completion


def _logprobs(kind: Kind, given: Any) -> tuple[dict[str, float], ...] | None:
    """Both endpoints' layouts as one: a dict per token."""
    if kind == "tokens" or not given:
        return None
    try:
        if kind == "chat":
            tokens = [each.top_logprobs or [each] for each in _CHAT.validate_python(given["content"])]
            pairs = [[(top.token, top.logprob) for top in token] for token in tokens]
        else:
            pairs = [list(token.items()) for token in _COMPLETION.validate_python(given["top_logprobs"])]
    except (ValidationError, LookupError, TypeError, OverflowError):
        return None
    rows: list[dict[str, float]] = []
    for token in pairs:
        row: dict[str, float] = {}
        for name, value in token:  # tokens of different bytes may have equal text: their probabilities add up
            row[name] = min(float(np.logaddexp(row.get(name, -inf), value)), 0.0)
        rows.append(row)
    return tuple(rows) or None


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
    body = getattr(error, "body", None)
    words = endpoint.redact(f"{getattr(error, 'message', error)} {body or ''}")[:_MOST_CHARS]
    codes = (body.get("code"), body.get("type")) if isinstance(body, dict) else ()
    closing = _CLOSING[402] if any(code in _QUOTA for code in codes) else _CLOSING.get(status)
    if closing is None and (status in _PASSES or status >= 500):
        wait_s = retry_after(getattr(getattr(error, "response", None), "headers", {}))
        return Failure(f"status {status}: {words}", "passing", status, status in _MAYBE_BILLED, wait_s)
    if closing is None and status >= 400:
        return Failure(f"status {status}: {words.rstrip('.')}. {_REFUSED}", "text", status, billed=False)
    names = {"base_url": endpoint.base_url, "host": endpoint.host, "key_variable": endpoint.api_key_env}
    problem = (closing or _MOVED).format(model=model, **names)
    return Failure(f"{problem}. The server said: {words}", "closed", status, billed=False)


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


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait, 0 or more; 0 if it does not say, or says nonsense.

    Reads "retry-after-ms" (milliseconds) and "retry-after" (seconds, or an HTTP date, RFC 9110 section 10.2.3); of two,
    the longer.
    """
    text = headers.get("retry-after", "")
    waits = [_seconds(headers.get("retry-after-ms", "")) / 1000, _seconds(text)]
    with suppress(TypeError, ValueError, IndexError, OverflowError):  # it is no date
        waits.append(email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return max(0.0, *waits)


def _seconds(text: str) -> float:
    """The number's value; 0 for anything else ("nan", "-5", "soon")."""
    with suppress(ValueError):
        value = float(text)
        return value if 0 < value < inf else 0.0
    return 0.0
