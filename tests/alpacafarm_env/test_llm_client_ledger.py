"""The client and the ledger: what is kept, what is counted and said to have cost, and what is not sent."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from ledger_calls import answer, attempts, begin, lookup, succeed, total
from wire_server import PRICES, WireServer, ask, ask_one, chat, failed, http, ok, said

from alpacafarm_env import errors
from alpacafarm_env.llm.client import Client, run
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.requests import Prices

pytestmark = pytest.mark.usefixtures("short_waits")
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


@pytest.mark.parametrize("usage", [(0, 3), (7, 10**12), (-9, 1), None])
def test_impossible_usage_is_charged_at_the_bound(usage):
    with WireServer(lambda seen, number: ok(usage=usage)) as server:
        results, _ = ask(server, 3, prices=PRICES)
    assert {result.cost_usd for result in results} == {RESERVE}


def test_budget_is_checked_before_anything_is_sent(ledger):
    with WireServer() as server:
        with pytest.raises(errors.BudgetExceededError):
            ask_one(server, ledger, prices=PRICES, budget_usd=1e-9)
        with pytest.raises(errors.PriceError):
            ask_one(server, ledger, prices=Prices.load(), budget_usd=1.0)
    assert not server.seen
    with pytest.raises(ValueError, match="budget_usd"):
        Client(Endpoint("http://127.0.0.1:1/v1"), ledger=ledger, prices=PRICES, budget_usd=2e9)


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
