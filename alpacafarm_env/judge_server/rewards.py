"""The reward server: an oracle behind the HTTP endpoint that OpenRLHF asks (`--reward.remote_url`).

POST /get_reward {"query": [...], "prompts": [...], "labels": [...]} gives {"rewards": [...], "scores": [...]}. A query
is a prompt and the response to it, decoded with its special tokens; a label is the instruction, as `export` writes it.

Source: OpenRLHF 0.11, `openrlhf/utils/agent.py` (who asks) and `openrlhf/cli/serve_rm.py` (their own server).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Self

from ..errors import AlpacaFarmError, DataError
from ..oracles.base import shorten
from .http import Listener
from .replies import HttpReply, as_error, as_json

ROUTE = "/get_reward"
_FIELDS = ("query", "prompts", "labels")


class RewardServer:
    """A reward server in this process, on threads of its own; a context manager.

    Args:
        score: Gives the rewards of instructions and responses.
        special_tokens: What the trained policy's tokenizer writes for its special tokens; those at a response's end are
            taken off.
        host, port, allow_remote: As of `JudgeServer`.
    """

    def __init__(
        self,
        score: Callable[[Sequence[str], Sequence[str]], list[float]],
        *,
        special_tokens: Sequence[str],
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
    ) -> None:
        self._score, self._special_tokens = score, tuple(filter(None, special_tokens))
        self._listener = Listener((host, port), self.reply, latency_s=0, allow_remote=allow_remote)
        self._listener.start()

    @property
    def remote(self) -> bool:
        """Whether other machines can reach it."""
        return self._listener.remote

    @property
    def url(self) -> str:
        """What OpenRLHF is given."""
        return self._listener.url + ROUTE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.stop()

    def reply(self, method: str, path: str, content: bytes, key: str) -> HttpReply:
        """The reply to one HTTP request."""
        if (method, path) != ("POST", ROUTE):
            return as_error(404, f"There is no {method} {path} here, only POST {ROUTE}.", "not_found")
        try:
            labels, responses = self._read(content)
        except DataError as error:
            return as_error(400, str(error), "invalid_request_error")
        try:
            rewards = self._score(labels, responses)
        except AlpacaFarmError as error:
            return as_error(500, str(error), "oracle_error")
        return as_json({"rewards": rewards, "scores": rewards, "extra_logs": {}})

    def _read(self, content: bytes) -> tuple[list[str], list[str]]:
        """The instructions and the responses that a request is about."""
        try:
            asked: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"The body is not JSON: {error}.") from error
        columns: list[Any] = [asked.get(name) for name in _FIELDS] if isinstance(asked, dict) else []
        if not columns or not all(_texts(column) and len(column) == len(columns[0]) for column in columns):
            raise DataError(f"Expected lists of texts of one length, {', '.join(_FIELDS)}, got {shorten(str(asked))}.")
        queries, prompts, labels = columns
        if not all(labels):
            raise DataError("Expected the instruction as label; train with --data.label_key label on exported prompts.")
        return labels, [self._response(*pair) for pair in zip(queries, prompts, strict=True)]

    def _response(self, query: str, prompt: str) -> str:
        if not query.startswith(prompt):
            raise DataError(
                f"Expected a query that begins with its prompt, got {shorten(query)} for {shorten(prompt)}: its "
                "tokenizer does not decode to what it encoded, or the prompt was cut at the length limit"
            )
        response = query.removeprefix(prompt)
        while ending := next(filter(response.endswith, self._special_tokens), ""):
            response = response.removesuffix(ending)
        return response


def _texts(column: Any) -> bool:
    return isinstance(column, list) and all(isinstance(text, str) for text in column)
