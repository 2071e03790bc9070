"""What is written for verl and OpenRLHF, read as they read it, and the rewards they get; data with scores and cards.

Written against verl 0.9.1 (`RLHFDataset`, `load_module`, `NaiveRewardManager`) and OpenRLHF 0.11.2 (`preprocess_data`,
`SingleTurnAgentExecutor`); neither is installed here.
"""

import importlib.util
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_files import write

from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import main
from alpacafarm_env.cli import export as export_files
from alpacafarm_env.cli.export import read_oracle
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import DataError, UnknownNameError, UnscoredError
from alpacafarm_env.integrations import scorer
from alpacafarm_env.judge_server.scoring import ScoreServer
from alpacafarm_env.oracles import Constant

ASKED = sandbox.SANDBOX.instructions("eval")
RESPONSES = ["A lion is brave, golden and proud.", "- one\n- two\n- three", "No."]
GOLD = sandbox.gold_oracle().score(ASKED[:3], RESPONSES)


def export(form: str, out: Path, *more: str) -> int:
    given = ["--format", form, "--split", "eval", "--oracle", "gold", "--out", str(out)]
    return main(["export", *given, *more])


def load(path: Path):
    """As verl's `load_module`."""
    spec = importlib.util.spec_from_file_location("custom_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_verl_reads_the_prompts_and_the_reward_function_gives_the_oracle_s_scores(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export("verl", tmp_path / "out") == 0
    told = capsys.readouterr().out
    assert f"data.train_files={tmp_path}/out/prompts.parquet" in told
    assert f" reward.custom_reward_function.path={tmp_path}/out/reward.py" in told
    rows = parquet.read_table(tmp_path / "out" / "prompts.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": str(ask)}] for ask in ASKED]
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(ASKED)))
    fields = {"data_source": str, "prompt": list, "ability": str, "reward_model": dict, "extra_info": dict}
    assert {name: type(value) for name, value in rows[0].items()} == fields
    assert rows[0]["reward_model"].keys() == {"style", "ground_truth"}
    compute_score = load(tmp_path / "out" / "reward.py").compute_score
    scores = []
    for row, response in zip(rows, RESPONSES, strict=False):
        # As NaiveRewardManager calls it.
        extra_info = {**row["extra_info"], "num_turns": 2, "rollout_reward_scores": {}}
        asked = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
        scores.append(compute_score(**asked, solution_str=response, extra_info=extra_info))
    assert scores == pytest.approx(GOLD)
    assert all(type(score) is float for score in scores)


def test_a_folder_s_data_and_an_oracle_by_mapping(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    rows = [{"instruction": f"Say {n}.", "input": "", "output": "x"} for n in range(3)]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "unlabeled.jsonl", rows)
    oracle = json.dumps({"name": "constant", "value": 0.25})
    monkeypatch.chdir(tmp_path)
    given = ["export", "--format", "verl", "--dataset", "data", "--oracle", oracle, "--out", "o"]
    assert main(given) == 0
    monkeypatch.chdir("/")
    assert load(tmp_path / "o" / "reward.py").compute_score("d", "x", "", {"instruction": "Say 1."}) == 0.25


@pytest.fixture
def server() -> Iterator[ScoreServer]:
    with ScoreServer(sandbox.gold_oracle(), ["<s>", "</s>", "<pad>", ""]) as running:
        yield running


def ask(url: str, **payload: object) -> dict:
    """As `SingleTurnAgentExecutor._fetch_rewards_via_http`."""
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def test_openrlhf_reads_the_prompts_and_is_given_the_oracle_s_scores(tmp_path, capsys, server):
    assert export("openrlhf", tmp_path) == 0
    assert "--reward.remote_url" in capsys.readouterr().out
    lines = (tmp_path / "prompts.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in lines if line]
    assert [(row["input"], row["label"]) for row in rows] == [(str(text), str(text)) for text in ASKED]
    # As `preprocess_data` with --data.apply_chat_template, and a query with what the tokenizer writes.
    prompts = [f"<s>Q: {row['input']}\nA: " for row in rows[:3]]
    endings = ["</s>", "</s><pad><pad>", ""]
    queries = [prompt + text + end for prompt, text, end in zip(prompts, RESPONSES, endings, strict=True)]
    reply = ask(server.url, query=queries, prompts=prompts, labels=[row["label"] for row in rows[:3]])
    assert reply["rewards"] == reply["scores"] == pytest.approx(list(GOLD))
    assert reply["extra_logs"] == {}


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ({"query": ["px", "x"], "prompts": ["p", "p"], "labels": ["l", "l"]}, "query[1]"),
        ({"query": ["px"], "prompts": ["p"], "labels": [""]}, "labels[0]"),
        ({"query": ["px"], "prompts": ["p"], "labels": []}, "labels"),
        ({"query": ["px"]}, "prompts"),
        ({"query": "px", "prompts": "p", "labels": "l"}, "query"),
    ],
)
def test_queries_that_cannot_be_scored_rightly_are_refused(server, payload, field):
    assert refusal(server.url, **payload) == (400, field)


def refusal(url: str, **payload: object) -> tuple[int, str | None]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, **payload)
    with caught.value as refused:
        return refused.code, json.load(refused)["error"]["param"]


def test_a_long_row_of_special_tokens_is_taken_off_a_response_in_a_moment():
    with ScoreServer(Constant(0.5), ["<s>", "</s>"]) as server:
        start = time.process_time()
        query = {"query": ["p" + 250_000 * "</s>"], "prompts": ["p"], "labels": ["l"]}
        assert ask(server.url, **query)["rewards"] == [0.5]
        assert time.process_time() - start < 1


def test_no_verdict_is_an_error_and_never_a_number(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.oracles.base.Constant.score", lambda *_: np.array([1.0, np.nan]))
    score = scorer(oracle="constant")
    with pytest.raises(UnscoredError, match="'b'"):
        score(["x", "y"], ["a", "b"])
    with ScoreServer(Constant(), []) as server:
        assert refusal(server.url, query=["pa", "pb"], prompts=["p", "p"], labels=["x", "y"]) == (500, None)
        assert ask(server.url, instructions=["x", "y"], responses=["a", "b"])["scores"] == [1.0, None]


def test_the_command_serves_with_the_special_tokens_of_a_model(monkeypatch):
    def serve(start, **_):
        with start() as server:
            query = {"query": [f"p{RESPONSES[0]}</s>"], "prompts": ["p"], "labels": [str(ASKED[0])]}
            assert ask(server.url, **query)["rewards"] == pytest.approx(list(GOLD[:1]))
        return 0

    monkeypatch.setattr("alpacafarm_env.judge_server.http.serve", serve)
    assert main(["serve", "AlpacaFarm-PPO-v0", "--oracle", "gold", "--tokenizer", str(sandbox.POLICY)]) == 0


def test_what_cannot_be_exported_is_told(tmp_path, capsys, monkeypatch):
    assert export("openrlhf", tmp_path) == 0
    assert export("openrlhf", tmp_path) == 2
    assert "prompts.jsonl" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert export("verl", tmp_path / "other") == 2
    assert "[data]" in capsys.readouterr().err
    with pytest.raises(DataError, match="JSON"):
        read_oracle('{"name": ')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    assert read_oracle('{"reward_model": "rm"}') == {"reward_model": str(tmp_path / "rm")}
    assert read_oracle('{"reward_model": "hub/name"}') == {"reward_model": "hub/name"}
    with pytest.raises(UnknownNameError, match="gold"):
        read_oracle("gould")


def test_data_with_scores_and_a_card(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export("trl", tmp_path / "out", "--to", "hub-folder") == 0
    told = capsys.readouterr().out
    assert all(f"{tmp_path}/out/{name}" in told for name in ("eval.parquet", "README.md"))
    rows = parquet.read_table(tmp_path / "out" / "eval.parquet").to_pylist()
    references = sandbox.SANDBOX.references("eval")
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": str(ask)}] for ask in ASKED]
    assert [row["completion"] for row in rows] == [[{"role": "assistant", "content": text}] for text in references]
    assert [row["score"] for row in rows] == list(sandbox.gold_oracle().score(ASKED, references))
    _, head, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    known = yaml.safe_load(head)
    assert known["configs"][0]["data_files"] == [{"split": "eval", "path": "eval.parquet"}]
    assert "a simulation" in text


def test_a_folder_holds_several_splits_each_once(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    write(tmp_path / "preference.jsonl", [{"prompt": "Say no.", "chosen": "No.", "rejected": "Yes."}])
    write(tmp_path / "sft.jsonl", [{"instruction": "Say yes.", "input": "", "output": "Yes."}])
    out = tmp_path / "out"

    def export(split: str, *more: str, to: str = "hub-folder", dataset: Path | str = tmp_path) -> int:
        given = ("--format", "trl", "--split", split, "--dataset", str(dataset), "--to", to, "--out", str(out))
        return main(["export", *given, *more])

    assert (export("preference"), export("sft")) == (0, 0)
    assert load_dataset(out).demonstrations()[0].response == "Yes."
    assert load_dataset(out).preferences()[0].responses == ("No.", "Yes.")
    _, head, _ = (out / "README.md").read_text().split("---\n", 2)
    assert [config["config_name"] for config in yaml.safe_load(head)["configs"]] == ["preference", "sft"]

    def scorer(**_: object) -> None:
        raise AssertionError("asked before it is known whether there is a place for the answer")

    monkeypatch.setattr(export_files, "scorer", scorer)
    files = sorted(out.iterdir())
    for wrong in ({"to": "jsonl"}, {"to": "parquet"}, {}):
        assert export("sft", "--oracle", "gold", **wrong) == 2
    assert export("eval", "--oracle", "gold", dataset="sandbox") == 2  # the card of another data set
    (out / "README.md").write_text("Mine.\n")
    (out / "sft.parquet").unlink()
    assert export("sft", "--oracle", "gold") == 2
    assert sorted(out.iterdir()) == [file for file in files if file.name != "sft.parquet"]


def test_pairs_have_two_scores_and_a_judge(tmp_path, monkeypatch):
    monkeypatch.setattr(export_files, "scorer", lambda **_: lambda asked, texts: [float(len(text)) for text in texts])
    write(tmp_path / "preference.jsonl", [{"prompt": str(ASKED[0]), "chosen": "No.", "rejected": RESPONSES[0]}])
    given = ["export", "--split", "preference", "--dataset", str(tmp_path), "--oracle", "gold", "--to", "jsonl"]
    for form, names in (("trl", ("score_chosen", "score_rejected")), ("alpacafarm", ("score_1", "score_2"))):
        assert main([*given, "--format", form, "--out", str(tmp_path / form)]) == 0
        (row,) = map(json.loads, (tmp_path / form / "preference.jsonl").read_text().splitlines())
        assert [row[name] for name in names] == [3.0, len(RESPONSES[0])]


@pytest.mark.parametrize(
    "oracle",
    [
        *('{"reward_model": 5}', '{"judge": "gold", "flip": "x"}', '{"name": "surrogate", "device": "x"}', "{}"),
        *("os:system", '{"pool": "ann", "base_url": 5}', '{"a":' + 100_000 * "["),
    ],
)
def test_what_is_no_oracle_is_one_line_and_not_a_traceback(tmp_path, capsys, monkeypatch, oracle):
    monkeypatch.setattr("alpacafarm_env.judge_server.http.serve", lambda *_, **__: pytest.fail("served"))
    exported = ["export", "--format", "trl", "--split", "val", "--out", str(tmp_path / "o")]
    for command in (["serve", "AlpacaFarm-Gold-v0"], exported):
        assert main([*command, "--oracle", oracle]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("form", ["openrlhf", "alpacafarm"])
@pytest.mark.parametrize("place", ["file", "file/out"])
def test_a_file_is_no_folder_to_export_into(tmp_path, capsys, form, place):
    (tmp_path / "file").write_text("mine")
    assert export(form, tmp_path / place) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--format", "verl"), "--oracle"),
        (("--format", "verl", "--oracle", "gold", "--to", "parquet"), "--to"),
        (("--format", "trl", "--oracle", "gold"), "--oracle"),
        (("--format", "trl", "--split", "tset"), "tset"),
    ],
)
def test_options_that_do_not_go_together_write_nothing(tmp_path, capsys, given, told):
    assert main(["export", *given, "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
