"""The launch script: what it starts on 1 to 8 GPUs and on two machines, by the command's own parser."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from alpacafarm_env.benchmarks import train

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
