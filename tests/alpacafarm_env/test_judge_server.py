"""The judge server: routes, keep-alive, faults beside healthy requests, its counts, and its command line."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import islice

import pytest
from faulty_server import FAULTS, Faults, FaultyJudgeServer
from judge_requests import LOOK_UP, PATHS, connect, exchange, make_body, pairs, port_of, post, send, text_of

from alpacafarm_env.__main__ import main
from alpacafarm_env.judge_server.server import KINDS, JudgeServer
from alpacafarm_env.llm.requests import content_key

COMMAND = [sys.executable, "-m", "alpacafarm_env", "judge-server"]


@cache
def body(number):
    return make_body("chatgpt_4", pairs(1, number))


def bodies(count):
    return list(map(body, range(count)))


def faulted(server, fault, count=1):
    """Requests on which this fault falls (None: none at all) the first time that they are sent."""
    drawn = ((n, server.faults.draw(server.seed, content_key(body(n)[1]), 0).fault) for n in range(1000))
    return [body(n) for n, _ in islice((found for found in drawn if found[1] == fault), count)]


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_routes():
    assert {kind: route for route, kind in KINDS.items()} == PATHS
    with JudgeServer() as server, connect(server) as connection:
        assert server.base_url == f"http://127.0.0.1:{port_of(server)}/v1"
        connection.request("GET", "/v1/models")
        listed = json.loads(connection.getresponse().read())
        assert [model["id"] for model in listed["data"]] == ["sandbox-chatgpt", "sandbox-davinci003", "sandbox-gpt4"]
        assert post(connection, *bodies(1)[0])[0] == 200
        connection.request("GET", "/stats?pretty")
        assert json.loads(connection.getresponse().read()) == server.stats()
        status, _, content = post(connection, "/v1/embeddings", {})
        assert (status, content["error"]["code"]) == (404, "not_found")
        assert "POST /v1/chat/completions" in content["error"]["message"]
        connection.request("GET", "/v1/completions")
        assert connection.getresponse().status == 404


def test_answers_look_like_the_apis():
    with JudgeServer() as server, connect(server) as connection:
        _, headers, chat = post(connection, *make_body("chatgpt_4", pairs(1)))
        _, _, completion = post(connection, *make_body("davinci003_4", pairs(1)))
    assert headers["Content-Type"] == "application/json"
    assert chat.keys() == completion.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (chat["object"], completion["object"]) == ("chat.completion", "text_completion")
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["model"] == "sandbox-chatgpt"


def test_bad_bodies_are_refused_and_the_connection_goes_on():
    path, asked = body(0)
    endless = json.dumps({**asked, "extra": 0}).replace('"extra": 0', '"extra": 1e999').encode()
    with JudgeServer() as server, connect(server) as connection:
        for content in (b"", b"{", b"\xff", b"[]", b'{"model": NaN}', b'{"a": 1e999}', b"[" * 200_000, endless):
            status, _, refusal = post(connection, path, content)
            assert (status, refusal["error"]["code"]) == (400, "invalid_request_error")
        assert post(connection, *bodies(1)[0])[0] == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("", 411),
        *((f"Content-Length: {wrong}\r\n", 400) for wrong in ("many", "-1", 5_000 * "9")),
        ("Content-Length: 99999999999\r\n", 413),
    ],
)
def test_bodies_of_unknown_or_endless_length_end_the_connection(header, status):
    with JudgeServer() as server, socket.create_connection(("127.0.0.1", port_of(server)), timeout=5) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        with connection.makefile("rb") as file:
            received = file.read()  # to its end
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Connection: close" in received


def test_only_the_key_is_let_in():
    with JudgeServer(api_key="sk-right") as server, connect(server) as connection:
        for key in ("sk-wrong", "", "sk-right2", "sk-r\xefght"):
            status, _, content = post(connection, *bodies(1)[0], key=key)
            assert (status, content["error"]["code"]) == (401, "invalid_api_key")
            assert "sk-" not in content["error"]["message"]
        assert post(connection, *bodies(1)[0], key="sk-right")[0] == 200
        assert server.stats()["by_status"] == {"200": 1, "401": 4}


@pytest.mark.parametrize("fault", FAULTS)
def test_connection_goes_on_after_a_fault_that_does_not_end_it(fault):
    with FaultyJudgeServer(faults=Faults({fault: 0.5}, drip_s=0.0, hang_s=0.05)) as server:
        if fault in ("reset", "hang"):
            assert exchange(server, *faulted(server, fault)[0]).end != "whole"
            assert exchange(server, *faulted(server, None)[0]).status == 200
            return
        with connect(server) as connection:
            local = connection.sock.getsockname()
            for path, asked in (*faulted(server, fault, 2), *faulted(server, None, 2)):
                connection.request("POST", path, json.dumps(asked).encode())
                content = connection.getresponse().read()
                assert connection.sock.getsockname() == local
        assert text_of(json.loads(content)).startswith("Output (")
        assert server.stats()["by_fault"] == {fault: 2}


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_stuck_requests_block_neither_others_nor_the_end(fault):
    server = FaultyJudgeServer(faults=Faults({fault: 0.5}, drip_s=60.0))
    stuck = [send(server, *request) for request in faulted(server, fault, 20)]
    healthy = faulted(server, None, 20)
    idle = connect(server)
    try:
        wait_for(lambda: server.stats()["by_fault"] == {fault: 20})
        start = time.monotonic()
        with connect(server) as connection:
            assert all(post(connection, *request)[0] == 200 for request in healthy)
        assert time.monotonic() - start < 2
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 1
        wait_for(lambda: not [t for t in threading.enumerate() if "process_request_thread" in t.name])
        for connection in stuck:
            received = b"".join(iter(lambda one=connection: one.recv(65536), b""))
            arrived = len(received.partition(b"\r\n\r\n")[2])
            assert (received == b"") if fault == "hang" else (arrived == 1)
    finally:
        for connection in stuck:
            connection.close()
        idle.__exit__(None, None, None)


def test_closed_server_refuses_and_close_may_be_repeated():
    server = JudgeServer()
    port = port_of(server)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with JudgeServer(port=port) as again:
        assert port_of(again) == port


def outcomes(server, requests, workers):
    """What each request came to: status, error or text, by its body."""

    def ask(request):
        wire = exchange(server, *request)
        return content_key(request[1]), (wire.status, wire.body, wire.end)

    with ThreadPoolExecutor(workers) as threads:
        return sorted(threads.map(ask, requests))


def test_same_seed_same_faults_in_any_order():
    requests, rates = bodies(60), {"retry_after_seconds": 0.2, "cut_json": 0.1, "hang": 0.1, "reset": 0.1}
    mix = Faults(rates, hang_s=0.0)
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(FaultyJudgeServer(seed=seed, faults=mix)) for seed in (3, 3, 0))
        first = outcomes(one, requests, 1)
        assert outcomes(two, requests[::-1], 8) == first
        assert outcomes(three, requests, 8) != first
        assert one.stats() == two.stats() != three.stats()
        expected = Counter(mix.draw(3, content_key(asked), 0).fault for _, asked in requests)
        del expected[None]
        assert one.stats()["by_fault"] == dict(sorted(expected.items()))


def test_client_that_goes_away_is_nobodys_error(capfd):
    with JudgeServer(latency_s=0.05) as server:
        for request in bodies(5):
            connection = send(server, *request)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        wait_for(lambda: server.stats()["requests"] == 5)
        time.sleep(0.1)
        assert exchange(server, *bodies(1)[0]).status == 200
    assert capfd.readouterr() == ("", "")


def test_own_errors_are_told(capfd, monkeypatch):
    with JudgeServer() as server:
        monkeypatch.setattr(server.judging, "answer", lambda *args: 1 / 0)
        assert exchange(server, *bodies(1)[0]).end == "closed"
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.fixture
def start():
    """Starts the command; whatever still runs at the end is killed."""
    running = []

    def run(*args):
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}
        process = subprocess.Popen(
            [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def test_command_line_serves_until_ctrl_c(start):
    plain = start()  # loads while the other does
    process = start("--port", "0", "--latency", "600", "--seed", "7", "--allow-remote")
    base_url = process.stdout.readline().strip()
    assert base_url == f"http://127.0.0.1:{port_of(base_url)}/v1"
    with send(base_url, *bodies(1)[0]):
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 5  # the answer alone would take 600 s
    assert (process.returncode, out, err) == (0, "", "")
    # A main thread that waits without an end sleeps through one interrupt in three, where threads of its own run.
    base_url = plain.stdout.readline().strip()
    assert [exchange(base_url, *request).status for request in bodies(5)] == [200] * 5
    plain.send_signal(signal.SIGINT)
    assert plain.communicate(timeout=15) == ("", "")
    assert plain.returncode == 0


def test_command_line_names_what_is_wrong(capsys, monkeypatch):
    def refused(*args):
        assert main(["judge-server", *args]) == 2
        out, err = capsys.readouterr()
        assert (out, err[:7]) == ("", "error: ")
        return err

    with JudgeServer() as server:
        err = refused("--port", str(port_of(server)))
        assert f"{port_of(server)}: " in err
        assert "--port" in err
    monkeypatch.setattr(socket, "getaddrinfo", LOOK_UP)
    err = refused("--host", "192.0.2.1", "--allow-remote")
    assert "--host" in err.rpartition(":")[2]
    with pytest.raises(SystemExit):
        main(["judge-server", "--port", "99999"])


def test_nothing_is_sent_in_two_parts():
    """Header and body in one packet, at once: no client waits for the second part."""
    with JudgeServer() as server:
        wires = [exchange(server, *request) for request in bodies(20)]
    assert [len(wire.chunks) for wire in wires] == [1] * 20
