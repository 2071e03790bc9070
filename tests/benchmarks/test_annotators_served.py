"""A served model is asked by each prompt about recorded pairs: what is counted, kept, and asked again."""

import json

import numpy as np
import pytest
from faulty_server import WireServer, ok

from alpacafarm_env.benchmarks.annotators import served
from alpacafarm_env.benchmarks.annotators.__main__ import main
from alpacafarm_env.benchmarks.annotators.served import annotators, recorded_pairs
from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.data.load import recorded_dataset
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError
from alpacafarm_env.sandbox.dataset import write_rows

NUM = 24
TEXTS = [f"Question {i}?" for i in range(NUM)]


@pytest.fixture
def folder(tmp_path):
    """Recorded judgements by "loves-odd": it prefers the model for instructions of odd index."""
    data = tmp_path / "data"
    rows = [{"index": i, "instruction": text, "input": ""} for i, text in enumerate(TEXTS)]
    references = [f"Reference {i}" for i in range(NUM)]
    write_rows(data / "eval_instructions.jsonl.gz", rows)
    for name, texts in (("davinci003", references), ("outputs/outputs_m", [f"Model {i}" for i in range(NUM)])):
        own = [{**row, "output": text, "generator": "m"} for row, text in zip(rows, texts, strict=True)]
        write_rows(data / f"{name}.jsonl.gz", own)
    verdicts = [{"index": i, "generator": "m", "preference": i % 2} for i in range(NUM)]
    write_rows(data / "preferences_loves-odd.jsonl.gz", verdicts)
    (data / "recorded.json").write_text(f'{{"reference_sha256": "{reference_digest(TEXTS, references)}"}}')
    return data


def study(folder, url, *more):
    out = folder.parent / "out"
    spec = json.dumps({"model": "m-1", "base_url": url, "ledger": str(folder.parent / "ledger.sqlite")})
    assert main(["--served", spec, "--data", str(folder), "--out", str(out), *more]) == 0
    rows = read_table(out / served.FILE)
    return {(row.judge, row.figure): row for row in rows.itertuples()}


def test_pairs_balance_verdicts_and_orders(folder):
    pairs = recorded_pairs(recorded_dataset(str(folder)), 20, 100)
    shown = [item for item, _, _ in pairs]
    assert len({item.instruction for item in shown}) == 20
    reference_first = np.array([item.first.startswith("Reference") for item in shown])
    second = np.array([wins for *_, wins in pairs])
    odd = np.array([int(item.instruction[9:-1]) % 2 for item in shown])
    np.testing.assert_array_equal(second, odd == reference_first)
    for always in (second, odd, reference_first):
        assert always.sum() == 10
    assert all((other.first, other.second) == (item.second, item.first) for item, other, _ in pairs)
    assert recorded_pairs(recorded_dataset(str(folder)), 8, 100) == pairs[:8]


def test_too_few_pairs_are_an_error(folder):
    for num, characters in ((NUM + 1, 100), (4, 10)):
        with pytest.raises(DataError, match="pairs"):
            recorded_pairs(recorded_dataset(str(folder)), num, characters)


def test_every_prompt_is_asked_once_and_alone():
    every = annotators(())
    assert len({each.prompt for each in every}) == len(every) == 13
    assert {each.batch_size for each in every} == {1}
    with pytest.raises(DataError, match="gpt4_9"):
        annotators(("gpt4_9",))


def test_a_judge_that_always_takes_the_first_is_seen_and_shown(folder, tmp_path):
    with WireServer(lambda seen, number: ok("Output (a)")) as server:
        rows = study(folder, server.url, "--pairs", "20", "--prompts", "gpt4_4")
    value = {figure: row.value for (_, figure), row in rows.items()}
    assert value["first_try"] == value["parsed"] == value["prefers_first"] == 1
    assert value["both_orders_agree"] == 0
    assert value["agreement_with_recorded"] == 0.5
    assert (value["prompt_tokens"], value["reply_tokens"]) == (7, 3)
    assert rows["gpt4_4", "both_orders_agree"].n == 10
    assert rows["gpt4_4", "parsed"].n == 20
    stored = read_table(tmp_path / "out" / served.FILE)
    shown = served.table(stored)
    assert [line[0] for line in shown.rows] == ["gpt4_4"]
    assert len(shown.rows[0]) == len(shown.header)
    assert "gpt4_4" in served.finding(stored)


def test_retries_and_replies_without_verdict_are_counted(folder):
    heard = {}

    def reply(seen, number):
        text = seen.body["messages"][-1]["content"]
        heard[text] = heard.get(text, 0) + 1
        if "Question 1" in text:  # 11 of 24 questions
            return ok("I cannot say.")
        return ok("Output (b)" if heard[text] > 1 else "Both are good.")

    with WireServer(reply) as server:
        rows = study(folder, server.url, "--pairs", "20", "--prompts", "chatgpt_4")
    asked = [item.instruction for item, _, _ in recorded_pairs(recorded_dataset(str(folder)), 20, 1_500)]
    silent = sum("Question 1" in text for text in asked)
    assert rows["chatgpt_4", "first_try"].value == 0
    assert rows["chatgpt_4", "parsed"].value == pytest.approx(1 - silent / 20)
    assert rows["chatgpt_4", "prefers_first"].value == 0
    assert rows["chatgpt_4", "prefers_first"].n == 20 - silent
    assert set(heard.values()) == {2, 3}


def test_more_pairs_and_prompts_ask_only_what_is_missing(folder):
    with WireServer(lambda seen, number: ok("Output (a)")) as server:
        study(folder, server.url, "--pairs", "8", "--prompts", "gpt4_4")
        study(folder, server.url, "--pairs", "8", "--prompts", "gpt4_4")
        assert len(server.seen) == 8 + 4
        study(folder, server.url, "--pairs", "12", "--prompts", "gpt4_4")
        assert len(server.seen) == 12 + 6
        rows = study(folder, server.url, "--pairs", "8", "--prompts", "chatgpt_4")
    assert {judge for judge, _ in rows} == {"gpt4_4", "chatgpt_4"}
    assert rows["gpt4_4", "parsed"].n == 12


@pytest.mark.parametrize("spec", ['{"model": "m"}', "{", '{"base_url": "http://127.0.0.1:1/v1"}', "gold"])
def test_a_faulty_request_is_refused_at_once(spec, folder, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert main(["--served", spec, "--data", str(folder), "--out", str(folder.parent / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (folder.parent / "out").exists()
