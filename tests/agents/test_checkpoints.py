"""Checkpoints are whole or not there; a run that is killed ends as if it had not been."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from tiny_worlds import Share, load_policy, make_env, small_ppo, start, train_ppo
from torch import nn

from alpacafarm_env.agents import checkpoints
from alpacafarm_env.agents.optimizer import Optimizer
from alpacafarm_env.agents.ppo import PPO
from alpacafarm_env.agents.processes import Processes
from alpacafarm_env.agents.settings import TrainingConfig
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.wrappers.vector import SurrogateReward


def write(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "weights").write_bytes(b"12345678")
    (folder / "state.json").write_text('{"step": 1}')


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run with two complete checkpoints."""
    for step in (5, 10):
        checkpoints.publish(tmp_path / f"checkpoint-{step}", write, Processes())
    return tmp_path


def test_a_published_checkpoint_is_complete_and_leaves_no_draft(out: Path) -> None:
    checkpoints.check(out / "checkpoint-10")
    assert names(out) == ["checkpoint-10", "checkpoint-5"]
    assert checkpoints.newest(out) == out / "checkpoint-10"
    for empty in (out / "none", out / "checkpoint-5"):
        assert checkpoints.newest(empty) is None


def test_a_fingerprint_tells_names_types_shapes_and_bits_apart() -> None:
    bits = torch.tensor([[0.0, 1.0]])
    variants = [
        {"a": bits},
        {"b": bits},
        {"a": bits.view(torch.int32)},
        {"a": bits.T},
        {"a": -bits},
        {"a": bits.bfloat16()},
        {"a": torch.tensor(1.0)},
        {},
    ]
    assert len({checkpoints.fingerprint(variant.items()) for variant in variants}) == len(variants)
    assert checkpoints.fingerprint({"a": bits.T}.items()) == checkpoints.fingerprint({"a": bits.T.clone()}.items())


def test_adapters_count_as_a_starting_point_once_they_do_something() -> None:
    def fingerprint(a: float, b: float, weight: float = 1.0) -> str:
        model = nn.ParameterDict({"weight": torch.tensor([float(weight)])})
        model.update({"lora_A": torch.tensor([float(a)]), "lora_B": torch.tensor([float(b)])})
        return checkpoints.starting_point(model)

    assert fingerprint(1, 0) == fingerprint(2, 0) != fingerprint(1, 0, weight=2)
    assert len({fingerprint(1, 0), fingerprint(1, 1), fingerprint(2, 1)}) == 3


def cut(content: bytes) -> bytes:
    return content[:-2]


def flip(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


NO_MANIFEST = (b"[]", b"null", b"{}", b'{"files": []}', b'{"files": null}', b'"x"', b"\xff")


@pytest.mark.parametrize("name", ["policy/weights", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, cut, None, b""])
def test_damage_to_any_file_is_found_and_the_one_before_is_taken(out: Path, name: str, damage: Any) -> None:
    path = out / "checkpoint-10" / name
    contents = [damage(path.read_bytes()) if callable(damage) else damage]
    for content in [*contents, *(NO_MANIFEST if name == "manifest.json" and not damage else ())]:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CheckpointError, match="checkpoint-10"):
            checkpoints.check(out / "checkpoint-10")
        with pytest.warns(UserWarning, match="checkpoint-10"):
            assert checkpoints.newest(out) == out / "checkpoint-5"


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    Exception("No space left on device (os error 28)"),  # as tokenizers has it
]


@pytest.mark.parametrize("error", [*FULL, KeyError("policy")], ids=lambda error: type(error).__name__)
def test_a_full_disk_is_one_error_and_leaves_the_older_checkpoint_and_no_draft(out: Path, error: Exception) -> None:
    """And a mistake in writing is not taken for a full disk."""

    def fail(folder: Path) -> None:
        write(folder)
        raise error

    full = error in FULL
    with pytest.raises(CheckpointError if full else KeyError, match=r"checkpoint-15.*errno 28" if full else "policy"):
        checkpoints.publish(out / "checkpoint-15", fail, Processes())
    assert names(out) == ["checkpoint-10", "checkpoint-5"]
    assert checkpoints.newest(out) == out / "checkpoint-10"


def test_what_is_not_needed_is_removed(out: Path) -> None:
    checkpoints.publish(out / "checkpoint-100", write, Processes())
    checkpoints.prune(out, keep=2)
    assert sorted(checkpoints.steps(out)) == [10, 100]  # the newest by number
    (out / ".checkpoint-15.123.tmp").mkdir()  # a draft of a killed process
    checkpoints.remove_leftovers(out, step=10)
    assert names(out) == ["checkpoint-10"]


def trained(steps: int, *, fused: bool | None = None) -> tuple[dict[str, nn.Parameter], Optimizer]:
    parameters = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2, 2))}
    optimizer = Optimizer(parameters, TrainingConfig(learning_rate=0.1))
    optimizer._adam = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.0, fused=fused)
    train(parameters, optimizer, steps)
    return parameters, optimizer


def train(parameters: dict[str, nn.Parameter], optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        sum((p**3).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
        optimizer.step(0.1)


@pytest.mark.parametrize(("before", "after"), [(None, None), (True, False), (False, True)])
def test_an_optimizer_goes_on_from_its_saved_state(before: bool | None, after: bool | None, tmp_path: Path) -> None:
    """To the bit, and where one of them is fused up to rounding."""
    whole, _ = trained(6)
    parameters, optimizer = trained(3, fused=before)
    optimizer.save(tmp_path, is_main=True)
    resumed, other = trained(0, fused=after)
    for name, parameter in parameters.items():
        resumed[name].data.copy_(parameter.data)
    other.load(tmp_path)
    train(resumed, other, 3)
    for name in whole:
        torch.testing.assert_close(resumed[name], whole[name], atol=0 if before is None else 1e-6, rtol=0)
    with pytest.raises(CheckpointError, match="other parameters"):
        Optimizer({"a": parameters["a"]}, TrainingConfig()).load(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Expected the weights .*model.safetensors"):
        checkpoints.load_weights(tmp_path, nn.Linear(2, 2))
    save_model(nn.Linear(3, 3), str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*mismatch"):
        checkpoints.load_weights(tmp_path, nn.Linear(2, 2))


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o000, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_as_readable_as_the_umask_permits(llama, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        llama.save(tmp_path / "saved")
    finally:
        os.umask(before)
    files = list((tmp_path / "saved").iterdir())
    assert "model.safetensors" in [path.name for path in files]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}


DEADLINE_S = 300


def result(out: Path) -> dict[str, bytes]:
    """Everything a finished run leaves that training decides."""
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    files = {str(path.relative_to(out)): path.read_bytes() for path in newest.rglob("*.safetensors")}
    return {**files, "metrics.jsonl": (out / "metrics.jsonl").read_bytes()}


def num_steps(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill_after(policy_folder: Path, out: Path, total_steps: int, *, step: int, delay_s: float) -> bool:
    """Start the run, SIGKILL it `delay_s` after `step` is on disk; False if it was done before."""
    process = start(train_ppo, policy_folder, out, total_steps)
    deadline = time.monotonic() + DEADLINE_S
    while num_steps(out) < step and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay_s)
    process.kill()  # os.kill would fail where the run has ended
    process.join()
    return process.exitcode == -signal.SIGKILL


def finish(policy_folder: Path, out: Path, total_steps: int) -> None:
    process = start(train_ppo, policy_folder, out, total_steps)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


@pytest.mark.parametrize(("num_kills", "total_steps"), [(2, 5), pytest.param(10, 25, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_if_it_had_not_been(
    policy_folder: Path, tmp_path: Path, num_kills: int, total_steps: int
) -> None:
    finish(policy_folder, tmp_path / "whole", total_steps)
    rng = random.Random(num_kills)
    steps = sorted(rng.sample(range(total_steps), num_kills))
    killed = [
        kill_after(policy_folder, tmp_path / "killed", total_steps, step=step, delay_s=rng.uniform(0, 0.1))
        for step in steps
    ]
    assert sum(killed) >= num_kills - 1  # the last delay may outlive the run
    finish(policy_folder, tmp_path / "killed", total_steps)
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
