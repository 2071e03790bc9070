"""One HTTP request through the openai library: its body as it is, its reply's body or why there is none."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .endpoint import Endpoint
from .failures import Failure, explain
from .requests import Request

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class Sender:
    """Sends requests to one endpoint. It repeats nothing and follows no redirect.

    Args:
        endpoint: The server and the key.
        timeout_s: Seconds for a whole attempt, by the wall clock, the reply's body included.
        transport: An async transport of the HTTP library that openai uses, instead of the network.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_s: float, transport: Any = None) -> None:
        self._endpoint, self._timeout_s, self._transport = endpoint, timeout_s, transport
        self._openai: AsyncOpenAI | None = None
        self._logs = ExitStack()

    async def close(self) -> None:
        """End all connections; the next request opens new ones."""
        library, self._openai = self._openai, None
        try:
            if library is not None:
                await library.close()
        finally:
            self._logs.close()

    async def send(self, request: Request) -> str | Failure:
        """The body of the reply, or why there is none."""
        from openai import OpenAIError

        library, model = self.connect(), request.model
        chat = request.kind == "chat"
        resource: Any = library.chat.completions if chat else library.completions
        # `extra_body` is sent as it is, unknown fields included, and replaces the arguments that the library demands.
        known: dict[str, Any] = {"messages": []} if chat else {"prompt": ""}
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await resource.with_raw_response.create(model=model, extra_body=request.body, **known)
                return self._endpoint.redact_reply(response.content.decode("utf-8-sig"))
        except TimeoutError:
            return Failure(f"timed out: no whole reply within attempt_timeout_s={self._timeout_s:g}")
        except UnicodeEncodeError:
            return Failure("the request holds half a character (a lone surrogate)", "text", billed=False)
        except UnicodeDecodeError:
            return Failure("the reply is not UTF-8", status=200)
        except OpenAIError as error:
            return explain(error, self._endpoint, model)

    def connect(self) -> AsyncOpenAI:
        """The library's client; made at the first request, as stored answers need none."""
        if self._openai is None:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient

            # A proxy is for other machines. Redirects are errors: the key is for this address alone.
            http = DefaultAsyncHttpxClient(
                transport=self._transport, follow_redirects=False, trust_env=not self._endpoint.local
            )
            self._openai = AsyncOpenAI(
                api_key=self._endpoint.key(),
                base_url=self._endpoint.base_url,
                timeout=self._timeout_s,
                max_retries=0,
                http_client=http,
            )
            self._logs.enter_context(self._endpoint.quiet_logs())
        return self._openai
