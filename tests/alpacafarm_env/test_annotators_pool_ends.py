"""How calls of the pool end: refused, interrupted, over budget, replayed; what is kept, counted and shown then."""

import asyncio
import json
import time

import numpy as np
import pytest
from pool_worlds import SINGLE, cut

from alpacafarm_env.annotators.pool import AnnotatorPool, make_pool
from alpacafarm_env.errors import (
    BudgetExceededError,
    InvalidResponseError,
    OutageError,
    PermanentAPIError,
    PoolError,
    PriceError,
    ReplayMissError,
    UnknownNameError,
)
from alpacafarm_env.judge_server.faults import Faults
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import ClientConfig
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger


def test_a_wrong_key_ends_the_call_at_once_and_keeps_what_came_before(make, pairs):
    rows = cut(pairs, 100)
    with JudgeServer(api_key="sk-right") as server:
        with pytest.raises(PermanentAPIError, match="key"):
            make(server, SINGLE, client_config=ClientConfig(max_concurrency=4)).judge(*rows)
        assert server.stats()["requests"] <= 5
        assert not np.isnan(make(server, SINGLE, api_key="sk-right").compare(*rows)).any()


def test_a_dead_server_ends_the_call(make, pairs, monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.limits.PROBES_S", (0.05, 0.1, 0.2))
    with JudgeServer() as server:
        pool = make(server, SINGLE)
    with pytest.raises(OutageError, match="127.0.0.1"):
        pool.judge(*cut(pairs, 40))


def test_replay_needs_no_server_and_no_key(make, pairs, tmp_path):
    rows = cut(pairs, 60)
    with JudgeServer() as server:
        pool = make(server)
        first = pool.judge(*rows)
        address = pool.endpoint.base_url
        pool.ledger.close()
    replayed = AnnotatorPool("alpaca_farm", "sandbox", base_url=address, ledger=tmp_path / "ledger.sqlite", replay=True)
    np.testing.assert_array_equal(replayed.compare(*rows), first.scores)
    with pytest.raises(ReplayMissError, match="1 of 61"):
        replayed.compare(*cut(pairs, 61))


def test_a_budget_stops_before_it_is_passed_and_goes_on_from_there(make, pairs):
    rows = cut(pairs, 60)
    prices = {"sandbox-gpt4": (1000.0, 1000.0)}
    with JudgeServer() as server:
        with pytest.raises(BudgetExceededError):
            make(server, SINGLE, prices=prices, budget_usd=30.0).judge(*rows)
        some = server.stats()["requests"]
        assert 0 < some < 60
        verdicts = make(server, SINGLE, prices=prices, budget_usd=1e6).judge(*rows)
        assert server.stats()["requests"] == 60
    assert verdicts.details["cached"].sum() == some
    assert (verdicts.details["cost_usd"][~verdicts.details["cached"]] > 0).all()


def test_a_model_without_a_price(make, pairs):
    rows = cut(pairs, 3)
    with JudgeServer() as server:
        unpriced = {"gpt4": {"model": "my-gpt4"}}
        assert np.isnan(make(server, SINGLE, models=unpriced).judge(*rows).details["cost_usd"]).all()
        with pytest.raises(PriceError, match="my-gpt4"):
            make(server, SINGLE, models=unpriced, budget_usd=1.0, seed=1).judge(*rows)


def test_an_interrupt_frees_what_was_claimed(make, pairs):
    """Cut short while its claim is being written, a call must not leave leases that live as long as the process."""
    rows = cut(pairs, 5)
    with JudgeServer() as server:
        pool = make(server, SINGLE)

        async def interrupted():
            ask = pool.asking({question.key: question for question in pool.questions(*rows)})
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


def test_an_error_of_ones_own_is_raised_as_it_is_and_what_was_paid_arrives(make, pairs):
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


def test_a_pause_that_the_server_asks_for_holds_over_calls(make, pairs):
    rows = cut(pairs, 3)
    with JudgeServer(faults=Faults({"retry_after_seconds": 1.0}, retry_s=1)) as server:
        pool = make(server, SINGLE, client_config=ClientConfig(max_attempts=1))
        assert np.isnan(pool.compare(*(column[:1] for column in rows))).all()
        start = time.monotonic()
        pool.compare(*(column[1:2] for column in rows))
        assert time.monotonic() - start > 0.7


def test_one_ledger_holds_every_attempt_billed_without_an_answer_too_and_no_key(make, pairs, tmp_path):
    key = "sk-canary-1234567890abcdef"
    rates = {"server_error": 0.2, "content_filter": 0.2, "null_content": 0.1}
    with JudgeServer(faults=Faults(rates)) as server:
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
        ({"order": "first"}, UnknownNameError, "first"),
        ({"compat": "alpaca"}, UnknownNameError, "alpacafarm"),
        ({"models": {"gpt4": "x"}}, PoolError, "chatgpt"),
        ({"pool": "alpaca_frm"}, PoolError, "alpaca_farm"),
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


def test_a_key_given_as_a_variables_name_is_not_printed(tmp_path):
    with pytest.raises(PoolError, match="api_key_env") as raised:
        AnnotatorPool(SINGLE, "sandbox", ledger=tmp_path / "l.sqlite", api_key_env="sk-canary-1234567890")
    assert "canary" not in str(raised.value)
    assert not (tmp_path / "l.sqlite").exists()


def test_one_model_has_one_price(tmp_path):
    def priced(*prices):
        roles = zip(("gpt4", "chatgpt", "davinci003"), prices, strict=True)
        models = {role: {"model": "m", "price_usd_per_million": price} for role, price in roles}
        return AnnotatorPool("alpaca_farm", models, base_url="http://localhost:1/v1", ledger=tmp_path / "l.sqlite")

    assert priced([1, 2], None, [1.0, 2.0]).prices.cost("m", 10**6, 10**6) == 3
    with pytest.raises(PoolError, match=r"'m'.*\[1.0, 2.0\] and \[1.0, 20.0\]"):
        priced([1, 2], [1, 2], [1, 20])


def test_a_text_that_cannot_be_sent_is_named_by_its_row(make, pairs):
    instructions, a, b = cut(pairs, 6)
    b[4] = "half \ud800"
    with JudgeServer() as server:
        with pytest.raises(InvalidResponseError, match="Pair 5, second.* character 5"):
            make(server).judge(instructions, a, b)
        assert server.stats()["requests"] == 0


def test_models_or_model_and_one_order_or_both():
    with pytest.raises(PoolError, match="not both"):
        make_pool(models="openai", model="x")
    with pytest.raises(ValueError, match="leave one out"):
        make_pool(both_orders=True, compat="alpacafarm")
