"""The command that trains one method."""

import csv
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.methods.catalogue import find_method
from alpacafarm_env.benchmarks.methods.methods import Job
from alpacafarm_env.benchmarks.methods.runs import MethodPlan, run_method
from alpacafarm_env.errors import CheckpointError, DataError


def test_it_trains_answers_saves_and_resumes(tmp_path, capsys):
    arguments = ["binary_feedme", "--quick", "--out", str(tmp_path), "--num-eval", "40"]
    assert train.run(train.parse(arguments)) == 0
    shown = capsys.readouterr().out
    assert "Binary FeedME, simulated feedback, seed 0" in shown
    with (tmp_path / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["method"], row["feedback"], row["seed"]) == ("binary_feedme", "simulated", "0")
    run = tmp_path / "runs" / "binary_feedme, simulated, seed 0"
    answers = json.loads((tmp_path / "evaluations" / "binary_feedme, simulated, seed 0.json").read_text())
    assert len(answers["responses"]) == 40
    trained = LanguageModel.from_pretrained(run / "policy", max_response_tokens=64)
    assert trained.encode_prompts(["Name a tree"])
    steps = (run / "metrics.jsonl").read_text()
    assert train.run(train.parse(arguments)) == 0  # nothing is left to train; it answers and says so again
    assert (run / "metrics.jsonl").read_text() == steps
    assert json.loads((tmp_path / "evaluations" / "binary_feedme, simulated, seed 0.json").read_text()) == answers


@pytest.mark.parametrize("changed", ["policy", "reward_model"])
def test_answers_of_another_model_are_never_taken_for_this_one_s(tmp_path, own_data, own_models, changed):
    folders = {path.name: shutil.copytree(path, tmp_path / path.name) for path in own_models}
    options = ["--policy", str(folders["policy"]), "--reward-model", str(folders["reward_model"])]
    given = ["best_of_16", *options, "--dataset", str(own_data), "--num-eval", "2", "--out", str(tmp_path / "out")]
    assert train.run(train.parse(given)) == 0
    weights = load_file(folders[changed] / "model.safetensors")
    save_file({name: -value for name, value in weights.items()}, folders[changed] / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{changed}.model.safetensors"):
        train.run(train.parse(given))


def test_expert_iteration_takes_the_instructions_that_there_are(tmp_path, own_data, own_models):
    policy, reward_model = map(str, own_models)
    job = Job(seed=0, folder=tmp_path, quick=True, dataset=str(own_data), sft=policy, reward=reward_model)
    assert len(find_method("expert_iteration").make(job).instructions) == 16


def test_the_number_of_instructions_is_that_which_there_is(tmp_path):
    options = [train.parse(["sft", "--out", str(tmp_path), "--num-eval", number]) for number in ("805", "100000")]
    assert [each.plan(None).num_eval for each in options] == [805, 805]


def test_a_negative_rank_is_refused_in_words(capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse(["dpo", "--lora", "-1"])
    assert ended.value.code == 2
    assert "--lora" in capsys.readouterr().err


def test_seconds_and_tokens_of_an_interrupted_run_are_added_up(tmp_path):
    plan = MethodPlan(method="gpt4", seed=0, out=tmp_path, quick=True, num_eval=5)
    plan.folder.mkdir(parents=True)
    (plan.folder / "seconds.json").write_text('{"seconds": 1000.0}')
    (plan.folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 77.0}\n')
    rows = run_method(plan, lambda news: None)
    assert [row["feedback"] for row in rows] == ["simulated", "human"]
    assert 1000 <= rows[0]["seconds"] < 1060
    assert rows[0]["tokens"] == 77


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("best_of_16", {}, "--reward-model"),
        ("reward_conditioning", {"lora": 4}, "--lora: expected 0"),
        ("sft_52k", {"lora": 4}, "--lora: expected 0"),
    ],
)
def test_what_a_method_cannot_do_it_says(tmp_path, method, changes, expected):
    with pytest.raises(DataError, match=expected):
        find_method(method).make(Job(seed=0, folder=tmp_path, **changes))


def test_labels_follow_feedback_and_seed(tmp_path):
    jobs = [
        Job(seed=seed, folder=tmp_path, feedback=feedback) for feedback in ("simulated", "human") for seed in (0, 1)
    ]
    labels = [tuple(pair.preference for pair in job.preferences()) for job in jobs]
    for i, first in enumerate(labels):
        for second in labels[:i]:
            share = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
            assert 0.5 < share < 0.8  # they agree more than coins do, and none is a copy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dpo", "--num-eval", "0"], "--num-eval: expected 1 or more"),
        (["dpo", "--policy", "/some/where"], "--dataset and --policy: expected both or none"),
    ],
)
def test_bad_options_are_named(arguments, expected, capsys):
    with pytest.raises(SystemExit):
        train.parse(arguments)
    assert expected in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--out: expected a folder to write into"):
        train.run(train.parse(["gpt4", "--quick", "--out", str(tmp_path / "file")]))


def test_an_unknown_method_is_named(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'ppo'"):
        train.run(train.parse(["pppo", "--out", str(tmp_path)]))
