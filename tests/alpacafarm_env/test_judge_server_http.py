"""The judge server's connections: who can reach it, and what becomes of those that bring no request."""

import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest
from judge_requests import LOOK_UP, connect, drip, exchange, has_ended, make_body, opened, pairs, port_of, post, send

from alpacafarm_env.__main__ import main
from alpacafarm_env.judge_server import http as listener
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.endpoint import Endpoint

IDLE_S = 0.3


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(listener, "IDLE_S", IDLE_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_this_machine_alone_needs_no_leave(host):
    with JudgeServer(host=host) as server:
        assert not server.remote
        address = Endpoint(server.base_url)
        assert address.local
        with closing(socket.create_connection((server._listener.server_address[0], port_of(server)), 10)) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "::ffff:127.0.0.1"])
def test_other_machines_are_let_in_only_if_asked_for_and_that_is_told(host, capsys, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", LOOK_UP)
    assert main(["judge-server", "--host", host]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--allow-remote" in err

    def interrupt(_):
        base_url, warning = map(str.strip, capsys.readouterr())
        assert warning.startswith("warning: ")
        assert Endpoint(base_url).local
        assert exchange(base_url, *make_body("chatgpt_4", pairs(1))).status == 200
        raise KeyboardInterrupt

    monkeypatch.setattr("alpacafarm_env.judge_server.http.time.sleep", interrupt)
    if host != "::ffff:127.0.0.1":
        assert main(["judge-server", "--host", host, "--allow-remote"]) == 0


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_connection_without_a_whole_request_is_ended(short, sent):
    with JudgeServer() as server, opened(server, sent) as connection:
        start = time.monotonic()
        assert has_ended(connection)
        assert time.monotonic() - start > IDLE_S / 2


def test_dripping_bytes_gain_no_time(short):
    sent = b"GET /v1/models HTTP/1.1\r\nX-Long: "
    with JudgeServer() as server, opened(server, sent) as connection, pytest.raises(ConnectionError):
        drip(connection)


def test_a_reply_that_is_not_taken_ends_the_connection(short):
    """Requests one after the other, and no reply is read: the server must not wait for ever to write."""
    with JudgeServer() as server, closing(socket.socket()) as connection:
        server._listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port_of(server)))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n" * 100)
        time.sleep(3 * IDLE_S)
        assert not server._listener._open


def test_clients_that_ask_in_time_and_slow_answers_are_unharmed(short):
    """Keep-alive with pauses below the limit, over several limits; then an answer that takes longer than it."""
    path, body = make_body("chatgpt_4", pairs(1))
    with JudgeServer() as server, connect(server) as connection:
        for _ in range(6):
            assert post(connection, path, body)[0] == 200
            time.sleep(IDLE_S / 3)
        server._listener.latency_s = 2 * IDLE_S
        assert post(connection, path, body)[0] == 200


def test_connections_beyond_the_most_take_the_place_of_idle_ones(monkeypatch):
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 20)
    path, body = make_body("chatgpt_4", pairs(1))
    before = threading.active_count()
    with JudgeServer() as server, ExitStack() as stack:
        held = [stack.enter_context(opened(server)) for _ in range(100)]
        assert exchange(server, path, body).status == 200
        assert threading.active_count() - before < 40
        assert has_ended(held[0])
        assert not has_ended(held[-1], within=0.2)


def test_requests_that_are_being_answered_are_not_ended_for_others(monkeypatch):
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 4)
    path, body = make_body("chatgpt_4", pairs(1))
    with JudgeServer(latency_s=0.8) as server, ExitStack() as stack:
        busy = [stack.enter_context(send(server, path, body)) for _ in range(4)]
        time.sleep(0.2)
        late = stack.enter_context(opened(server))
        assert late.recv(100).startswith(b"HTTP/1.1 503")
        assert all(connection.recv(100).startswith(b"HTTP/1.1 200") for connection in busy)
        assert exchange(server, path, body).status == 200  # there is room again
