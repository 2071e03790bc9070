"""Processes that torchrun starts end well, and a folder is written by one run at a time; see also test_contract.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from tiny_worlds import DEMONSTRATIONS, load_policy

from alpacafarm_env.agents import tracking
from alpacafarm_env.agents.processes import Processes, float32_matmuls, join
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.errors import CheckpointError, WorldError

MEET = "from alpacafarm_env.agents.processes import Processes\nProcesses().together(lambda: None)\n"


def test_a_world_ends_well_as_soon_as_its_work_is_done(tmp_path: Path) -> None:
    """Two of five worlds aborted at their exit while threads of gloo were left to the interpreter's end."""
    (tmp_path / "meet.py").write_text(MEET)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, *torchrun, tmp_path / "meet.py"], env=environment, timeout=300, check=True)


def test_a_process_that_was_not_joined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    join()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldError, match="WORLD_SIZE"):
        Processes(torch.device("cpu"))


@pytest.mark.parametrize(("device", "tf32"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_tf32_on_gpus_within_a_block(device: str, tf32: bool) -> None:
    def fail() -> None:
        with float32_matmuls(torch.device(device), tf32=tf32):
            found.append(torch.get_float32_matmul_precision())
            raise KeyError

    found: list[str] = []
    with pytest.raises(KeyError):
        fail()
    assert found == ["high" if (device, tf32) == ("cuda", True) else "highest"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_two_precisions_live_in_one_process() -> None:
    found = []
    for precision in ("bf16", "no", "bf16"):
        with Processes(torch.device("cpu"), mixed_precision=precision).autocast():  # type: ignore[arg-type]
            found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    assert found == [torch.bfloat16, torch.float32, torch.bfloat16]


def sft(policy_folder: Path, out: Path) -> SFT:
    return SFT(
        load_policy(policy_folder, max_response_tokens=16),
        DEMONSTRATIONS,
        config=SFTConfig(batch_size=5, epochs=3),
        out=out,
    )


def test_a_folder_is_written_by_one_run_at_a_time(policy_folder: Path, tmp_path: Path) -> None:
    first, idle = sft(policy_folder, tmp_path / "run"), sft(policy_folder, tmp_path / "run")
    updates = first.updates()
    next(updates)
    with pytest.raises(CheckpointError, match="is being written"):
        sft(policy_folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="is being written"):
        idle.learn()
    assert [metrics["step"] for metrics in updates] == [2, 3]
    assert sft(policy_folder, tmp_path / "run").learn() == {}  # at its end the folder is free
    with pytest.raises(CheckpointError, match="another one has written"):
        idle.learn()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_an_agent_whose_updates_were_left_says_to_close_them(policy_folder: Path, tmp_path: Path) -> None:
    agent = sft(policy_folder, tmp_path)
    updates = agent.updates()
    next(updates)
    with pytest.raises(CheckpointError, match=r"this process: close\(\).*updates\(\)"):
        agent.learn()
    updates.close()  # type: ignore[attr-defined]
    assert agent.learn()["step"] == 3


def test_after_an_interrupt_the_same_agent_learns_on(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = sft(policy_folder, tmp_path)
    with monkeypatch.context() as patched:
        bar = MagicMock()
        bar.__enter__.return_value.update.side_effect = KeyboardInterrupt
        patched.setattr(tracking, "make_bar", lambda *_, **__: bar)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last traceback
            agent.learn()
    assert agent.learn()["step"] == 3
    assert kept.value.__traceback__ is not None


def test_a_run_that_is_left_lets_its_folder_go(policy_folder: Path, tmp_path: Path) -> None:
    first = sft(policy_folder, tmp_path)
    for _ in first.updates():
        break
    assert sft(policy_folder, tmp_path).learn()["step"] == 3
