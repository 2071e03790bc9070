"""`train --dry-run`: what it takes from options, presets and the machine, without a weight."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from alpacafarm_env import agents, sandbox
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.methods.dry_run import KNOWN, USABLE, Machine, make_plan
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
    assert lora.always["merged copy"] == pytest.approx(12.95e9, rel=0.01)
    small = plan(llama, "--preset", "llama_7b_lora", machine=replace(GPU, memory=GPU.memory * 0.6))
    assert not small.run.merged  # more than half of what the models leave


def test_all_weights_of_llama_7b_fit_eight_gpus_by_the_preset_alone(llama):
    full = plan(llama, "--preset", "llama_7b_full", machine=replace(GPU, processes=8))
    assert (full.run.sharded, full.run.lora, full.run.value) == (True, 0, "model")
    assert max(full.peaks.values()) < USABLE * GPU.memory


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
