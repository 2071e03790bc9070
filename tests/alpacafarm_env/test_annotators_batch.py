"""How a batch is asked, and how calls of the pool end: what is sent, kept, counted and shown then."""

import asyncio
import json

import numpy as np
import pytest
from faulty_server import Faults, FaultyJudgeServer
from judge_requests import SINGLE, cut

from alpacafarm_env import errors
from alpacafarm_env.annotators import served as asking
from alpacafarm_env.annotators.config import PoolConfig
from alpacafarm_env.annotators.pool import AnnotatorPool
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import Client
from alpacafarm_env.llm.ledger import Ledger
from alpacafarm_env.llm.ledger import operations as sql


def test_a_wrong_key_ends_the_call_at_once(make, pairs):
    rows = cut(pairs, 100)
    with JudgeServer(api_key="sk-right") as server:
        with pytest.raises(errors.PermanentAPIError, match="key"):
            make(server, SINGLE, max_concurrency=4).judge(*rows)
        assert server.stats()["requests"] <= 5
        assert not np.isnan(make(server, SINGLE, api_key="sk-right").compare(*rows)).any()


def test_an_interrupt_frees_what_was_claimed(make, pairs):
    """Cut short while its claim is being written, a call must not leave leases that live as long as the process."""
    rows = cut(pairs, 5)
    with JudgeServer() as server:
        pool = make(server, SINGLE)

        async def interrupted():
            ask = asking.Call(pool, wanted(pool, rows))
            ask._do = claim_and_cancel(ask._do)
            await ask.run()

        def claim_and_cancel(do):
            async def wrapped(operation, *args):
                if operation is sql.claim:
                    pool.ledger.do(operation, *args).result()
                    raise asyncio.CancelledError
                return await do(operation, *args)

            return wrapped

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(interrupted())
        assert not np.isnan(make(server, SINGLE).compare(*rows)).any()


def test_a_users_error_loses_no_paid_answer(make, pairs):
    rows = cut(pairs, 40)

    def fail(progress):
        raise KeyError("my own")

    with JudgeServer() as server:
        pool = make(server, SINGLE, on_progress=fail)
        with pytest.raises(KeyError, match="my own"):
            pool.judge(*rows)
        total = pool.ledger.do(sql.spending).result().total
        assert total.answered == server.stats()["charged"]["requests"]
        assert (total.unknown, total.running) == (0, 0)


def test_the_ledger_holds_every_attempt_and_no_key(make, pairs, tmp_path):
    key = "sk-canary-1234567890abcdef"
    rates = {"server_error": 0.2, "content_filter": 0.2, "null_content": 0.1}
    with FaultyJudgeServer(faults=Faults(rates)) as server:
        pool = make(server, SINGLE, prices={"sandbox-gpt4": (100.0, 100.0)}, api_key=key)
        verdicts = pool.judge(*cut(pairs, 40))
        total, stats = pool.ledger.do(sql.spending).result().total, server.stats()
        pool.ledger.close()
    assert total.attempts == stats["requests"]
    assert total.failed == stats["by_fault"]["server_error"]
    assert total.answered == stats["answered"] == (~np.isnan(verdicts.scores)).sum()
    assert verdicts.details["cost_usd"].sum() == pytest.approx(total.usd, rel=1e-6)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert written
    assert key.encode() not in written
    assert key not in repr(pool.__dict__) + repr(verdicts) + json.dumps(stats)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"models": {"gpt4": "x"}}, errors.PoolError, "chatgpt"),
        ({"pool": "alpaca_frm"}, errors.PoolError, "alpaca_farm"),
        ({"base_url": "ftp://x"}, ValueError, "http"),
        ({"base_url": 5}, ValueError, "base_url"),
        ({"seed": "a"}, ValueError, "seed"),
        ({"seed": 1.5}, ValueError, "seed"),
        ({"budget_usd": -1}, ValueError, "budget_usd"),
        ({"budget_usd": float("nan")}, ValueError, "budget_usd"),
        ({"budget_usd": "10"}, ValueError, "budget_usd"),
        ({"budget_usd": 1.1e9}, ValueError, "budget_usd"),
    ],
)
def test_what_is_not_well_said_is_refused(make, options, error, match):
    class Server:
        base_url = "http://127.0.0.1:1/v1"

    with pytest.raises(error, match=match):
        make(Server(), **options)


def test_a_replay_takes_no_ledger_that_could_pay(tmp_path):
    with (
        Ledger(tmp_path / "l.sqlite") as ledger,
        pytest.raises(ValueError, match="l.sqlite"),
    ):
        AnnotatorPool(SINGLE, "sandbox", ledger=ledger, replay=True)
    with Ledger(tmp_path / "l.sqlite", replay=True) as ledger:
        assert AnnotatorPool(SINGLE, "sandbox", ledger=ledger, replay=True, api_key_env="NOT_SET").ledger is ledger


def test_one_model_has_one_price(tmp_path):
    def priced(*prices):
        roles = zip(("gpt4", "chatgpt", "davinci003"), prices, strict=True)
        models = {role: {"model": "m", "price_usd_per_million": price} for role, price in roles}
        return AnnotatorPool("alpaca_farm", models, base_url="http://localhost:1/v1", ledger=tmp_path / "l.sqlite")

    assert priced([1, 2], None, [1.0, 2.0]).prices.cost("m", 10**6, 10**6) == 3
    with pytest.raises(errors.PoolError, match=r"'m'.*\[1.0, 2.0\] and \[1.0, 20.0\]"):
        priced([1, 2], [1, 2], [1, 20])


PRICES = {"sandbox-gpt4": (1000.0, 1000.0)}
SHARED = PoolConfig(
    name="shared",
    draws="single",
    annotators=tuple(member.model_copy(update={"batch_size": 5}) for member in SINGLE.annotators),
)
"""The same annotator, drawn alike, but five pairs a request."""


def test_an_uncached_pair_takes_four_ledger_operations(make, pairs, monkeypatch):
    with JudgeServer() as server:
        pool, operations = make(server, SINGLE), []
        do = pool.ledger.do
        monkeypatch.setattr(pool.ledger, "do", lambda op, *args, **more: operations.append(op) or do(op, *args, **more))
        pool.judge(*cut(pairs, 1))
    assert operations == [sql.claim, sql.begin, sql.succeed, sql.release]


def test_what_another_call_asks_is_waited_for(make, pairs):
    """The other call shares a request among pairs that this one would have asked in two."""
    with JudgeServer(latency_s=0.2) as server:
        pool = make(server, SHARED)
        keys = wanted(pool, cut(pairs, 10))
        some = dict(list(keys.items())[1:6])

        async def both():
            first = asyncio.create_task(asking.Call(pool, some).run())
            await asyncio.sleep(0.05)
            return await asking.Call(pool, keys).run(), await first

        answers, _ = asyncio.run(both())
        assert server.stats()["requests"] == 2
    assert {key for key, answer in answers.items() if answer.cached} == set(some)


def wanted(pool, rows):
    questions = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "answers", lambda new: questions.extend(new) or [asking.Answer(0.5)] * len(new))
        pool.judge(*rows)
    return {question.key: question for question in questions}


def asked_at_once(pool, rows, monkeypatch, ahead):
    """The requests in the order in which the client was asked, the most it was asked at once, and the verdicts."""
    order, most, active, ask = [], 0, 0, Client.ask

    async def counted(self, request, **options):
        nonlocal active, most
        order.append(str(request.body))
        active, most = active + 1, max(most, active + 1)
        try:
            return await ask(self, request, **options)
        finally:
            active -= 1

    questions = wanted(pool, rows)
    with monkeypatch.context() as patch:
        patch.setattr(asking, "AHEAD", ahead)
        patch.setattr(Client, "ask", counted)
        answers = asyncio.run(asyncio.wait_for(asking.Call(pool, questions).run(), 30))
    return order, most, [answers[key].score for key in questions]


def test_few_requests_are_made_ahead_in_order(make, pairs, monkeypatch, tmp_path):
    rows = cut(pairs, 30)
    with JudgeServer() as server:
        pools = [make(server, SINGLE, max_concurrency=2, ledger=tmp_path / name) for name in ("few", "all")]
        order, most, scores = asked_at_once(pools[0], rows, monkeypatch, ahead=3)
        assert (most, len(order)) == (5, 30)
        assert asked_at_once(pools[1], rows, monkeypatch, ahead=999) == (order, 30, scores)


def test_pairs_that_are_asked_again_find_a_place(make, pairs, monkeypatch):
    """Shared requests, of which each is followed by its pairs' own, hold all the places there are."""
    rows = cut(pairs, 15)
    with FaultyJudgeServer(faults=Faults({"wrong_count": 1.0})) as server:
        order, most, scores = asked_at_once(make(server, SHARED, max_concurrency=1), rows, monkeypatch, ahead=0)
    assert (most, len(order)) == (1, 3 + 3 * 15)
    assert np.isnan(scores).all()
