"""How the client ends what does not come: deadlines, refusals, outages, over the loopback interface."""

import time

import pytest
from llm_asks import PRICES, ask
from wire_server import WireServer, failed, http, ok

from alpacafarm_env.errors import ContentRefusedError, OutageError, PermanentAPIError, TransientAPIError

pytestmark = pytest.mark.usefixtures("short_waits")


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
        (error,), seconds = ask(server, config={"attempt_timeout_s": 0.5, "max_attempts": 1}, prices=PRICES)
    assert isinstance(error, TransientAPIError)
    assert "attempt_timeout_s=0.5" in str(error)
    assert error.cost_usd > 0  # it may have been billed
    assert 0.4 < seconds < 1.0


def test_a_request_ends_at_its_deadline_repeats_included():
    with WireServer(lambda seen, number: failed(500)) as server:
        (error,), seconds = ask(server, config={"deadline_s": 0.3, "max_attempts": 99})
    assert "deadline_s=0.3" in str(error)
    assert "500" in str(error)
    assert 0.2 < seconds < 0.8


QUOTA = http(429, {"error": {"message": "You have no credit left", "code": "insufficient_quota"}})
CLOSING = {
    401: "OPENAI_API_KEY",
    402: "quota",
    403: "may not use",
    404: "'m-1'",
    **dict.fromkeys((405, 501, 302, 308), "base_url"),
    "quota": "quota",
    "account": "account was flagged",
}


@pytest.mark.parametrize("fault", CLOSING)
def test_refusals_end_all_at_once(fault):
    def reply(seen, number):
        if fault == "account":
            return failed(403, "Your account was flagged")
        return QUOTA if fault == "quota" else failed(fault, "never", location="/other")

    with WireServer(reply) as server:
        errors, seconds = ask(server, 100, config={"max_concurrency": 4})
    assert {type(error) for error in errors} == {PermanentAPIError}
    assert all(CLOSING[fault] in str(error) for error in errors)
    assert len(server.seen) <= 5
    assert seconds < 2


VLLM = "This model's maximum context length is 2048 tokens. However, you requested 9000 tokens."
OPENROUTER = {"code": 403, "message": "Refused", "metadata": {"reasons": ["violence"], "flagged_input": "Question"}}
ONE_TEXT = {
    "vLLM": http(400, {"code": 400, "type": "BadRequestError", "message": VLLM}),
    "vLLM, newer": http(400, {"error": {"code": 400, "type": "BadRequestError", "message": VLLM}}),
    "llama.cpp": http(400, {"error": {"code": 400, "message": "request exceeds the available context size"}}),
    "TGI": http(422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096"}),
    "too large": http(413, b"<html>Payload Too Large</html>"),
    "too long": http(400, {"error": {"message": "too long", "code": "context_length_exceeded"}}),
    "filter": http(400, {"error": {"message": "no", "code": "content_filter"}}),
    "OpenRouter": http(403, {"error": OPENROUTER}),
    "flagged": http(403, {"error": {"code": 403, "message": "Your input was flagged"}}),
    "flagged in 200": http(200, {"error": {"code": 403, "message": "Your input was flagged"}}),
    "stopped": ok("Half an ans", reason="content_filter"),
    "no room": ok("", reason="length"),
}
ONE_REQUEST = {"settings": failed(400, "bad temperature"), "unprocessable": failed(422)}


@pytest.mark.parametrize("fault", [*ONE_TEXT, *ONE_REQUEST])
def test_what_is_wrong_with_one_request_ends_that_one(fault):
    def reply(seen, number):
        ours = seen.body["messages"][0]["content"] == "Question 3?"
        return (ONE_TEXT | ONE_REQUEST)[fault] if ours else ok()

    with WireServer(reply) as server:
        results, _ = ask(server, 10, config={"max_concurrency": 1})
    assert type(results.pop(3)) is (ContentRefusedError if fault in ONE_TEXT else PermanentAPIError)
    assert {result.reply.text for result in results} == {"Yes."}
    assert len(server.seen) == 10


def test_an_outage_ends_all(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.limits.PROBES_S", (0.05, 0.1, 0.2))
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_MAX_S", 0.3)
    with WireServer(lambda seen, number: [None]) as server:
        errors, seconds = ask(server, 200, config={"max_concurrency": 32})
    assert {type(error) for error in errors} == {OutageError}
    assert 20 <= len(server.seen) <= 20 + 32
    assert seconds < 10


def test_a_server_that_comes_back_in_time_loses_nothing(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.limits.PROBES_S", (0.1, 0.2, 0.4))
    start = time.monotonic()
    with WireServer(lambda seen, number: [None] if time.monotonic() < start + 0.25 else ok()) as server:
        answers, _ = ask(server, 60)
    assert {answer.reply.text for answer in answers} == {"Yes."}
