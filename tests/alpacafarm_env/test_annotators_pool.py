"""The pool over HTTP, against the sandbox's annotators behind a real server."""

from collections import Counter

import numpy as np
import pytest
from faulty_server import Faults, FaultyJudgeServer
from judge_requests import SINGLE, chances, cut, truth

from alpacafarm_env.annotators import served as asking
from alpacafarm_env.annotators.config import load_pool
from alpacafarm_env.annotators.pool import make_pool
from alpacafarm_env.annotators.prompts import Item
from alpacafarm_env.errors import PermanentAPIError, UnparsableVerdictError
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import ClientConfig
from alpacafarm_env.oracles import Flip
from alpacafarm_env.oracles.judges import KeyedDraws
from alpacafarm_env.sandbox.judges import Annotator


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


def test_the_pool_draws_each_annotator_and_batches_its_pairs(server, asked, make, pairs):
    """And another seed is another opinion."""
    verdicts = make(server).judge(*pairs)
    members = load_pool("alpaca_farm").annotators
    counts = Counter(verdicts.details["annotator"].tolist())
    assert set(counts) == {member.name for member in members}
    assert asked() == sum(-(-counts[member.name] // member.batch_size) for member in members)
    drawn = KeyedDraws(0, load_pool("alpaca_farm").stream).annotators(list(zip(*pairs, strict=True)), 13)
    assert verdicts.details["annotator"].tolist() == [members[index].name for index in drawn]
    other = make(server, seed=1).compare(*cut(pairs, 150))
    assert 0.1 < (verdicts.scores[:150] != other).mean() < 0.6


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
    with FaultyJudgeServer(faults=Faults({fault: rate}), seed=3) as server:
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


def test_a_failed_request_leaves_its_rows_unscored(make, pairs):
    rows = cut(pairs, 40)
    with FaultyJudgeServer(faults=Faults({"server_error": 0.3})) as server:
        pool = make(server, SINGLE)
        pool.limits = ClientConfig(max_attempts=1)
        verdicts = pool.judge(*rows)
        missing = np.isnan(verdicts.scores)
        assert 0 < missing.mean() < 0.7
        assert all(reason.startswith("TransientAPIError") for reason in verdicts.details["unscored_reason"][missing])
        before = server.stats()["requests"]
        again = pool.judge(*rows)
        # Failures are no answers: they are asked again, and nothing else is.
        assert server.stats()["requests"] - before == missing.sum()
    assert np.array_equal(again.scores[~missing], verdicts.scores[~missing])


def test_both_orders_cancel_a_liking_for_a_position(make, pairs, tmp_path, monkeypatch):
    instructions, a, b = cut(pairs, 20)
    with JudgeServer() as server:
        common = {"base_url": server.base_url, "models": "sandbox", "ledger": tmp_path / "ledger.sqlite"}
        first_shown = Annotator("first", (0.0,) * 6, 0.0, 0.0, 0.0, 5.0, 0.3)
        monkeypatch.setattr(server.judging, "_annotators", {"greedy_gpt4": first_shown})
        seen, answer = [], server.judging.answer
        monkeypatch.setattr(server.judging, "answer", lambda asked, key: seen.append(asked.items) or answer(asked, key))
        judge = make_pool("greedy", both_orders=True, **common)
        verdicts = judge.judge(instructions, a, b)
        # Four requests an order: no request shows a pair in both, where the judge would see the contradiction.
        assert server.stats()["requests"] == 8
        for request in seen:
            assert len({(item.instruction, *sorted(item[1:])) for item in request}) == len(request)
    assert (verdicts.scores == 0.5).all()
    assert not verdicts.details["orders_agree"].any()


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
