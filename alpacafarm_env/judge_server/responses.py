"""A reply of the judge server as it goes over the wire, and what each fault makes of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, Final, Literal

from .completions import JudgeAnswer
from .faults import Draw, Faults

_GARBAGE: Final = ("soon", "-5", "nan", "inf", "1e999", "", "12 parsecs", "Thu, 99 Foo 2042")
_PAGE: Final = b"<!doctype html><html><head><title>502 Bad Gateway</title></head><body>Bad gateway</body></html>\n"
_REFUSALS: Final = {
    "retry_after_seconds": (429, "Too many requests.", "rate_limit_exceeded"),
    "retry_after_date": (429, "Too many requests.", "rate_limit_exceeded"),
    "retry_after_ms": (429, "Too many requests.", "rate_limit_exceeded"),
    "retry_after_garbage": (429, "Too many requests.", "rate_limit_exceeded"),
    "server_error": (500, "The server had an error.", "server_error"),
    "unavailable": (503, "The server is overloaded.", "overloaded"),
    "echo_key": (401, "Incorrect API key provided: {key}.", "invalid_api_key"),
    "redirect": (307, "The server has moved.", "moved"),
}

Manner = Literal["whole", "reset", "drip", "hang"]
_MANNERS: Final[dict[str, Manner]] = {"reset": "reset", "drip": "drip", "hang": "hang"}


@dataclass(frozen=True)
class HttpReply:
    """A reply to send.

    Attributes:
        status: The HTTP status.
        body: The body's bytes; Content-Length is always their number.
        headers: What is sent beside Content-Length.
        manner: "whole": at once. "reset": headers and half of the body, then the connection is reset. "drip": headers
            at once, then a byte at a time. "hang": nothing, then the connection ends.
    """

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    manner: Manner = "whole"


def as_json(content: object, status: int = 200) -> HttpReply:
    """A reply whose body is JSON."""
    return HttpReply(status, json.dumps(content).encode())


def as_error(status: int, message: str, code: str) -> HttpReply:
    """A refusal, with the error object that OpenAI-compatible servers send."""
    return as_json(_error(message, code), status)


def spoiled(answer: JudgeAnswer, draw: Draw, faults: Faults, key: str) -> HttpReply:
    """The reply to a request on which the fault `draw.fault` falls, None for none.

    Args:
        answer: What would be answered without the fault.
        draw: The fault, and the number that decides its details.
        faults: The parameters.
        key: The API key that came with the request, "" for none.
    """
    if draw.fault is None:
        return as_json(answer.completion())
    if draw.fault in _REFUSALS:
        return _refusal(draw, faults, key)
    if draw.fault == "html":
        return HttpReply(200, _PAGE, (("Content-Type", "text/html; charset=utf-8"),))
    if draw.fault == "error_in_200":
        return as_error(200, "The model could not be reached.", "upstream_error")
    return _changed(answer, draw)


def _refusal(draw: Draw, faults: Faults, key: str) -> HttpReply:
    status, message, code = _REFUSALS[str(draw.fault)]
    headers = {
        "retry_after_seconds": ("Retry-After", f"{faults.retry_s:g}"),
        "retry_after_date": ("Retry-After", _date(faults.retry_s)),
        "retry_after_ms": ("retry-after-ms", f"{1000 * faults.retry_s:g}"),
        "retry_after_garbage": ("Retry-After", _GARBAGE[int(draw.detail * len(_GARBAGE))]),
        "redirect": ("Location", faults.redirect_to),
    }
    reply = as_error(status, message.replace("{key}", key), code)
    return replace(reply, headers=(*reply.headers, headers[str(draw.fault)])) if draw.fault in headers else reply


def _date(seconds: float) -> str:
    """The time that is `seconds` from now or up to a second later, as HTTP writes dates."""
    moment = datetime.now(UTC) + timedelta(seconds=seconds)
    whole = math.ceil(moment.timestamp())
    return format_datetime(datetime.fromtimestamp(whole, UTC), usegmt=True)


def _changed(answer: JudgeAnswer, draw: Draw) -> HttpReply:
    """A reply that begins as the answer."""
    fault, first = draw.fault, draw.detail < 0.5
    if fault == "wrong_count":
        fewer = answer.verdicts[:-1]
        other = fewer if first and fewer else (*answer.verdicts, answer.verdicts[-1])
        return as_json(replace(answer, verdicts=other).completion())
    content = answer.completion()
    choice, usage = content["choices"][0], content["usage"]
    if fault == "empty_choices":
        content["choices"] = []
    elif fault == "null_content":
        _say(choice, None)
    elif fault == "content_filter":
        _say(choice, "")
        choice["finish_reason"] = "content_filter"
    elif fault == "finish_length":
        text = str(choice["text"] if "text" in choice else choice["message"]["content"])
        _say(choice, text[: len(text) // 2])
        choice["finish_reason"] = "length"
    elif fault == "absurd_usage":
        usage.update({"prompt_tokens": -usage["prompt_tokens"]} if first else {"completion_tokens": 10**12})
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    elif fault == "no_usage":
        del content["usage"]
    reply = as_json(content)
    if fault == "cut_json":
        return replace(reply, body=reply.body[: len(reply.body) // 2])
    return replace(reply, manner=_MANNERS.get(str(fault), "whole"))


def _say(choice: dict[str, Any], text: str | None) -> None:
    """Puts another text in a choice; its logprobs would be of the old one."""
    choice["logprobs"] = None
    if "message" in choice:
        choice["message"]["content"] = text
    else:
        choice["text"] = text


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "param": None, "code": code}}
