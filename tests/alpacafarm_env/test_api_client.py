"""The client against a real server on the loopback interface: what is sent, and what is asked again."""

import email.utils
import socket
import time
from itertools import pairwise
from math import isnan

import pytest
from api_asks import KEY, ask, chat, first
from wire_server import WireServer, failed, http, ok, said

from alpacafarm_env.errors import TransientAPIError
from alpacafarm_env.llm.client import Client
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.requests import Request
from alpacafarm_env.llm.run_sync import run


@pytest.fixture(autouse=True)
def _no_environment_and_short_waits(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


# ------------------------------------------------------------------------------------------------ what is sent


def test_body_path_and_key_as_sent():
    body = {"model": "m-1", "messages": [{"role": "user", "content": "日本 \0"}], "unknown": {"deep": [1]}, "seed": 3}
    with WireServer() as server:

        async def main():
            async with Client(Endpoint(f"{server.url}/", KEY)) as client:
                first = await client.ask(Request(server.url, "chat", body))
                server.reply = lambda seen, number: ok("It.", kind="completion")
                return first, await client.ask(Request(server.url, "completion", {"model": "m-2", "prompt": "Say"}))

        answers = run(main())
    assert [answer.reply.text for answer in answers] == ["Yes.", "It."]
    assert [(seen.path, seen.body) for seen in server.seen] == [
        ("/v1/chat/completions", body),
        ("/v1/completions", {"model": "m-2", "prompt": "Say"}),
    ]
    assert {seen.headers["authorization"] for seen in server.seen} == {f"Bearer {KEY}"}
    assert answers[0].attempts == 1
    assert not answers[0].cached
    assert isnan(answers[0].cost_usd)
    assert '"content": "Yes."' in answers[0].raw


def test_many_at_once_in_order_and_within_the_limit():
    def reply(seen, number):
        time.sleep(0.01)
        return ok(seen.body["messages"][0]["content"])

    with WireServer(reply) as server:
        answers, _ = ask(server, 60, config={"max_concurrency": 5})
    assert [answer.reply.text for answer in answers] == [f"Question {i}?" for i in range(60)]
    assert server.most_active == 5


def test_use_outside_its_block_and_for_another_server():
    async def main():
        client = Client(Endpoint("http://127.0.0.1:1/v1"))
        with pytest.raises(RuntimeError, match="async with"):
            await client.ask(chat("http://127.0.0.1:1/v1"))
        async with client:
            with pytest.raises(ValueError, match="another|127.0.0.1:2"):
                await client.ask(chat("http://127.0.0.1:2/v1"))
            with pytest.raises(RuntimeError, match="open already"):
                async with client:
                    pass

    run(main())
    with pytest.raises(ValueError, match="needs a ledger"):
        Client(Endpoint("http://127.0.0.1:1/v1"), budget_usd=1.0)


# ------------------------------------------------------------------------------------------------ what passes


PASSING = {
    "408": failed(408),
    "409": failed(409),
    "429": failed(429),
    "500": failed(500),
    "503": failed(503, "<html>down</html>"),
    "html": http(200, b"<html>hello</html>", content_type="text/html"),
    "cut json": http(200, b'{"choices": [{"mess'),
    "error in 200": http(200, {"error": {"message": "overloaded"}}),
    "no choice": http(200, said() | {"choices": []}),
    "null": ok(None),
    "latin-1": http(200, b'{"choices": [{"message": {"content": "\xe9"}}]}'),
    "short body": ok()[:-20],
    "no http": b"garbage\r\n\r\n",
    "bad gzip": http(200, b"not gzip", content_encoding="gzip"),
    "reset": [ok()[:150], None],
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_asked_again(fault):
    def reply(seen, number):
        if number > 1:
            return ok()
        whole = PASSING[fault]
        return [whole, None] if fault in ("short body", "no http") else whole

    with WireServer(reply) as server:
        answer = first(server)
    assert answer.reply.text == "Yes."
    assert answer.attempts == len(server.seen) == 2


def test_what_stays_ends_after_the_attempts():
    with WireServer(lambda seen, number: failed(500, "out of luck", retry_after_ms=1)) as server:
        error = first(server, config={"max_attempts": 3})
    assert isinstance(error, TransientAPIError)
    assert len(server.seen) == 3
    for part in ("3 attempts", "m-1", "500", "out of luck", "127.0.0.1"):
        assert part in str(error)


def test_connection_refused():
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"

    class Nobody:
        url = free_url

    error = first(Nobody, config={"max_attempts": 2})
    assert isinstance(error, TransientAPIError)
    assert free_url in str(error)
    assert "ConnectError" in str(error)


def waits(header, count=2, **config):
    """Seconds between the attempts that a server's header asks to be apart."""

    def reply(seen, number):
        return failed(429, **header()) if number < count else ok()

    with WireServer(reply) as server:
        result = first(server, config=config)
    starts = [seen.started for seen in server.seen]
    return result, [later - earlier for earlier, later in pairwise(starts)]


RETRY_AFTER = {
    "seconds": (lambda: {"retry_after": 1}, 1.0),
    "float": (lambda: {"retry_after": "0.7"}, 0.7),
    "milliseconds": (lambda: {"retry_after_ms": 600}, 0.6),
    "date": (lambda: {"retry_after": email.utils.formatdate(time.time() + 2, usegmt=True)}, 1.0),
    "date of a clock that is ahead": (
        lambda: {
            "date": email.utils.formatdate(time.time() + 3600, usegmt=True),
            "retry_after": email.utils.formatdate(time.time() + 3601, usegmt=True),
        },
        1.0,
    ),
    "garbage": (lambda: {"retry_after": "soon"}, 0.0),
    "nan": (lambda: {"retry_after": "nan"}, 0.0),
    "negative": (lambda: {"retry_after": -7}, 0.0),
    "past": (lambda: {"retry_after": email.utils.formatdate(time.time() - 99, usegmt=True)}, 0.0),
}


@pytest.mark.parametrize("form", RETRY_AFTER)
def test_retry_after_is_obeyed_and_never_earlier(form):
    header, least = RETRY_AFTER[form]
    answer, (waited,) = waits(header)
    assert answer.reply.text == "Yes."
    assert least <= waited < least + 1.5


def test_twin_with_its_own_backoff_is_earlier_than_told(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.failures.retry_after", lambda headers: 0.0)
    _, (waited,) = waits(RETRY_AFTER["seconds"][0])
    assert waited < 1


def test_retry_after_holds_for_all_requests_of_the_client():
    with WireServer(lambda seen, number: failed(429, retry_after=0.5) if number == 1 else ok()) as server:
        ask(server, 5, config={"max_concurrency": 1})
    starts = [seen.started for seen in server.seen]
    assert len(starts) == 6
    assert starts[1] - starts[0] >= 0.5


@pytest.mark.parametrize("wait", ["3600", "9" * 400])
def test_too_long_a_wait_is_an_error_at_once(wait):
    with WireServer(lambda seen, number: failed(429, retry_after=wait)) as server:
        errors, seconds = ask(server, 20, config={"max_concurrency": 2})
    assert {type(error) for error in errors} == {TransientAPIError}
    assert "longer than max_wait_s=120" in str(errors[-1])
    assert len(server.seen) <= 2
    assert seconds < 2


def crowd():
    """100 questions, 32 at once, to a server that takes four at once: answers and requests."""
    active = []

    def reply(seen, number):
        active.append(seen)
        try:
            time.sleep(0.03)
            return failed(429, retry_after_ms=20) if len(active) > 4 else ok()
        finally:
            active.remove(seen)

    with WireServer(reply) as server:
        results, _ = ask(server, 100, config={"max_concurrency": 32, "max_attempts": 12})
    return sum(hasattr(result, "reply") for result in results), len(server.seen)


def test_crowded_servers_get_fewer_requests_at_once():
    answered, sent = crowd()
    assert answered == 100
    assert sent <= 250


def test_twin_with_a_fixed_limit_sends_most_in_vain(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.failures.Failure.crowded", False)
    monkeypatch.setattr("alpacafarm_env.llm.limits.OUTAGE", 10**6)
    _, sent = crowd()

    assert sent > 250
