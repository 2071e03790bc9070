"""Model folders: the same bytes wherever and however the model was loaded, readable by others."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from alpacafarm_env.agents import checkpoints
from alpacafarm_env.agents.optimizer import Optimizer
from alpacafarm_env.agents.settings import TrainingConfig
from alpacafarm_env.errors import CheckpointError


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
        checkpoints.publish(tmp_path / f"checkpoint-{step}", write)
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


def test_a_file_that_was_added_is_found(out: Path) -> None:
    (out / "checkpoint-10" / "extra").touch()
    with pytest.raises(CheckpointError, match="extra"):
        checkpoints.check(out / "checkpoint-10")


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
        checkpoints.publish(out / "checkpoint-15", fail)
    assert names(out) == ["checkpoint-10", "checkpoint-5"]
    assert checkpoints.newest(out) == out / "checkpoint-10"


def test_what_is_not_needed_is_removed(out: Path) -> None:
    checkpoints.publish(out / "checkpoint-100", write)
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


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_counts_where_its_parameter_is(fused: bool, tmp_path: Path) -> None:
    parameters, optimizer = trained(3)
    optimizer.save(tmp_path, is_main=True)
    optimizer.parameters = {name: nn.Parameter(parameter.to("meta")) for name, parameter in parameters.items()}
    optimizer._adam.defaults["fused"] = fused
    optimizer._adam.state.clear()
    optimizer.load(tmp_path)
    assert {str(state["step"].device) for state in optimizer._adam.state.values()} == {"meta" if fused else "cpu"}


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Expected the weights .*model.safetensors"):
        checkpoints.load_weights(tmp_path, nn.Linear(2, 2))
    save_model(nn.Linear(3, 3), str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*mismatch"):
        checkpoints.load_weights(tmp_path, nn.Linear(2, 2))


ROOT = Path(__file__).resolve().parents[2]


def contents(folder):
    """But the model card, which says where the model comes from."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


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
