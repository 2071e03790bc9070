"""The page's server: Starlette on uvicorn, on this machine alone unless asked otherwise.

The address has a secret, without which there is nothing to see. The page asks nobody else for anything, and its
Content-Security-Policy forbids the browser to. It keeps no state: all is in the database, so that a page may be
reloaded and the server killed at any time.

    GET  /TOKEN/               who are you
    GET  /TOKEN/work?name=Ann  the pair to judge now
    POST /TOKEN/answer         name, pair, since (when it was shown), and choice (1 to 4) or reason; for a single
                               response choice is 1 to 7, with critique (optional)
    POST /TOKEN/undo           name, pair (none at the end), since
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from ..errors import AlpacaFarmError, DataError
from ..judge_server.http import Server
from .session import MOST_CRITIQUE, NOTES, QUALIFIED_FROM, Session, read_name

TEMPLATES: Final = Path(__file__).parent / "templates"
FILES: Final = ("page.css", "page.js", "icon.svg")
MAX_BODY: Final = 16 * 1024
"""Bytes of what a page may send."""
REASONS: Final = (
    "I do not know enough about it",
    "The instruction makes no sense",
    "Both are equally good",
    "I would rather not read this",
)
CHOICES: Final = ("A is clearly better", "A is slightly better", "B is slightly better", "B is clearly better")
RATINGS: Final = ("useless", "bad", "weak", "middling", "decent", "good", "excellent")
"""The meanings of 1 to 7."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # the address has the secret; "no-referrer" would take the Origin off our forms
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # a page from the browser's cache would show a pair that is answered
}


def make_app(session: Session, guideline: str) -> ASGIApp:
    """The application; `guideline` is plain text that annotators are shown."""
    page = _Page(session, guideline)
    routes = [
        Route("/", page.start),
        Route("/work", page.work),
        Route("/answer", page.answer, methods=["POST"]),
        Route("/undo", page.undo, methods=["POST"]),
        Route("/{file}", page.file),
    ]
    app = Starlette(
        routes=[Mount(f"/{session.store.token}", routes=routes)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_add_headers)],
        exception_handlers={AlpacaFarmError: _refuse},
    )
    app.router.redirect_slashes = False  # without the secret nothing is said of what there is
    return app


def _refuse(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 400 if isinstance(error, DataError) else 503)


async def _add_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response


class _Page:
    def __init__(self, session: Session, guideline: str) -> None:
        self._session = session
        self._guideline = guideline
        self._choices = RATINGS if session.rates else CHOICES
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )

    def start(self, request: Request) -> Response:
        return self._show("start.html.j2", problem="")

    def work(self, request: Request) -> Response:
        try:
            name = read_name(request.query_params.get("name", ""))
        except DataError as error:
            return self._show("start.html.j2", 400, problem=str(error))
        name = self._session.store.spelling(name)
        standing = self._session.standing(name)
        pair = standing.pair
        shown = (pair.outputs if standing.shown_first == 1 else pair.outputs[::-1]) if pair else ()
        return self._show(
            "work.html.j2",
            name=name,
            note=NOTES.get(request.query_params.get("note", ""), ""),
            standing=standing,
            shown=shown,
            since=f"{time.time():.3f}",
            choices=list(enumerate(self._choices, 1)),
            reasons=[reason for reason in REASONS if not (self._session.rates and reason.startswith("Both"))],
            needed=QUALIFIED_FROM,
            most_critique=MOST_CRITIQUE,
        )

    async def answer(self, request: Request) -> Response:
        return await run_in_threadpool(self._post, await request.body(), self._answer)

    async def undo(self, request: Request) -> Response:
        return await run_in_threadpool(self._post, await request.body(), self._undo)

    def _answer(self, name: str, fields: Mapping[str, str]) -> str:
        choice, last = fields.get("choice"), len(self._choices)
        if choice is not None and choice not in map(str, range(1, last + 1)):
            raise DataError(f"choice: expected 1 to {last}, got {choice[:20]!r}.")
        reason = fields.get("reason", "") or fields.get("other", "")
        critique = fields.get("critique", "") if self._session.rates else ""
        key, number = fields.get("pair", ""), int(choice) if choice else None
        return self._session.answer(name, key, _seconds(fields), choice=number, reason=reason, critique=critique)

    def _undo(self, name: str, fields: Mapping[str, str]) -> str:
        return self._session.undo(name, fields.get("pair", ""), _seconds(fields))

    def _post(self, body: bytes, act: Callable[[str, Mapping[str, str]], str]) -> Response:
        """Follows a form and sends the browser to the next page, which a reload only shows again."""
        try:
            fields = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=10))
        except ValueError as error:
            raise DataError(f"Expected a form's fields: {error}.") from error
        name = self._session.store.spelling(read_name(fields.get("name", "")))
        note = act(name, fields)
        return RedirectResponse(f"work?{urlencode({'name': name, **({'note': note} if note else {})})}", 303)

    def file(self, request: Request) -> Response:
        name = request.path_params["file"]
        return FileResponse(TEMPLATES / name) if name in FILES else PlainTextResponse("Not found.", 404)

    def _show(self, template: str, status: int = 200, **values: Any) -> Response:
        values |= {"rates": self._session.rates, "guideline": self._guideline}
        text = self._environment.get_template(template).render(values)
        return Response(text, status, media_type="text/html")


class PageServer(Server):
    """The page on a thread of its own; a context manager.

    Args:
        session: Who is shown what.
        guideline: Plain text that annotators are shown.
        where: `host`, `port` and `allow_remote`, as of `Server`. Anybody on the way can read what is asked and said.
    """

    def __init__(self, session: Session, guideline: str, **where: Any) -> None:
        super().__init__(make_app(session, guideline), max_body=MAX_BODY, grace_s=5.0, **where)
        self.url += f"/{session.store.token}/"


def _seconds(fields: Mapping[str, str]) -> float:
    """Since the page was sent."""
    given = fields.get("since", "")
    try:
        since = float(given)
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise DataError(f"since: expected the time at which the page was sent, got {given[:20]!r}.")
    return max(0.0, time.time() - since)
