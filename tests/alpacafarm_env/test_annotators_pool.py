"""The pool over HTTP against the sandbox's annotators: its verdicts; what is sent, kept, counted and shown."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from faulty_server import FaultyJudgeServer
from judge_requests import SINGLE, chances, cut, truth

from alpacafarm_env import errors
from alpacafarm_env.annotators import served as asking
from alpacafarm_env.annotators.config import PoolConfig
from alpacafarm_env.annotators.pool import AnnotatorPool, make_pool
from alpacafarm_env.annotators.prompts import Item
from alpacafarm_env.errors import PermanentAPIError, UnparsableVerdictError
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import Client
from alpacafarm_env.llm.ledger import Ledger
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.oracles import Flip


@pytest.fixture(scope="module")
def server():
    with JudgeServer() as running:
        yield running


@pytest.fixture
def asked(server):
    """How many requests the server got since the last call."""
    before = server.stats()["requests"]

    def since():
        nonlocal before
        now = server.stats()["requests"]
        before, new = now, now - before
        return new

    return since


def test_verdicts_are_the_annotators_own(server, asked, make, pairs):
    seen = []
    verdicts = make(server, "greedy", on_progress=seen.append).judge(*cut(pairs, 120))
    assert asked() == 24  # 120 pairs of one annotator, five a request
    assert truth(verdicts, *cut(pairs, 120)).all()
    assert set(verdicts.details["annotator"]) == {"greedy_gpt4"}
    assert 30 < (verdicts.details["shown_first"] == "a").sum() < 90
    assert not verdicts.details["cached"].any()
    assert {progress.total for progress in seen} == {seen[-1].done} == {120}


def test_a_swapped_pair_costs_nothing(server, asked, make, pairs):
    instructions, a, b = cut(pairs, 100)
    pool = make(server)
    first = pool.judge(instructions, a, b)
    assert asked() > 0
    again = pool.judge(instructions[::-1], b[::-1], a[::-1])
    assert asked() == 0
    np.testing.assert_array_equal(again.scores[::-1], 1 - first.scores)
    assert again.details["cached"].all()


def test_eval_and_ann_share_their_answers(server, asked, make, pairs, tmp_path):
    rows = cut(pairs, 150)
    common = {"base_url": server.base_url, "models": "sandbox", "ledger": tmp_path / "ledger.sqlite"}
    noisy = make_pool("ann", **common).judge(*rows)
    noised = noisy.details["noised"]
    assert 0.35 < noised.mean() < 0.65
    assert set(noisy.details["annotator"][noised]) == {""}
    assert asked() < 150
    verdicts = make(server, "eval").judge(*rows)
    assert verdicts.details["cached"].tolist() == (~noised).tolist()
    asked()
    make_pool("ann", **common).judge(*rows)
    assert asked() == 0
    verdicts = Flip(make(server, SINGLE), 0.25).judge(*rows)
    assert asked() == (~verdicts.details["noised"]).sum()


@pytest.mark.parametrize(
    ("fault", "rate", "least", "error"),
    [("wrong_count", 0.4, 0.9, "UnparsableVerdictError"), ("content_filter", 0.3, 0.5, "ContentRefusedError")],
)
def test_replies_without_verdicts_are_asked_again(make, pairs, fault, rate, least, error):
    """A pair alone has three tries after a wrong count, and one after a refusal."""
    rows = cut(pairs, 100)
    with FaultyJudgeServer({fault: rate}, seed=3) as server:
        verdicts = make(server, "greedy").judge(*rows)
        assert server.stats()["by_fault"][fault] > 5
    missing = np.isnan(verdicts.scores)
    assert 0 < missing.mean() < 1 - least
    assert all(error in reason for reason in verdicts.details["unscored_reason"][missing])
    assert truth(verdicts, *rows)[~missing].all()


def test_a_better_parser_reads_what_was_paid_for(server, asked, make, pairs, monkeypatch):
    rows = cut(pairs, 10)
    with monkeypatch.context() as patch:
        patch.setattr(asking, "parse", lambda *_: (_ for _ in ()).throw(UnparsableVerdictError("no")))
        verdicts = make(server, SINGLE).judge(*rows)
        assert np.isnan(verdicts.scores).all()
        (reason,) = set(verdicts.details["unscored_reason"])
        assert reason == "UnparsableVerdictError: no verdict in 3 replies; the last: no"
    assert asked() == 30
    verdicts = make(server, SINGLE).judge(*rows)
    assert asked() == 0
    assert truth(verdicts, *rows).all()


def test_no_request_shows_a_pair_in_both_orders(pairs, tmp_path, monkeypatch):
    """There the judge would see the contradiction."""
    with JudgeServer() as server:
        seen, answer = [], server.judging.answer
        monkeypatch.setattr(server.judging, "answer", lambda asked, key: seen.append(asked.items) or answer(asked, key))
        common = {"base_url": server.base_url, "models": "sandbox", "ledger": tmp_path / "ledger.sqlite"}
        make_pool("greedy", both_orders=True, **common).judge(*cut(pairs, 20))
    assert len(seen) == 8
    for request in seen:
        assert len({(item.instruction, *sorted(item[1:])) for item in request}) == len(request)


def test_a_pool_with_a_prompt_of_ones_own(server, make, pairs, tmp_path):
    member = "{name: gpt4_3, role: judge, prompt: ./prompt.yaml, max_tokens: 20, temperature: 0}"
    (tmp_path / "mine.yaml").write_text(f"{{name: mine, annotators: [{member}]}}")
    parts = "[{system: 'Which is better? Answer with `Output (a)` or `Output (b)`.'}, {items: true}]"
    (tmp_path / "prompt.yaml").write_text(f"{{name: short, format: label, layout: chat, parts: {parts}}}")
    file, rows = tmp_path / "mine.yaml", cut(pairs, 20)
    models = {"model": "any", "price_usd_per_million": [0, 0]}
    with pytest.raises(PermanentAPIError, match="prompts"):
        make(server, file, models=models).judge(*rows)
    with JudgeServer(pools=[file]) as reading:
        verdicts = make(reading, file, models=models).judge(*rows)
        likelier = chances(reading.judging, "gpt4_3", [Item(str(i), x, y) for i, x, y in zip(*rows, strict=True)])
    assert set(verdicts.scores) <= {0.0, 1.0}
    # Where the order hardly matters, it is what the sandbox's annotator of that name says.
    clear = np.abs(likelier - 0.5) > 0.2
    assert np.array_equal(verdicts.scores[clear] == 1, likelier[clear] > 0.5)


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
        total = pool.ledger.do(sql.spending).result().sum()
        assert total.answered == server.stats()["charged"]["requests"]
        assert (total.unknown, total.running) == (0, 0)


def test_rows_bear_the_cost_of_their_failures(make, pairs):
    with FaultyJudgeServer({"server_error": 0.2, "content_filter": 0.2, "null_content": 0.1}) as server:
        pool = make(server, SINGLE, prices={"sandbox-gpt4": (100.0, 100.0)})
        verdicts = pool.judge(*cut(pairs, 40))
        total = pool.ledger.do(sql.spending).result().sum()
    assert total.unknown > 0
    assert verdicts.details["cost_usd"].sum() == pytest.approx(total.usd, rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("seed", "a"), ("budget_usd", float("nan"))])
def test_what_is_not_well_said_is_refused(make, name, value):
    with pytest.raises(ValueError, match=name):
        make(SimpleNamespace(base_url="http://127.0.0.1:1/v1"), **{name: value})


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


SHARED = PoolConfig(
    name="shared",
    draws="single",
    annotators=tuple(member.model_copy(update={"batch_size": 5}) for member in SINGLE.annotators),
)
"""The same annotator, drawn alike, but five pairs a request."""


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


@pytest.mark.parametrize(("pool", "fault", "requests", "most"), [(SINGLE, 0.0, 15, 3), (SHARED, 1.0, 48, 1)])
def test_few_requests_are_made_ahead(make, pairs, monkeypatch, pool, fault, requests, most):
    """Also where shared requests, each followed by its pairs' own, hold all the places there are."""
    active, ask = [], Client.ask

    async def counted(self, request, **options):
        active.append((active[-1] if active else 0) + 1)
        try:
            return await ask(self, request, **options)
        finally:
            active.append(active[-1] - 1)

    with FaultyJudgeServer({"wrong_count": fault}) as server:
        pool = make(server, pool, max_concurrency=1)
        questions = wanted(pool, cut(pairs, 15))
        monkeypatch.setattr(asking, "AHEAD", most - 1)
        monkeypatch.setattr(Client, "ask", counted)
        answers = asyncio.run(asyncio.wait_for(asking.Call(pool, questions).run(), 30))
    assert (max(active), len(active)) == (most, 2 * requests)
    assert {bool(np.isnan(answers[key].score)) for key in questions} == {bool(fault)}
