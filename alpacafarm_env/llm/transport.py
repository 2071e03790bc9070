"""One HTTP request through the openai library: its body as it is, its reply's body or why there is none."""

import asyncio
import importlib
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..errors import InvalidReplyError, PermanentAPIError
from .endpoint import Endpoint
from .replies import Failure, Reply, explain, read_reply
from .requests import Kind, Request

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECT_S: Final = 10.0
"""Seconds to make a connection, TLS included; half of an attempt's if that is less."""
LONGEST_REPLY: Final = 8 * 2**20
"""Bytes of the longest body that is read, after decompression."""
_PATHS: Final[dict[Kind, str]] = {
    "chat": "/chat/completions",
    "completion": "/completions",
    "tokens": "/completions",
}
_ENCODINGS: Final = ("gzip", "deflate")
"""Accepted compressions, one at a time: a piece from the wire (64 KiB) becomes 64 MiB at most."""


class Sender:
    """Sends requests to one endpoint, `timeout_s` seconds of wall clock each. Repeats nothing, follows no redirect.

    Each request under way has a connection of its own, which then serves the next. In one pool the HTTP library would
    look at each of them for every request: with 64 that takes longer than all else together.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._all: list[AsyncOpenAI] = []
        self._free: list[AsyncOpenAI] = []  # a stack: the last used connection is the least likely gone
        self._opened = ExitStack()
        self._certificates: Any = None

    async def close(self) -> None:
        """End all connections; the next request opens new ones."""
        libraries, self._all, self._free = self._all, [], []
        with self._opened:
            for library in libraries:
                await library.close()

    async def send(self, request: Request) -> tuple[str, Reply | Failure]:
        """The body of the reply, "" if there is none, and what it says."""
        from openai import OpenAIError

        self.connect()
        library = self._free.pop() if self._free else self._another()
        whole: Any = _http().Response  # the body is sent as it is, and the reply not read by the library
        raw = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await library.post(_PATHS[request.kind], cast_to=whole, body=request.body)
                raw = self._endpoint.redact_reply(response.content.decode("utf-8-sig"))
            return raw, read_reply(request.kind, raw)
        except TimeoutError:
            return "", Failure(f"timed out: no whole reply within attempt_timeout_s={self._timeout_s:g}")
        except UnicodeEncodeError:
            return "", Failure("the request holds half a character (a lone surrogate)", "text", billed=False)
        except UnicodeDecodeError:
            return "", Failure("the reply is not UTF-8", status=200)
        except (OpenAIError, InvalidReplyError) as error:
            return raw, explain(error, self._endpoint, request.model)
        finally:
            self._free.append(library)

    async def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """GET a path below the server's root, or POST a body to it: the status, 0 if there is none, and what was said.

        For what a server offers beside answers: its version, its models, loading one.
        """
        from openai import APIStatusError, OpenAIError

        self.connect()
        library, whole = self._all[0], _http().Response
        url = self._endpoint.base_url.removesuffix("/v1") + path
        try:
            async with asyncio.timeout(self._timeout_s):
                send = library.get(url, cast_to=whole) if body is None else library.post(url, cast_to=whole, body=body)
                response: Any = await send
        except APIStatusError as error:
            response = error.response
        except (OpenAIError, InvalidReplyError, TimeoutError) as error:
            return 0, self._endpoint.redact(f"{error} {error.__cause__ or ''}".strip())
        return response.status_code, self._endpoint.redact_reply(response.content.decode("utf-8", "replace"))

    def connect(self) -> None:
        """Be ready to send, with the key as it is now; not before it is needed: stored answers need no library and key.

        Raises:
            PermanentAPIError: There is no key, or the environment's certificates or proxies cannot be used.
        """
        if self._all:
            return
        from openai import AsyncOpenAI

        first = AsyncOpenAI(
            api_key=self._endpoint.key(),
            base_url=self._endpoint.base_url,
            # Shorter than `send`'s own time-out, so that a connection that is never made charges nothing.
            timeout=_http().Timeout(None, connect=min(CONNECT_S, self._timeout_s / 2)),
            max_retries=0,
            http_client=self._connection(),
        )
        self._opened.enter_context(self._endpoint.quiet_logs())
        self._all, self._free = [first], [first]

    def _another(self) -> "AsyncOpenAI":
        self._all.append(self._all[0].copy(http_client=self._connection()))
        return self._all[-1]

    def _connection(self) -> Any:
        try:
            if self._certificates is None:  # once, as it takes 20 ms to read them; http:// shows none
                encrypted = self._endpoint.base_url.startswith("https:")
                self._certificates = _http().create_ssl_context() if encrypted else False
            # A proxy is for other machines. Redirects are errors: the key is for this address alone.
            return _limited_client()(
                follow_redirects=False,
                headers={"Accept-Encoding": ", ".join(_ENCODINGS)},
                trust_env=not self._endpoint.local,
                verify=self._certificates,
            )
        except Exception as error:  # noqa: BLE001 - there are as many kinds as ways to get a variable wrong
            problem = f"{type(error).__name__}: {error}"
        raise PermanentAPIError(
            f"No connection to {self._endpoint.host} can be prepared ({self._endpoint.redact(problem)}). Check the "
            "environment variables SSL_CERT_FILE, SSL_CERT_DIR, HTTPS_PROXY, HTTP_PROXY and ALL_PROXY."
        )


@cache
def _http() -> Any:
    """The HTTP library that openai uses: httpx, or httpx2 since its version 3."""
    from openai import DefaultAsyncHttpxClient

    return importlib.import_module(DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])


@cache
def _limited_client() -> Any:
    """The openai library's HTTP client, but with a limit on the size of a body."""
    from openai import DefaultAsyncHttpxClient

    class LimitedClient(DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            response = await super().send(request, **(options | {"stream": True}))
            try:
                body = await _read_body(response)
            finally:
                await response.aclose()  # where the body has not ended, the connection does
            read = ("content-encoding", "content-length", "transfer-encoding")
            headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in read]
            return _http().Response(response.status_code, headers=headers, content=body, request=request)

    return LimitedClient


async def _read_body(response: Any) -> bytes:
    """A reply's body, decompressed; only the beginning of an error's, as its status says enough.

    Raises:
        InvalidReplyError: It is longer than `LONGEST_REPLY`, or compressed in a way that was not asked for.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *_ENCODINGS):
        if not response.is_success:
            return b""
        raise InvalidReplyError(f"the reply is compressed ({encoding[:50]!a}), which was not asked for")
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > LONGEST_REPLY:
            if response.is_success:
                raise InvalidReplyError(f"the reply has more than {LONGEST_REPLY:,} bytes, and was not read to its end")
            break
    return bytes(body[:LONGEST_REPLY])
