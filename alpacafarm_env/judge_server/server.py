"""The judge server: the sandbox's annotators behind an OpenAI-compatible endpoint on this machine.

    with JudgeServer(seed=0) as server:
        pool = AnnotatorPool("alpaca_farm", "sandbox", base_url=server.base_url)

Routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /stats. It keeps no secret and has no
encryption: it is meant for this machine's own programs.
"""

import asyncio
import hmac
import json
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ..annotators.config import ROLES, load_models
from ..errors import AlpacaFarmError, PoolError
from ..llm.requests import content_key
from .http import Response, Server, as_error, as_json, json_app
from .sandbox_judge import JudgeAnswer, SandboxJudge

KINDS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


class JudgeServer(Server):
    """A judge server in this process, on threads of its own; a context manager. `close` ends open connections at once.

    A verdict depends on the seed and its own pair alone, see `SandboxJudge.answer`: a failed request, when repeated,
    gets the verdicts it would have got at once, whatever the order or the number of connections.

    Args:
        seed: Seeds the verdicts of requests without a seed.
        host: The interface to listen on, an address or a name of this machine.
        port: 0 for any free one.
        api_key: The only accepted key; None accepts all.
        latency_s: Seconds that each answer takes at least.
        pools: Further pools, names or files, whose prompts are recognized.
        anyway: Judge instructions that are not the sandbox's too, by taste alone; else such a request is refused (400).
        allow_remote: Take a `host` that other machines can reach, such as "0.0.0.0" or "::". Anybody on the way can
            read what is asked and answered.

    Attributes:
        base_url: The address for clients, "http://127.0.0.1:PORT/v1".
        remote: Whether other machines can reach it.

    Raises:
        AlpacaFarmError: `host` can be reached by other machines, and that was not allowed.
        OSError: `host` is not known, or the port is taken or may not be used.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        latency_s: float = 0.0,
        pools: Iterable[str | Path] = (),
        anyway: bool = False,
        allow_remote: bool = False,
    ) -> None:
        self.judging, self.latency_s = SandboxJudge(seed, pools, anyway=anyway), latency_s
        self._api_key = api_key
        self._statuses, self._charged, self._lock = Counter[str](), Counter[str](), threading.Lock()
        super().__init__(json_app(self._respond), host=host, port=port, allow_remote=allow_remote)
        self.url = self.base_url = f"{self.url}/v1"

    def stats(self) -> dict[str, Any]:
        """Counts of requests so far, as plain data.

        `requests` (for answers, and whatever was refused), `answered`, `charged` (requests, prompt_tokens and
        completion_tokens that a provider would have billed) and `by_status`.
        """
        with self._lock:
            charges = ("requests", "prompt_tokens", "completion_tokens")
            return {
                "requests": self._statuses.total(),
                "answered": self._statuses["200"],
                "charged": {name: self._charged[name] for name in charges},
                "by_status": dict(sorted(self._statuses.items())),
            }

    def reply(self, method: str, route: str, content: bytes, key: str) -> Response:
        """The reply to one HTTP request; `key` is the API key that came with it, "" for none."""
        if method == "GET" and route == "/stats":
            return as_json(self.stats())
        if self._api_key is not None and not hmac.compare_digest(key.encode(), self._api_key.encode()):
            return self._refused(401, "The API key is not the judge server's.", "invalid_api_key")
        if method == "GET" and route == "/v1/models":
            names = sorted({model.model for model in load_models("sandbox", ROLES).values()})
            listed = [{"id": name, "object": "model", "created": 0, "owned_by": "alpacafarm_env"} for name in names]
            return as_json({"object": "list", "data": listed})
        if method != "POST" or route not in KINDS:
            routes = f"{', '.join(f'POST {route}' for route in KINDS)}, GET /v1/models, GET /stats"
            return self._refused(404, f"There is no {method} {route} here. There are: {routes}.", "not_found")
        try:
            return self._judge(KINDS[route], content, key)
        except AlpacaFarmError as error:
            return self._refused(400, str(error), "invalid_request_error")

    async def _respond(self, method: str, route: str, content: bytes, key: str) -> Response:
        """Without a thread: to start one takes as long as a verdict."""
        response = self.reply(method, route, content, key)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        return response

    def _judge(self, kind: str, content: bytes, key: str) -> Response:
        try:
            body = json.loads(content)
            digest = content_key(body)  # raises on NaN and 1e999
        except (ValueError, RecursionError) as error:
            raise PoolError(f"The body is not JSON: {error}.") from error
        question = self.judging.read(kind, body)
        return self._deliver(self.judging.answer(question, digest), digest, key)

    def _deliver(self, answer: JudgeAnswer, digest: str, key: str) -> Response:
        """The reply with an answer to a body of that digest, sent with that key; counted."""
        self._count("200", answer)
        return as_json(answer.completion())

    def _count(self, status: str, billed: JudgeAnswer | None = None) -> None:
        with self._lock:
            self._statuses[status] += 1
            if billed is not None:
                self._charged.update(requests=1, **billed.usage)

    def _refused(self, status: int, message: str, code: str) -> Response:
        self._count(str(status))
        return as_error(status, message, code)
