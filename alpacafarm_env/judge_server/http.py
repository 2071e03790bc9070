"""The one HTTP stack, of `serve`, `judge-server` and `annotate-human`: Starlette by uvicorn, behind one guard.

The guard refuses what another site's page makes a browser send (Host, Origin), and bodies that are too long. A
connection without a whole request within `IDLE_S` is ended, however slowly its bytes drip; so is one that does not take
its replies. Beyond `MOST_CONNECTIONS` the one that has waited longest makes room; one whose request is being answered
is never ended.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import math
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from time import sleep
from typing import Any, Final, ParamSpec, Self
from urllib.parse import urlsplit

from ..errors import AlpacaFarmError
from ..oracles.base import shorten

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.requests import Request as Request
    from starlette.responses import Response as Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
except ImportError as error:
    hint = "Install them: pip install 'alpacafarm-env[serve]', or '.[serve]' in a clone."
    raise AlpacaFarmError(f"A server needs the packages starlette and uvicorn ({error}). {hint}") from error

IDLE_S: Final = 30.0
"""Seconds a connection has for its next whole request, and to take the replies to those before."""
MOST_CONNECTIONS: Final = 512
"""Connections at once, each a file and perhaps a thread: a process may mostly open 1,024 files."""
MAX_BODY: Final = 64 * 1024**2
P = ParamSpec("P")


def as_json(content: object, status: int = 200) -> Response:
    """A reply whose body is JSON, in ASCII: a lone surrogate that came with the request can be shown too."""
    return Response(json.dumps(content), status, media_type="application/json")


def as_error(status: int, message: str, code: str, field: str | None = None) -> Response:
    """A refusal, with the error object that OpenAI-compatible servers send; `field` is the body's that is wrong."""
    return as_json({"error": {"message": message, "type": code, "param": field, "code": code}}, status)


def json_route(path: str, reply: Callable[[str, str, bytes, str], Awaitable[Response]]) -> Route:
    """A route whose requests are answered by their method, path, body and API key ("" for none)."""

    async def respond(request: Request) -> Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return await reply(request.method, request.scope["path"], await request.body(), key)

    return Route(path, respond, methods=["GET", "POST"])


def threaded(reply: Callable[P, Response]) -> Callable[P, Awaitable[Response]]:
    """Answers each request on a thread of its own, so that oracles can merge those that come together.

    Unlike an executor's, such a thread does not keep the process alive when its oracle never answers.
    """

    async def respond(*args: P.args, **keywords: P.kwargs) -> Response:
        result = Future[Response]()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(reply(*args, **keywords))
            except BaseException as error:  # noqa: BLE001 -- raised where it is awaited
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return await asyncio.wrap_future(result)

    return respond


def json_app(reply: Callable[[str, str, bytes, str], Awaitable[Response]]) -> Starlette:
    """An application whose every path is `reply`'s, see `json_route`."""
    return Starlette(routes=[json_route("/{path:path}", reply)])


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's alone."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class Guard:
    """Lets an application see whole requests alone, of programs on this machine and of its own pages.

    A browser says from which site's page a request comes (Origin), and by which name it found the server (Host): a
    site can have its own name point to this machine. Programs say no Origin, and the name that they were given.

    Args:
        app: The application.
        allow_remote: Let requests for any Host in.
        max_body: Most bytes of a request.
    """

    def __init__(self, app: ASGIApp, *, allow_remote: bool = False, max_body: int = MAX_BODY) -> None:
        self._app, self._allow_remote, self._max_body = app, allow_remote, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or hands it on; as ASGI has it."""
        refused = None if scope["type"] == "lifespan" else self._refusal(Headers(scope=scope))
        if refused is None and scope["type"] == "http":
            body, more = bytearray(), True
            while more and refused is None:
                message = await receive()
                body += message.get("body", b"")
                refused, more = self._too_long(len(body)), message.get("more_body", False)
            receive = _replay(bytes(body), receive)
        if refused is None:
            with suppress(asyncio.CancelledError):  # the server ends
                await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refused.headers["Connection"] = "close"  # the rest of a body is still to come
            await refused(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        host, origin = headers.get("host"), headers.get("origin")
        name = _hostname(f"//{host}")
        if host and not self._allow_remote and not is_loopback(name):
            return _forbidden("Host", host, "a name of this machine, such as 127.0.0.1 (any with --allow-remote)")
        if origin is not None and (sender := _hostname(origin)) != name and not is_loopback(sender):
            return _forbidden("Origin", origin, "no page of another site")
        return self._too_long(int(headers.get("content-length", 0)))  # h11 has seen to it that it is a number

    def _too_long(self, length: int) -> Response | None:
        if length <= self._max_body:
            return None
        return as_error(413, f"Expected a body of at most {self._max_body} bytes, got {length} or more.", "too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The messages of a request whose body was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _forbidden(field: str, value: str, expected: str) -> Response:
    return as_error(403, f"{field}: expected {expected}, got {shorten(value)}.", "forbidden", field)


class Server:
    """An application behind HTTP in this process, on a thread of its own, until `close`; a context manager.

    Args:
        app: A Starlette or FastAPI application.
        host: The interface to listen on, an address or a name of this machine.
        port: 0 for any free one.
        allow_remote: Take a `host` that other machines can reach, such as "0.0.0.0" or "::". Anybody on the way can
            read what is asked and answered.
        max_body: Most bytes of a request.
        grace_s: Seconds that requests being answered have when it is closed.

    Attributes:
        url: The address for clients, "http://127.0.0.1:PORT".
        remote: Whether other machines can reach it.

    Raises:
        AlpacaFarmError: `host` can be reached by other machines, and that was not allowed.
        OSError: `host` is not known, or the port is taken or may not be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        max_body: int = MAX_BODY,
        grace_s: float = 0.0,
    ) -> None:
        family, address, self.remote = resolve(host, port, allow_remote=allow_remote)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._socket = socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=both)
        name, number = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        config = uvicorn.Config(
            Guard(app, allow_remote=allow_remote, max_body=max_body),
            http=_Connection,
            log_config=None,
            log_level="error",
            access_log=False,  # a page's address has its secret
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=math.ceil(IDLE_S),
            backlog=1024,
        )
        self._server = _Uvicorn(config, grace_s)
        # On a thread of its own, where uvicorn leaves the process's signals alone.
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more connections, and ends those that are open; may be called again."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Uvicorn(uvicorn.Server):
    """Uvicorn, but that it ends within `grace_s`, and at once where nobody waits for an answer."""

    def __init__(self, config: uvicorn.Config, grace_s: float) -> None:
        super().__init__(config)
        self._grace_s = grace_s

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()  # those that wait for an answer end after it
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=self._grace_s)
        for connection in list(state.connections):
            connection.transport.abort()
        await self.lifespan.shutdown()


class _Connection(H11Protocol):
    """One connection; uvicorn itself waits for ever for a request that has begun, and for a reply to be taken."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio sets it on sockets of its own alone. A reply is sent in two parts: the second would wait for an ACK.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await()
        if len(self.connections) >= MOST_CONNECTIONS:
            self._make_room()

    def on_response_complete(self) -> None:
        self._await()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._await()
        super().pause_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._due is not None:
            self._due.cancel()

    @property
    def _waits(self) -> bool:
        """Whether it is the client's turn; a WebSocket has a protocol of its own."""
        cycle: RequestResponseCycle | None = self.cycle  # None at first
        answers = cycle is not None and not cycle.response_complete and not cycle.more_body
        return (not answers or self.flow.write_paused) and self.transport.get_protocol() is self

    def _await(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = self.loop.call_later(IDLE_S, self._end)

    def _end(self) -> None:
        if self._waits:
            self.connections.discard(self)
            self.transport.abort()

    def _make_room(self) -> None:
        others = [each for each in self.connections if each is not self and isinstance(each, _Connection)]
        waiting = [(each._due.when(), id(each), each) for each in others if each._due is not None and each._waits]
        if waiting:
            min(waiting)[-1]._end()


def resolve(host: str, port: int, *, allow_remote: bool) -> tuple[socket.AddressFamily, Any, bool]:
    """The address behind a host's name, IPv4 where there are both, and whether other machines can reach it.

    Raises:
        AlpacaFarmError: They can, and that was not allowed.
        OSError: There is no such host.
    """
    entries = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(entries, key=lambda entry: entry[0] != socket.AF_INET)
    remote = not is_loopback(str(address[0]))
    if remote and not allow_remote:
        raise AlpacaFarmError(
            f"expected a host that only this machine can reach, such as 127.0.0.1 or ::1, got {host!r}. There is no "
            "encryption: on a network that you trust, allow_remote=True, --allow-remote on the command line, takes it "
            "as it is."
        )
    return family, address, remote


def serve(start: Callable[[], Server], *, host: str, port: int) -> int:
    """Starts a server and prints its address, and a warning if other machines can reach it.

    Returns 0 at Ctrl-C, or when the process is asked to end (SIGTERM). AlpacaFarmError if the host or port cannot be
    had.
    """
    try:
        server = start()
    except OSError as error:
        reason = str(error.strerror or error).rstrip(".")
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        text = f"Cannot listen on --host {host}, --port {port}: {reason}. Give another {option}."
        raise AlpacaFarmError(text) from error
    with server, suppress(KeyboardInterrupt):
        if server.remote:
            warning = f"warning: other machines can reach {server.url}; what is asked is not encrypted"
            print(warning, file=sys.stderr, flush=True)  # noqa: T201 -- for whoever starts it
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            print(server.url, flush=True)  # noqa: T201 -- this is what a caller waits for
            while True:  # a wait without an end is not always woken by a signal that a thread of ours has taken
                sleep(0.1)
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0
