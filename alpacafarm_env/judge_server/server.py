"""The judge server: the sandbox's annotators behind an OpenAI-compatible endpoint on this machine.

    with JudgeServer(seed=0) as server:
        pool = AnnotatorPool("alpaca_farm", "sandbox", base_url=server.base_url)

Routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /stats. It keeps no secret and has no
encryption: it is meant for this machine's own programs.
"""

import hmac
import json
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

from ..annotators.config import ROLES, load_models
from ..errors import AlpacaFarmError, PoolError
from ..llm.requests import content_key
from .http import Listener, serve
from .replies import HttpReply, JudgeAnswer, as_error, as_json
from .sandbox_judge import SandboxJudge

KINDS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_CHARGES: Final = ("requests", "prompt_tokens", "completion_tokens")


class JudgeServer:
    """A judge server in this process, on threads of its own; a context manager.

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
        self.judging = SandboxJudge(seed, pools, anyway=anyway)
        self._api_key = api_key
        self._statuses = Counter[str]()
        self._charged: dict[str, Counter[str]] = {}
        self._answered = 0
        self._lock = threading.Lock()
        self._listener = Listener((host, port), self.reply, latency_s=latency_s, allow_remote=allow_remote)
        self._listener.start()

    @property
    def base_url(self) -> str:
        """The address for clients, "http://127.0.0.1:PORT/v1"."""
        return f"{self._listener.url}/v1"

    @property
    def remote(self) -> bool:
        """Whether other machines can reach it."""
        return self._listener.remote

    def stats(self) -> dict[str, Any]:
        """What happened so far, as plain data.

        `requests` (for answers, and whatever was refused), `answered`, `charged` and `charged_by_model` (requests,
        prompt_tokens and completion_tokens that a provider would have billed) and `by_status`.
        """
        with self._lock:
            by_model = {model: {name: sums[name] for name in _CHARGES} for model, sums in self._charged.items()}
            return {
                "requests": self._statuses.total(),
                "answered": self._answered,
                "charged": {name: sum(sums[name] for sums in by_model.values()) for name in _CHARGES},
                "charged_by_model": by_model,
                "by_status": dict(sorted(self._statuses.items())),
            }

    def close(self) -> None:
        """Stops at once, whatever is still being answered: open connections end."""
        self._listener.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reply(self, method: str, path: str, content: bytes, key: str) -> HttpReply:
        """The reply to one HTTP request; `key` is the API key that came with it, "" for none."""
        route = path.partition("?")[0]
        if method == "GET" and route == "/stats":
            return as_json(self.stats())
        if self._api_key is not None and not hmac.compare_digest(key.encode(), self._api_key.encode()):
            return self._refused(401, "The API key is not the judge server's.", "invalid_api_key")
        if method == "GET" and route == "/v1/models":
            names = sorted({model.model for model in load_models("sandbox", ROLES).values()})
            listed = [{"id": name, "object": "model", "created": 0, "owned_by": "alpacafarm_env"} for name in names]
            return as_json({"object": "list", "data": listed})
        if method != "POST" or route not in KINDS:
            known = f"{', '.join(f'POST {route}' for route in KINDS)}, GET /v1/models, GET /stats"
            return self._refused(404, f"There is no {method} {route} here. There are: {known}.", "not_found")
        try:
            return self._judge(KINDS[route], content, key)
        except AlpacaFarmError as error:
            return self._refused(400, str(error), "invalid_request_error")

    def _judge(self, kind: str, content: bytes, key: str) -> HttpReply:
        try:
            body = json.loads(content)
            digest = content_key(body)  # raises on NaN and 1e999
        except (ValueError, RecursionError) as error:
            raise PoolError(f"The body is not JSON: {error}.") from error
        question = self.judging.read(kind, body)
        return self._deliver(self.judging.answer(question, digest), digest, key)

    def _deliver(self, answer: JudgeAnswer, digest: str, key: str) -> HttpReply:
        """The reply with an answer to a body of that digest, sent with that key; counted."""
        with self._lock:
            self._count(answer, "200")
        return as_json(answer.completion())

    def _count(self, answer: JudgeAnswer, status: str, *, answered: bool = True, billed: bool = True) -> None:
        self._statuses[status] += 1
        self._answered += answered
        if billed:
            usage = {name: count for name, count in answer.usage.items() if name in _CHARGES}
            self._charged.setdefault(answer.question.model, Counter()).update(requests=1, **usage)

    def _refused(self, status: int, message: str, code: str) -> HttpReply:
        with self._lock:
            self._statuses[str(status)] += 1
        return as_error(status, message, code)


def run_server(**options: Any) -> int:
    """Serves until Ctrl-C; returns the exit status. Prints the base URL, and a warning if other machines can reach it.

    Args:
        options: The arguments of `JudgeServer`.

    Raises:
        AlpacaFarmError: The host or port cannot be had.
    """
    where = {name: options[name] for name in ("host", "port") if name in options}
    return serve(lambda: JudgeServer(**options), lambda server: server.base_url, **where)
