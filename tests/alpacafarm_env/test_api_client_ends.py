"""How the client ends what does not come: deadlines, refusals, outages, over the loopback interface."""

import asyncio
import time

import pytest
from api_asks import ask, chat
from wire_server import WireServer, failed, http, ok

from alpacafarm_env.errors import ContentRefusedError, OutageError, PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.client import Client
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.run_sync import run
from alpacafarm_env.llm.transport import Sender


@pytest.fixture(autouse=True)
def _no_environment_and_short_waits(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


# ------------------------------------------------------------------------------------------------ deadlines


def drip(seen, number):
    """The body comes at a byte every 0.2 s."""
    head, body = ok().split(b"\r\n\r\n", 1)
    yield head + b"\r\n\r\n"
    for byte in body:
        yield bytes([byte])
        yield 0.2


def hang(seen, number):
    yield 30.0


class PerRead(Sender):
    """The twin: the library's own time-out, which counts the silence between two bytes."""

    async def send(self, request):
        from openai import OpenAIError

        self.connect()
        resource = self._all[0].chat.completions.with_raw_response
        wait = {"model": "m", "messages": [], "extra_body": request.body, "timeout": self._timeout_s}
        try:
            response = await asyncio.wait_for(resource.create(**wait), 1.8)
            return response.content.decode()
        except (OpenAIError, TimeoutError):
            return ok().decode()


@pytest.mark.parametrize("fault", [drip, hang])
def test_an_attempt_ends_at_its_deadline(fault):
    with WireServer(fault) as server:
        error, seconds = ask(server, config={"attempt_timeout_s": 1.0, "max_attempts": 1})
    assert isinstance(error[0], TransientAPIError)
    assert "attempt_timeout_s=1" in str(error[0]) or "timed out" in str(error[0])
    assert 0.9 < seconds < 1.5


def test_twin_with_the_librarys_time_out_drips_on(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.client.Sender", PerRead)
    with WireServer(drip) as server:
        _, seconds = ask(server, config={"attempt_timeout_s": 1.0, "max_attempts": 1})
    assert seconds > 1.5


def test_a_request_ends_at_its_deadline_repeats_included():
    with WireServer(lambda seen, number: failed(500)) as server:
        errors, seconds = ask(server, config={"deadline_s": 0.4, "max_attempts": 99})
    assert "deadline_s=0.4" in str(errors[0])
    assert "500" in str(errors[0])
    assert 0.3 < seconds < 0.9


# ------------------------------------------------------------------------------------------------ what cannot pass


CLOSING = {
    401: "OPENAI_API_KEY",
    402: "quota",
    403: "may not use",
    404: "no model 'm-1'",
    405: "no OpenAI-compatible server",
    501: "no OpenAI-compatible server",
    302: "base_url",
    308: "base_url",
}


@pytest.mark.parametrize("status", CLOSING)
def test_refusals_end_all_at_once(status):
    with WireServer(lambda seen, number: failed(status, "never", location="/other")) as server:
        errors, seconds = ask(server, 200, config={"max_concurrency": 4})
    assert {type(error) for error in errors} == {PermanentAPIError}
    assert all(CLOSING[status] in str(error) for error in errors)
    assert len(server.seen) <= 5
    assert seconds < 2


def test_a_spent_quota_is_no_crowd():
    body = {"error": {"message": "You have no credit left", "code": "insufficient_quota"}}
    with WireServer(lambda seen, number: http(429, body)) as server:
        errors, _ = ask(server, 50, config={"max_concurrency": 4})
    assert all("quota" in str(error) for error in errors)
    assert len(server.seen) <= 5


class Stubborn(Client):
    """The twin: refuses nothing by itself."""

    def _refuse(self, error):
        pass


def test_twin_that_does_not_close_sends_all():
    with WireServer(lambda seen, number: failed(401)) as server:
        ask(server, 40, client=Stubborn, config={"max_concurrency": 4, "max_attempts": 1})
    assert len(server.seen) == 40


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (failed(400, "bad temperature"), "bad temperature"),
        (failed(422), "omit"),
        (http(400, {"error": {"message": "too long", "code": "context_length_exceeded"}}), "longer than the model's"),
        (http(400, {"error": {"message": "no", "code": "content_filter"}}), "filter refused"),
        (failed(413, "Payload"), "longer than the model's"),
        (http(200, {"error": {"code": 403, "message": "Your input was flagged"}}), "filter refused"),
        (ok("Half an ans", reason="content_filter"), "filter stopped"),
        (ok("", reason="length"), "limit on tokens is too low"),
    ],
)
def test_what_is_wrong_with_one_request_ends_that_one(response, says):
    def reply(seen, number):
        return response if seen.body["messages"][0]["content"] == "Question 3?" else ok()

    with WireServer(reply) as server:
        results, _ = ask(server, 10)
    assert says in str(results.pop(3))
    assert {result.reply.text for result in results} == {"Yes."}
    assert len(server.seen) == 10


VLLM = "This model's maximum context length is 2048 tokens. However, you requested 9000 tokens."
OPENROUTER = {"code": 403, "message": "Refused", "metadata": {"reasons": ["violence"], "flagged_input": "Question"}}
ONE_TEXT = {
    "vLLM": http(400, {"code": 400, "type": "BadRequestError", "message": VLLM}),
    "vLLM, newer": http(400, {"error": {"code": 400, "type": "BadRequestError", "message": VLLM}}),
    "llama.cpp": http(400, {"error": {"code": 400, "message": "request exceeds the available context size"}}),
    "TGI": http(422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096"}),
    "too large": http(413, b"<html>Payload Too Large</html>"),
    "OpenRouter": http(403, {"error": OPENROUTER}),
    "flagged": http(403, {"error": {"code": 403, "message": "Your input was flagged"}}),
}


def refused_once(response):
    """Ten questions, one of which is refused: the results and the requests."""

    def reply(seen, number):
        return response if seen.body["messages"][0]["content"] == "Question 3?" else ok()

    with WireServer(reply) as server:
        results, _ = ask(server, 10, config={"max_concurrency": 1})
    assert type(results[3]) is ContentRefusedError, results[3]
    assert [hasattr(result, "reply") for result in results].count(True) == 9


@pytest.mark.parametrize("server", ONE_TEXT)
def test_a_text_that_is_refused_ends_no_other(server):
    refused_once(ONE_TEXT[server])


def test_twin_that_reads_codes_alone_ends_all(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.failures.refused_text", lambda *_: "")
    for server in ("vLLM", "OpenRouter"):
        with pytest.raises(AssertionError):
            refused_once(ONE_TEXT[server])


def test_a_refused_account_ends_all():
    with WireServer(lambda seen, number: failed(403, "Your account was flagged")) as server:
        errors, _ = ask(server, 20, config={"max_concurrency": 1})
    assert {type(error) for error in errors} == {PermanentAPIError}
    assert len(server.seen) == 1


def test_half_characters_are_not_sent():
    with WireServer() as server:

        async def main():
            async with Client(Endpoint(server.url)) as client:
                await client.ask(chat(server.url, "half \ud800"))

        with pytest.raises(PermanentAPIError, match="surrogate"):
            run(main())
    assert not server.seen


# ------------------------------------------------------------------------------------------------ outages


def outage(monkeypatch, count, **settings):
    monkeypatch.setattr("alpacafarm_env.llm.limits.PROBES_S", (0.05, 0.1, 0.2))
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_MAX_S", 0.3)
    with WireServer(lambda seen, number: [None]) as server:
        results, seconds = ask(server, count, config={"max_concurrency": 32}, **settings)
    return results, seconds, len(server.seen)


def test_an_outage_ends_all(monkeypatch):
    errors, seconds, sent = outage(monkeypatch, 300)
    assert {type(error) for error in errors} == {OutageError}
    assert "run again" in str(errors[0])
    assert 20 <= sent <= 20 + 32
    assert seconds < 10


def test_twin_without_an_end_asks_on(monkeypatch):
    errors, _, sent = outage(monkeypatch, 20, client=Stubborn)
    assert OutageError not in {type(error) for error in errors}
    assert sent > 20 + 32


def test_a_server_that_comes_back_in_time_loses_nothing(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.limits.PROBES_S", (0.2, 0.4, 0.8))
    start = time.monotonic()
    with WireServer(lambda seen, number: [None] if time.monotonic() < start + 0.5 else ok()) as server:
        answers, _ = ask(server, 100)
    assert {answer.reply.text for answer in answers} == {"Yes."}
