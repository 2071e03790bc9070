"""The score server: an oracle behind an HTTP endpoint that other trainers ask.

POST /score {"instructions": [...], "responses": [...]} gives {"oracle": name, "scores": [...]}, null for no verdict.

The same route is OpenRLHF's remote reward function (`--reward.remote_url`): {"query": [...], "prompts": [...],
"labels": [...]} gives {"rewards": [...], "scores": [...], "extra_logs": {}}. A query is a prompt and the response to
it, decoded with its special tokens; a label is the instruction, as `export` writes it.

GET /health says what is served, and how much was asked so far.

Source: OpenRLHF 0.11, `openrlhf/utils/agent.py` (who asks) and `openrlhf/cli/serve_rm.py` (their own server).
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np

from ..errors import (
    AlpacaFarmError,
    DataError,
    FieldError,
    InvalidResponseError,
    InvalidResponseTypeError,
    UnknownNameError,
)
from ..oracles.base import RewardOracle, judge, rewards_of, shorten
from ..oracles.batched import MicroBatched
from ..spaces import MAX_TEXT_LENGTH, find_surrogate
from .http import Listener
from .replies import HttpReply, as_error, as_json

SCORE: Final = "/score"
HEALTH: Final = "/health"
MAX_ROWS: Final = 4096
"""Most rows of a request."""
MOST_TIMES: Final = 10_000
"""Most requests of whose times a report tells."""
_PLAIN: Final = ("instructions", "responses")
_FAULTS: Final = (DataError, UnknownNameError, InvalidResponseError, InvalidResponseTypeError)
_LOG: Final = logging.getLogger(__name__)
_OPENRLHF: Final = ("query", "prompts", "labels")


class Scoring:
    """Answers requests about one oracle, from any number of threads; `oracle` merges those that come together.

    Args:
        oracle: Who is asked.
        special_tokens: What the trained policy's tokenizer writes for its special tokens; those at a response's end are
            taken off OpenRLHF's queries. None: such queries are refused, as they would be scored with them.
    """

    def __init__(self, oracle: RewardOracle, special_tokens: Sequence[str] | None = None) -> None:
        self.oracle = oracle if isinstance(oracle, MicroBatched) else MicroBatched(oracle)
        self._special_tokens = None if special_tokens is None else tuple(filter(None, special_tokens))
        self._lock = threading.Lock()
        self._requests = self._refused = self._failed = self._rows = 0
        self._seconds = deque[float](maxlen=MOST_TIMES)  # of the last requests since the last report
        self._reported = self._calls = 0  # of the last report

    def reply(self, method: str, path: str, content: bytes, key: str = "") -> HttpReply:
        """The reply to one HTTP request."""
        route = path.partition("?")[0]
        if (method, route) == ("GET", HEALTH):
            return as_json(self.health())
        if (method, route) != ("POST", SCORE):
            text = f"There is no {method} {shorten(route)} here. There are: POST {SCORE}, GET {HEALTH}."
            return as_error(404, text, "not_found")
        start = time.perf_counter()
        try:
            scored = self._answer(content)
        except Exception as error:  # noqa: BLE001 -- an oracle may be anybody's
            answer = refused(error)
            if not isinstance(error, AlpacaFarmError):
                _LOG.exception("oracle %r failed", self.oracle.name)
            with self._lock:
                self._refused += answer.status < 500
                self._failed += answer.status >= 500
            return answer
        with self._lock:
            self._requests += 1
            self._rows += len(scored["scores"])
            self._seconds.append(time.perf_counter() - start)
        return as_json(scored)

    def health(self) -> dict[str, Any]:
        """What is served, and how much was asked so far, as plain data."""
        with self._lock:
            counts = {"requests": self._requests, "refused": self._refused, "failed": self._failed, "rows": self._rows}
        return {"status": "healthy", "oracle": self.oracle.name, **counts, "oracle_calls": self.oracle.calls}

    def report(self) -> str:
        """One line about the time since the last report."""
        with self._lock:
            seconds = list(self._seconds)
            self._seconds.clear()
            requests, self._reported = self._requests - self._reported, self._requests
            calls, self._calls = self.oracle.calls - self._calls, self.oracle.calls
        # Of no request there is no quantile.
        middle, late = 1000 * np.quantile(seconds, (0.5, 0.99)) if seconds else (0.0, 0.0)
        times = f", p50 {middle:.1f} ms, p99 {late:.1f} ms" if seconds else ""
        totals = f"in all {self._requests} requests, {self._rows} rows, {self._refused} refused, {self._failed} failed"
        return f"{requests} requests to {SCORE}{times}, {calls} calls of {self.oracle.name}; {totals}"

    def _answer(self, content: bytes) -> dict[str, Any]:
        try:
            body: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"The body is not JSON: {error}.") from error
        if not isinstance(body, dict):
            raise DataError(f"Expected a JSON object with {' and '.join(_PLAIN)}, got {shorten(str(body))}.")
        if "query" in body:
            return self._answer_openrlhf(body)
        instructions, responses = _columns(body, _PLAIN)
        scores = judge(self.oracle, instructions, responses).scores
        return {"oracle": self.oracle.name, "scores": [None if score != score else score for score in scores.tolist()]}

    def _answer_openrlhf(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._special_tokens is None:
            text = "OpenRLHF's queries hold special tokens. Start serve with --tokenizer, that of the trained model"
            raise FieldError("query", text)
        queries, prompts, labels = _columns(body, _OPENRLHF)
        for row, label in enumerate(labels):
            if not label:
                text = "expected the instruction; train with --data.label_key label on exported prompts"
                raise FieldError(f"labels[{row}]", text)
        responses = [self._response(row, *pair) for row, pair in enumerate(zip(queries, prompts, strict=True))]
        rewards = rewards_of(self.oracle, labels, responses)
        return {"rewards": rewards, "scores": rewards, "extra_logs": {}}

    def _response(self, row: int, query: str, prompt: str) -> str:
        if not query.startswith(prompt):
            raise FieldError(
                f"query[{row}]",
                f"expected a text that begins with its prompt, got {shorten(query)} for {shorten(prompt)}: its "
                "tokenizer does not decode to what it encoded, or the prompt was cut at the length limit",
            )
        response = query.removeprefix(prompt)
        end, tokens = len(response), self._special_tokens or ()
        # By the place of the end: to cut off one token after the other would copy a long response each time.
        while ending := next((token for token in tokens if response.endswith(token, 0, end)), ""):
            end -= len(ending)
        return response[:end]


def refused(error: Exception) -> HttpReply:
    """The reply that says why a request has no answer: 400 if that is its own fault, else 500."""
    if isinstance(error, _FAULTS):
        return as_error(400, str(error), "invalid_request_error", getattr(error, "field", None))
    told = str(error) if isinstance(error, AlpacaFarmError) else f"{type(error).__name__}: {error}"
    return as_error(500, told, "oracle_error")


class ScoreServer(Scoring):
    """`Scoring` behind HTTP in this process, on threads of its own; a context manager.

    Args:
        oracle: As of `Scoring`.
        special_tokens: As of `Scoring`.
        host: As of `JudgeServer`, and so are `port` and `allow_remote`.
    """

    def __init__(
        self,
        oracle: RewardOracle,
        special_tokens: Sequence[str] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
    ) -> None:
        super().__init__(oracle, special_tokens)
        self._listener = Listener((host, port), self.reply, latency_s=0, allow_remote=allow_remote)
        self._listener.start()

    @property
    def remote(self) -> bool:
        """Whether other machines can reach it."""
        return self._listener.remote

    @property
    def url(self) -> str:
        """What clients, and OpenRLHF, are given."""
        return self._listener.url + SCORE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.stop(grace_s=5.0)


def _columns(body: dict[str, Any], names: Sequence[str]) -> list[list[str]]:
    """The lists of texts of these names, all of one length."""
    for name in names:
        if name not in body:
            raise FieldError(name, f"expected a list of texts, got no such field among {shorten(str(list(body)))}")
        _check_texts(name, body[name])
        if len(body[name]) != len(body[names[0]]):
            raise FieldError(name, f"expected {len(body[names[0]])} texts, as {names[0]} has, got {len(body[name])}")
    return [body[name] for name in names]


def _check_texts(name: str, texts: Any) -> None:
    if not isinstance(texts, list):
        raise FieldError(name, f"expected a list of texts, got {shorten(str(texts))}")
    if len(texts) > MAX_ROWS:
        raise FieldError(name, f"expected at most {MAX_ROWS} texts, got {len(texts)}; ask in several requests")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise FieldError(f"{name}[{row}]", f"expected a text, got {shorten(str(text))}")
        if len(text) > MAX_TEXT_LENGTH:
            raise FieldError(f"{name}[{row}]", f"expected at most {MAX_TEXT_LENGTH} code points, got {len(text)}")
        if find_surrogate(text) >= 0:
            raise FieldError(
                f"{name}[{row}]", f"expected text that UTF-8 can write, got {text[find_surrogate(text)]!r}"
            )
