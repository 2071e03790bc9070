"""Replies are read up to a limit: bodies without an end, compressed or not, cost neither memory nor time."""

import gzip
import json
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

import pytest
from api_asks import ask, first
from ledger_reads import attempts
from wire_server import WireServer, http, ok, said

from alpacafarm_env.errors import PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.ledger.store import Ledger
from alpacafarm_env.llm.replies import LONGEST_REPLY

MOST_KB = 300_000
"""What a client's memory may grow by; the bodies below have 400 MB."""
HEAD = b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\n%s\r\n"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)


def endless(status=200, piece=b" " * 2**16):
    yield HEAD % (status, b"") + b'{"choices": ['
    for _ in range(400 * 2**20 // len(piece)):  # a client without a limit ends, too
        yield piece


@cache
def bomb(*encodings):
    """Blanks, compressed as often as there are encodings."""
    packer = zlib.compressobj(level=1, wbits=31)
    body = b"".join(packer.compress(b" " * 2**20) for _ in range(400)) + packer.flush()
    for _ in encodings[1:]:
        body = gzip.compress(body)
    return http(200, body, content_encoding=", ".join(encodings))


def asked_elsewhere(response):
    """What a client in a process of its own, whose address space is limited, says of a server with that response."""
    script = (
        "import resource, sys; sys.path.insert(0, sys.argv[1]); from api_asks import WARM, ask\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({4 * 2**30}, {4 * 2**30}))\n"
        "from types import SimpleNamespace\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "config = {'max_attempts': 2, 'attempt_timeout_s': 20.0}\n"
        "error = ask(SimpleNamespace(url=sys.argv[2]), config=config)[0][0]\n"
        "print(type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)\n"
    )
    with WireServer(lambda seen, number: response()) as server:
        command = [sys.executable, "-c", script, str(Path(__file__).parent), server.url]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        name, grown, words = found.stdout.split(" ", 2)
        return name, int(grown), words, len(server.seen)


@pytest.mark.parametrize(
    "response", [endless, lambda: bomb("gzip"), lambda: bomb("gzip", "gzip")], ids=["endless", "bomb", "bombs"]
)
def test_a_body_without_an_end_is_not_read_to_its_end(response):
    name, grown, words, requests = asked_elsewhere(response)
    assert name == "TransientAPIError", words
    assert grown < MOST_KB
    assert requests == 2


def test_a_reply_that_is_too_long_counts_at_its_reserve_and_is_no_answer(tmp_path):
    with (
        WireServer(
            lambda seen, number: endless() if seen.body["messages"][0]["content"] == "Question 1?" else ok()
        ) as server,
        Ledger(tmp_path / "ledger.sqlite") as ledger,
    ):
        answers, _ = ask(server, 3, ledger=ledger, config={"max_attempts": 2})
        rows = ledger.do(attempts).result()
    assert [getattr(answer, "raw", None) is not None for answer in answers] == [True, False, True]
    assert isinstance(answers[1], TransientAPIError)
    assert f"{LONGEST_REPLY:,}" in str(answers[1])
    told = [(row.state, row.error) for row in rows if row.state != "answered"]
    assert [state for state, error in told if f"{LONGEST_REPLY:,}" in error] == ["unknown"] * 2, told


@pytest.mark.parametrize(
    "response", [lambda: endless(401), lambda: http(401, b"none", content_encoding="br")], ids=["endless", "unreadable"]
)
def test_an_error_without_an_end_is_told_by_its_status(response):
    with WireServer(lambda seen, number: response()) as server:
        error = first(server)
        assert isinstance(error, PermanentAPIError)
        assert len(server.seen) == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_replies_are_read(encoding):
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](json.dumps(said("Well.")).encode())
    with WireServer(lambda seen, number: http(200, packed, content_encoding=encoding)) as server:
        assert first(server).reply.text == "Well."
        assert encoding in server.seen[0].headers["accept-encoding"]


def test_the_longest_reply_is_read():
    body = json.dumps(said("x" * 1000)).encode()
    whole = body + b" " * (LONGEST_REPLY - len(body))
    with WireServer(lambda seen, number: http(200, whole)) as server:
        assert first(server).reply.text == "x" * 1000


def test_a_body_that_trickles_for_ever_ends_with_its_attempt():
    def trickle(seen, number):
        yield HEAD % (200, b"")
        for _ in range(100):
            yield b" "
            yield 0.05

    with WireServer(trickle) as server:
        errors, seconds = ask(server, config={"attempt_timeout_s": 0.5, "max_attempts": 2})
    assert isinstance(errors[0], TransientAPIError)
    assert seconds < 3
