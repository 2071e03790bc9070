"""The command that trains one method, in the sandbox and on a user's own data and models."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from written import rows_of

from alpacafarm_env.__main__ import main
from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.annotators import JudgeServer
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.experiment import evaluation
from alpacafarm_env.benchmarks.experiment.engine import Experiment, run
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.methods.methods import find_method
from alpacafarm_env.errors import CheckpointError, DataError, UnknownNameError
from alpacafarm_env.oracles.base import Constant


@pytest.fixture
def own(own_data, own_models, tmp_path):
    """Runs a method with these options on tiny models and data."""
    policy, reward_model = map(str, own_models)
    models = ["--policy", policy, "--reward-model", reward_model, "--preset", "sandbox"]
    given = [*models, "--dataset", str(own_data), "--out", str(tmp_path / "out"), "--quick", "--num-eval", "5"]
    return lambda method, *options: train.run(train.parse([method, *given, *map(str, options)]))


def row_of(folder):
    (row,) = rows_of(folder)
    return row


# --------------------------------------------------------------------------------------------------------- the sandbox


def test_it_trains_answers_saves_and_resumes(tmp_path, capsys, monkeypatch):
    pairs = Job.preferences
    monkeypatch.setattr(Job, "preferences", lambda job: pairs(job)[:128])
    arguments = ["dpo", "--quick", "--out", str(tmp_path), "--num-eval", "20"]
    assert train.run(train.parse(arguments)) == 0
    assert "DPO, simulated feedback, seed 0" in capsys.readouterr().out
    row = row_of(tmp_path)
    assert (row["method"], row["feedback"], row["seed"]) == ("dpo", "simulated", "0")
    run = tmp_path / "runs" / "dpo-simulated-seed-0"
    stored = run / "evaluations" / "end.json"
    answers = stored.read_text()
    assert len(json.loads(answers)["splits"]["eval"]["responses"]) == 20
    trained = LanguageModel.from_pretrained(run / "policy", max_response_tokens=64)
    assert trained.encode_prompts(["Name a tree"])
    assert all(re.fullmatch(r"[\w.=+-]+", path.name) for path in tmp_path.rglob("*"))  # no shell minds
    steps = (run / "metrics.jsonl").read_text()
    assert train.run(train.parse(arguments)) == 0  # nothing is left to train; it answers and says so again
    assert (run / "metrics.jsonl").read_text() == steps
    assert stored.read_text() == answers


def test_seconds_and_tokens_of_an_interrupted_run_are_added_up(tmp_path):
    plan = Experiment(cell="gpt4", agent="gpt4", seed=0, out=tmp_path, quick=True, splits=(("eval", 5),))
    plan.folder.mkdir(parents=True)
    (plan.folder / "seconds.json").write_text('{"seconds": 1000.0}')
    (plan.folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 77.0}\n')
    (row,) = run(plan, lambda news: None)
    assert 1000 <= row["seconds"] < 1060
    assert row["tokens"] == 77


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dpo", "--num-eval", "0"], "--num-eval: expected"),
        (["dpo", "--lora", "-1"], "--lora"),
        (["dpo", "--policy", "/some/where"], "--dataset and --policy: expected both or none"),
    ],
)
def test_bad_options_are_named(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse(arguments)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- one's own data and models


def test_what_it_writes_evaluate_reads_and_nothing_is_called_simulated(own, tmp_path, monkeypatch, capsys):
    assert own("best_of_16") == 0
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
        assert main(["judge", "evaluate", str(outputs), *asked]) == 0
    assert "best_of_16" in capsys.readouterr().out


@pytest.mark.parametrize("how", [[], ["--lora", "2"]], ids=["full", "lora"])
def test_from_a_model_and_pairs_to_ppo_by_three_commands(own_data, own_models, tmp_path, capsys, how):
    data, (policy, _) = shutil.copytree(own_data, tmp_path / "data"), own_models
    answers = {"output_1": "No.", "output_2": "Yes, now.", "preference": 2}
    rows = {
        "sft": [{"instruction": f"Do {i}.", "input": "", "output": f"Done {i}."} for i in range(8)],
        "preference": [{"instruction": f"Try {i // 2}.", "input": "", **answers} for i in range(16)],
    }
    rows["preference"][1::2] = [{**row, "output_1": "Never."} for row in rows["preference"][1::2]]
    for split, found in rows.items():
        (data / f"{split}.json").write_text(json.dumps(found))

    def command(method, policy, *more):
        out = ["--dataset", str(data), "--out", str(tmp_path / method), "--quick", "--num-eval", "5", *how]
        out += ["--preset", "sandbox"]
        return train.run(train.parse([method, "--policy", str(policy), *out, *map(str, more)]))

    assert command("sft", policy, "--epochs", 2, "--batch-size", 4, "--learning-rate", 0.01) == 0
    (tuned,) = (tmp_path / "sft").glob("runs/*/policy")
    assert len((tuned.parent / "metrics.jsonl").read_text().splitlines()) == 4
    assert not (tuned / "adapter_config.json").exists()  # a whole model, which the next two build on
    assert command("reward_modeling", tuned, "--batch-size", 2, "--save", "adapter") == 0  # on PPO's own base
    row = row_of(tmp_path / "reward_modeling")
    assert (row["num_train"], row["num_test"]) == ("14", "2")  # both pairs of one instruction
    assert "accuracy" in capsys.readouterr().out
    sizes = ["--rollout-batch-size", 4, "--minibatch-size", 4, "--steps", 1]
    assert command("ppo", tuned, "--reward-model", tmp_path / "reward_modeling" / "reward_model", *sizes) == 0
    with pytest.raises(DataError, match="--judge"):
        command("reward_modeling", tuned, "--judge", "constant")


@pytest.mark.parametrize("changed", ["policy", "reward_model"])
def test_answers_of_another_model_are_never_taken_for_this_one_s(own, own_models, tmp_path, changed):
    folders = {path.name: shutil.copytree(path, tmp_path / path.name) for path in own_models}
    options = ["--policy", folders["policy"], "--reward-model", folders["reward_model"]]
    assert own("best_of_16", *options) == 0
    weights = load_file(folders[changed] / "model.safetensors")
    save_file({name: -value for name, value in weights.items()}, folders[changed] / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{changed}.model.safetensors"):
        own("best_of_16", *options)


def test_a_judge_of_ones_own_gives_a_win_rate(own, tmp_path, capsys):
    assert own("best_of_16", "--judge", json.dumps({"name": "constant", "value": 1.0})) == 0
    assert "constant" in capsys.readouterr().out
    row = row_of(tmp_path / "out")
    own_columns = ("win_rate", "standard_error", "n_total", "feedback")
    assert [row[name] for name in own_columns] == ["50.0", "0.0", "5", "own"]
    with pytest.raises(CheckpointError, match="judge"):
        own("best_of_16")


def test_responses_without_a_verdict_are_counted(own, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "make_own_judge", lambda *_, **__: Constant(math.nan))
    assert own("best_of_n", "--judge", "constant") == 0
    assert "5 of 5" in capsys.readouterr().out


def test_the_reward_model_trained_on_is_not_held_out(own, own_models, tmp_path):
    with pytest.raises(DataError, match="held out"):
        own("best_of_n", "--judge", json.dumps({"reward_model": str(own_models[1])}))
    assert not (tmp_path / "out" / "runs").exists()


def test_batch_sizes_and_steps_are_options_and_long_prompts_left_out_and_answered(own, tmp_path):
    sizes = ["--rollout-batch-size", 8, "--minibatch-size", 4, "--micro-batch-tokens", 512, "--learning-rate", 1e-4]
    with pytest.warns(UserWarning, match="left out of training"):
        assert own("quark", *sizes, "--steps", 1, "--max-prompt-tokens", 40, "--max-response-tokens", 7) == 0
    (metrics,) = (tmp_path / "out").rglob("metrics.jsonl")
    (step,) = map(json.loads, metrics.read_text().splitlines())
    assert step["tokens"] <= 8 * 7
    (saved,) = (tmp_path / "out").glob("runs/*/policy")
    assert LanguageModel.from_pretrained(saved).max_response_tokens == 7
    assert len(json.loads((tmp_path / "out" / "outputs.json").read_text())) == 5


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("dpo", "--steps", 100_000),
        ("quark", "--epochs", 100_000),
        ("best_of_n", "--learning-rate", 100_000),
        ("ppo", "--max-prompt-tokens", 5000),
        ("quark", "--max-response-tokens", 5000),
    ],
)
def test_a_setting_that_a_method_cannot_have_is_named(own, pairs, method, option, value):
    with pytest.raises(DataError, match=option):
        own(method, option, value, "--dataset", pairs)


def test_a_prompt_of_eval_without_room_is_told_before_training(own, own_data, tmp_path):
    data = shutil.copytree(own_data, tmp_path / "data")
    rows = json.loads((data / "eval.json").read_text())
    (data / "eval.json").write_text(json.dumps([{**rows[0], "instruction": "long " * 60}, *rows[1:]]))
    with pytest.raises(DataError, match="1 of 5 prompts of eval"):
        own("quark", "--dataset", data)
    assert not any(path.read_text() for path in (tmp_path / "out").rglob("metrics.jsonl"))


def test_settings_that_are_refused_do_not_hold_the_folder(own):
    sizes = ["--steps", 1, "--rollout-batch-size", 8, "--minibatch-size"]
    with pytest.raises(DataError, match="--minibatch-size"):
        own("ppo", *sizes, 7)
    assert own("ppo", *sizes, 8) == 0


def test_the_file_of_a_run_takes_it_up_again(own, pairs, tmp_path, capsys):
    given = ["--dataset", pairs, "--batch-size", 4, "--trackers", "tensorboard"]
    assert own("DPO", *given) == 0
    (metrics,) = (tmp_path / "out").rglob("metrics.jsonl")
    steps, before = metrics.read_bytes(), capsys.readouterr().out
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))
    file = str(tmp_path / "out" / "run.yaml")
    options = train.parse(["--config", file])
    assert (options.method, options.trackers, options.batch_size) == ("dpo", ("tensorboard",), 4)
    assert train.run(options) == 0
    assert metrics.read_bytes() == steps
    answers = [text[text.index("\n> ") :] for text in (before, capsys.readouterr().out)]
    assert answers[0] == answers[1]
    assert train.parse(["sft", "--config", file, "--seed", "3"]).name == "train sft, own labels, seed 3"


def test_only_what_can_be_trained_is_a_method():
    for name, meant in (("pppo", "'ppo'?"), ("quark_slow", "'quark'?"), ("gpt4", "reward_modeling"), ("crowd", "dpo")):
        with pytest.raises(UnknownNameError, match=re.escape(meant)):
            train.parse([name])
    assert train.parse(["Best-Of-N"]).method == "best_of_n"
    assert find_method("quark_slow").title == "Quark, a tenth of the rate"  # the ranking's


def test_a_folder_is_of_one_run_alone(own, pairs, tmp_path):
    other = shutil.copytree(pairs, tmp_path / "other")
    for name in ("eval", "preference"):
        rows = json.loads((other / f"{name}.json").read_text())
        (other / f"{name}.json").write_text(json.dumps(rows[1:]))
    for first in ("best_of_16", "reward_modeling"):
        out = ["--dataset", pairs, "--out", tmp_path / first]
        none = ["--reward-model", "sandbox"] if first == "reward_modeling" else []
        assert own(first, *out, *none) == 0
        before = {path: path.read_bytes() for path in (tmp_path / first).rglob("*.*") if path.is_file()}
        others = [("dpo",), ("best_of_16", "--seed", 1), ("reward_modeling", "--seed", 1), (first, "--dataset", other)]
        for method, *changed in others:
            with pytest.raises(CheckpointError, match=first):
                own(method, *out, *([] if method == "best_of_16" else none), *changed)
        assert {path: path.read_bytes() for path in before} == before
        assert own(first, *out, *none) == 0


def test_a_method_that_needs_a_reward_model_is_refused_without_one_first(own, tmp_path):
    with pytest.raises(DataError, match="--reward-model"):
        own("grpo", "--reward-model", "sandbox", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--policy", "--reward-model"])
def test_a_model_that_is_not_there_is_refused_before_anything_is_written(own, tmp_path, option):
    with pytest.raises(CheckpointError, match="nowhere"):
        own("ppo", option, tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pairs(own_data, tmp_path):
    """The data with preferences too."""
    data = shutil.copytree(own_data, tmp_path / "data")
    row = {"input": "", "output_1": "No.", "output_2": "Yes, now.", "preference": 2}
    (data / "preference.json").write_text(json.dumps([{"instruction": f"Try {i}.", **row} for i in range(8)]))
    return data


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_either_form_is_a_policy_a_reward_model_and_a_judge_of_later_runs(own, pairs, tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    small = ["--dataset", "data", "--batch-size", 4, "--lora", 2, "--save", form]
    assert own("reward_modeling", *small, "--out", "reward", "--reward-model", "sandbox") == 0
    assert own("dpo", *small, "--out", "dpo") == 0
    (policy,), reward = Path("dpo").glob("runs/*/policy"), Path("reward/reward_model")
    for folder in (policy, reward):
        assert (folder / "adapter_config.json").exists() is (form == "adapter")
        card = (folder / "README.md").read_text()
        assert all(f"| {name} |" in card for name in ("method", "base", "data", "settings", "metrics"))
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name} moved"))
    monkeypatch.chdir(moved / "dpo")
    used = ["--dataset", "../data", "--policy", moved / policy, "--reward-model", "../reward/reward_model"]
    assert own("best_of_16", *used, "--out", "best") == 0
    judged = ["--judge", json.dumps({"reward_model": "../reward/reward_model"}), "--out", "judged"]
    assert own("dpo", *used, "--batch-size", 4, *judged) == 0


class Hub:
    """The hub's client, as far as it is used."""

    def __init__(self):
        self.calls, self.refuses = [], set()

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            if name in self.refuses:
                raise OSError(f"{name}: 403 Forbidden")
            return "https://hub/me/model"

        return call

    def auth_check(self, name, *, write=False):
        self.__getattr__("auth_check")(name, write=write)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr("alpacafarm_env.benchmarks.train.HfApi", lambda: hub)
    return hub


def test_a_model_is_pushed_once_it_is_saved(own, pairs, hub, capsys):
    given = ["--dataset", pairs, "--batch-size", 4, "--push-to-hub", "me/model"]
    assert own("dpo", *given) == 0
    (*early, (name, _, options)) = hub.calls
    assert ("create_repo", ("me/model",), {"private": True, "exist_ok": True}) in early
    assert (name, options["repo_id"]) == ("upload_folder", "me/model")
    assert "metrics" in (options["folder_path"] / "README.md").read_text()
    assert "https://hub/me/model" in capsys.readouterr().out
    hub.refuses = {"upload_folder"}
    with pytest.raises(CheckpointError, match=r"403.*hf upload me/model .*policy"):
        own("dpo", *given)
    LanguageModel.from_pretrained(options["folder_path"])


def test_what_cannot_be_pushed_is_refused_before_training(own, pairs, hub, tmp_path):
    given = ["--dataset", pairs, "--batch-size", 4, "--push-to-hub", "me/model"]
    with pytest.raises(DataError, match=r"adapter.*--save merged"):
        own("dpo", *given, "--lora", 2, "--save", "adapter")
    for name in ("create_repo", "auth_check"):
        hub.refuses = {name}
        with pytest.raises(CheckpointError, match=r"me/model.*403.*hf auth login"):
            own("dpo", *given)
    assert not (tmp_path / "out").exists()
