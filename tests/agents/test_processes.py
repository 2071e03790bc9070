"""Processes that train together: joined, told apart, sharded, and no two runs in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from agent_worlds import VARIANTS, evaluate, newest, train_bfloat16, train_until, train_variants
from safetensors.torch import load_file
from test_contract import check_same_training
from tiny_worlds import DEMONSTRATIONS, LORA, assert_near, build_llama, finish, load_policy, start_world

from alpacafarm_env.agents import checkpoints, policy_agent
from alpacafarm_env.agents.processes import Processes, float32_matmuls, join
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.agents.sharding import Shards, chunk, local, make_shards
from alpacafarm_env.errors import CheckpointError, WorldError


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
    for precision in ("bfloat16", "float32", "bfloat16"):
        with Processes(torch.device("cpu"), precision=precision).autocast():  # type: ignore[arg-type]
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
    with pytest.raises(CheckpointError, match=r"close\(\).*updates\(\)"):
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
        patched.setattr(policy_agent, "make_bar", lambda *_, **__: bar)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last traceback
            agent.learn()
    assert agent.learn()["step"] == 3
    assert kept.value.__traceback__ is not None


def test_an_adapter_is_not_sharded(policy_folder: Path) -> None:
    config = SFTConfig(sharding="full")
    with pytest.raises(ValueError, match=r"LoRA.*policy"):
        SFT(load_policy(policy_folder, lora=LORA, max_response_tokens=16), DEMONSTRATIONS, config=config)


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_next_agent_trains_what_was_read_into_a_sharded_model() -> None:
    """As a round of expert iteration does whose checkpoint is resumed."""
    model = build_llama(32)
    Shards([model])
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    later = Shards([model])
    with later.split():
        assert all(bool((local(weight) == 0.5).all()) for weight in model.parameters())
    assert all(bool((weight == 0.5).all()) for weight in model.parameters())
    with pytest.raises(ValueError, match=r"'full'.*'none'.*policy"):
        make_shards({"policy": model}, [], sharding="none", count=2)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_any_rows_are_read_from_any_number_of_files(tmp_path: Path, count: int) -> None:
    whole = {"a:x": torch.randn(5, 3), "b:x": torch.randn(1), "a:step": torch.tensor(7.0)}
    for rank in range(count):
        own = {key: value[chunk(len(value), rank, count)] if value.ndim else value for key, value in whole.items()}
        checkpoints.save_rows(tmp_path, f"moments-{rank + 1:05}-of-{count:05}", own)
    found = dict(checkpoints.load_rows(tmp_path, "moments"))
    assert found.keys() == whole.keys()
    for key, value in whole.items():
        for begin in range(len(value) if value.ndim else 1):
            for end in range(begin, len(value) + 1 if value.ndim else 1):
                rows = slice(begin, end)
                assert torch.equal(found[key](rows), value[rows] if value.ndim else value)


@pytest.mark.slow
def test_variants_train_as_one_process_does(policy_folder: Path, tmp_path: Path) -> None:
    """Tied embeddings with control tokens, a process without scores, checkpointing."""
    started = start_world(train_variants, policy_folder, tmp_path / "2", size=2)
    train_variants(policy_folder, tmp_path / "1")
    finish(started)
    for name in VARIANTS:
        check_same_training(tmp_path / "1" / name, tmp_path / "2" / name, atol=1e-6)


@pytest.mark.slow
def test_processes_evaluate_in_different_numbers_of_passes(policy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    started = start_world(evaluate, policy_folder, tmp_path / "two", size=2)
    (tmp_path / "one").mkdir()
    evaluate(policy_folder, tmp_path / "one")
    finish(started)
    one, first, second = (load_file(tmp_path / f"{name}.safetensors")["kl"] for name in ("one/0", "two/0", "two/1"))
    torch.testing.assert_close(first, one[::2], rtol=0, atol=1e-5)
    torch.testing.assert_close(second, one[1::2], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_sharded_otherwise(policy_folder: Path, tmp_path: Path) -> None:
    train_until(policy_folder, tmp_path / "straight", 4, "none")
    mixed = tmp_path / "mixed"
    finish(start_world(train_until, policy_folder, mixed, 1, "full", size=2))
    assert len(list(newest(mixed).glob("optimizer-*"))) == 2
    train_until(policy_folder, mixed, 2, "none")
    finish(start_world(train_until, policy_folder, mixed, 3, "full", size=3))
    finish(start_world(train_until, policy_folder, mixed, 4, "none", size=2))
    check_same_training(tmp_path / "straight", mixed, atol=1e-6)
    moments = [dict(read_all(newest(run), "optimizer")) for run in (mixed, tmp_path / "straight")]
    assert_near(*moments, atol=1e-6)


@pytest.mark.slow
def test_small_updates_of_bfloat16_shards_are_kept(policy_folder: Path, tmp_path: Path) -> None:
    """They are too small for the weights; the float32 masters move as those of one process do."""
    finish(start_world(train_bfloat16, policy_folder, tmp_path / "2", size=2))
    train_bfloat16(policy_folder, tmp_path / "1")
    before = dict(read_all(tmp_path / "1" / "checkpoint-1", "masters"))
    two, one = (dict(read_all(newest(tmp_path / run), "masters")) for run in "21")
    moved = torch.cat([(one[name] - before[name]).reshape(-1) for name in one])
    apart = torch.cat([(one[name] - two[name]).reshape(-1) for name in one])
    assert moved.norm() > 0
    assert apart.norm() < 0.1 * moved.norm()
    lines = [json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


def read_all(folder: Path, name: str) -> list[tuple[str, torch.Tensor]]:
    return [(key, rows(slice(None))) for key, rows in checkpoints.load_rows(folder, name)]
