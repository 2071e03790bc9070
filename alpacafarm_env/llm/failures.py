"""What a failed request means: whether asking again can help, when, and whether it may have been billed."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal

from ..errors import InvalidReplyError
from .endpoint import Endpoint
from .refusals import TOO_LONG, refused_text

if TYPE_CHECKING:
    from openai import OpenAIError

MOST_CHARS = 500
"""Characters of a server's own words in a message."""
_PASSES = (408, 409, 425, 429)
_MAYBE_BILLED = (408, 502, 504, 520, 522, 524)
"""Statuses by which a gateway gives up on a server that may have gone on and billed."""
_NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol", "LocalProtocolError")
_NO_API = (405, 501)
_OF_A_TEXT = (400, 403, 413, 422)
_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")


@dataclass(frozen=True)
class Failure:
    """Why an attempt brought no reply.

    Attributes:
        message: For people; without the key.
        kind: "passing": asking again may help; "text": not for this request's text, others may pass; "final": not for
            this request, whose settings are refused; "closed": not for any request.
        status: The HTTP status, if there was one.
        billed: Whether it may have been billed.
        retry_after_s: Seconds to wait before the next request, as the server says; 0: it does not say.
    """

    message: str
    kind: Literal["passing", "text", "final", "closed"] = "passing"
    status: int | None = None
    billed: bool = True
    retry_after_s: float = 0.0

    @property
    def crowded(self) -> bool:
        """Whether the server has more to do than it can."""
        return self.status in (429, 503)


def explain(error: OpenAIError | InvalidReplyError, endpoint: Endpoint, model: str) -> Failure:
    """What an error of the openai library, or of reading a body, means and what to do."""
    status: int | None = getattr(error, "status_code", None)
    if status is None:
        return _unanswered(error, endpoint)
    words = str(getattr(error, "message", error))
    body = getattr(error, "body", None)
    if isinstance(body, str | dict) and body and not (isinstance(body, dict) and body.get("message")):
        words = f"{words} {body}"  # it is in the message of some versions only
    text = refused_text(words, body) if status in _OF_A_TEXT else ""
    words = endpoint.redact(words)[:MOST_CHARS]
    code = body.get("code") or body.get("type") if isinstance(body, dict) else None
    if status == 402 or code in _QUOTA or getattr(error, "code", None) in _QUOTA:
        return _closed(
            status, f"the quota or the credit of this key is used up; see the account at {endpoint.host}", words
        )
    if text or status == 413:
        return Failure(f"{text or TOO_LONG}. The server said: {words}", "text", status, billed=False)
    if status in _NO_API:
        what = "there is no OpenAI-compatible server: it does not take such requests at all"
        return _closed(status, f"{what}; check base_url ({endpoint.base_url})", words)
    if status in _PASSES or status >= 500:
        headers = getattr(getattr(error, "response", None), "headers", {})
        return Failure(f"status {status}: {words}", "passing", status, status in _MAYBE_BILLED, retry_after(headers))
    if status < 400:
        what = "the server sends requests on to another address, which is not followed, as the key is for this one only"
        return _closed(status, f"{what}; check base_url", words)
    closing = {
        401: f"the server refused the key; check the environment variable {endpoint.api_key_env}, or api_key",
        403: "the key may not use this model or server",
        404: f"the server has no model {model!r}, or base_url is wrong (it mostly ends in /v1)",
    }
    if status in closing:
        return _closed(status, closing[status], words)
    settings = (
        "If it refused the request's settings: a file of models can leave out what the model does not take (omit: "
        "[temperature, top_p]) and rename the limit (max_tokens_field: max_completion_tokens); see also the config"
    )
    return Failure(f"status {status}: {words.rstrip('.')}. {settings}", "final", status, billed=False)


def _unanswered(error: OpenAIError | InvalidReplyError, endpoint: Endpoint) -> Failure:
    """No status: the connection failed or broke, or the body was not read to its end."""
    cause = error.__cause__
    for ours in (error, cause):  # from reading the body; versions 2 of the library wrap it
        if isinstance(ours, InvalidReplyError):
            return Failure(str(ours), status=200)
    name = type(cause).__name__ if cause is not None else type(error).__name__
    words = endpoint.redact(f"{error} {cause or ''}".strip())[:MOST_CHARS]
    return Failure(f"{words} ({name}, {endpoint.base_url})", billed=name not in _NOT_SENT)


def _closed(status: int, what: str, words: str) -> Failure:
    return Failure(f"{what}. The server said: {words}", "closed", status, billed=False)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float:
    """Seconds that a server asks to wait, 0 or more; 0 where it does not say, or says what cannot be.

    Reads "retry-after-ms" (milliseconds) and "retry-after" (seconds, whole or not, or an HTTP date, RFC 9110 section
    10.2.3); of two, the longer. A date counts from the server's own "date" if it sends one: clocks differ.

    Args:
        headers: The response's, with names in lower case or a mapping that does not tell cases apart.
        now: Seconds since 1970, for dates where the server sends none; None: the clock.
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
    value = float(text) if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text, re.ASCII) else 0.0
    return value if isfinite(value) else 1e300 if value == inf else 0.0


def _date(text: str) -> float | None:
    try:
        moment = email.utils.parsedate_to_datetime(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
