"""How the tests of the client ask: one request, or many at once."""

import asyncio
import time

import openai.resources.chat
import stamina

from alpacafarm_env.errors import APIError
from alpacafarm_env.llm.client import Client, ClientConfig, run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.pricing import Prices
from alpacafarm_env.llm.requests import Request

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
