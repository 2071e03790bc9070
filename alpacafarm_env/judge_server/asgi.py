"""The score server's routes beside those of another application, such as OpenEnv's, on one port by uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import AlpacaFarmError
from ..oracles.base import RewardOracle
from .http import MAX_BODY, MOST_CONNECTIONS
from .replies import as_error
from .running import RunningApp, as_response, read_body
from .scoring import HEALTH, SCORE, Scoring, refused


class AppServer(Scoring):
    """`Scoring` and an application in this process; a context manager.

    Args:
        oracle, special_tokens: As of `Scoring`.
        app: A Starlette or FastAPI application, whose own routes of these paths count no more. What it raises is
            answered as `POST /score` answers it.
        host, port, allow_remote: As of `RunningApp`.
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
        app.router.routes[:0] = [Route(SCORE, self._respond, methods=["POST"]), Route(HEALTH, self._respond)]
        app.add_exception_handler(AlpacaFarmError, _refuse)
        app.add_exception_handler(Exception, _refuse)
        self._running = RunningApp(app, host=host, port=port, allow_remote=allow_remote)
        self.remote = self._running.remote
        self.url = self._running.url + SCORE
        # One for each client: those who wait for the oracle are asked for together.
        self._threads = ThreadPoolExecutor(MOST_CONNECTIONS)

    def __enter__(self) -> Self:
        self._running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.__exit__()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _respond(self, request: Request) -> Response:
        content = await read_body(request, MAX_BODY)
        if content is None:
            return as_response(as_error(413, f"expected a body of at most {MAX_BODY} bytes.", "too_large"))
        asked = (request.method, request.url.path, content)
        loop = asyncio.get_running_loop()
        return as_response(await loop.run_in_executor(self._threads, self.reply, *asked))


def _refuse(_: Request, error: Exception) -> Response:
    return as_response(refused(error))
