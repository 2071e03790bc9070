"""The pool over HTTP, against the sandbox's annotators behind a real server; the released code's draws, bit for bit."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from faulty_server import Faults, FaultyJudgeServer
from judge_requests import SINGLE, chances, cut, truth

from alpacafarm_env.annotators import served as asking
from alpacafarm_env.annotators.config import load_pool
from alpacafarm_env.annotators.pool import AlpacaFarmDraws, make_pool
from alpacafarm_env.annotators.prompts import Item
from alpacafarm_env.errors import PermanentAPIError, UnparsableVerdictError
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.client import ClientConfig
from alpacafarm_env.oracles import Flip
from alpacafarm_env.oracles.draws import KeyedDraws
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
    config = ClientConfig(max_attempts=1)
    with FaultyJudgeServer(faults=Faults({"server_error": 0.3})) as server:
        pool = make(server, SINGLE, client_config=config)
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


def test_compat_draws_as_the_released_code(server, make, pairs, tmp_path):
    rows = list(zip(*cut(pairs, 60), strict=True))
    verdicts = make(server, compat="alpacafarm").judge(*cut(pairs, 60))
    members, drawn = load_pool("alpaca_farm").annotators, AlpacaFarmDraws(0)
    assert verdicts.details["annotator"].tolist() == [members[index].name for index in drawn.annotators(rows, 13)]
    assert (verdicts.details["shown_first"] == "b").tolist() == drawn.b_first(rows).tolist()
    common = {"base_url": server.base_url, "models": "sandbox", "ledger": tmp_path / "ledger.sqlite"}
    noisy, noise = make_pool("ann", compat="alpacafarm", **common).judge(*cut(pairs, 60)), drawn.noise(rows, 0.25)
    assert noisy.details["noised"].tolist() == (~np.isnan(noise)).tolist()
    np.testing.assert_array_equal(noisy.scores[~np.isnan(noise)], noise[~np.isnan(noise)] - 1)


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


DATA = os.environ.get("ALPACAFARM_DATA", "")
TEXTS = {
    "instruction": lambda record: record["instruction"],
    "merged": lambda record: "\n\n".join(filter(None, (record["instruction"], record["input"]))),
    "joined": lambda record: record["instruction"] + record["input"],
}
DEALT_OUT = {  # annotator -> how many of the 805 instructions it judges, by the text that is the key
    "instruction": [48, 65, 60, 60, 49, 68, 82, 60, 79, 44, 60, 66, 64],
    "merged": [53, 63, 54, 56, 47, 76, 77, 68, 78, 48, 63, 65, 57],
    "joined": [43, 70, 60, 61, 55, 64, 71, 60, 73, 54, 65, 72, 57],
}


def records(name):
    with gzip.open(Path(DATA) / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rows_of(kept, text="instruction"):
    return [(TEXTS[text](record), "a", "b") for record in kept]


def vector(rows):
    return np.bincount(AlpacaFarmDraws().annotators(rows, 13), minlength=13).tolist()


def pairs_of_one(count=1000):
    return [("Name a colour.", f"answer {i}", f"reply {i * 7919 % count}") for i in range(count)]


def test_released_draws_are_keyed_by_instruction():
    """1,000 pairs of one instruction: one annotator, one order, one noise label; a new seed changes them.

    So they show (a, b) and (b, a) in opposite orders of the texts.
    """
    draws, rows = AlpacaFarmDraws(), pairs_of_one()
    assert len(set(draws.annotators(rows, 13).tolist())) == 1
    assert len(set(draws.b_first(rows).tolist())) == 1
    assert len(set(draws.noise(rows, 0.25).astype(str).tolist())) == 1
    assert (draws.b_first(rows) == draws.b_first([(i, b, a) for i, a, b in rows])).all()
    assert len({int(AlpacaFarmDraws(seed).annotators(rows[:1], 13)[0]) for seed in range(50)}) > 8
    assert len(set(KeyedDraws(0, "alpaca_farm").annotators(rows, 13).tolist())) == 13


@pytest.mark.data
def test_the_805_instructions_are_dealt_as_released():
    asked = records("eval_instructions")
    assert {text: vector(rows_of(asked, text)) for text in TEXTS} == DEALT_OUT
    rows = rows_of(asked, "merged")
    assert AlpacaFarmDraws().b_first(rows).sum() == 406
    noise = AlpacaFarmDraws().noise(rows, 0.25)
    assert [np.isnan(noise).sum(), (noise == 1).sum(), (noise == 2).sum()] == [402, 198, 205]
    assert AlpacaFarmDraws(seed=1).b_first(rows).sum() != 406
    texts = {record["index"]: row for record, row in zip(asked, rows, strict=True)}
    judged = records("preferences_alpaca_eval_gpt4")[:1610]  # whose `first_shown` is recorded: a = reference, b = model
    shown = AlpacaFarmDraws().b_first([texts[record["index"]] for record in judged])
    assert shown.tolist() == [record["first_shown"] == "model" for record in judged]
