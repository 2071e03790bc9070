"""How the tests of the client ask: one request, or many at once."""

import asyncio
import time

import openai.resources.chat
import stamina

from alpacafarm_env.errors import APIError
from alpacafarm_env.llm.client import Client, ClientConfig
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.requests import Request
from alpacafarm_env.llm.run_sync import run

KEY = "sk-canary-0123456789abcdef"


def chat(url, text="Well?", **more):
    body = {"model": "m-1", "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    return Request(url, "chat", body | more)


WARM = openai.resources.chat, stamina
"""Loaded before any clock starts: the package loads them at its first request, which takes a second."""


def ask(server, count=1, *, client=Client, config=None, **settings):
    """Ask `count` questions at once: the answers and errors in order, and the seconds it took."""
    start = time.monotonic()

    async def main():
        async with client(Endpoint(server.url, KEY), config=ClientConfig(**(config or {})), **settings) as open_client:
            asks = (open_client.ask(chat(server.url, f"Question {i}?")) for i in range(count))
            return await asyncio.gather(*asks, return_exceptions=True)

    results = run(main())
    assert all(isinstance(result, APIError) or hasattr(result, "reply") for result in results), results
    return results, time.monotonic() - start


def first(server, **settings):
    return ask(server, **settings)[0][0]
