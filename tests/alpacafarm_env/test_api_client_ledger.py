"""The client and the ledger: what is kept, what is counted, and what is not sent."""

import asyncio
import json
import sqlite3
import time
from math import isnan

import pytest
from api_asks import ask, chat
from ledger_reads import attempts
from wire_server import WireServer, failed, http, ok, said

from alpacafarm_env.errors import BudgetExceededError, LedgerError, PriceError, ReplayMissError
from alpacafarm_env.llm.attempts import AttemptRecorder
from alpacafarm_env.llm.client import Client
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger
from alpacafarm_env.llm.pricing import Prices
from alpacafarm_env.llm.run_sync import run

PRICES = Prices.load({"m-1": [1.0, 2.0]})


@pytest.fixture(autouse=True)
def _no_environment_and_short_waits(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def rows(ledger):
    return [(row.state, row.status, row.cost_usd) for row in reversed(ledger.do(attempts).result())]


def ask_one(server, ledger, *, client=Client, request=None, questions=(), label="", **settings):
    async def main():
        async with client(Endpoint(server.url), ledger=ledger, **settings) as open_client:
            return await open_client.ask(request or chat(server.url), questions=questions, label=label)

    return run(main())


def test_an_answer_is_paid_once(ledger):
    with WireServer() as server:
        paid = ask_one(server, ledger, prices=PRICES, questions=["q1", "q2"], label="judge")
        again = ask_one(server, ledger, prices=PRICES, questions=["q3"])
    assert len(server.seen) == 1
    assert (paid.cached, paid.attempts, paid.cost_usd) == (False, 1, pytest.approx(13e-6))
    assert (again.cached, again.attempts, again.cost_usd) == (True, 0, 0.0)
    assert again.reply == paid.reply
    assert again.raw == paid.raw
    linked = ledger.do(sql.lookup, ["q1", "q2", "q3"]).result()
    assert [(linked[q].position, linked[q].size) for q in ("q1", "q2", "q3")] == [(0, 2), (1, 2), (0, 1)]
    (row,) = ledger.do(attempts).result()
    assert (row.label, row.model, row.num_questions, row.host) == ("judge", "m-1", 2, Endpoint(server.url).host)


def test_a_model_without_a_price_costs_nan(ledger):
    with WireServer() as server:
        assert isnan(ask_one(server, ledger, prices=Prices.load()).cost_usd)


BILLED = 13e-6
FAULTS = {
    "500": (failed(500, retry_after_ms=1), ("failed", 500, 0.0)),
    "504": (failed(504, retry_after_ms=1), ("unknown", 504, None)),
    "429": (failed(429, retry_after_ms=1), ("failed", 429, 0.0)),
    "cut json": (http(200, b'{"choices'), ("unknown", 200, None)),
    "null, with its usage": (ok(None), ("unknown", 200, BILLED)),
    "null, with no usage": (ok(None, usage=None), ("unknown", 200, None)),
    "reset": ([ok()[:200], None], ("unknown", None, None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_attempt_has_a_row(ledger, fault):
    response, row = FAULTS[fault]
    with WireServer(lambda seen, number: response if number == 1 else ok()) as server:
        answer = ask_one(server, ledger, prices=PRICES)
    assert answer.attempts == 2
    first, second = rows(ledger)
    assert first == (*row[:2], row[2] if row[2] is None else pytest.approx(row[2]))
    assert second == ("answered", None, pytest.approx(BILLED))


def test_absurd_usage_is_charged_within_the_bound(ledger):
    with WireServer(lambda seen, number: ok(usage=(-5, 10**12))) as server:
        answer = ask_one(server, ledger, prices=PRICES)
        assert answer.cost_usd == PRICES.upper_bound("m-1", chat(server.url).bounds)
    assert answer.reply.prompt_tokens is None


def test_twin_that_forgets_leaves_rows_open(ledger, monkeypatch):
    """The twin forgets the rows of attempts that failed."""
    monkeypatch.setattr(AttemptRecorder, "failed", lambda *_: None)
    with WireServer(lambda seen, number: failed(500, retry_after_ms=1) if number == 1 else ok()) as server:
        ask_one(server, ledger, prices=PRICES)
    assert [row[0] for row in rows(ledger)] == ["running", "answered"]


# ------------------------------------------------------------------------------------------------ begin comes first


def states_when_sent(tmp_path, client):
    """What a second reader of the file sees while the server has the request."""
    path, seen_rows = tmp_path / "ledger.sqlite", []

    def reply(seen, number):
        connection = sqlite3.connect(path)
        seen_rows.extend(connection.execute("SELECT state FROM attempts").fetchall())
        connection.close()
        return ok()

    with Ledger(path) as ledger, WireServer(reply) as server:
        ask_one(server, ledger, client=client, prices=PRICES)
    return seen_rows


class Hasty(Client):
    """The twin: sends, then records."""

    async def _begin(self, job):
        early = await self._sender.send(job.request)
        self._sender = _Sent(early, self._sender.close)
        return await super()._begin(job)


class _Sent:
    """What was sent too early."""

    def __init__(self, outcome, close):
        self.outcome, self.close = outcome, close

    def connect(self):
        pass

    async def send(self, request):
        return self.outcome


def test_the_row_is_on_the_disk_before_anything_is_sent(tmp_path):
    assert states_when_sent(tmp_path, Client) == [("running",)]


def test_twin_that_sends_first_is_seen(tmp_path):
    assert states_when_sent(tmp_path, Hasty) == []


@pytest.mark.parametrize(("client", "sent"), [(Client, 0), (Hasty, 1)])
def test_budget_is_checked_before_anything_is_sent(ledger, client, sent):
    with WireServer() as server:
        with pytest.raises(BudgetExceededError):
            ask_one(server, ledger, client=client, prices=PRICES, budget_usd=1e-9)
        assert len(server.seen) == sent  # 1 is the twin's
        with pytest.raises(PriceError):
            ask_one(server, ledger, prices=Prices.load(), budget_usd=1.0)
        assert len(server.seen) == sent


def test_a_budget_that_no_ledger_can_count_to_is_refused_before_anything_is_asked(ledger):
    with pytest.raises(ValueError, match="budget_usd: expected US dollars from 0 to 1,000,000,000"):
        Client(Endpoint("http://127.0.0.1:1/v1"), ledger=ledger, prices=PRICES, budget_usd=2e9)


def test_replay_needs_no_key_and_sends_nothing(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with WireServer() as server:
        with Ledger(path) as ledger:
            raw = ask_one(server, ledger).raw
        with Ledger(path, replay=True) as ledger:
            assert ask_one(server, ledger, questions=["q"]).raw == raw
            with pytest.raises(ReplayMissError):
                ask_one(server, ledger, request=chat(server.url, "Another?"))
    assert len(server.seen) == 1


# ------------------------------------------------------------------------------------------------ cancelled


def test_a_cancelled_attempt_is_unknown(ledger):
    def reply(seen, number):
        yield 5.0

    async def main():
        async with Client(Endpoint(server.url), ledger=ledger, prices=PRICES) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.ask(chat(server.url)), 0.3)

    with WireServer(reply) as server:
        start = time.monotonic()
        run(main())
        assert time.monotonic() - start < 2
    assert rows(ledger) == [("unknown", None, None)]
    assert ledger.do(sql.spending).result().total.unknown_usd > 0


def test_an_answer_that_has_come_is_kept_though_its_caller_is_cancelled(ledger, monkeypatch):
    """Cancelled while the answer is being committed."""
    done = []
    do = ledger.do

    def slowly(operation, *args, **kwargs):
        if operation is sql.succeed:
            done.append(True)
            task.cancel()
        return do(operation, *args, **kwargs)

    monkeypatch.setattr(ledger, "do", slowly)

    async def main():
        nonlocal task
        async with Client(Endpoint(server.url), ledger=ledger, prices=PRICES) as client:
            task = asyncio.create_task(client.ask(chat(server.url), questions=["q"]))
            await asyncio.wait([task])

    task = None
    with WireServer() as server:
        run(main())
    assert done
    assert task.cancelled()
    assert [row[0] for row in rows(ledger)] == ["answered"]
    assert "q" in ledger.do(sql.lookup, ["q"]).result()


def test_a_stored_reply_that_cannot_be_read_is_not_paid_again(ledger):
    with WireServer() as server:
        request = chat(server.url)
        owner = ledger.new_owner()
        row = {"host": "h", "model": "m-1", "label": "", "num_questions": 1, "reserve_usd": None, "budget_usd": None}
        attempt = ledger.do(sql.begin, request_key=request.key, owner=owner, **row).result()
        end = {"cost_usd": 0.0, "prompt_tokens": None, "completion_tokens": None, "question_keys": []}
        ledger.do(sql.succeed, attempt, raw=json.dumps(said(None)), **end).result()
        with pytest.raises(LedgerError, match="not read"):
            ask_one(server, ledger, request=request)
    assert not server.seen


def test_one_ledger_many_requests(ledger):
    with WireServer() as server:
        answers, _ = ask(server, 100, ledger=ledger, prices=PRICES, budget_usd=1.0)
        again, seconds = ask(server, 100, ledger=ledger, prices=PRICES, budget_usd=1.0)
    assert len(server.seen) == 100
    assert not any(answer.cached for answer in answers)
    assert all(answer.cached for answer in again)
    assert ledger.do(sql.spending).result().total.answered == 100
    assert seconds < 3


def test_nothing_is_sent_once_the_ledger_was_cut(ledger):
    with WireServer() as server:
        ask_one(server, ledger, prices=PRICES, budget_usd=1.0)
        ledger.path.write_bytes(b"")
        with pytest.raises(LedgerError, match="cut"):
            ask_one(server, ledger, prices=PRICES, budget_usd=1.0)
        with pytest.raises(LedgerError, match="cut"):
            ask_one(server, ledger, prices=PRICES, budget_usd=1.0, request=chat(server.url, "Another?"))
    assert len(server.seen) == 1
