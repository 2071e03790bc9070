"""Bodies are read up to a limit, connections made as the environment says; `run` in plain code and in notebooks."""

import asyncio
import gzip
import json
import signal
import subprocess
import sys
import threading
import time
import zlib
from functools import cache
from pathlib import Path

import pytest
from ledger_calls import attempts
from wire_server import KEY, WireServer, ask, asked, chat, first, http, ok, said

from alpacafarm_env.errors import PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.client import run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.transport import LONGEST_REPLY

pytestmark = pytest.mark.usefixtures("short_waits")
BODY_MB, MOST_KB = 100, 75_000
"""A body, and what a client's memory may grow by."""
HEAD = b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\n%s\r\n"


def endless(status=200, piece=b" " * 2**16):
    yield HEAD % (status, b"") + b'{"choices": ['
    for _ in range(BODY_MB * 2**20 // len(piece)):  # a client without a limit ends, too
        yield piece


@cache
def bomb(*encodings):
    """Blanks, compressed as often as there are encodings."""
    packer = zlib.compressobj(level=1, wbits=31)
    body = b"".join(packer.compress(b" " * 2**20) for _ in range(BODY_MB)) + packer.flush()
    for _ in encodings[1:]:
        body = gzip.compress(body)
    return http(200, body, content_encoding=", ".join(encodings))


ROOT = Path(__file__).parents[2]
SCRIPT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from types import SimpleNamespace
from wire_server import WARM, ask
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
for url in sys.argv[2:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = ask(SimpleNamespace(url=url), config={'max_attempts': 1, 'attempt_timeout_s': 20.0})[0][0]
    print(type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_endless_body_is_not_read_on():
    """By a process of its own, whose address space is limited."""
    responses = [endless, lambda: bomb("gzip"), lambda: bomb("gzip", "gzip")]
    servers = [WireServer(lambda seen, number, response=response: response()) for response in responses]
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    with servers[0], servers[1], servers[2]:
        command += [server.url for server in servers]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT)
    told = [line.split() for line in found.stdout.splitlines()]
    assert [name for name, _ in told] == ["TransientAPIError"] * 3
    assert max(int(grown) for _, grown in told) < MOST_KB


def test_a_reply_too_long_counts_at_its_reserve(ledger):
    def reply(seen, number):
        return endless() if seen.body["messages"][0]["content"] == "Question 1?" else ok()

    with WireServer(reply) as server:
        answers, _ = ask(server, 3, ledger=ledger, config={"max_attempts": 2})
    assert [hasattr(answer, "raw") for answer in answers] == [True, False, True]
    assert isinstance(answers[1], TransientAPIError)
    told = [row.state for row in attempts(ledger) if row.error and f"{LONGEST_REPLY:,}" in row.error]
    assert told == ["unknown"] * 2


@pytest.mark.parametrize("response", [lambda: endless(401), lambda: http(401, b"none", content_encoding="br")])
def test_an_endless_error_is_known_by_its_status(response):
    with WireServer(lambda seen, number: response()) as server:
        assert isinstance(first(server), PermanentAPIError)
    assert len(server.seen) == 1


def test_the_longest_reply_is_read_compressed_or_not():
    body = json.dumps(said("x" * 1000)).encode()
    with WireServer(lambda seen, number: http(200, body + b" " * (LONGEST_REPLY - len(body)))) as server:
        assert first(server).reply.text == "x" * 1000
    for encoding, pack in {"gzip": gzip.compress, "deflate": zlib.compress}.items():
        with WireServer(lambda *_, e=encoding, p=pack: http(200, p(body), content_encoding=e)) as server:
            assert first(server).reply.text == "x" * 1000
        assert encoding in server.seen[0].headers["accept-encoding"]


def test_redirects_to_another_host_are_not_followed():
    with WireServer() as other:
        where = other.url.replace("127.0.0.1", "localhost")
        with WireServer(lambda seen, n: http(307, b"", location=f"{where}/chat/completions")) as server:
            error = first(server)
    assert other.seen == []
    assert isinstance(error, PermanentAPIError)


def test_the_proxy_is_for_other_machines_alone(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with WireServer() as proxy, WireServer(lambda seen, n: ok("Local.")) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        assert first(server).reply.text == "Local."
        assert not proxy.seen
        endpoint = Endpoint("http://judge.example/v1", KEY, allow_insecure=True)
        assert asked(endpoint, [chat(endpoint.base_url)])[0].reply.text == "Yes."
    assert len(proxy.seen) == len(server.seen) == 1


@pytest.mark.parametrize(("variable", "value"), [("SSL_CERT_FILE", "/no/such.pem"), ("ALL_PROXY", "ftp://p.example")])
def test_variables_that_allow_no_connection_are_named(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    endpoint = Endpoint("https://judge.example/v1", KEY)
    (error,) = asked(endpoint, [chat(endpoint.base_url)])
    assert isinstance(error, PermanentAPIError)
    assert variable in str(error)


def notebook(call):
    """From a function that a running loop calls."""

    async def cell():
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.parametrize("place", [lambda call: call(), notebook], ids=["plain", "notebook"])
def test_results_and_errors(place):
    async def work(value):
        await asyncio.sleep(0.001)
        return 42 // value

    assert place(lambda: run(work(2))) == 21
    with pytest.raises(ZeroDivisionError) as caught:
        place(lambda: run(work(0)))
    assert caught.value.__context__ is caught.value.__cause__ is None


@pytest.mark.parametrize("place", [lambda call: call(), notebook], ids=["plain", "notebook"])
def test_interrupt_cancels_cleanly(place):
    cleaned = []

    async def sleeper():
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            await asyncio.sleep(20)
        finally:
            await asyncio.sleep(0.01)  # such as closing connections
            cleaned.append(True)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        place(lambda: run(sleeper()))
    assert cleaned == [True]
    assert time.monotonic() - start < 5
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
