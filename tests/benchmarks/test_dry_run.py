"""`train --dry-run`: what it takes from options, presets and the machine, without a weight."""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from alpacafarm_env import agents, sandbox
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.methods.dry_run import (
    KNOWN,
    USABLE,
    Machine,
    config_for,
    make_plan,
    report,
    samples_merged,
)
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.methods.methods import BY_NAME
from alpacafarm_env.errors import DataError

GPU = Machine(name="a GPU", gpu=True, memory=80 * 1.0737e9, processes=1, gemm=6e14, copy=3e12)


@pytest.fixture
def llama(tmp_path):
    """Folders of LLaMA 7B as policy and as reward model, which hold a config alone."""
    for name in ("policy", "reward"):
        LlamaConfig(vocab_size=32_001, max_position_embeddings=2048).save_pretrained(tmp_path / name)
    return tmp_path


def plan(folder, *options, method="ppo", machine=GPU):
    models = ["--dataset", "none", "--policy", str(folder / "policy"), "--reward-model", str(folder / "reward")]
    given = train.parse([method, *models, *options])
    return make_plan(given.job(given.reward_model), method, machine)


def test_presets_fit_the_machines_they_are_for_by_the_options_alone(llama):
    lora = plan(llama, "--preset", "llama_7b_lora")
    assert (lora.run.rows, lora.run.prompt, lora.run.response, lora.run.lora) == (512, 192, 300, 8)
    assert (lora.run.checkpointing, lora.run.value, lora.steps) == (True, "adapter", 390)
    assert max(lora.peaks.values()) < USABLE * GPU.memory
    assert 64 < lora.run.sampling_rows < 512  # what fits beside the models


def test_all_weights_of_llama_7b_fit_eight_gpus_by_the_preset_alone(llama):
    full = plan(llama, "--preset", "llama_7b_full", machine=replace(GPU, processes=8))
    assert (full.run.sharded, full.run.lora, full.run.value) == (True, 0, "model")
    assert max(full.peaks.values()) < USABLE * GPU.memory


def test_the_copy_to_sample_from_is_counted_where_it_is_made(llama):
    found = plan(llama, "--preset", "llama_7b_lora")
    assert found.always["merged copy"] == pytest.approx(13e9, rel=0.01)  # of two bytes a weight of the layers
    assert max(found.peaks.values()) < USABLE * GPU.memory
    assert found.run.reward_dtype == "bfloat16"
    # On 40 GB it is made too, of half of what is free beside 13.5 GB, and then there is no room for an update.
    assert samples_merged(found, replace(GPU, memory=43e9))
    assert found.peaks["update"] > 43e9
    assert not samples_merged(found, replace(GPU, memory=24e9))
    assert not samples_merged(found, replace(GPU, gpu=False))
    assert not samples_merged(replace(found, run=replace(found.run, lora=0)), GPU)


@pytest.mark.parametrize("quick", [[], ["--quick"]])
@pytest.mark.parametrize(
    ("method", "agent"),
    [("ppo", "PPO"), ("dpo", "DPO"), ("fine_tuning", "SFT"), ("binary_feedme", "BinaryFeedME")],
)
def test_settings_are_those_of_the_run(method, agent, quick, monkeypatch):
    made = []
    monkeypatch.setattr(agents, agent, lambda *args, config, **_: made.append((args[1], config)))
    for name in ("env", "policy"):
        monkeypatch.setattr(Job, name, lambda *_: None)
    examples = SimpleNamespace(demonstrations=lambda _: range(9999), preferences=lambda _: range(7777))
    monkeypatch.setattr(Job, "data", examples)
    job = train.parse([method, *quick]).job("sandbox")
    BY_NAME[method].make(job)
    ((data, config),) = made
    found, names = config_for(job, method), ("total_steps", "epochs", "batch_size", "learning_rate")
    assert [getattr(found, name, None) for name in names] == [getattr(config, name, None) for name in names]
    expected = config.epochs * ceil(len(data) / config.batch_size) if data else config.total_steps
    found_plan = make_plan(job, method, GPU)
    assert found_plan.steps == expected
    assert ("reference" in found_plan.always) == (method == "ppo")


def test_a_reward_model_is_asked_for_as_by_the_run(llama):
    given = train.parse(["ppo", "--dataset", "none", "--policy", str(llama / "policy")])
    with pytest.raises(DataError, match="--reward-model"):
        make_plan(given.job(given.reward_model), "ppo", GPU)


def test_a_policy_without_room_for_the_preset_s_responses_is_refused():
    given = train.parse(["ppo", "--preset", "llama_7b_lora"])  # of the sandbox's policy, which knows 256 positions
    with pytest.raises(DataError, match="--policy sandbox, .*--preset llama_7b_lora.*--preset sandbox"):
        make_plan(given.job("sandbox"), "ppo", GPU)


def test_the_guide_shows_what_is_printed(llama):
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "gpus.md").read_text(encoding="utf-8")
    assumed = replace(GPU, name="GPU of 80 GiB", memory=80 * 2**30)
    for preset, processes in (("llama_7b_lora", 1), ("llama_7b_full", 8)):
        machine = replace(assumed, processes=processes)
        text, fits = report(plan(llama, "--preset", preset, machine=machine), machine)
        assert fits
        assert text in guide


def test_options_win_and_a_run_that_does_not_fit_is_seen(llama):
    found = plan(llama, "--preset", "llama_7b_lora", "--gradient-checkpointing", "False", "--steps", "7")
    assert (found.steps, found.run.checkpointing) == (7, False)
    assert max(found.peaks.values()) > GPU.memory
    assert plan(llama, "--preset", "paper", "--max-prompt-tokens", "100").run.prompt == 100
    cpu = replace(GPU, gpu=False)
    assert plan(llama, machine=cpu).run.sampling_rows == 256
    assert plan(llama, "--sampling-batch", "5").run.sampling_rows == 5


def test_the_rank_of_a_policy_that_is_an_adapter_is_its_own(llama):
    adapter = llama / "adapter"
    adapter.mkdir()
    config = {"r": 3, "base_model_name_or_path": str(llama / "policy"), "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert plan(llama, "--preset", "llama_7b_lora", "--policy", str(adapter)).run.lora == 3


def test_the_command_prints_a_table_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agents, "LanguageModel", None)  # no weights
    for method in ("ppo", "fine_tuning"):
        assert train.run(train.parse([method, "--dry-run"])) == 0
        told = capsys.readouterr().out
        assert "in all" in told
        assert ("value weights" in told) == (method == "ppo")
    assert list(tmp_path.iterdir()) == []
    assert set(KNOWN) <= set(BY_NAME) | {train.REWARD_MODELING}
    with pytest.raises(DataError, match="best_of_n"):
        train.run(train.parse(["best_of_n", "--dry-run"]))


def test_a_policy_s_parameters_are_those_of_its_weights():
    policy = agents.LanguageModel.from_pretrained(sandbox.POLICY)
    given = train.parse(["ppo"])
    shape = make_plan(given.job("sandbox"), "ppo", GPU).shape
    assert shape.parameters == sum(each.numel() for each in policy.model.parameters())
