"""The HTTP stack of all servers: who is let in, hostile requests, idle connections, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from judge_requests import LOOK_UP, connect, drip, has_ended, opened, port_of, post
from starlette.applications import Starlette

from alpacafarm_env.__main__ import main
from alpacafarm_env.judge_server import http as stack
from alpacafarm_env.judge_server.http import Server, as_json, json_app, threaded
from alpacafarm_env.judge_server.scoring import ScoreServer
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.oracles import Constant

ROOT = Path(__file__).resolve().parents[2]
IDLE_S = 0.3


def echo(method, path, content, key):
    """After as many seconds as the path says."""
    time.sleep(float(path[1:] or 0))
    return as_json([method, path, len(content), key])


def judges(**options):
    return JudgeServer(**options)


def scores(**options):
    return ScoreServer(Constant(0.5), **options)


def scores_beside(**options):
    return ScoreServer(Constant(0.5), app=Starlette(), **options)


def echoes(**options):
    return Server(json_app(threaded(echo)), **options)


@pytest.fixture(params=[judges, scores, scores_beside, echoes])
def make(request):
    """A function that starts one of the servers."""
    return request.param


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(stack, "IDLE_S", IDLE_S)


def ask(server, path="/0", body=b"{}", **headers):
    """Status and body of a POST on a connection of its own."""
    with connect(server.url) as connection:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


@contextmanager
def command(*args):
    """A command in a process of its own, and the first line that it prints."""
    arguments = [sys.executable, "-m", "alpacafarm_env", *args]
    environment, pipe = {**os.environ, "PYTHONUNBUFFERED": ""}, subprocess.PIPE
    with subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_pages_of_other_sites_are_refused(make):
    with make() as server, make(allow_remote=True) as open_to_all:
        for name, value in [("Host", "evil.com"), ("Host", "[::1"), ("Origin", "http://evil.com"), ("Origin", "null")]:
            status, content = ask(server, **{name: value})
            assert (status, json.loads(content)["error"]["param"]) == (403, name)
        for headers in ({"Origin": "http://localhost:3000"}, {"Host": "[::1]:80"}, {"Host": "LOCALHOST"}):
            assert ask(server, **headers)[0] != 403
        assert ask(open_to_all, Host="my.net", Origin="http://my.net")[0] != 403
        assert ask(open_to_all, Host="my.net", Origin="http://evil.com")[0] == 403


@pytest.mark.parametrize(
    ("header", "status"),
    [
        *((f"Content-Length: {wrong}", 400) for wrong in ("many", "-1", 5_000 * "9")),
        ("Content-Length: 99999999999", 413),
        ("Transfer-Encoding: chunked", 413),
    ],
)
def test_bodies_of_bad_length_end_the_connection(make, monkeypatch, header, status):
    monkeypatch.setattr(Server.__init__, "__kwdefaults__", {**Server.__init__.__kwdefaults__, "max_body": 10})
    chunks = b"8\r\nabcdefgh\r\n" * 4  # and so on for ever
    with make() as server, opened(server.url) as connection:
        connection.sendall(f"POST /score HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode() + chunks)
        received = connection.recv(4096)
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in received.lower()


def test_large_bodies_arrive_whole_however_they_are_sent():
    with echoes() as server, connect(server.url) as connection:
        content = ask(server, body=b"x" * 2**20, Authorization="Bearer sk-1")[1]
        assert json.loads(content) == ["POST", "/0", 2**20, "sk-1"]
        connection.request("POST", "/0", iter([b"x" * 2**19] * 2), encode_chunked=True)
        assert json.loads(connection.getresponse().read())[2] == 2**20


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_this_machine_alone_needs_no_leave(host):
    with JudgeServer(host=host) as server:
        assert not server.remote
        assert Endpoint(server.base_url).local
        with closing(socket.create_connection(server._socket.getsockname()[:2], 10)) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "::ffff:127.0.0.1"])
def test_other_machines_need_leave(host, capsys, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", LOOK_UP)
    assert main(["judge-server", "--host", host]) == 2
    out, err = capsys.readouterr()
    assert (out, "--allow-remote" in err) == ("", True)

    def interrupt(_):
        base_url, warning = map(str.strip, capsys.readouterr())
        assert warning.startswith("warning: ")
        assert Endpoint(base_url).local
        with connect(base_url) as connection:
            assert post(connection, "/v1/completions", {})[0] == 400
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"{stack.__name__}.sleep", interrupt)
        if host != "::ffff:127.0.0.1":
            assert main(["judge-server", "--host", host, "--allow-remote"]) == 0


HALVES = {
    "nothing": b"",
    "half a head": b"POST /score HT",
    "half a body": b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_connections_without_whole_requests_are_ended(short, make, sent):
    with make() as server, opened(server.url, sent) as connection:
        start = time.monotonic()
        assert has_ended(connection)
        assert time.monotonic() - start > IDLE_S / 2


def test_dripping_bytes_gain_no_time(short, make):
    sent = b"GET /health HTTP/1.1\r\nX-Long: "
    with make() as server, opened(server.url, sent) as connection, pytest.raises(ConnectionError):
        drip(connection)


@pytest.mark.parametrize("size", [10, 200_000])
def test_replies_that_are_not_taken_end_the_connection(short, size):
    with Server(json_app(threaded(lambda *_: as_json("x" * size)))) as server, closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port_of(server.url)))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        end = time.monotonic() + 30  # a busy machine takes its time to answer a thousand requests
        time.sleep(IDLE_S)
        while server._server.server_state.connections:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_replies_do_not_wait_for_each_other():
    """A reply's second part would wait 40 ms for the client to acknowledge the first."""
    with echoes() as server, connect(server.url) as connection:
        start = time.monotonic()
        for _ in range(100):
            assert post(connection, "/0", {})[0] == 200
        assert time.monotonic() - start < 2


def test_keep_alive_and_slow_answers_are_unharmed(short):
    with echoes() as server, connect(server.url) as connection:
        for _ in range(6):
            assert post(connection, "/0", {})[0] == 200
            time.sleep(IDLE_S / 3)
        assert post(connection, f"/{2 * IDLE_S}", {})[0] == 200


def test_connections_beyond_the_most_take_idle_ones_places(make, monkeypatch):
    monkeypatch.setattr(stack, "MOST_CONNECTIONS", 20)
    with make() as server, ExitStack() as held:
        half = [held.enter_context(opened(server.url, b"POST /score HTTP/1.1\r\nX-L: ")) for _ in range(60)]
        assert ask(server)[0] != 503
        assert has_ended(half[0])
        assert not has_ended(half[-1], within=0.2)


def test_requests_being_answered_are_not_ended_for_others(monkeypatch):
    monkeypatch.setattr(stack, "MOST_CONNECTIONS", 4)
    with echoes() as server, ExitStack() as held:
        request = b"GET /0.8 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        busy = [held.enter_context(opened(server.url, request)) for _ in range(3)]
        time.sleep(0.2)
        assert ask(server)[0] == 503
        assert all(connection.recv(100).startswith(b"HTTP/1.1 200") for connection in busy)
        assert ask(server)[0] == 200  # there is room again


def test_closed_servers_refuse_and_close_may_be_repeated(make):
    server = make()
    port = port_of(server.url)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with make(port=port) as again:
        assert port_of(again.url) == port


def test_closing_waits_for_answers_within_the_grace():
    for grace_s, expected in ((5.0, 200), (0.0, None)):
        with echoes(grace_s=grace_s) as server, ThreadPoolExecutor(1) as thread, connect(server.url):
            asking = thread.submit(ask, server, "/0.5")
            time.sleep(0.2)
            start = time.monotonic()
            server.close()
            assert time.monotonic() - start < 0.2 + grace_s
            error = asking.exception(timeout=10)
            assert isinstance(error, ConnectionError) if expected is None else asking.result()[0] == expected


def test_own_errors_are_logged(caplog):
    with Server(json_app(threaded(lambda *_: 1 / 0))) as server:
        assert ask(server)[0] == 500
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_commands_end_at_once_when_told_to(sent):
    with command("judge-server", "--latency", "600", "--allow-remote") as (process, base_url):
        assert base_url == f"http://127.0.0.1:{port_of(base_url)}/v1"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        with opened(base_url, head):
            time.sleep(0.2)
            process.send_signal(sent)
            start = time.monotonic()
            assert process.communicate(timeout=30) == ("", "")
            assert time.monotonic() - start < 5  # the answer alone would take 600 s
    assert process.returncode == 0


def test_servers_name_what_is_wrong_with_the_address(capsys, monkeypatch):
    with echoes() as server:
        assert main(["judge-server", "--port", str(port_of(server.url))]) == 2
        out, err = capsys.readouterr()
        assert (out, f"{port_of(server.url)}: " in err, "--port" in err) == ("", True, True)
    monkeypatch.setattr(socket, "getaddrinfo", LOOK_UP)
    assert main(["judge-server", "--host", "192.0.2.1", "--allow-remote"]) == 2
    assert "--host" in capsys.readouterr().err.rpartition(":")[2]
    with pytest.raises(SystemExit):
        main(["judge-server", "--port", "99999"])


PROGRAM = """
import sys
sys.modules["uvicorn"] = None
from alpacafarm_env.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_says_which_extra_is_missing():
    command = [sys.executable, "-c", PROGRAM, "judge-server"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "[serve]" in run.stderr
    assert run.stderr.count("\n") == 1
