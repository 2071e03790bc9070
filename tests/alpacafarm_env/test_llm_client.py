"""The client against a real server on the loopback interface: what is sent, and what is asked again."""

import email.utils
import socket
import time
from math import isnan
from types import SimpleNamespace

import pytest
from llm_asks import KEY, ask, asked, chat, first
from wire_server import WireServer, failed, http, ok, said

from alpacafarm_env.errors import PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.client import Client, run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.limits import ClientConfig, Limiter
from alpacafarm_env.llm.requests import Request

pytestmark = pytest.mark.usefixtures("short_waits")


def test_body_path_and_key_as_sent():
    body = {"model": "m-1", "messages": [{"role": "user", "content": "日本 \0"}], "unknown": {"deep": [1]}, "seed": 3}
    prompt = {"model": "m-2", "prompt": "Say"}
    with WireServer(lambda seen, n: ok("It.", kind="completion" if "prompt" in seen.body else "chat")) as server:
        requests = [Request(server.url, "chat", body), Request(server.url, "completion", prompt)]
        answers = [asked(Endpoint(f"{server.url}/", KEY), [request])[0] for request in requests]
    assert [answer.reply.text for answer in answers] == ["It.", "It."]
    sent = [(seen.path, seen.body, seen.headers["authorization"]) for seen in server.seen]
    paths = ("/v1/chat/completions", "/v1/completions")
    assert sent == [(path, each, f"Bearer {KEY}") for path, each in zip(paths, (body, prompt), strict=True)]
    assert (answers[0].attempts, answers[0].cached, isnan(answers[0].cost_usd)) == (1, False, True)
    assert '"content": "It."' in answers[0].raw


def test_many_at_once_in_order_within_the_limit_on_connections_that_are_used_again():
    ports = set()

    class Counting(WireServer):
        def _serve(self, connection):
            ports.add(connection.getpeername())
            super()._serve(connection)

    def reply(seen, number):
        time.sleep(0.01)
        return ok(seen.body["messages"][0]["content"])

    with Counting(reply) as server:
        answers, _ = ask(server, 60, config={"max_concurrency": 5})
    assert [answer.reply.text for answer in answers] == [f"Question {i}?" for i in range(60)]
    assert server.most_active == 5
    assert len(ports) <= 5


def test_use_outside_its_block_and_for_another_server():
    async def main():
        client = Client(Endpoint("http://127.0.0.1:1/v1"))
        with pytest.raises(RuntimeError, match="async with"):
            await client.ask(chat("http://127.0.0.1:1/v1"))
        async with client:
            with pytest.raises(ValueError, match="127.0.0.1:2"):
                await client.ask(chat("http://127.0.0.1:2/v1"))
            with pytest.raises(RuntimeError, match="open already"):
                async with client:
                    pass

    run(main())
    with pytest.raises(ValueError, match="budget_usd"):
        Client(Endpoint("http://127.0.0.1:1/v1"), budget_usd=1.0)


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
    "short body": [ok()[:-20], None],
    "no http": [b"garbage\r\n\r\n", None],
    "bad gzip": http(200, b"not gzip", content_encoding="gzip"),
    "reset": [ok()[:150], None],
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_asked_again(fault):
    with WireServer(lambda seen, number: ok() if number > 1 else PASSING[fault]) as server:
        answer = first(server)
    assert answer.reply.text == "Yes."
    assert answer.attempts == len(server.seen) == 2


def test_what_is_asked_again_goes_before_all_that_wait():
    def reply(seen, number):
        time.sleep(0.05)
        return failed(500) if number == 1 else ok()

    with WireServer(reply) as server:
        ask(server, 30, config={"max_concurrency": 1})
    sent = [seen.body["messages"][0]["content"] for seen in server.seen]
    assert sent[0] in sent[1:15]


def test_what_stays_ends_after_the_attempts():
    with WireServer(lambda seen, number: failed(500, "out of luck", retry_after_ms=1)) as server:
        error = first(server, config={"max_attempts": 3})
    assert isinstance(error, TransientAPIError)
    assert len(server.seen) == 3
    for part in ("3 attempts", "m-1", "500", "out of luck", "127.0.0.1"):
        assert part in str(error)


def test_connection_refused():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = SimpleNamespace(url=f"http://127.0.0.1:{free.getsockname()[1]}/v1")
    error = first(nobody, config={"max_attempts": 2})
    assert isinstance(error, TransientAPIError)
    assert nobody.url in str(error)
    assert "ConnectError" in str(error)


def test_half_characters_are_not_sent():
    with WireServer() as server:
        (error,) = asked(Endpoint(server.url), [chat(server.url, "half \ud800")])
    assert isinstance(error, PermanentAPIError)
    assert "surrogate" in str(error)
    assert not server.seen


# ------------------------------------------------------------------------------------------------ waits

RETRY_AFTER = {  # every form that a header can have is in test_llm_failures.py
    "seconds": (lambda: {"retry_after": 0.3}, 0.3),
    "milliseconds": (lambda: {"retry_after_ms": 300}, 0.3),
    "date": (lambda: {"retry_after": email.utils.formatdate(time.time() + 1.4, usegmt=True)}, 0.3),
    "garbage": (lambda: {"retry_after": "nan"}, 0.0),
    "past": (lambda: {"retry_after": email.utils.formatdate(time.time() - 99, usegmt=True)}, 0.0),
}


@pytest.mark.parametrize("form", RETRY_AFTER)
def test_retry_after_is_obeyed_by_all_requests_of_the_client_and_never_earlier(form):
    header, least = RETRY_AFTER[form]
    with WireServer(lambda seen, number: ok() if number > 1 else failed(429, **header())) as server:
        answers, _ = ask(server, 3, config={"max_concurrency": 1})
    assert {answer.reply.text for answer in answers} == {"Yes."}
    starts = [seen.started for seen in server.seen]
    assert len(starts) == 4
    assert least <= starts[1] - starts[0] < least + 1.5


def test_a_wait_holds_for_the_next_client():
    """A call that is told to wait and gives up; the next one has the limiter from it."""
    limiter = Limiter(ClientConfig(max_concurrency=32))
    with WireServer(lambda seen, number: failed(429, retry_after=0.3) if number == 1 else ok()) as server:
        for attempts in (1, 6):
            ask(server, config={"max_attempts": attempts}, limiter=limiter)
    assert server.seen[1].started - server.seen[0].started >= 0.3
    assert limiter.limit == pytest.approx(16, abs=0.1)


@pytest.mark.parametrize("wait", ["3600", "9" * 400])
def test_too_long_a_wait_is_an_error_at_once(wait):
    with WireServer(lambda seen, number: failed(429, retry_after=wait)) as server:
        errors, seconds = ask(server, 20, config={"max_concurrency": 2})
    assert {type(error) for error in errors} == {TransientAPIError}
    assert "max_wait_s=120" in str(errors[-1])
    assert len(server.seen) <= 2
    assert seconds < 2


def test_crowded_servers_get_fewer_requests_at_once():
    """100 questions, 32 at once, to a server that takes four: one that is asked on at 32 has to refuse most of them."""
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
    assert all(hasattr(result, "reply") for result in results)
    assert len(server.seen) <= 250
