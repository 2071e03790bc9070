"""`serve`: scores over HTTP, many clients at once, and whatever bodies they send."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from judge_requests import LOOK_UP, connect, post
from starlette.applications import Starlette

from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import main
from alpacafarm_env.judge_server import scoring
from alpacafarm_env.judge_server.scoring import ScoreServer
from alpacafarm_env.oracles import Constant, MicroBatched, judge, make_oracle

SERVERS = [ScoreServer, partial(ScoreServer, app=Starlette())]
"""The server by itself, and beside an application."""
GOOD = {"instructions": ["Say a.", "Say b."], "responses": ["a", "bb"]}


@pytest.fixture(scope="module", params=SERVERS)
def server(request):
    with request.param(Constant(0.5)) as running:
        yield running


def ask(server, path="/score", body=GOOD, method="POST"):
    """Status and parsed body of one request."""
    with connect(server.url) as connection:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def refused(server, body):
    """Status of a refusal, and the field that it names."""
    status, content = ask(server, body=body)
    return status, content["error"]["param"]


@pytest.mark.parametrize(("name", "num"), [("gold", 64), pytest.param("surrogate", 1000, marks=pytest.mark.slow)])
def test_many_clients_get_the_oracles_scores(name, num):
    """A reward model's to 1e-5, the difference that other rows in a batch make."""
    oracle, rows, clients = make_oracle(name, dataset=sandbox.SANDBOX), 4, 8
    stored = sandbox.SANDBOX.preferences("preference")
    pairs = [(str(row.instruction), text) for row in stored for text in row.responses][: num * rows]
    instructions, responses = zip(*pairs, strict=True)
    expected = judge(oracle, instructions, responses).scores

    def client(number):
        with connect(server.url, timeout=60) as connection:
            for start in range(number * rows, num * rows, clients * rows):
                part = slice(start, start + rows)
                body = {"instructions": instructions[part], "responses": responses[part]}
                status, _, content = post(connection, "/score", body)
                assert status == 200
                np.testing.assert_allclose(content["scores"], expected[part], rtol=0, atol=1e-5)

    with ScoreServer(oracle) as server, ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
        health = ask(server, "/health", b"", method="GET")[1]
    assert (health["requests"], health["rows"]) == (num, num * rows)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"instructions": None}, "instructions"),
        ({"responses": ["a"]}, "responses"),
        ({"query": ["a"]}, "query"),
        ({"responses": ["a", 5]}, "responses[1]"),
        ({"responses": "ab"}, "responses"),
        ({"instructions": ["a", "\ud800"]}, "instructions[1]"),
        ({"responses": ["a", "b" * (2**20 + 1)]}, "responses[1]"),
        ({"responses": ["a"] * (scoring.MAX_ROWS + 1)}, "responses"),
    ],
)
def test_a_wrong_field_is_named(server, change, field):
    assert refused(server, GOOD | change) == (400, field)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_request_is_refused(server, body):
    assert refused(server, body) == (400, None)


def test_empty_batches_and_empty_texts_are_legal(server):
    assert ask(server, body={"instructions": [], "responses": []}) == (200, {"oracle": "constant", "scores": []})
    assert ask(server, "/score?x=1", {"instructions": [""], "responses": [""]})[1]["scores"] == [0.5]


@pytest.mark.parametrize("make", SERVERS)
def test_oracles_errors_are_answered_and_counted(make, caplog):
    class Broken(Constant):
        def score(self, instructions, responses):
            raise KeyError("lost")

    with make(Broken()) as server:
        status, content = ask(server)
        assert (status, content["error"]["code"]) == (500, "oracle_error")
        assert ask(server, "/health", b"", "GET")[1]["failed"] == 1
    assert "lost" in content["error"]["message"]
    assert "lost" in caplog.text


@pytest.mark.parametrize("make", SERVERS)
def test_clients_who_ask_together_are_one_call(make):
    oracle = MicroBatched(Constant(0.5), wait_s=5.0)
    oracle._last = 24  # as after a call for 24
    with make(oracle) as server, ThreadPoolExecutor(24) as threads:
        assert {status for status, _ in threads.map(lambda _: ask(server), range(24))} == {200}
    assert oracle.calls == 1


def test_health_counts_what_was_asked():
    with ScoreServer(Constant(0.5)) as server:
        for body in (GOOD, GOOD, {}):
            ask(server, body=body)
        counts = {"requests": 2, "refused": 1, "failed": 0, "rows": 4, "oracle_calls": 2}
        assert ask(server, "/health", b"", "GET") == (200, {"status": "healthy", "oracle": "constant", **counts})
        assert ask(server, "/get_reward")[0] == ask(server, "/score", b"", method="GET")[0] == 404


def mangled(rng):
    """A right body with a wrong value, or with bytes changed, cut or doubled."""
    values = (None, True, 0, 1e308, "text", "\ud800", [], {}, ["a"], ["a", None], [["a"]], {"a": 1}, ["é🙂"])
    names = ("instructions", "responses", "query", "prompts", "labels", "")
    content = bytearray(json.dumps(GOOD | {rng.choice(names): rng.choice(values)}).encode())
    for _ in range(rng.choice((0, 0, 1, 3, 20))):
        start = rng.randrange(len(content) + 1)
        content[start : start + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
    return bytes(content)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_body_breaks_the_server(count):
    rng, statuses = random.Random(0), set()
    with ScoreServer(Constant(0.5), ["</s>"]) as server, connect(server.url) as connection:
        for _ in range(count):
            status, _, content = post(connection, "/score", mangled(rng))
            statuses.add(status)
            assert ("scores" in content) == (status == 200)
        assert post(connection, "/score", GOOD)[2]["scores"] == [0.5, 0.5]
    assert statuses == {200, 400}


def test_what_cannot_be_served_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", LOOK_UP)
    for args, reason in [
        (["AlpacaFarm-Token-v0"], "whole responses"),
        (["AlpacaFarm-PPO"], "AlpacaFarm-PPO-v0"),
        (["AlpacaFarm-PPO-v0", "--oracle", "gould"], "gold"),
        (["AlpacaFarm-PPO-v0", "--oracle", "constant", "--dataset", "no/such"], "no/such"),
        (["AlpacaFarm-PPO-v0", "--oracle", "constant", "--host", "0.0.0.0"], "--allow-remote"),
    ]:
        assert main(["serve", *args]) == 2
        assert reason in capsys.readouterr().err
