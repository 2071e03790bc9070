"""Requests to the judge server, sockets of one's own, and pools that ask it."""

import http.client
import json
import socket
import time
from contextlib import closing
from functools import cache
from urllib.parse import urlsplit

import numpy as np

from alpacafarm_env.annotators.config import AnnotatorConfig, PoolConfig, load_models, load_pool, load_prompt
from alpacafarm_env.annotators.pool import AnnotatorPool
from alpacafarm_env.annotators.prompts import Item, render
from alpacafarm_env.judge_server.sandbox_judge import JudgeQuestion, SandboxJudge
from alpacafarm_env.sandbox import SANDBOX

LOOK_UP = socket.getaddrinfo
"""As it is outside of tests: addresses in numbers need no network."""
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
POOLS = ("alpaca_farm", "greedy", "weighted")
MEMBERS = {member.name: member for pool in POOLS for member in load_pool(pool).annotators}


def pairs(count, start=0):
    """Some pairs of the sandbox."""
    return [Item(str(row.instruction), *row.responses) for row in _rows()[start : start + count]]


@cache
def _rows():
    return SANDBOX.preferences("preference")


def make_body(name, items, **settings):
    """The path and the body that ask one annotator."""
    member = MEMBERS[name]
    model = load_models("sandbox", roles=[member.role])[member.role]
    prompt = render(load_prompt(member.prompt), items, model.kind)
    field = "messages" if model.kind == "chat" else "prompt"
    body = {"model": model.model, field: prompt, "max_tokens": member.max_tokens, "temperature": member.temperature}
    return PATHS[model.kind], {**body, **settings}


def chances(judging, name, items):
    """P(the second shown is better), [B], in the eyes of a judge server's annotator."""
    question = JudgeQuestion(name, items, kind="chat", model="any", format="lines", temperature=0.0)
    return np.array([verdict.chance for verdict in judging.answer(question, "key").verdicts])


def port_of(server):
    return urlsplit(getattr(server, "base_url", server)).port


def connect(server, timeout=10):
    """An open connection, to be used in a with statement."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=timeout)
    connection.connect()
    return closing(connection)


def post(connection, path, body, key="sk-client"):
    """Status, headers and parsed body of one request on an open connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, {"Authorization": f"Bearer {key}"})
    reply = connection.getresponse()
    return reply.status, reply.headers, json.loads(reply.read())


def has_ended(connection, within=5.0):
    """Whether the server ends a connection, whatever it sends before."""
    connection.settimeout(within)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def opened(server, sent=b""):
    """A socket of its own on which something was sent."""
    connection = socket.create_connection(("127.0.0.1", port_of(server)), timeout=10)
    connection.sendall(sent)
    return closing(connection)


def drip(connection):
    for _ in range(200):
        time.sleep(0.05)
        connection.sendall(b"x")


def text_of(content):
    choice = content["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


SINGLE = PoolConfig(
    name="single",
    annotators=(
        AnnotatorConfig(name="greedy_gpt4", role="gpt4", prompt="greedy_gpt4", max_tokens=250, temperature=0.0),
    ),
)
"""The greedy annotator, one pair a request."""


def unequal_pairs(count=400):
    """Instructions, first and second responses of stored pairs with two different responses."""
    rows = [row for row in SANDBOX.preferences("preference")[:count] if len(set(row.responses)) == 2]
    return [row.instruction for row in rows], *zip(*(row.responses for row in rows), strict=True)


def builder(folder, kind=AnnotatorPool):
    """A function that makes a pool that asks a server; its ledger is in the folder."""

    def build(server, pool=None, **options):
        defaults = {"base_url": server.base_url, "ledger": folder / "ledger.sqlite", "api_key": "sk-test"}
        return kind(pool, options.pop("models", "sandbox"), **{**defaults, **options})

    return build


def cut(pairs, count):
    return tuple(list(column[:count]) for column in pairs)


def truth(verdicts, instructions, a, b):
    """Rows whose verdict is the greedy annotator's likelier one, in the order that was shown."""
    b_first = verdicts.details["shown_first"] == "b"
    items = [
        Item(str(i), y, x) if swap else Item(str(i), x, y)
        for i, x, y, swap in zip(instructions, a, b, b_first, strict=True)
    ]
    second = chances(SandboxJudge(0), "greedy_gpt4", items) > 0.5
    return np.where(b_first, ~second, second) == (verdicts.scores == 1)
