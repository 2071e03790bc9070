"""One HTTP request through the openai library: its body as it is, its reply's body or why there is none."""

from __future__ import annotations

import asyncio
import importlib
import os
import ssl
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from .endpoint import Endpoint
from .failures import Failure, explain
from .requests import Request

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PATHS: Final = {"chat": "/chat/completions", "completion": "/completions"}


class Sender:
    """Sends requests to one endpoint. It repeats nothing and follows no redirect.

    Connections are aiohttp's, by openai's own extra of that name: with httpx's a request took 1.4 times the CPU time.

    Args:
        endpoint: The server and the key.
        timeout_s: Seconds for a whole attempt, by the wall clock, the reply's body included.
        transport: An async transport of the HTTP library that openai uses, instead of the network.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_s: float, transport: Any = None) -> None:
        self._endpoint, self._timeout_s, self._transport = endpoint, timeout_s, transport
        self._library: AsyncOpenAI | None = None
        self._logs = ExitStack()

    async def close(self) -> None:
        """End all connections; the next request opens new ones."""
        library, self._library = self._library, None
        try:
            if library is not None:
                await library.close()
        finally:
            self._logs.close()

    async def send(self, request: Request) -> str | Failure:
        """The body of the reply, or why there is none."""
        from aiohttp import ClientError
        from openai import OpenAIError

        library = self.connect()
        whole: Any = _http().Response  # the body is sent as it is, and the reply not read by the library
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await library.post(_PATHS[request.kind], cast_to=whole, body=request.body)
                return self._endpoint.redact_reply(response.content.decode("utf-8-sig"))
        except TimeoutError:
            return Failure(f"timed out: no whole reply within attempt_timeout_s={self._timeout_s:g}")
        except UnicodeEncodeError:
            return Failure("the request holds half a character (a lone surrogate)", "text", billed=False)
        except UnicodeDecodeError:
            return Failure("the reply is not UTF-8", status=200)
        except (OpenAIError, ClientError) as error:  # openai lets some of aiohttp's pass
            return explain(error, self._endpoint, request.model)

    def connect(self) -> AsyncOpenAI:
        """Be ready to send; at the first request, as stored answers need neither the library nor a key.

        Raises:
            PermanentAPIError: There is no key.
        """
        if self._library is not None:
            return self._library
        from openai import AsyncOpenAI, DefaultAioHttpClient

        http = _http()
        encrypted = self._endpoint.base_url.startswith("https:")
        self._library = AsyncOpenAI(
            api_key=self._endpoint.key(),
            base_url=self._endpoint.base_url,
            # The other waits end with `send`'s own time-out, which counts them all.
            timeout=http.Timeout(None, connect=self._timeout_s),
            max_retries=0,
            # A proxy is for other machines. Redirects are errors: the key is for this address alone.
            http_client=DefaultAioHttpClient(
                transport=self._transport,
                follow_redirects=False,
                trust_env=not self._endpoint.local,
                verify=_certificates(*map(os.environ.get, _CERTIFICATES)) if encrypted else _no_certificates(),
                limits=http.Limits(max_connections=0, keepalive_expiry=5.0),  # 0: any number; the limiter counts them
            ),
        )
        self._logs.enter_context(self._endpoint.quiet_logs())
        return self._library


@cache
def _http() -> Any:
    """The HTTP library that openai uses: httpx, or httpx2 since its version 3."""
    from openai import DefaultAsyncHttpxClient

    return importlib.import_module(DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])


_CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@cache
def _certificates(*_: str | None) -> ssl.SSLContext:
    """Whom the HTTP library trusts; read once for each setting of the variables that say so, as it takes 20 ms."""
    context: ssl.SSLContext = _http().create_ssl_context()
    return context


@cache
def _no_certificates() -> ssl.SSLContext:
    """Trusts nobody: for http://, which shows no certificate."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
