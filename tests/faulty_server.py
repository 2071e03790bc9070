"""Servers on which things go wrong: a judge server with seeded faults, and one that writes any bytes; how tests ask."""

import asyncio
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import openai.resources.chat
import stamina
from starlette.responses import Response

from alpacafarm_env.errors import APIError
from alpacafarm_env.judge_server.http import as_error, as_json
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import Client, ClientConfig, run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.requests import Prices, Request
from alpacafarm_env.seeding import keyed_uniforms

UNBILLED = {
    "rate_limit": lambda: as_error(429, "Too many requests.", "rate_limit_exceeded"),
    "server_error": lambda: as_error(500, "The server had an error.", "server_error"),
    "html": lambda: Response(b"<!doctype html><title>Bad Gateway</title>", media_type="text/html"),
}
FAULTS = (*UNBILLED, "cut_json", "null_content", "wrong_count", "content_filter", "finish_length", "hang")


class Hanging(Response):
    """Nothing for `seconds`, then the connection ends."""

    def __init__(self, server, seconds):
        super().__init__()
        self.server, self.seconds = server, seconds

    async def __call__(self, scope, receive, send):
        await asyncio.sleep(self.seconds)
        connections = self.server._server.server_state.connections
        next(each.transport for each in connections if each.client == scope["client"]).abort()
        await asyncio.sleep(0)  # uvicorn notices, and sends no answer of its own


class FaultyJudgeServer(JudgeServer):
    """A judge server whose faults are keyed on its seed, the whole body and how often that came before.

    `faults` maps a fault to its share of the requests. In `stats`, "answered" are right answers; there is `by_fault`.
    """

    def __init__(self, faults=None, *, seed=0, **options):
        faults = faults or {}
        assert faults.keys() <= set(FAULTS)
        self.seed, self.faults = seed, faults
        self._arrived, self._faulted, self._useless = Counter(), Counter(), 0
        super().__init__(seed=seed, **options)

    def stats(self):
        stats = super().stats()
        return {**stats, "answered": stats["answered"] - self._useless, "by_fault": dict(self._faulted)}

    def _draw(self, digest):
        """The fault of one request, or none."""
        chance = keyed_uniforms(self.seed, "fault", [(digest, str(self._arrived[digest]))])[0]
        self._arrived[digest] += 1
        for fault in FAULTS:  # in this order, whatever the mapping's
            chance -= self.faults.get(fault, 0.0)
            if chance < 0:
                return fault
        return None

    def _deliver(self, answer, digest, key):
        with self._lock:
            fault = self._draw(digest)
            self._faulted.update([fault] if fault else [])
        if fault is None:
            return super()._deliver(answer, digest, key)
        reply = self._spoiled(answer, fault)
        self._useless += fault != "hang" and reply.status_code == 200
        self._count("none" if fault == "hang" else str(reply.status_code), None if fault in UNBILLED else answer)
        return reply

    def _spoiled(self, answer, fault):
        if fault in UNBILLED:
            return UNBILLED[fault]()
        if fault == "hang":
            return Hanging(self, 60.0)
        if fault == "wrong_count":
            return as_json(replace(answer, verdicts=(*answer.verdicts, answer.verdicts[-1])).completion())
        content = answer.completion()
        if fault == "cut_json":
            body = as_json(content).body
            return Response(body[: len(body) // 2], media_type="application/json")
        text, reason = {
            "null_content": (None, None),
            "content_filter": ("", "content_filter"),
            "finish_length": (answer.text[: len(answer.text) // 2], "length"),
        }[fault]
        choice = content["choices"][0]
        choice["logprobs"] = None  # they would be of the whole text
        choice["finish_reason"] = reason or choice["finish_reason"]
        if "message" in choice:
            choice["message"]["content"] = text
        else:
            choice["text"] = text
        return as_json(content)


@dataclass(frozen=True)
class Seen:
    """A request as it came; `started` is on the monotonic clock."""

    path: str
    headers: dict[str, str]
    body: dict
    started: float


Part = bytes | float | None  # bytes to send, seconds to wait, or a reset of the connection


class WireServer:
    """Answers each request with what `reply(seen, number)` returns: the whole response, or its parts in turn."""

    def __init__(self, reply: Callable[[Seen, int], bytes | Iterable[Part]] | None = None) -> None:
        self.reply = reply or (lambda seen, number: ok())
        self.seen: list[Seen] = []
        self.active = self.most_active = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def __enter__(self) -> "WireServer":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                while (line := stream.readline()).strip():
                    self._answer(connection, stream, line.decode().split()[1])
            except (OSError, _ResetError):
                pass

    def _answer(self, connection: socket.socket, stream, path: str) -> None:
        headers = {}
        while text := stream.readline().decode("latin-1").strip():
            name, value = text.split(":", 1)
            headers[name.lower()] = value.strip()
        body = json.loads(stream.read(int(headers.get("content-length", 0))) or b"{}")
        with self._lock:
            self.seen.append(Seen(path, headers, body, time.monotonic()))
            self.active += 1
            self.most_active = max(self.active, self.most_active)
            number = len(self.seen)
        try:
            parts = self.reply(self.seen[number - 1], number)
        finally:
            with self._lock:
                self.active -= 1
        for part in [parts] if isinstance(parts, bytes) else parts:
            if part is None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise _ResetError
            if isinstance(part, bytes):
                connection.sendall(part)
            elif self._stop.wait(part):
                return


class _ResetError(Exception):
    pass


def http(status: int, body: object, reason: str = "Said", **headers: object) -> bytes:
    """A whole response; a body that is not bytes is sent as JSON. Header names: "retry_after" is "retry-after"."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": len(data)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {reason}\r\n{head}\r\n".encode("latin-1") + data


def said(text: object = "Yes.", reason: str = "stop", usage: object = (7, 3), kind: str = "chat") -> dict:
    """The JSON of a reply."""
    part = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]} if isinstance(usage, tuple) else usage
    return {"id": "1", "model": "m", "choices": [{"index": 0, "finish_reason": reason, **part}], "usage": counts}


def ok(text: object = "Yes.", **settings) -> bytes:
    """A whole response with a reply."""
    return http(200, said(text, **settings))


def failed(status: int, message: str = "no", **headers: object) -> bytes:
    """A whole response with an error."""
    return http(status, {"error": {"message": message}}, **headers)


KEY = "sk-canary-0123456789abcdef"
PRICES = Prices.load({"m-1": [1.0, 2.0]})


def chat(url, text="Well?", **more):
    body = {"model": "m-1", "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    return Request(url, "chat", body | more)


WARM = openai.resources.chat, stamina
"""Loaded before any clock starts: the package loads them at its first request, which takes a second."""


def asked(endpoint, requests, *, client=Client, questions=(), label="", **settings):
    """Ask all at once: the answers and errors in order."""

    async def main():
        async with client(endpoint, **settings) as open_client:
            asks = (open_client.ask(request, questions=questions, label=label) for request in requests)
            return await asyncio.gather(*asks, return_exceptions=True)

    return run(main())


def ask(server, count=1, *, config=None, **settings):
    """Ask `count` questions at once: the answers and errors in order, and the seconds it took."""
    start = time.monotonic()
    requests = [chat(server.url, f"Question {i}?") for i in range(count)]
    results = asked(Endpoint(server.url, KEY), requests, config=ClientConfig(**(config or {})), **settings)
    assert all(isinstance(result, APIError) or hasattr(result, "reply") for result in results), results
    return results, time.monotonic() - start


def first(server, **settings):
    return ask(server, **settings)[0][0]


def ask_one(server, ledger, *, request=None, **settings):
    """One answer by way of a ledger; its error is raised."""
    (result,) = asked(Endpoint(server.url), [request or chat(server.url)], ledger=ledger, **settings)
    if isinstance(result, BaseException):
        raise result
    return result
