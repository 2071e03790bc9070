"""`serve`: scores over HTTP, many clients at once, and whatever bodies they send."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from judge_requests import LOOK_UP, connect, drip, has_ended, opened, post
from starlette.applications import Starlette

from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import main
from alpacafarm_env.judge_server import asgi, running, scoring
from alpacafarm_env.judge_server import http as listener
from alpacafarm_env.judge_server.asgi import AppServer
from alpacafarm_env.judge_server.scoring import ScoreServer
from alpacafarm_env.oracles import Constant, MicroBatched, judge, make_oracle

ROOT = Path(__file__).resolve().parents[2]
SERVERS = [ScoreServer, lambda *args, **options: AppServer(*args, app=Starlette(), **options)]
"""The server by itself, and beside an application."""
GOOD = {"instructions": ["Say a.", "Say b."], "responses": ["a", "bb"]}


@pytest.fixture(scope="module", params=SERVERS)
def server(request):
    with request.param(Constant(0.5)) as running:
        yield running


def ask(server, path, body, method="POST", **headers):
    """Status and parsed body of one request."""
    with connect(getattr(server, "url", server)) as connection:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def refused(server, body):
    """Status of a refusal, and the field that it names."""
    status, content = ask(server, "/score", body)
    return status, content["error"]["param"]


@contextmanager
def served(*args, report_s=60.0):
    """The command in a process of its own, and the address it prints."""
    code = f"import sys; from alpacafarm_env.judge_server import http; http.REPORT_S = {report_s}\n"
    code += "from alpacafarm_env.__main__ import main; sys.exit(main())"
    command, pipe = [sys.executable, "-c", code, "serve", *args], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            yield process, url
        finally:
            process.kill()


def load(url, oracle, requests, clients, rows=16):
    """Asks `requests` times for the scores of `rows` of the sandbox's responses, and prints the times.

    Each score must be the in-process oracle's: of a reward model to the 1e-5 that other rows in a batch make.
    """
    stored = sandbox.SANDBOX.preferences("preference")
    pairs = [(str(row.instruction), text) for row in stored for text in row.responses][: requests * rows]
    instructions, responses = zip(*pairs, strict=True)
    expected = judge(oracle, instructions, responses).scores
    seconds, exact = [], []

    def client(number):
        with connect(url, timeout=60) as connection:
            for start in range(number * rows, requests * rows, clients * rows):
                part, since = slice(start, start + rows), time.perf_counter()
                body = {"instructions": instructions[part], "responses": responses[part]}
                status, _, content = post(connection, "/score", body)
                seconds.append(time.perf_counter() - since)
                assert status == 200
                np.testing.assert_allclose(content["scores"], expected[part], rtol=0, atol=1e-5)
                exact.append(content["scores"] == expected[part].tolist())

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
    rate = requests * rows / (time.perf_counter() - began)
    health = ask(url, "/health", b"", method="GET")[1]
    assert (health["requests"], health["rows"]) == (len(seconds), requests * rows)
    middle, late = 1000 * np.quantile(seconds, (0.5, 0.99))
    told = f"{oracle.name}: {requests} requests of {rows} by {clients} clients: p50 {middle:.1f} ms, p99 {late:.1f} ms"
    print(f"\n{told}, {rate:.0f} rows/s, {health['oracle_calls']} calls, {np.mean(exact):.0%} bit-identical")


def test_every_client_gets_the_in_process_oracle_s_scores():
    oracle = make_oracle("gold", dataset=sandbox.SANDBOX)
    with ScoreServer(oracle) as server:
        load(server.url, oracle, requests=64, clients=8, rows=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gold", "surrogate", "annotators"])
def test_a_thousand_requests_of_32_clients(name, capsys):
    with served("AlpacaFarm-PPO-v0", "--oracle", name) as (_, url), capsys.disabled():
        load(url, make_oracle(name, dataset=sandbox.SANDBOX), requests=1000, clients=32)


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


def test_what_is_no_request_is_refused(server, monkeypatch):
    for body in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000, b"1" * 5000):
        assert refused(server, body) == (400, None)
    monkeypatch.setattr(listener, "MAX_BODY", 10)
    monkeypatch.setattr(asgi, "MAX_BODY", 10)
    assert ask(server, "/score", GOOD)[0] == 413


def test_empty_batches_and_empty_texts_are_legal(server):
    assert ask(server, "/score", {"instructions": [], "responses": []}) == (200, {"oracle": "constant", "scores": []})
    assert ask(server, "/score?x=1", {"instructions": [""], "responses": [""]})[1]["scores"] == [0.5]


@pytest.mark.parametrize("make", SERVERS)
def test_whatever_an_oracle_raises_is_answered_and_counted(make, caplog):
    class Broken(Constant):
        def score(self, instructions, responses):
            raise KeyError("lost")

    with make(Broken()) as server:
        status, told = ask(server, "/score", GOOD)
        assert (status, told["error"]["code"], ask(server, "/health", b"", "GET")[1]["failed"]) == (
            500,
            "oracle_error",
            1,
        )
    assert "lost" in told["error"]["message"]
    assert "lost" in caplog.text


@pytest.mark.parametrize("make", SERVERS)
def test_pages_of_other_sites_are_refused(make):
    with make(Constant(0.5)) as server, make(Constant(0.5), allow_remote=True) as open_to_all:
        for name, value in [("Host", "evil.com"), ("Host", "[::1"), ("Origin", "http://evil.com"), ("Origin", "null")]:
            assert ask(server, "/score", GOOD, **{name: value})[0] == 403
        for headers in ({"Origin": "http://localhost:3000"}, {"Host": "[::1]:80"}, {"Host": "LOCALHOST"}):
            assert ask(server, "/score", GOOD, **headers)[0] == 200
        assert ask(open_to_all, "/score", GOOD, Host="my.net", Origin="http://my.net")[0] == 200
        assert ask(open_to_all, "/score", GOOD, Host="my.net", Origin="http://evil.com")[0] == 403


def test_a_length_that_is_no_number_is_refused(server):
    head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: %s\r\n\r\n"
    for length in (b"9" * 5_000, b"-1"):
        with opened(server.url, head % length) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_connections_that_bring_no_request_keep_nobody_out_of_an_application(monkeypatch):
    monkeypatch.setattr(running, "MOST_CONNECTIONS", 20)
    with SERVERS[1](Constant(0.5)) as server, ExitStack() as stack:
        held = [stack.enter_context(opened(server.url, b"POST /score HTTP/1.1\r\nX-L: ")) for _ in range(60)]
        assert ask(server, "/score", GOOD)[0] == 200
        assert has_ended(held[0])
        assert not has_ended(held[-1], within=0.2)
    monkeypatch.setattr(running, "IDLE_S", 0.3)
    with SERVERS[1](Constant(0.5)) as server, ExitStack() as stack:
        half = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        sent = (b"", b"POST /score HT", half)
        held = [stack.enter_context(opened(server.url, each)) for each in sent]
        assert all(map(has_ended, held))
        with opened(server.url, b"GET /health HTTP/1.1\r\nX-L: ") as slow, pytest.raises(ConnectionError):
            drip(slow)


def test_an_application_s_slow_answers_outlast_the_wait_for_requests(monkeypatch):
    class Slow(Constant):
        def score(self, instructions, responses):
            time.sleep(0.5)
            return super().score(instructions, responses)

    monkeypatch.setattr(running, "IDLE_S", 0.2)
    with SERVERS[1](Slow(0.5)) as server:
        assert ask(server, "/score", GOOD)[0] == 200


@pytest.mark.parametrize("make", SERVERS)
def test_clients_who_ask_together_are_one_call(make):
    oracle = MicroBatched(Constant(0.5), wait_s=5.0)
    oracle._last = 24  # as after a call for 24
    with make(oracle) as server, ThreadPoolExecutor(24) as threads:
        assert {status for status, _ in threads.map(lambda _: ask(server, "/score", GOOD), range(24))} == {200}
    assert oracle.calls == 1


def test_health_and_the_report_count_what_was_asked(monkeypatch):
    monkeypatch.setattr(scoring, "MOST_TIMES", 1)
    with ScoreServer(Constant(0.5)) as server:
        for body in (GOOD, GOOD, {}):
            ask(server, "/score", body)
        status, told = ask(server, "/health", b"", method="GET")
        assert (status, told["status"], told["oracle"]) == (200, "healthy", "constant")
        counts = {"requests": 2, "rows": 4, "refused": 1, "failed": 0, "oracle_calls": 2}
        assert {name: told[name] for name in counts} == counts
        assert ask(server, "/get_reward", GOOD)[0] == ask(server, "/score", b"", method="GET")[0] == 404
        assert server.report().startswith("2 requests")
        assert server.report().startswith("0 requests")


def mangled(rng):
    """A body: some JSON of the right names and wrong values, or a right one with bytes changed, cut or doubled."""
    values = (
        None,
        True,
        0,
        -1.5,
        1e308,
        "text",
        "\ud800",
        [],
        {},
        ["a"],
        ["a", None],
        [["a"]],
        [{}],
        {"a": 1},
        ["é🙂"],
    )
    names = ("instructions", "responses", "query", "prompts", "labels", "", "scores")
    body = {name: rng.choice(values) for name in rng.sample(names, rng.randrange(len(names) + 1))}
    content = bytearray(json.dumps(rng.choice((body, GOOD, GOOD | body, [body]))).encode())
    for _ in range(rng.choice((0, 0, 1, 3, 20))):
        start = rng.randrange(len(content) + 1)
        content[start : start + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
    return bytes(content)


def fuzz(count):
    """Sends bodies on one connection; each is answered with 200 or 4xx, and the server still works. By status."""
    rng, statuses = random.Random(0), {}
    with ScoreServer(Constant(0.5), ["</s>"]) as server, connect(server.url) as connection:
        for _ in range(count):
            status, _, content = post(connection, "/score", mangled(rng))
            statuses[status] = statuses.get(status, 0) + 1
            assert ("scores" in content) == (status == 200)
        assert post(connection, "/score", GOOD)[2]["scores"] == [0.5, 0.5]
    assert statuses.keys() == {200, 400}
    return statuses


def test_no_body_breaks_the_server():
    fuzz(500)


@pytest.mark.slow
def test_ten_thousand_bodies_do_not_break_the_server(capsys):
    found = fuzz(10_000)
    with capsys.disabled():
        print(f"\n10,000 fuzzed bodies: {found}")


def test_an_answer_on_its_way_is_given_before_the_server_ends():
    class Slow(Constant):
        def score(self, instructions, responses):
            entered.set()
            time.sleep(0.3)
            return super().score(instructions, responses)

    entered, found = threading.Event(), []
    with ScoreServer(Slow(0.5)) as server, connect(server.url) as idle:
        asking = threading.Thread(target=lambda: found.append(ask(server, "/score", GOOD)))
        asking.start()
        assert entered.wait(10)
    asking.join(10)
    assert found == [(200, {"oracle": "constant", "scores": [0.5, 0.5]})]
    assert idle is not None
    with pytest.raises(OSError, match="refused"):
        ask(server, "/score", GOOD)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_logs_and_ends_when_it_is_told_to(sent):
    with served("AlpacaFarm-Gold-v0", report_s=0.2) as (process, url):
        assert url.endswith("/score")
        logged = process.stderr.readline()
        process.send_signal(sent)
        assert process.wait(20) == 0
        assert "0 requests" in logged
        assert "Traceback" not in process.stderr.read()


def test_what_cannot_be_served_is_told(capsys, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", LOOK_UP)
    for args, told in [
        (["AlpacaFarm-Token-v0"], "whole responses"),
        (["AlpacaFarm-PPO"], "AlpacaFarm-PPO-v0"),
        (["AlpacaFarm-PPO-v0", "--oracle", "gould"], "gold"),
        (["AlpacaFarm-PPO-v0", "--oracle", "constant", "--dataset", "no/such"], "no/such"),
        (["AlpacaFarm-PPO-v0", "--oracle", "constant", "--host", "0.0.0.0"], "--allow-remote"),
    ]:
        assert main(["serve", *args]) == 2
        assert told in capsys.readouterr().err
