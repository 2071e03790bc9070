"""The judge server: the sandbox's annotators behind an OpenAI-compatible endpoint on this machine, with seeded faults.

    with JudgeServer(seed=0) as server:
        pool = AnnotatorPool("alpaca_farm", "sandbox", base_url=server.base_url)

Routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /stats. It keeps no secret and has no
encryption: it is meant for this machine's own programs.
"""

import argparse
import hmac
import json
import threading
from collections import Counter
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self

from ..annotators.config import ROLES, load_models
from ..arguments import SEED, real_number, whole_number
from ..errors import AlpacaFarmError, PoolError
from ..llm.requests import content_key
from .faults import FAULTS, PARAMETERS, Faults
from .http import Listener, serve
from .replies import HttpReply, JudgeAnswer, as_error, as_json, spoiled
from .sandbox_judge import BY_TASTE, SandboxJudge

KINDS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_CHARGES: Final = ("requests", "prompt_tokens", "completion_tokens")


class JudgeServer:
    """A judge server in this process, on threads of its own; a context manager.

    A verdict depends on the seed and its own pair alone, see `SandboxJudge.answer`: a failed request, when repeated,
    gets the verdicts it would have got at once. Faults are keyed on the whole body and how often it came before. So
    neither depends on the order or the number of connections.

    Args:
        seed: Seeds the faults, and the verdicts of requests without a seed.
        faults: What goes wrong, and how often. None: nothing.
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
        faults: Faults | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        latency_s: float = 0.0,
        pools: Iterable[str | Path] = (),
        anyway: bool = False,
        allow_remote: bool = False,
    ) -> None:
        self.seed, self.faults = seed, faults or Faults()
        self.judging = SandboxJudge(seed, pools, anyway=anyway)
        self._api_key = api_key
        self._arrived, self._statuses, self._faulted = Counter[str](), Counter[str](), Counter[str]()
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

        `requests` (for answers, and whatever was refused), `answered` (with the right answer, however odd its usage or
        slow its bytes), `charged` and `charged_by_model` (requests, prompt_tokens and completion_tokens that a provider
        would have billed), `by_status` ("none": no status was sent) and `by_fault`.
        """
        with self._lock:
            by_model = {model: {name: sums[name] for name in _CHARGES} for model, sums in self._charged.items()}
            return {
                "requests": self._statuses.total(),
                "answered": self._answered,
                "charged": {name: sum(sums[name] for sums in by_model.values()) for name in _CHARGES},
                "charged_by_model": by_model,
                "by_status": dict(sorted(self._statuses.items())),
                "by_fault": dict(sorted(self._faulted.items())),
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
        with self._lock:
            draw = self.faults.draw(self.seed, digest, self._arrived[digest])
            self._arrived[digest] += 1
        answer = self.judging.answer(question, digest)
        reply = spoiled(answer, draw, self.faults, key)
        with self._lock:
            self._statuses["none" if reply.manner == "hang" else str(reply.status)] += 1
            self._count(answer, draw.fault)
        return reply

    def _count(self, answer: JudgeAnswer, fault: str | None) -> None:
        if fault is not None:
            self._faulted[fault] += 1
        self._answered += fault is None or FAULTS[fault].usable
        if fault is None or FAULTS[fault].billed:
            usage = {name: count for name, count in answer.usage.items() if name in _CHARGES}
            self._charged.setdefault(answer.question.model, Counter()).update(requests=1, **usage)

    def _refused(self, status: int, message: str, code: str) -> HttpReply:
        with self._lock:
            self._statuses[str(status)] += 1
        return as_error(status, message, code)


def run_server(*, faults: str | PathLike[str] | None = None, **options: Any) -> int:
    """Serves until Ctrl-C; returns the exit status. Prints the base URL, and a warning if other machines can reach it.

    Args:
        faults: A faults file, see `faults`; None for no faults.
        options: The other arguments of `JudgeServer`.

    Raises:
        AlpacaFarmError: The faults file is not well written (PoolError), or the host or port cannot be had.
    """
    loaded = None if faults is None else Faults.load(faults)
    where = {name: options[name] for name in ("host", "port") if name in options}
    return serve(lambda: JudgeServer(faults=loaded, **options), lambda server: server.base_url, **where)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `judge-server`: `run_server`'s arguments by name."""
    text = "where to listen (default: 0, any free port)"
    parser.add_argument("--port", type=whole_number(0, 65535), default=0, metavar="N", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="the interface to listen on")
    text = "take a --host that other machines can reach, such as 0.0.0.0; anybody on the way can read the texts"
    parser.add_argument("--allow-remote", action="store_true", help=text)
    text = "JSON or YAML: a rate in [0, 1] for each fault, and the parameters that should not be as below"
    parser.add_argument("--faults", metavar="FILE", help=text)
    text = "seeds the faults, and verdicts of requests without a seed"
    parser.add_argument("--seed", type=SEED, default=0, metavar="N", help=text)
    text = "seconds an answer takes at least"
    parser.add_argument("--latency", dest="latency_s", type=real_number(), default=0.0, metavar="S", help=text)
    text = "a pool of your own, whose prompts are to be read; may be given several times"
    parser.add_argument("--pool", dest="pools", action="append", default=[], metavar="FILE", help=text)
    text = f"judge instructions that are not the sandbox's too, {BY_TASTE}: such verdicts say nothing of the responses"
    parser.add_argument("--anyway", action="store_true", help=text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = [f"  {name:<20} {kind.about}" for name, kind in FAULTS.items()]
    rest = [f"  {name:<20} {default}" for name, default in PARAMETERS.items()]
    parser.epilog = "\n".join(["faults:", *kinds, "parameters:", *rest])
