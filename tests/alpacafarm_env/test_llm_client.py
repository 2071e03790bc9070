"""The client against a real server on the loopback interface: what is sent, what is asked again, and what ends."""

import time
from math import isnan

import pytest
from wire_server import KEY, PRICES, WireServer, ask, asked, chat, failed, first, http, ok, said

from alpacafarm_env.errors import ContentRefusedError, OutageError, PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.client import REFUSALS, Client, run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.limits import ClientConfig, Pace
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
    assert sent == [("/v1/chat/completions", body, f"Bearer {KEY}"), ("/v1/completions", prompt, f"Bearer {KEY}")]
    assert (answers[0].attempts, isnan(answers[0].cost_usd)) == (1, True)
    assert '"content": "It."' in answers[0].raw


def test_concurrent_requests_reuse_connections_within_the_limit():
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


def test_requests_for_another_server_are_refused():
    with pytest.raises(ValueError, match="127.0.0.1:2"):
        run(Client(Endpoint("http://127.0.0.1:1/v1")).ask(chat("http://127.0.0.1:2/v1")))
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


def test_repeats_go_before_all_that_wait():
    def reply(seen, number):
        time.sleep(0.02)
        return failed(500) if number == 1 else ok()

    with WireServer(reply) as server:
        ask(server, 20, config={"max_concurrency": 1})
    sent = [seen.body["messages"][0]["content"] for seen in server.seen]
    assert sent[0] in sent[1:10]


def test_what_stays_ends_after_the_attempts():
    with WireServer(lambda seen, number: failed(500, "out of luck", retry_after_ms=1)) as server:
        error = first(server, config={"max_attempts": 3})
    assert isinstance(error, TransientAPIError)
    assert len(server.seen) == 3
    for part in ("3 attempts", "m-1", "500", "out of luck", "127.0.0.1"):
        assert part in str(error)


def test_retry_after_holds_all_requests_back():
    reply = failed(429, retry_after_ms=200)
    with WireServer(lambda seen, number: ok() if number > 1 else reply) as server:
        answers, _ = ask(server, 3, config={"max_concurrency": 1})
    assert {answer.reply.text for answer in answers} == {"Yes."}
    assert len(server.seen) == 4
    assert 0.2 <= server.seen[1].started - server.seen[0].started < 1.7


def test_a_wait_holds_for_the_next_client():
    """A call that is told to wait and gives up; the next one has the pace from it."""
    pace = Pace(32.0)
    with WireServer(lambda seen, number: failed(429, retry_after=0.3) if number == 1 else ok()) as server:
        for attempts in (1, 6):
            ask(server, config={"max_attempts": attempts}, pace=pace)
    assert server.seen[1].started - server.seen[0].started >= 0.3
    assert pace.limit == pytest.approx(16, abs=0.1)


def test_too_long_a_wait_is_an_error_at_once():
    with WireServer(lambda seen, number: failed(429, retry_after="3600")) as server:
        errors, seconds = ask(server, 20, config={"max_concurrency": 2})
    assert {type(error) for error in errors} == {TransientAPIError}
    assert "max_wait_s=120" in str(errors[-1])
    assert len(server.seen) <= 2
    assert seconds < 2


def drip(seen, number):
    """The body comes at a byte every 0.1 s: no silence is long."""
    head, body = ok().split(b"\r\n\r\n", 1)
    yield head + b"\r\n\r\n"
    for byte in body:
        yield bytes([byte])
        yield 0.1


def hang(seen, number):
    yield 30.0


@pytest.mark.parametrize("fault", [drip, hang])
def test_an_attempt_ends_at_its_deadline(fault):
    with WireServer(fault) as server:
        (error,), seconds = ask(server, config={"attempt_timeout_s": 0.3, "max_attempts": 1}, prices=PRICES)
    assert isinstance(error, TransientAPIError)
    assert "attempt_timeout_s=0.3" in str(error)
    assert error.cost_usd > 0  # it may have been billed
    assert 0.2 < seconds < 0.8


def test_a_request_ends_at_its_deadline_repeats_included():
    with WireServer(lambda seen, number: failed(500)) as server:
        (error,), seconds = ask(server, config={"deadline_s": 0.3, "max_attempts": 99})
    assert "deadline_s=0.3" in str(error)
    assert "500" in str(error)
    assert 0.2 < seconds < 0.8


QUOTA = http(429, {"error": {"message": "You have no credit left", "code": "insufficient_quota"}})
CLOSING = {
    401: "--api-key-env",
    402: "quota",
    404: "'m-1'",
    **dict.fromkeys((405, 501, 302, 308), "base_url"),
    "quota": "quota",
}


@pytest.mark.parametrize("fault", CLOSING)
def test_refusals_end_all_at_once(fault):
    def reply(seen, number):
        return QUOTA if fault == "quota" else failed(fault, "never", location="/other")

    with WireServer(reply) as server:
        errors, seconds = ask(server, 100, config={"max_concurrency": 4})
    assert {type(error) for error in errors} == {PermanentAPIError}
    assert all(CLOSING[fault] in str(error) for error in errors)
    assert len(server.seen) <= 5
    assert seconds < 2


ONE_TEXT = {
    "vLLM": http(400, {"code": 400, "type": "BadRequestError", "message": "maximum context length is 2048 tokens"}),
    "TGI": http(422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096"}),
    "too large": http(413, b"<html>Payload Too Large</html>"),
    "flagged": http(403, {"error": {"code": 403, "message": "Refused", "metadata": {"flagged_input": "Question"}}}),
    "flagged in 200": http(200, {"error": {"code": 403, "message": "Your input was flagged"}}),
    "stopped": ok("Half an ans", reason="content_filter"),
    "no room": ok("", reason="length"),
    "half a character": ok(),
}


@pytest.mark.parametrize("fault", ONE_TEXT)
def test_a_refused_text_ends_its_own_request(fault):
    def reply(seen, number):
        return ONE_TEXT[fault] if "Question 3" in seen.body["messages"][0]["content"] else ok()

    with WireServer(reply) as server:
        texts = [f"Question {i}?" + "\ud800" * (fault == "half a character" and i == 3) for i in range(10)]
        results = asked(
            Endpoint(server.url), [chat(server.url, text) for text in texts], config=ClientConfig(max_concurrency=1)
        )
    assert type(results.pop(3)) is ContentRefusedError
    assert {result.reply.text for result in results} == {"Yes."}
    assert len(server.seen) == 10 - (fault == "half a character")


def test_what_every_request_is_refused_for_ends_all():
    """Settings that the model does not take, such as a temperature."""
    with WireServer(lambda seen, number: failed(400, "bad temperature")) as server:
        errors, _ = ask(server, 100, config={"max_concurrency": 4})
    assert {type(error) for error in errors[REFUSALS + 4 :]} == {PermanentAPIError}
    assert "bad temperature" in str(errors[-1])
    assert len(server.seen) <= REFUSALS + 4


def test_an_outage_ends_all(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.limits.OUTAGE_S", 0.5)
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_MAX_S", 0.3)
    with WireServer(lambda seen, number: [None]) as server:
        errors, seconds = ask(server, 200, config={"max_concurrency": 32, "max_attempts": 99})
    assert {type(error) for error in errors} == {OutageError}
    assert seconds < 10
