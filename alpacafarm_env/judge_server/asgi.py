"""The score server's routes beside those of another application, such as OpenEnv's, on one port by uvicorn."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Self

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..oracles.base import RewardOracle
from .http import IDLE_S, MAX_BODY, MOST_CONNECTIONS, resolve, url_of
from .replies import HttpReply, as_error
from .scoring import HEALTH, SCORE, Scoring

_GRACE_S: Final = 5


class AppServer(Scoring):
    """`Scoring` and an application in this process; a context manager.

    Args:
        oracle, special_tokens: As of `Scoring`.
        app: A Starlette or FastAPI application, whose own routes of these paths count no more.
        host, port, allow_remote: As of `JudgeServer`.
    """

    def __init__(
        self,
        oracle: RewardOracle,
        special_tokens: Sequence[str] | None = None,
        *,
        app: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
    ) -> None:
        super().__init__(oracle, special_tokens)
        family, address, self.remote = resolve(host, port, allow_remote=allow_remote)
        self._socket = socket.create_server(address[:2], family=family, backlog=1024)
        self.url = url_of(self._socket.getsockname()) + SCORE
        app.router.routes[:0] = [Route(SCORE, self._respond, methods=["POST"]), Route(HEALTH, self._respond)]
        config = uvicorn.Config(
            app,
            log_config=None,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        # On a thread of its own, where uvicorn leaves the process's signals alone.
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(2 * _GRACE_S)

    async def _respond(self, request: Request) -> Response:
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BODY:
                return _response(as_error(413, f"expected a body of at most {MAX_BODY} bytes.", "too_large"))
        answer = partial(self.reply, request.method, request.url.path, bytes(content))
        return _response(await asyncio.to_thread(answer))


def _response(reply: HttpReply) -> Response:
    return Response(reply.body, reply.status, dict(reply.headers))
