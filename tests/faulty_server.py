"""A judge server on which things go wrong, seeded: how often, and whether the answer was billed."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from alpacafarm_env.judge_server.http import as_error, as_json
from alpacafarm_env.judge_server.sandbox_judge import JudgeAnswer
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.seeding import keyed_uniforms

_GARBAGE: Final = ("soon", "-5", "nan", "inf", "1e999", "", "12 parsecs", "Thu, 99 Foo 2042")
_PAGE: Final = b"<!doctype html><html><head><title>502 Bad Gateway</title></head><body>Bad gateway</body></html>\n"
_CROWDED: Final = (429, "Too many requests.", "rate_limit_exceeded")
_REFUSALS: Final = {
    "retry_after_seconds": _CROWDED,
    "retry_after_date": _CROWDED,
    "retry_after_ms": _CROWDED,
    "retry_after_garbage": _CROWDED,
    "server_error": (500, "The server had an error.", "server_error"),
    "unavailable": (503, "The server is overloaded.", "overloaded"),
}
_WHOLE: Final = ("drip", "absurd_usage", "no_usage")
"""Their replies hold the answer: a byte every drip_s; with negative tokens or 10^12 of them; without a count."""
_BILLED: Final = ("cut_json", "null_content", "wrong_count", "content_filter", "finish_length", "hang", *_WHOLE)
FAULTS: Final = (
    *(*_REFUSALS, "cut_json", "html", "null_content", "wrong_count", "content_filter", "finish_length"),
    *("drip", "hang", "absurd_usage", "no_usage"),
)


class Draw(NamedTuple):
    """The fate of one request: a fault or none, and a number in [0, 1) for its details."""

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
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    retry_s: float = 1.0
    drip_s: float = 1.0
    hang_s: float = 600.0

    def __post_init__(self) -> None:
        assert self.rates.keys() <= set(FAULTS)
        assert sum(self.rates.values()) <= 1 + 1e-9

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


class Slow(Response):
    """A reply whose bytes come `pause_s` apart; or, if it `hangs`, nothing for `pause_s`, then the connection ends."""

    def __init__(self, reply, pause_s, server, *, hangs):
        super().__init__(reply.body, media_type="application/json")
        self.pause_s, self.server, self.hangs = pause_s, server, hangs

    async def __call__(self, scope, receive, send):
        if self.hangs:
            await asyncio.sleep(self.pause_s)
            connections = self.server._server.server_state.connections
            next(each.transport for each in connections if each.client == scope["client"]).abort()
            await asyncio.sleep(0)  # uvicorn notices, and sends no answer of its own
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for byte in self.body:
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await asyncio.sleep(self.pause_s)
        await send({"type": "http.response.body", "body": b""})


class FaultyJudgeServer(JudgeServer):
    """A judge server with `faults`, keyed on its seed, the whole body and how often that came before.

    In `stats`, "answered" are right answers, however odd their usage or slow their bytes; there is `by_fault` too.
    """

    def __init__(self, faults: Faults | None = None, *, seed: int = 0, **options: Any) -> None:
        self.seed, self.faults = seed, faults or Faults()
        self._arrived, self._faulted, self._useless = Counter[str](), Counter[str](), 0
        super().__init__(seed=seed, **options)

    def stats(self) -> dict[str, Any]:
        stats = super().stats()
        answered = stats["answered"] - self._useless
        return {**stats, "answered": answered, "by_fault": dict(sorted(self._faulted.items()))}

    def _deliver(self, answer: JudgeAnswer, digest: str, key: str) -> Response:
        with self._lock:
            draw = self.faults.draw(self.seed, digest, self._arrived[digest])
            self._arrived[digest] += 1
            self._faulted.update([draw.fault] if draw.fault else [])
        if draw.fault is None:
            return super()._deliver(answer, digest, key)
        reply = self._spoiled(answer, draw)
        status = "none" if draw.fault == "hang" else str(reply.status_code)
        self._useless += status == "200" and draw.fault not in _WHOLE
        self._count(status, answer if draw.fault in _BILLED else None)
        return reply

    def _spoiled(self, answer: JudgeAnswer, draw: Draw) -> Response:
        """The reply to a request on which the fault `draw.fault` falls."""
        faults, fault = self.faults, str(draw.fault)
        if fault == "html":
            return Response(_PAGE, media_type="text/html")
        if fault in ("drip", "hang"):
            pause_s = faults.hang_s if fault == "hang" else faults.drip_s
            return Slow(_changed(answer, draw), pause_s, self, hangs=fault == "hang")
        if fault not in _REFUSALS:
            return _changed(answer, draw)
        headers = {
            "retry_after_seconds": ("Retry-After", f"{faults.retry_s:g}"),
            "retry_after_date": ("Retry-After", _date(faults.retry_s)),
            "retry_after_ms": ("retry-after-ms", f"{1000 * faults.retry_s:g}"),
            "retry_after_garbage": ("Retry-After", _GARBAGE[int(draw.detail * len(_GARBAGE))]),
        }
        reply = as_error(*_REFUSALS[fault])
        if fault in headers:
            reply.headers.append(*headers[fault])
        return reply


def _date(seconds: float) -> str:
    """The time `seconds` from now, or up to a second later, as HTTP writes dates."""
    moment = datetime.now(UTC) + timedelta(seconds=seconds)
    return format_datetime(datetime.fromtimestamp(math.ceil(moment.timestamp()), UTC), usegmt=True)


def _changed(answer: JudgeAnswer, draw: Draw) -> Response:
    """A reply that begins as the answer."""
    fault, first = str(draw.fault), draw.detail < 0.5
    if fault == "wrong_count":
        fewer = answer.verdicts[:-1]
        other = fewer if first and fewer else (*answer.verdicts, answer.verdicts[-1])
        return as_json(replace(answer, verdicts=other).completion())
    content = answer.completion()
    choice, usage = content["choices"][0], content["usage"]
    if fault == "null_content":
        _say(choice, None)
    elif fault == "content_filter":
        _say(choice, "", "content_filter")
    elif fault == "finish_length":
        _say(choice, answer.text[: len(answer.text) // 2], "length")
    elif fault == "absurd_usage":
        usage.update({"prompt_tokens": -usage["prompt_tokens"]} if first else {"completion_tokens": 10**12})
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    elif fault == "no_usage":
        del content["usage"]
    reply = as_json(content)
    return Response(reply.body[: len(reply.body) // 2], media_type="application/json") if fault == "cut_json" else reply


def _say(choice: dict[str, Any], text: str | None, reason: str = "") -> None:
    """Puts another text in a choice; its logprobs would be of the old one."""
    choice["logprobs"] = None
    choice["finish_reason"] = reason or choice["finish_reason"]
    if "message" in choice:
        choice["message"]["content"] = text
    else:
        choice["text"] = text
