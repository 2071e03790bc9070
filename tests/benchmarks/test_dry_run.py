"""`train --dry-run` measures steps and leaves nothing; the launch script starts what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from alpacafarm_env import agents, sandbox
from alpacafarm_env.agents.memory import DeviceMemory
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.experiment.dry_run import BATCHES, count, rehearse
from alpacafarm_env.benchmarks.methods.job import ONE_BATCH, Job
from alpacafarm_env.benchmarks.methods.methods import BY_NAME


def batch_sizes(config):
    return [getattr(config, preset)().batch_size for preset in ("paper", "sandbox") if hasattr(config, preset)]


def test_one_batch_is_some_of_all_lengths_and_the_longest(tmp_path):
    whole = Job(seed=0, folder=tmp_path)
    few = Job(seed=0, folder=tmp_path, one_batch=True)
    for wanted in (Job.preferences, Job.demonstrations):
        every, some = wanted(whole), wanted(few)
        assert len(some) == ONE_BATCH < len(every)
        assert len(set(some)) == ONE_BATCH
        assert set(some) <= set(every)
    lengths = [len(each.instruction) + len(each.response) for each in few.demonstrations()]
    assert lengths[-1] == max(len(each.instruction) + len(each.response) for each in whole.demonstrations())
    configs = (agents.SFTConfig, agents.DPOConfig, agents.RewardModelingConfig, agents.BinaryFeedMEConfig)
    assert max(size for config in configs for size in batch_sizes(config)) < 0.9 * ONE_BATCH
    assert set(BATCHES) <= set(BY_NAME) | {train.REWARD_MODELING}


@pytest.mark.parametrize(
    ("method", "phases"),
    [
        ("sft", ["load", "update"]),
        (train.REWARD_MODELING, ["load", "update"]),
        ("ppo", ["load", "sample", "score", "prepare", "update"]),
    ],
)
def test_a_step_is_measured_and_nothing_is_kept(method, phases, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.run(train.parse([method, "--dry-run", "--micro-batch-tokens", "777"])) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert [row[0] for row in rows if row and row[0] in phases] == phases
    assert "777 tokens" in printed
    assert list(tmp_path.iterdir()) == []


def test_its_steps_are_those_of_the_run(tmp_path):
    for method in ("dpo", "binary_feedme"):
        job = train.parse([method, "--out", str(tmp_path), "--quick"]).job()
        assert rehearse(job, method).steps == BY_NAME[method].make(job).num_steps


def test_a_run_without_room_is_told_so(monkeypatch, capsys):
    free = iter([10**5, *[10**12] * 9])  # asked first for all of the run, then for its updates
    monkeypatch.setattr(DeviceMemory, "free", lambda self: next(free))
    assert train.run(train.parse(["sft", "--dry-run"])) == 1
    assert "does not fit" in capsys.readouterr().out


def test_without_weights_there_is_a_table_of_sizes(tmp_path, capsys, own_data):
    LlamaConfig(vocab_size=32_001, max_position_embeddings=2048).save_pretrained(tmp_path / "policy")
    given = ["--dataset", str(own_data), "--policy", str(tmp_path / "policy"), "--preset", "llama_7b_lora"]
    assert train.run(train.parse(["ppo", *given, "--dry-run"])) == 0
    printed = capsys.readouterr().out
    assert "6,738,423,808" in printed
    assert re.search(r"rank 8 on bfloat16 +13\.6 ", printed)
    policy = agents.LanguageModel.from_pretrained(sandbox.POLICY)
    assert count(sandbox.POLICY, 8)[0] == sum(each.numel() for each in policy.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "ppo", "dpo", train.REWARD_MODELING])
def test_the_peak_is_that_of_the_run(method, tmp_path):
    given = [sys.executable, "-m", "alpacafarm_env.benchmarks.train", method, "--quick", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    dry, _ = (
        subprocess.run([*given, *more], env=environment, capture_output=True, text=True, check=True).stdout
        for more in (["--dry-run"], [])
    )
    (timing,) = (tmp_path / "out").rglob("timing.jsonl")
    peak = max(json.loads(line)["peak_gb"] for line in timing.read_text().splitlines())
    assert float(re.search(r"Peak: ([\d.]+) GB", dry)[1]) == pytest.approx(peak, rel=0.1)


SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_on_gpus.sh"
RECORDER = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps(sys.argv[1:]), file=open(os.environ["LOG"], "a"))
"""


def started(tmp_path, *options, **environment):
    """What the script starts: (torchrun's options, the command's options) of each stage."""
    torchrun, log = tmp_path / "torchrun", tmp_path / "log"
    torchrun.write_text(RECORDER)
    torchrun.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), **environment}
    subprocess.run(["bash", SCRIPT, "model", "data", "out", *options], env=variables, check=True)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    module = [call.index("-m") for call in found]
    assert {call[at + 1] for call, at in zip(found, module, strict=True)} == {train.__name__}
    return [(call[:at], train.parse(call[at + 2 :])) for call, at in zip(found, module, strict=True)]


@pytest.mark.parametrize("gpus", ["1", "2", "4", "8"])
def test_each_stage_starts_from_what_the_one_before_leaves(tmp_path, gpus):
    (launch, sft), (_, reward), (_, ppo) = started(tmp_path, GPUS=gpus)
    assert launch == ["--nproc_per_node", gpus, "--standalone"]
    assert [stage.method for stage in (sft, reward, ppo)] == ["sft", "reward_modeling", "ppo"]
    assert {(stage.data, stage.preset, stage.dry_run) for stage in (sft, reward, ppo)} == {
        ("data", "llama_7b_lora", False)
    }
    left = sft.folder / "runs" / "sft-seed-0" / "policy"
    assert sft.policy == "model"
    assert reward.policy == ppo.policy == str(left)
    assert ppo.reward_model == str(reward.folder / "reward_model")


def test_two_machines_meet_at_the_first_one(tmp_path):
    settings = {"GPUS": "8", "NODES": "2", "HEAD": "host", "PRESET": "llama_7b_full"}
    ((launch, stage), *_) = started(tmp_path, **settings, NODE="1")
    options = dict(zip(launch[::2], launch[1::2], strict=True))
    assert options == {
        "--nproc_per_node": "8", "--nnodes": "2", "--node_rank": "1", "--master_addr": "host", "--master_port": "29500",
    }  # fmt: skip
    assert stage.preset == "llama_7b_full"


def test_a_dry_run_asks_for_nothing_that_is_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("--template", "alpaca"), {"DRY_RUN": "1", "STEPS": "7"}
    stages = [stage for _, stage in started(tmp_path, *given[0], **given[1])]
    assert [stage.method for stage in stages] == ["sft", "reward_modeling"]
    (tmp_path / "out" / "reward" / "reward_model").mkdir(parents=True)
    (tmp_path / "log").unlink()
    stages = [stage for _, stage in started(tmp_path, *given[0], **given[1])]
    assert all(stage.dry_run and stage.policy == "model" and stage.template == "alpaca" for stage in stages)
    assert (stages[2].reward_model, stages[2].steps) == ("out/reward/reward_model", 7)
