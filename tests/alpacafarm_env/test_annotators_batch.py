"""How a batch is asked: what a pair has cost and whether it was asked, what is read once, what is made ahead."""

import asyncio

import numpy as np
from pool_worlds import SINGLE, cut, truth

from alpacafarm_env.annotators import batch as asking
from alpacafarm_env.annotators.config import PoolConfig
from alpacafarm_env.judge_server.faults import Faults
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import Client, ClientConfig
from alpacafarm_env.llm.ledger import operations as sql

PRICES = {"sandbox-gpt4": (1000.0, 1000.0)}
SHARED = PoolConfig(
    name="shared",
    draws="single",
    annotators=tuple(member.model_copy(update={"batch_size": 5}) for member in SINGLE.annotators),
)
"""The same annotator, drawn alike, but five pairs a request."""


def test_a_pair_was_asked_if_any_request_about_it_was(make, pairs):
    """Here the shared requests are sent and say nothing; the pairs' own are in the ledger."""
    rows = cut(pairs, 10)
    with JudgeServer() as server:
        make(server, SINGLE, prices=PRICES).judge(*rows)
        server.faults = Faults({"wrong_count": 1.0})
        verdicts = make(server, SHARED, prices=PRICES).judge(*rows)
        assert server.stats()["requests"] == 12
    assert truth(verdicts, *rows).all()
    assert (verdicts.details["cost_usd"] > 0).all()
    assert not verdicts.details["cached"].any()


def test_a_pair_was_not_asked_if_all_its_replies_were_in_the_ledger(make, pairs):
    """One pair alone is the same request, whatever number could share it."""
    rows = cut(pairs, 1)
    with JudgeServer(faults=Faults({"wrong_count": 1.0})) as server:
        first = make(server, SINGLE, prices=PRICES).judge(*rows)
        verdicts = make(server, SHARED, prices=PRICES).judge(*rows)
        assert server.stats()["requests"] == 3
    assert np.isnan(verdicts.scores).all()
    assert (first.details["cached"].item(), verdicts.details["cached"].item()) == (False, True)
    assert first.details["cost_usd"].item() > verdicts.details["cost_usd"].item() == 0


def test_a_reply_that_pairs_share_is_read_once(make, pairs, monkeypatch):
    rows, sizes = cut(pairs, 10), []
    with JudgeServer() as server:
        first = make(server, SHARED).compare(*rows)
        parse = asking.parse
        monkeypatch.setattr(asking, "parse", lambda *args: sizes.append(args[2]) or parse(*args))
        np.testing.assert_array_equal(make(server, SHARED).compare(*rows), first)
    assert sizes == [5, 5]


def test_what_another_call_answers_before_the_claim_is_not_asked_again(make, pairs):
    """The other call shares a request among pairs that this one would have asked in two."""
    with JudgeServer() as server:
        pool = make(server, SHARED)
        wanted = {question.key: question for question in pool.questions(*cut(pairs, 10))}
        late, some = pool.asking(wanted), dict(list(wanted.items())[1:6])
        do = late._do

        async def after_the_other(operation, *args):
            if operation is sql.claim:
                await pool.asking(some).run()
            return await do(operation, *args)

        late._do = after_the_other
        answers = asyncio.run(late.run())
        assert server.stats()["requests"] == 2
    assert {key for key, answer in answers.items() if answer.cached} == set(some)


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

    wanted = {question.key: question for question in pool.questions(*rows)}
    with monkeypatch.context() as patch:
        patch.setattr(asking, "AHEAD", ahead)
        patch.setattr(Client, "ask", counted)
        answers = asyncio.run(asyncio.wait_for(pool.asking(wanted).run(), 30))
    return order, most, [answers[key].score for key in wanted]


def test_few_requests_are_made_ahead_and_start_in_the_same_order(make, pairs, monkeypatch, tmp_path):
    rows, config = cut(pairs, 30), ClientConfig(max_concurrency=2)
    with JudgeServer() as server:
        pools = [make(server, SINGLE, client_config=config, ledger=tmp_path / name) for name in ("few", "all")]
        order, most, scores = asked_at_once(pools[0], rows, monkeypatch, ahead=3)
        assert (most, len(order)) == (5, 30)
        assert asked_at_once(pools[1], rows, monkeypatch, ahead=999) == (order, 30, scores)


def test_pairs_that_are_asked_again_find_a_place(make, pairs, monkeypatch):
    """Shared requests, of which each is followed by its pairs' own, hold all the places there are."""
    rows, config = cut(pairs, 15), ClientConfig(max_concurrency=1)
    with JudgeServer(faults=Faults({"wrong_count": 1.0})) as server:
        order, most, scores = asked_at_once(make(server, SHARED, client_config=config), rows, monkeypatch, ahead=0)
    assert (most, len(order)) == (1, 3 + 3 * 15)
    assert np.isnan(scores).all()
