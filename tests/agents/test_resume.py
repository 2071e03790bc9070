"""A run that is killed and resumed ends as the run that was not: the same bytes of weights and of metrics.jsonl."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tiny_worlds import Share, load_policy, make_env, small_ppo, start, train_ppo, train_sandbox_ppo

from alpacafarm_env import wrappers as single
from alpacafarm_env.agents.collecting import describe
from alpacafarm_env.agents.ppo import PPO
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.wrappers.vector import SurrogateReward

DEADLINE_S = 300

Job = Callable[[Path, Path, int], None]


def result(out: Path) -> dict[str, bytes]:
    """Everything a finished run leaves that training decides."""
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    files = {str(path.relative_to(out)): path.read_bytes() for path in newest.rglob("*.safetensors")}
    return {**files, "metrics.jsonl": (out / "metrics.jsonl").read_bytes()}


def num_steps(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill_after(job: Job, policy_folder: Path, out: Path, total_steps: int, *, step: int, delay_s: float) -> bool:
    """Start the run, SIGKILL it `delay_s` after `step` is on disk; False if it was done before."""
    process = start(job, policy_folder, out, total_steps)
    deadline = time.monotonic() + DEADLINE_S
    while num_steps(out) < step and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay_s)
    process.kill()  # os.kill would fail where the run has ended
    process.join()
    return process.exitcode == -signal.SIGKILL


def finish(job: Job, policy_folder: Path, out: Path, total_steps: int) -> None:
    process = start(job, policy_folder, out, total_steps)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def test_a_run_that_ends_before_its_kill_is_not_killed(tmp_path: Path) -> None:
    assert not kill_after(print, tmp_path, tmp_path, 1, step=1, delay_s=0.1)


@pytest.mark.parametrize(
    ("job", "num_kills", "total_steps"),
    [
        pytest.param(train_ppo, 2, 5, id="short"),
        pytest.param(train_ppo, 10, 25, id="full", marks=pytest.mark.slow),
        pytest.param(train_sandbox_ppo, 10, 25, id="sandbox", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_if_it_had_not_been(
    policy_folder: Path, tmp_path: Path, job: Job, num_kills: int, total_steps: int
) -> None:
    finish(job, policy_folder, tmp_path / "whole", total_steps)
    rng = random.Random(num_kills)
    steps = sorted(rng.sample(range(total_steps), num_kills))
    killed = [
        kill_after(job, policy_folder, tmp_path / "killed", total_steps, step=step, delay_s=rng.uniform(0, 0.1))
        for step in steps
    ]
    assert sum(killed) >= num_kills - 1  # the last delay may outlive the run
    finish(job, policy_folder, tmp_path / "killed", total_steps)
    assert result(tmp_path / "killed") == result(tmp_path / "whole")
    assert num_steps(tmp_path / "killed") == total_steps
    assert not list((tmp_path / "killed").glob(".checkpoint-*"))


def test_a_damaged_checkpoint_costs_its_steps_but_not_the_result(policy_folder: Path, tmp_path: Path) -> None:
    config = small_ppo(total_steps=4, save_every=2)
    PPO(make_env(), load_policy(policy_folder), config=config, out=tmp_path).learn()
    expected = result(tmp_path)
    weights = tmp_path / "checkpoint-4" / "value.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"checkpoint-4 is damaged: value.safetensors"):
        resumed = PPO(make_env(), load_policy(policy_folder), config=config, out=tmp_path)
    assert [metrics["step"] for metrics in resumed.updates()] == [3, 4]
    assert result(tmp_path) == expected


def test_when_no_checkpoint_is_complete_nothing_is_removed(policy_folder: Path, tmp_path: Path) -> None:
    config = small_ppo(total_steps=1)
    PPO(make_env(), load_policy(policy_folder), config=config, out=tmp_path).learn()
    (tmp_path / "checkpoint-1" / "state.json").unlink()
    with (
        pytest.warns(UserWarning, match="checkpoint-1"),
        pytest.raises(CheckpointError, match="holds checkpoints, but none is complete"),
    ):
        PPO(make_env(), load_policy(policy_folder), config=config, out=tmp_path)
    assert (tmp_path / "checkpoint-1").is_dir()


def test_a_run_that_drew_otherwise_is_not_continued(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1.0 keyed its draws on process and round and did not say so."""
    with monkeypatch.context() as old:
        old.setattr("alpacafarm_env.agents.collecting.DRAWS", {})
        PPO(make_env(), load_policy(policy_folder), config=small_ppo(), out=tmp_path).learn()
    with pytest.raises(CheckpointError, match="draws"):
        PPO(make_env(), load_policy(policy_folder), config=small_ppo(), out=tmp_path)


def test_other_models_and_environments_are_named(
    policy_folder: Path, reward_model_folder: Path, tmp_path: Path
) -> None:
    PPO(make_env(), load_policy(policy_folder), config=small_ppo(), out=tmp_path).learn()

    def refused(field: str, **changes: Any) -> None:
        arguments = {"env": make_env(), "policy": load_policy(policy_folder), "config": small_ppo(), **changes}
        with pytest.raises(CheckpointError, match=rf"Changed: {field}"):
            PPO(**arguments, out=tmp_path)

    other = load_policy(policy_folder)
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1e-3  # the head is not in the value model
    refused("policy_sha256: '.{64}' -> '.{64}'\\.", policy=other)
    refused("value_sha256: '.{64}' -> '.{64}'\\.", value_init=reward_model_folder)
    louder = Share("!")
    louder.name = "louder"
    refused("oracle: 'share' -> 'louder'\\.", env=make_env(oracle=louder))
    refused(r"wrappers: \[\] -> \['SurrogateReward\(louder\)'\]", env=SurrogateReward(make_env(), oracle=louder))
    env = make_env()
    env.dataset.name, env.split = "other", "val"
    refused("dataset: 'tiny' -> 'other'; split: 'unlabeled' -> 'val'", env=env)


def test_an_environment_is_described_by_its_specification() -> None:
    spec = {"reward_model": Path("models/a")}
    batched = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=2, oracle=spec)
    assert describe(batched) == {
        "env": "AlpacaFarm-PPO-v0",
        "num_envs": 2,
        "dataset": "sandbox",
        "split": "unlabeled",
        "oracle": {"reward_model": "models/a"},
        "wrappers": [],
    }
    batched.unwrapped.leave_out([batched.unwrapped.instructions[0].id])  # type: ignore[attr-defined]
    assert describe(batched)["num_drawn"] == len(batched.unwrapped.instructions) - 1  # type: ignore[attr-defined]
    separate = gym.vector.SyncVectorEnv([lambda: single.GoldReward(gym.make("AlpacaFarm-PPO-v0"))] * 2)
    described = describe(separate)
    assert described["dataset"] == "sandbox"
    assert any(wrapper.startswith("GoldReward(gold") for wrapper in described["wrappers"])
