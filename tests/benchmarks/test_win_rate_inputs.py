"""What a user brings is checked before anything is written: prompts that do not fit, models that are not there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from alpacafarm_env.agents import PPOConfig
from alpacafarm_env.benchmarks.harness.study import run_command
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.train import TrainOptions
from alpacafarm_env.benchmarks.win_rate_curve.command import run
from alpacafarm_env.benchmarks.win_rate_curve.plan import RunPlan, WinRateCurveOptions, make_plans
from alpacafarm_env.benchmarks.win_rate_curve.runs import check_inputs, make_agent, num_positions, prompt_limits
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.templates import ALPACA

RESPONSE = 6
POSITIONS = 128
ROOM = POSITIONS - RESPONSE


@pytest.fixture
def options(own_data, own_models, tmp_path, monkeypatch):
    """One seed of one step with short responses, in this process."""
    config = PPOConfig(total_steps=1, rollout_batch_size=4, minibatch_size=4, max_response_tokens=RESPONSE)
    monkeypatch.setattr(RunPlan, "ppo_config", lambda plan: config)
    models = {"policy": str(own_models[0]), "reward_model": str(own_models[1])}
    return WinRateCurveOptions(out=tmp_path / "out", seeds=1, data=str(own_data), **models, steps=1, processes=1)


@pytest.fixture
def with_prompts(options, tmp_path):
    """The options with a copy of the data whose first prompts of a split have so many tokens.

    These are bytes, with "Q: ", "A:" and a newline.
    """

    def copy(split, *num_tokens, of=options):
        folder = Path(shutil.copytree(of.data, tmp_path / f"{split} {len(num_tokens)}"))
        path = folder / f"{split}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))
        for place, number in enumerate(num_tokens):
            rows[place] = {**rows[place], "instruction": chr(97 + place) * (number - len("Q: \nA:")), "input": ""}
        path.write_text(json.dumps(rows), encoding="utf-8")
        return replace(of, data=str(folder))

    return copy


@pytest.mark.parametrize("split", ["val", "eval"])
def test_prompts_that_do_not_fit_are_counted_before_anything_is_written(with_prompts, split):
    options = with_prompts(split, ROOM, ROOM + 1, ROOM + 40)
    told = f"at most {ROOM} tokens, but 2 of 16 in {split} have more, the longest {ROOM + 40}.*--max-prompt-tokens"
    with pytest.raises(DataError, match=told):
        run(options)
    assert not options.out.exists()


def test_prompts_of_training_that_do_not_fit_are_left_out_unless_they_are_all(with_prompts):
    (plan,) = make_plans(with_prompts("unlabeled", ROOM, ROOM + 1, ROOM + 40))
    check_inputs(plan)
    with pytest.warns(UserWarning, match=f"2 of 16 prompts .* more than {ROOM} tokens"):
        agent = make_agent(plan)
    assert [metrics["step"] for metrics in agent.updates()] == [1]
    with pytest.raises(DataError, match="16 of 16 in unlabeled"):
        check_inputs(make_plans(with_prompts("unlabeled", *range(ROOM + 1, ROOM + 17)))[0])


def test_micro_batches_that_are_too_small_are_refused_before_anything_is_written(with_prompts, monkeypatch):
    options = with_prompts("unlabeled", 70, ROOM + 1)
    small = replace(RunPlan().ppo_config(), micro_batch_tokens=70 + RESPONSE - 1)
    monkeypatch.setattr(RunPlan, "ppo_config", lambda plan: small)
    with pytest.raises(DataError, match=f"--micro-batch-tokens.* {70 + RESPONSE} "):
        run(options)
    assert not options.out.exists()


def test_all_that_fits_with_a_response_is_accepted_and_trained_on(with_prompts):
    (plan,) = make_plans(with_prompts("unlabeled", *range(ROOM, ROOM - 16, -1)))
    check_inputs(plan)
    agent = make_agent(plan)
    assert (agent.policy.max_prompt_tokens, agent.policy.max_response_tokens) == (ROOM, RESPONSE)
    assert [metrics["step"] for metrics in agent.updates()] == [1]


def test_the_limit_can_be_lowered_but_not_above_what_the_model_with_fewer_positions_knows(options, tmp_path):
    (plan,) = make_plans(options)
    assert prompt_limits(plan) == prompt_limits(replace(plan, max_prompt_tokens=ROOM)) == (ROOM, ROOM)
    assert prompt_limits(replace(plan, max_prompt_tokens=60)) == (ROOM, 60)
    with pytest.raises(DataError, match=f"--max-prompt-tokens: expected at most {ROOM} .*got {ROOM + 1}"):
        prompt_limits(replace(plan, max_prompt_tokens=ROOM + 1))
    assert plan.settings() != replace(plan, max_prompt_tokens=60).settings()

    short = Path(shutil.copytree(options.reward_model, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text(encoding="utf-8"))
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}), encoding="utf-8")
    plan = replace(plan, reward_model=str(short))
    assert prompt_limits(plan)[0] == 100 - RESPONSE
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 5}), encoding="utf-8")
    with pytest.raises(DataError, match="expected more than 6 positions.*got 5"):
        prompt_limits(plan)


def test_what_training_leaves_out_is_answered_in_evaluations(with_prompts):
    options = with_prompts("val", 61, ROOM, of=with_prompts("unlabeled", 60, 61))
    with pytest.warns(UserWarning, match="1 of 16 prompts .* more than 60 tokens"):
        assert run(replace(options, max_prompt_tokens=60)) == 0
    evaluation = json.loads((options.out / "runs" / "seed-0" / "evaluations" / "step-00001.json").read_text())
    assert [row["split"] for row in evaluation["rows"] if row["length"] > 0] == ["val", "eval"]


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


def test_a_policy_without_an_end_of_sequence_is_refused(options, tmp_path):
    path = Path(shutil.copytree(options.policy, tmp_path / "no_end")) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "eos_token": None}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no_end: .*end-of-sequence token"):
        check_inputs(make_plans(replace(options, policy=str(path.parent)))[0])


def test_models_without_a_template_are_refused_unless_it_is_named(options, own_models, tmp_path, capsys):
    bare = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in own_models]
    for folder in bare:
        (folder / "prompt_template.json").unlink()
    policy, reward_model = map(str, bare)
    for changes in ({"policy": policy}, {"reward_model": reward_model}):
        assert run_command(lambda changes=changes: run(replace(options, **changes))) == 2
        assert "--template" in capsys.readouterr().err
        assert not options.out.exists()
    named = replace(options, policy=policy, reward_model=reward_model, template="alpaca")
    with pytest.raises(DataError, match="prompts of at most"):  # Alpaca's prompt does not fit these tiny models
        check_inputs(make_plans(named)[0])
    job = Job(seed=0, folder=tmp_path, sft=policy, reward=reward_model, template="alpaca")
    assert job.policy().template == ALPACA
    start = job.policy().encode_responses(["Below is"], eos=False)[0]
    assert job.oracle().encode(["Hi"], [""])[0][: len(start)] == start
    for command in (WinRateCurveOptions, lambda template: TrainOptions("sft", template=template)):
        with pytest.raises(ValueError, match="--policy"):
            command(template="alpaca")
