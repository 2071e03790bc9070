"""The client against a real server: what is sent, asked again and what ends; with a ledger: what is kept and paid."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from math import isnan
from types import SimpleNamespace

import pytest
from faulty_server import KEY, PRICES, WireServer, ask, ask_one, asked, chat, failed, first, http, ok, said
from ledger_calls import answer, attempts, begin, lookup, succeed, total

from alpacafarm_env import errors
from alpacafarm_env.errors import ContentRefusedError, OutageError, PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.client import REFUSALS, Client, run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.ledger import operations as sql
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


def test_answers_keep_their_order_within_the_limit():
    def reply(seen, number):
        time.sleep(0.01)
        return ok(seen.body["messages"][0]["content"])

    with WireServer(reply) as server:
        answers, _ = ask(server, 60, config={"max_concurrency": 5})
    assert [answer.reply.text for answer in answers] == [f"Question {i}?" for i in range(60)]
    assert server.most_active == 5


def test_requests_for_another_server_are_refused():
    with pytest.raises(ValueError, match="127.0.0.1:2"):
        run(Client(Endpoint("http://127.0.0.1:1/v1")).ask(chat("http://127.0.0.1:2/v1")))


PASSING = {
    "408": failed(408),
    "503": failed(503, "<html>down</html>"),
    "html": http(200, b"<html>hello</html>", content_type="text/html"),
    "latin-1": http(200, b'{"choices": [{"message": {"content": "\xe9"}}]}'),
    "short body": [ok()[:-20], None],
    "no http": [b"garbage\r\n\r\n", None],
    "bad gzip": http(200, b"not gzip", content_encoding="gzip"),
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
    **dict.fromkeys((405, 501, 302, 307, 308), "base_url"),
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


BILLED = 13e-6
RESERVE = PRICES.upper_bound(chat("", "Question 0?"))


def rows(ledger):
    return [(row.state, row.status, row.cost_usd) for row in attempts(ledger)]


def test_an_answer_is_paid_once(ledger):
    with WireServer() as server:
        paid = ask_one(server, ledger, prices=PRICES, questions=["q1", "q2"], label="judge")
        again = ask_one(server, ledger, prices=PRICES, questions=["q3"])
    assert len(server.seen) == 1
    assert (paid.attempts, paid.cost_usd) == (1, pytest.approx(BILLED))
    assert (again.attempts, again.cost_usd) == (0, 0.0)
    assert (again.reply, again.raw) == (paid.reply, paid.raw)
    linked = lookup(ledger, "q1", "q2", "q3")
    assert [(linked[q].position, linked[q].size) for q in ("q1", "q2", "q3")] == [(0, 2), (1, 2), (0, 1)]
    (row,) = attempts(ledger)
    assert (row.label, row.model, row.num_questions, row.host) == ("judge", "m-1", 2, Endpoint(server.url).host)


def test_the_answer_that_another_process_stored_first_stands(ledger):
    """It has been used by now, maybe."""

    def reply(seen, number):
        answer(ledger, request.key, [], json.dumps(said("First.")))
        return ok("Second.")

    with WireServer(reply) as server:
        request = chat(server.url)
        told = ask_one(server, ledger, request=request)
    assert told.reply.text == "First."
    assert json.loads(told.raw) == said("First.")
    assert total(ledger).answered == 2


LATER = {"retry_after_ms": 1}
NOTHING, UNKNOWN, PAID = ("failed", 500, 0.0), ("unknown", 200, RESERVE), ("answered", None, BILLED)
ENDS = {  # responses, the rows they leave, what they cost
    "one answer": ([ok()], [PAID], BILLED),
    "free failures": (
        [failed(500, **LATER), failed(429, **LATER), ok()],
        [NOTHING, ("failed", 429, 0.0), PAID],
        BILLED,
    ),
    "a gateway gave up": ([failed(504, **LATER), ok()], [("unknown", 504, RESERVE), PAID], RESERVE + BILLED),
    "cut json": ([http(200, b'{"choices'), ok()], [UNKNOWN, PAID], RESERVE + BILLED),
    "null, with its usage": ([ok(None), ok()], [("unknown", 200, BILLED), PAID], 2 * BILLED),
    "null, with no usage": ([ok(None, usage=None), ok()], [UNKNOWN, PAID], RESERVE + BILLED),
    "reset": ([[ok()[:150], None], ok()], [("unknown", None, RESERVE), PAID], RESERVE + BILLED),
    "hung up on": ([[None], ok()], [("unknown", None, RESERVE), PAID], RESERVE + BILLED),
    "never an answer": ([ok(None)] * 3, [("unknown", 200, BILLED)] * 3, 3 * BILLED),
    "filtered": (
        [http(200, b"cut"), ok("No.", reason="content_filter")],
        [UNKNOWN, ("unknown", 200, BILLED)],
        RESERVE + BILLED,
    ),
    "refused": ([failed(504, **LATER), failed(413)], [("unknown", 504, RESERVE), ("failed", 413, 0.0)], RESERVE),
}
ERRORS = {
    "never an answer": errors.TransientAPIError,
    "filtered": errors.ContentRefusedError,
    "refused": errors.ContentRefusedError,
}


@pytest.mark.parametrize("end", ENDS)
def test_every_attempt_has_a_row_and_a_cost(ledger, end):
    responses, expected, cost = ENDS[end]
    with WireServer(lambda seen, n: responses[n - 1]) as server:
        (result,), _ = ask(server, ledger=ledger, prices=PRICES, config={"max_attempts": 3})
    assert len(server.seen) == len(responses)
    assert rows(ledger) == [(*row[:2], pytest.approx(row[2], abs=1e-9)) for row in expected]
    assert result.cost_usd == pytest.approx(cost)
    assert total(ledger).usd == pytest.approx(cost, abs=1e-8)
    assert isinstance(result, ERRORS[end]) if end in ERRORS else result.attempts == len(responses)


@pytest.mark.parametrize("listens", [False, True], ids=["refused", "no handshake"])
def test_what_never_left_costs_nothing(ledger, listens):
    with ExitStack() as opened:
        silent = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        nobody = SimpleNamespace(url=f"https://127.0.0.1:{silent.getsockname()[1]}/v1")
        if not listens:
            opened.close()
        (result,), _ = ask(nobody, ledger=ledger, prices=PRICES, config={"max_attempts": 2, "attempt_timeout_s": 0.3})
    assert isinstance(result, errors.TransientAPIError)
    assert "Connect" in str(result)
    assert result.cost_usd == total(ledger).usd == 0


def test_an_unreadable_stored_reply_is_not_paid_again(ledger):
    with WireServer() as server:
        request = chat(server.url)
        succeed(ledger, begin(ledger, request.key).result(), [], json.dumps(said(None))).result()
        with pytest.raises(errors.LedgerError, match=request.key):
            ask_one(server, ledger, request=request)
    assert not server.seen


def test_a_cancelled_attempt_is_unknown(ledger):
    async def main():
        async with Client(Endpoint(server.url), ledger=ledger, prices=PRICES) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.ask(chat(server.url)), 0.2)

    with WireServer(lambda seen, number: [5.0]) as server:
        start = time.monotonic()
        run(main())
        assert time.monotonic() - start < 2
    assert [row[0] for row in rows(ledger)] == ["unknown"]
    assert total(ledger).reserved_usd > 0


def test_an_answer_is_kept_though_its_caller_is_cancelled(ledger, monkeypatch):
    """Cancelled while the answer is being committed."""
    do, task = ledger.do, None

    def cancelling(operation, *args, **kwargs):
        future = do(operation, *args, **kwargs)
        if operation is sql.succeed:
            task.get_loop().call_soon(task.cancel)
        return future

    monkeypatch.setattr(ledger, "do", cancelling)

    async def main():
        nonlocal task
        async with Client(Endpoint(server.url), ledger=ledger, prices=PRICES) as client:
            task = asyncio.create_task(client.ask(chat(server.url), questions=["q"]))
            await asyncio.wait([task])

    with WireServer() as server:
        run(main())
    assert [row[0] for row in rows(ledger)] == ["answered"]
    assert "q" in lookup(ledger, "q")
