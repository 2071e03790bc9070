"""The command that trains one method, on a user's own data and models."""

import csv
import json
import math
import shutil

import pytest

from alpacafarm_env.__main__ import main
from alpacafarm_env.annotators import JudgeServer
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.harness import evaluation
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.folders import claim
from alpacafarm_env.oracles.base import Constant

OWN = ["--quick", "--num-eval", "5"]


@pytest.fixture
def own(own_data, own_models, tmp_path):
    policy, reward_model = map(str, own_models)
    models = ["--policy", policy, "--reward-model", reward_model]
    return [*models, "--dataset", str(own_data), "--out", str(tmp_path / "out"), *OWN]


def test_what_it_writes_evaluate_reads_and_nothing_is_called_simulated(own, tmp_path, monkeypatch, capsys):
    assert train.run(train.parse(["sft", *own])) == 0
    told = capsys.readouterr().out
    assert "simulated" not in told
    assert "10k" not in told
    outputs, references = (tmp_path / "out" / f"{name}.json" for name in ("outputs", "references"))
    rows = json.loads(outputs.read_text(), parse_constant=pytest.fail)
    assert len(rows) == 5
    assert set(rows[0]) == {"instruction", "input", "output", "generator"}
    assert rows[0]["input"] == "line 0"
    assert "line 0" not in rows[0]["instruction"]
    monkeypatch.setenv("ALPACAFARM_LEDGER", str(tmp_path / "own.sqlite"))
    with JudgeServer(anyway=True) as server:
        asked = ["--reference", str(references), "--base-url", server.base_url, "--models", "sandbox"]
        assert main(["evaluate", str(outputs), *asked]) == 0
    assert "sft" in capsys.readouterr().out


def test_a_judge_of_ones_own_gives_a_win_rate(own, tmp_path, capsys):
    judge = json.dumps({"name": "constant", "value": 1.0})
    assert train.run(train.parse(["sft", *own, "--judge", judge])) == 0
    assert "constant" in capsys.readouterr().out
    with (tmp_path / "out" / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["win_rate"], row["feedback"]) == ("50.0", "own")
    with pytest.raises(CheckpointError, match="judge"):
        train.run(train.parse(["sft", *own]))


def test_responses_without_a_verdict_are_counted(own, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "make_own_judge", lambda *_, **__: Constant(math.nan))
    assert train.run(train.parse(["sft", *own, "--judge", "constant"])) == 0
    assert "5 of 5" in capsys.readouterr().out


def test_the_reward_model_trained_on_is_not_held_out(own, own_models, tmp_path):
    with pytest.raises(DataError, match="held out"):
        train.run(train.parse(["best_of_n", *own, "--judge", json.dumps({"reward_model": str(own_models[1])})]))
    assert not (tmp_path / "out" / "runs").exists()


def test_batch_sizes_and_steps_are_options(own, tmp_path):
    sizes = ["--rollout-batch-size", "8", "--minibatch-size", "4", "--steps", "1", "--learning-rate", "1e-4"]
    assert train.run(train.parse(["quark", *own, *sizes, "--micro-batch-tokens", "512"])) == 0
    (metrics,) = (tmp_path / "out").rglob("metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "option"),
    [("sft", "--steps"), ("quark", "--epochs"), ("best_of_n", "--learning-rate")],
)
def test_a_setting_that_a_method_cannot_have_is_named(own, method, option):
    with pytest.raises(DataError, match=option):
        train.run(train.parse([method, *own, option, "100000"]))


def test_long_prompts_are_left_out_of_training_and_answered_all_the_same(own, own_data, tmp_path):
    short = ["--max-prompt-tokens", "40", "--rollout-batch-size", "8", "--minibatch-size", "8", "--steps", "1"]
    with pytest.warns(UserWarning, match="left out of training"):
        assert train.run(train.parse(["quark", *own, *short])) == 0
    assert len(json.loads((tmp_path / "out" / "outputs.json").read_text())) == 5


def test_a_prompt_of_eval_without_room_is_told_before_training(own, own_data, tmp_path):
    data = shutil.copytree(own_data, tmp_path / "data")
    rows = json.loads((data / "eval.json").read_text())
    (data / "eval.json").write_text(json.dumps([{**rows[0], "instruction": "long " * 60}, *rows[1:]]))
    with pytest.raises(DataError, match="1 of 5 prompts of eval"):
        train.run(train.parse(["quark", *own, "--dataset", str(data)]))
    assert not any(path.read_text() for path in (tmp_path / "out").rglob("metrics.jsonl"))


def test_settings_that_are_refused_do_not_hold_the_folder(own, tmp_path):
    command = ["ppo", *own, "--steps", "1", "--rollout-batch-size", "8", "--minibatch-size"]
    with pytest.raises(DataError, match="--minibatch-size"):
        train.run(train.parse([*command, "7"]))
    assert train.run(train.parse([*command, "8"])) == 0


def test_a_judge_that_is_none_does_not_hold_the_folder(own, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "judges_of_train.py").write_text(
        "class NoScore: name = 'none'\nclass Raises:\n def __init__(self): 1 / 0\n"
    )
    for judge in ("judges_of_train:NoScore", "judges_of_train:Raises"):
        with pytest.raises(DataError, match=judge):
            train.run(train.parse(["sft", *own, "--judge", judge]))
    assert train.run(train.parse(["sft", *own, "--num-eval", "2"])) == 0


def test_limits_that_do_not_fit_are_told_with_the_option(own):
    with pytest.raises(DataError, match="--max-prompt-tokens"):
        train.run(train.parse(["ppo", *own, "--max-prompt-tokens", "5000"]))


@pytest.mark.parametrize("option", ["--policy", "--reward-model"])
def test_a_model_that_is_not_there_is_refused_before_anything_is_written(own, tmp_path, option):
    with pytest.raises(CheckpointError, match="nowhere"):
        train.run(train.parse(["ppo", *own, option, str(tmp_path / "nowhere")]))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_another_call_writes_is_refused_before_models_are_read(own, tmp_path):
    with claim(tmp_path / "out", "another call"), pytest.raises(CheckpointError, match="another call"):
        train.run(train.parse(["ppo", *own, "--policy", str(tmp_path / "nowhere")]))
