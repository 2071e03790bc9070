"""An ASGI application on a thread of its own, by uvicorn; slow clients and other sites' pages keep nobody out."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from typing import Any, Final, Self

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from .guard import refusal
from .http import IDLE_S, MOST_CONNECTIONS, resolve, url_of
from .replies import HttpReply

_GRACE_S: Final = 5


class RunningApp:
    """Serves an application from `__enter__` to `__exit__`, where requests being answered have some seconds.

    Args:
        app: The application.
        host, port, allow_remote: As of `JudgeServer`; without `allow_remote` only requests for a loopback Host pass.
        options: Of `uvicorn.Config`.

    Raises:
        AlpacaFarmError: `host` can be reached by other machines, and that was not allowed.
        OSError: `host` is not known, or the port is taken or may not be used.
    """

    def __init__(
        self, app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False, **options: Any
    ) -> None:
        family, address, self.remote = resolve(host, port, allow_remote=allow_remote)
        self._socket = socket.create_server(address[:2], family=family, backlog=1024)
        self.url = url_of(self._socket.getsockname())
        """The address for clients, "http://127.0.0.1:PORT"."""
        config = uvicorn.Config(
            _Guard(app, allow_remote=allow_remote),
            http=_Connection,
            log_config=None,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=math.ceil(IDLE_S),
            timeout_graceful_shutdown=_GRACE_S,
            **options,
        )
        self._server = uvicorn.Server(config)
        # On a thread of its own, where uvicorn leaves the process's signals alone.
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(2 * _GRACE_S)
        self._socket.close()


def as_response(reply: HttpReply) -> Response:
    """The reply as Starlette sends it."""
    return Response(reply.body, reply.status, dict(reply.headers))


async def read_body(request: Request, most: int) -> bytes | None:
    """The body of a request; None if it has more bytes than `most`, of which no more are read."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            return None
    return bytes(content)


class _Guard:
    def __init__(self, app: ASGIApp, *, allow_remote: bool) -> None:
        self._app, self._allow_remote = app, allow_remote

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else {}
        refused = refusal(headers.get("host"), headers.get("origin"), allow_remote=self._allow_remote)
        if refused is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await as_response(refused)(scope, receive, send)


class _Connection(H11Protocol):
    """Waits for its next whole request as a `Listener`'s connection does: `IDLE_S`, however slowly bytes drip.

    Uvicorn itself waits for ever for a request that has begun.
    """

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await()
        if len(self.connections) >= MOST_CONNECTIONS:
            self._make_room()

    def on_response_complete(self) -> None:
        self._await()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._due is not None:
            self._due.cancel()

    @property
    def _waits(self) -> bool:
        """Whether the next request has not come in full; a WebSocket has a protocol of its own."""
        cycle: RequestResponseCycle | None = self.cycle  # None at first
        answers = cycle is not None and not cycle.response_complete and not cycle.more_body
        return not answers and self.transport.get_protocol() is self

    def _await(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = self.loop.call_later(IDLE_S, self._end)

    def _end(self) -> None:
        if self._waits:
            self.connections.discard(self)
            self.transport.abort()

    def _make_room(self) -> None:
        """Ends the connection that has waited longest; one whose request is being answered is never ended."""
        others = [each for each in self.connections if each is not self and isinstance(each, _Connection)]
        waiting = [(each._due.when(), id(each), each) for each in others if each._due is not None and each._waits]
        if waiting:
            min(waiting)[-1]._end()
