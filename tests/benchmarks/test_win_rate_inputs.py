"""What a user brings is checked before anything is written: prompts that do not fit, models that are not there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from alpacafarm_env.benchmarks.harness.study import run_command
from alpacafarm_env.benchmarks.methods.methods import Job
from alpacafarm_env.benchmarks.train import TrainOptions
from alpacafarm_env.benchmarks.win_rate_curve.command import WinRateCurveOptions, make_plans, run
from alpacafarm_env.benchmarks.win_rate_curve.inputs import check_inputs, num_positions, prompt_limit
from alpacafarm_env.benchmarks.win_rate_curve.plan import RunPlan
from alpacafarm_env.benchmarks.win_rate_curve.runs import make_agent
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.templates import ALPACA

RESPONSE = 6
POSITIONS = 128
ROOM = POSITIONS - RESPONSE


@pytest.fixture
def options(own_data, own_models, tmp_path, monkeypatch):
    """One seed of one step with short responses, in this process."""
    from alpacafarm_env.agents import PPOConfig

    def config(plan):
        return PPOConfig(total_steps=1, rollout_batch_size=4, minibatch_size=4, max_response_tokens=RESPONSE)

    monkeypatch.setattr(RunPlan, "ppo_config", config)
    policy, reward_model = map(str, own_models)
    models = {"policy": policy, "reward_model": reward_model}
    return WinRateCurveOptions(out=tmp_path / "out", seeds=1, data=str(own_data), **models, steps=1, processes=1)


def with_prompts(own_data, folder, split, *num_tokens):
    """A copy of the data whose first prompts of a split have so many tokens: bytes, with "Q: ", "A:" and a newline."""
    shutil.copytree(own_data, folder)
    path = folder / f"{split}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))
    for place, number in enumerate(num_tokens):
        rows[place] = {**rows[place], "instruction": chr(97 + place) * (number - len("Q: \nA:")), "input": ""}
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("split", ["val", "eval"])
def test_prompts_that_do_not_fit_are_counted_before_anything_is_written(options, own_data, tmp_path, split):
    data = with_prompts(own_data, tmp_path / "long", split, ROOM, ROOM + 1, ROOM + 40)
    told = f"at most {ROOM} tokens, but 2 of 16 in {split} have more, the longest {ROOM + 40}.*--max-prompt-tokens"
    with pytest.raises(DataError, match=told):
        run(replace(options, data=data))
    assert not options.out.exists()


def test_prompts_of_training_that_do_not_fit_are_left_out_unless_they_are_all(options, own_data, tmp_path):
    data = with_prompts(own_data, tmp_path / "some", "unlabeled", ROOM, ROOM + 1, ROOM + 40)
    plan = make_plans(replace(options, data=data))[0]
    check_inputs(plan)
    with pytest.warns(UserWarning, match=f"2 of 16 prompts .* more than {ROOM} tokens"):
        agent = make_agent(plan)
    assert [metrics["step"] for metrics in agent.updates()] == [1]
    data = with_prompts(own_data, tmp_path / "all", "unlabeled", *[ROOM + 1 + place for place in range(16)])
    with pytest.raises(DataError, match="16 of 16 in unlabeled"):
        check_inputs(make_plans(replace(options, data=data))[0])


def test_micro_batches_that_are_too_small_are_refused_before_anything_is_written(
    options, own_data, tmp_path, monkeypatch
):
    data = with_prompts(own_data, tmp_path / "some", "unlabeled", 70, ROOM + 1)
    whole = RunPlan.ppo_config
    monkeypatch.setattr(RunPlan, "ppo_config", lambda plan: replace(whole(plan), micro_batch_tokens=70 + RESPONSE - 1))
    with pytest.raises(DataError, match=f"--micro-batch-tokens.* {70 + RESPONSE} "):
        run(replace(options, data=data))
    assert not options.out.exists()


def test_all_that_fits_beside_a_response_is_accepted_and_trained_on(options, own_data, tmp_path):
    data = with_prompts(own_data, tmp_path / "fits", "unlabeled", *[ROOM - place for place in range(16)])
    plan = make_plans(replace(options, data=data))[0]
    check_inputs(plan)
    agent = make_agent(plan)
    assert (agent.policy.max_prompt_tokens, agent.policy.max_response_tokens) == (ROOM, RESPONSE)
    assert [metrics["step"] for metrics in agent.updates()] == [1]


def test_the_limit_can_be_lowered_but_not_above_what_the_models_know(options, own_data, tmp_path):
    plan = make_plans(options)[0]
    assert prompt_limit(plan) == ROOM
    assert prompt_limit(replace(plan, max_prompt_tokens=ROOM)) == ROOM
    with pytest.raises(DataError, match=f"--max-prompt-tokens: expected at most {ROOM} .*got {ROOM + 1}"):
        prompt_limit(replace(plan, max_prompt_tokens=ROOM + 1))
    assert plan.settings() != replace(plan, max_prompt_tokens=60).settings()


def test_what_training_leaves_out_is_answered_in_evaluations(options, own_data, tmp_path):
    data = with_prompts(own_data, tmp_path / "unlabeled", "unlabeled", 60, 61)
    data = with_prompts(Path(data), tmp_path / "limit", "val", 61, ROOM)
    with pytest.warns(UserWarning, match="1 of 16 prompts .* more than 60 tokens"):
        assert run(replace(options, data=data, max_prompt_tokens=60)) == 0
    evaluation = json.loads((options.out / "runs" / "seed-0" / "evaluations" / "step-00001.json").read_text())
    assert [row["split"] for row in evaluation["rows"] if row["length"] > 0] == ["val", "eval"]


def test_the_limit_is_that_of_the_model_with_fewer_positions(options, own_models, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(own_models[1], short)
    config = json.loads((short / "config.json").read_text(encoding="utf-8"))
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}), encoding="utf-8")
    plan = make_plans(replace(options, reward_model=str(short)))[0]
    assert prompt_limit(plan) == 100 - RESPONSE
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 5}), encoding="utf-8")
    with pytest.raises(DataError, match="expected more than 6 positions.*got 5"):
        prompt_limit(plan)


def test_positions_of_an_adapter_are_those_of_its_base_model(own_models, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(own_models[0])}))
    assert num_positions(str(tmp_path)) == POSITIONS


@pytest.mark.parametrize("option", ["policy", "reward_model"])
@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_a_model_that_is_not_there_is_refused_before_anything_is_written(options, tmp_path, capsys, option, kind):
    wrong = tmp_path / kind
    if kind == "empty":
        wrong.mkdir()
    assert run_command(lambda: run(replace(options, **{option: str(wrong)}))) == 2
    assert str(wrong) in capsys.readouterr().err
    assert not options.out.exists()


def test_a_policy_without_a_padding_token_is_refused(options, own_models, tmp_path):
    folder = tmp_path / "no_pad"
    shutil.copytree(own_models[0], folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "pad_token": "</s>"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no_pad: .*padding token"):
        check_inputs(make_plans(replace(options, policy=str(folder)))[0])


def test_models_without_a_template_are_refused_unless_it_is_named(options, own_models, tmp_path, capsys):
    bare = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in own_models]
    for folder in bare:
        (folder / "prompt_template.json").unlink()
    for changes in ({"policy": str(bare[0])}, {"reward_model": str(bare[1])}):
        assert run_command(lambda changes=changes: run(replace(options, **changes))) == 2
        assert "--template" in capsys.readouterr().err
        assert not options.out.exists()
    named = replace(options, policy=str(bare[0]), reward_model=str(bare[1]), template="alpaca")
    with pytest.raises(DataError, match="prompts of at most"):  # Alpaca's prompt does not fit these tiny models
        check_inputs(make_plans(named)[0])
    job = Job(seed=0, folder=tmp_path, sft=str(bare[0]), reward=str(bare[1]), template="alpaca")
    assert job.policy().template == ALPACA
    assert (
        job.oracle().encode(["Hi"], [""])[0][: len("Below is")]
        == job.policy().encode_responses(["Below is"], eos=False)[0]
    )
    with pytest.raises(ValueError, match="--policy"):
        WinRateCurveOptions(template="alpaca")
    with pytest.raises(ValueError, match="--policy"):
        TrainOptions("sft", template="alpaca")
