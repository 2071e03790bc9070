"""Models in shards train as whole ones do; a run may go on with other processes, or whole; see test_contract.py too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shard_jobs import VARIANTS, evaluate, newest, train_bfloat16, train_until, train_variants
from test_contract import check_same_training
from tiny_models import LORA, build_llama
from tiny_worlds import DEMONSTRATIONS, assert_near, finish, load_policy, start_world

from alpacafarm_env.agents import checkpoints
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.agents.sharding import Shards, chunk, local, make_shards


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
    """Tied embeddings with control tokens, a value head on the policy, a process without scores, checkpointing."""
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
