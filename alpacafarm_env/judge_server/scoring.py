"""The score server: an oracle behind an HTTP endpoint that other trainers ask.

POST /score {"instructions": [...], "responses": [...]} gives {"oracle": name, "scores": [...]}, null for no verdict.

The same route is OpenRLHF's remote reward function (`--reward.remote_url`): {"query": [...], "prompts": [...],
"labels": [...]} gives {"rewards": [...], "scores": [...], "extra_logs": {}}. A query is a prompt and the response to
it, decoded with its special tokens; a label is the instruction, as `export` writes it.

GET /health names the oracle, and says how often it was asked so far.

Source: OpenRLHF 0.11, `openrlhf/utils/agent.py` (who asks) and `openrlhf/cli/serve_rm.py` (their own server).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
from ..spaces import MAX_TEXT_LENGTH
from .http import Response, Server, as_error, as_json, json_app, json_route, threaded

SCORE: Final = "/score"
HEALTH: Final = "/health"
MAX_ROWS: Final = 4096
"""Most rows of a request."""
GRACE_S: Final = 5.0
"""Seconds that requests being answered have when the server ends."""
_FAULTS: Final = (DataError, UnknownNameError, InvalidResponseError, InvalidResponseTypeError)
_LOG: Final = logging.getLogger(__name__)

_Texts = Annotated[list[Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]], Field(max_length=MAX_ROWS)]


class _Plain(BaseModel):
    model_config = ConfigDict(strict=True)
    instructions: _Texts
    responses: _Texts


class _OpenRLHF(BaseModel):
    model_config = ConfigDict(strict=True)
    query: _Texts
    prompts: _Texts
    labels: _Texts


class ScoreServer(Server):
    """Answers requests about one oracle in this process, on threads of its own; a context manager.

    Args:
        oracle: Who is asked; requests that come together are one call.
        special_tokens: What the trained policy's tokenizer writes for its special tokens; those at a response's end are
            taken off OpenRLHF's queries. None: such queries are refused, as they would be scored with them.
        app: A Starlette or FastAPI application to serve beside, such as OpenEnv's, whose own routes of these paths
            count no more. What it raises is answered as `POST /score` answers it.
        where: `host`, `port` and `allow_remote`, as of `JudgeServer`.

    Attributes:
        url: What clients, and OpenRLHF, are given.
    """

    def __init__(
        self,
        oracle: RewardOracle,
        special_tokens: Sequence[str] | None = None,
        *,
        app: Any = None,
        **where: Any,
    ) -> None:
        self.oracle = oracle if isinstance(oracle, MicroBatched) else MicroBatched(oracle)
        self._special_tokens = None if special_tokens is None else tuple(filter(None, special_tokens))
        if app is None:
            app = json_app(threaded(self.reply))
        else:
            app.router.routes[:0] = [json_route(path, threaded(self.reply)) for path in (SCORE, HEALTH)]
            app.add_exception_handler(AlpacaFarmError, lambda _, error: refused(error))
            app.add_exception_handler(Exception, lambda _, error: refused(error))
        super().__init__(app, grace_s=GRACE_S, **where)
        self.url += SCORE

    def reply(self, method: str, route: str, content: bytes, key: str = "") -> Response:
        """The reply to one HTTP request."""
        if (method, route) == ("GET", HEALTH):
            return as_json(self.health())
        if (method, route) != ("POST", SCORE):
            text = f"There is no {method} {shorten(route)} here. There are: POST {SCORE}, GET {HEALTH}."
            return as_error(404, text, "not_found")
        try:
            return as_json(self._answer(content))
        except Exception as error:  # noqa: BLE001 -- an oracle may be anybody's
            if not isinstance(error, AlpacaFarmError):
                _LOG.exception("oracle %r failed", self.oracle.name)
            return refused(error)

    def health(self) -> dict[str, Any]:
        """The oracle's name, and how often it was asked so far, as plain data."""
        return {"status": "healthy", "oracle": self.oracle.name, "oracle_calls": self.oracle.calls}

    def _answer(self, content: bytes) -> dict[str, Any]:
        try:
            body: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"The body is not JSON: {error}.") from error
        if not isinstance(body, dict):
            raise DataError(f"Expected a JSON object with instructions and responses, got {shorten(str(body))}.")
        if "query" in body:
            return self._answer_openrlhf(body)
        instructions, responses = _columns(_Plain, body)
        scores = judge(self.oracle, instructions, responses).scores
        return {"oracle": self.oracle.name, "scores": [None if score != score else score for score in scores.tolist()]}

    def _answer_openrlhf(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._special_tokens is None:
            text = "OpenRLHF's queries hold special tokens. Start serve with --tokenizer, that of the trained model"
            raise FieldError("query", text)
        queries, prompts, labels = _columns(_OpenRLHF, body)
        if "" in labels:
            text = "expected the instruction; train with --data.label_key label on exported prompts"
            raise FieldError(f"labels[{labels.index('')}]", text)
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


def refused(error: Exception) -> Response:
    """The reply that says why a request has no answer: 400 if that is its own fault, else 500."""
    if isinstance(error, _FAULTS):
        return as_error(400, str(error), "invalid_request_error", getattr(error, "field", None))
    text = str(error) if isinstance(error, AlpacaFarmError) else f"{type(error).__name__}: {error}"
    return as_error(500, text, "oracle_error")


def _columns(form: type[BaseModel], body: dict[str, Any]) -> list[list[str]]:
    """The lists of texts of a form's fields, all of one length; FieldError for the first that is wrong."""
    try:
        columns: dict[str, list[str]] = dict(form.model_validate(body))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name, *rows = fault["loc"]
        field = f"{name}{''.join(f'[{row}]' for row in rows)}"
        raise FieldError(field, f"{fault['msg']}, got {shorten(str(fault['input']))}") from error
    first, *others = columns
    for name in others:
        if len(columns[name]) != len(columns[first]):
            lengths = len(columns[first]), len(columns[name])
            raise FieldError(name, f"expected {lengths[0]} texts, as {first} has, got {lengths[1]}")
    return list(columns.values())
