import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_worlds import DEMONSTRATIONS, assert_near, load_policy
from torch import nn

from alpacafarm_env.agents.loop import Loop, Resume, TrainingConfig, epoch_batch, keyed_generator, schedule_factor
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.errors import CheckpointError


def make_loop(
    out: Path | None = None, *, total: int = 4, resume: Resume = "auto", frozen: bool = False, **changes: Any
) -> tuple[nn.Linear, Loop]:
    """A loop over one weight vector that starts at zero."""
    model = nn.Linear(3, 1, bias=False).requires_grad_(not frozen)
    nn.init.zeros_(model.weight)
    config = TrainingConfig(**{"learning_rate": 0.1, **changes})
    nothing = {"inputs": {}, "write": lambda folder: None, "read": lambda folder: None}
    return model, Loop({"model": model}, config=config, total=total, seed=0, out=out, resume=resume, **nothing)


def step_of(model: nn.Linear, loop: Loop) -> Any:
    def step(number: int) -> dict[str, float]:
        rows = torch.randn(5, 3, generator=keyed_generator(0, "rows", number))
        return loop.update([torch.arange(5)], lambda r: {"loss": (model(rows[r]) - 1).square().sum()}, count=5)

    return step


# Schedule and order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "warmup", "total", "factors"),
    [
        ("linear", 0, 4, {0: 1, 1: 0.75, 2: 0.5, 3: 0.25}),  # ends one step above zero
        ("linear", 4, 10, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1, 5: 5 / 6}),  # never zero, and peaks after its steps
        ("cosine", 0, 10, {5: 0.5}),
        ("constant", 0, 10, {9: 1}),
        ("cosine", 0.03, 100, {0: 1 / 4, 3: 1}),  # below one, a share
    ],
)
def test_schedule(kind: str, warmup: float, total: int, factors: dict[int, float]) -> None:
    found = {k: schedule_factor(k, total, warmup=warmup, kind=kind) for k in factors}
    assert found == pytest.approx(factors)


def test_every_epoch_holds_every_item_once_in_a_new_order() -> None:
    epochs = [
        [int(i) for k in range(4) for i in epoch_batch(4 * e + k + 1, num_items=10, batch_size=3, seed=1)]
        for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


# Updates ---------------------------------------------------------------------------------------------------------


def test_gradients_do_not_depend_on_micro_batches(policy_folder: Path) -> None:
    sft = SFT(
        load_policy(policy_folder, max_response_tokens=16), [*DEMONSTRATIONS] * 4, config=SFTConfig(batch_size=16)
    )
    data = sft._data[torch.arange(16)]
    gradients = {}
    for size in (16, 4, 1):
        parts = list(torch.arange(16).split(size))
        sft._loop.accumulate(parts, lambda rows: sft._sums(data[rows]), count=len(data.tokens))
        gradients[size] = {name: p.grad.clone() for name, p in sft._loop.parameters.items() if p.grad is not None}
        sft._loop._optimizer.zero_grad()
    for size in (4, 1):
        assert_near(gradients[size], gradients[16], atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients[16].values()) > 1e-3


def test_the_gradient_is_that_of_the_mean_over_all_items() -> None:
    model, loop = make_loop()
    rows = torch.arange(12.0).reshape(4, 3)
    loop.accumulate([torch.tensor([0]), torch.tensor([1, 2, 3])], lambda r: {"loss": model(rows[r]).sum()}, count=4)
    torch.testing.assert_close(model.weight.grad, rows.mean(0, keepdim=True))


def test_clipping_limits_the_gradient_and_logs_its_norm() -> None:
    model, loop = make_loop(max_grad_norm=0.5, adam_eps=1.0)  # large enough for the first step to show the gradient
    metrics = loop.update([torch.arange(1)], lambda _: {"loss": 30 * model.weight.sum()}, count=1)
    assert metrics["grad_norm"] == pytest.approx(30 * math.sqrt(3))
    gradient = 0.5 / math.sqrt(3)
    assert model.weight.tolist() == [pytest.approx([-0.1 * gradient / (gradient + 1)] * 3, rel=1e-4)]


def test_a_loss_that_is_not_finite_stops_before_the_weights_change() -> None:
    model, loop = make_loop()
    with pytest.raises(FloatingPointError, match=r"step 1.*nan"):
        loop.update([torch.arange(1)], lambda _: {"loss": model.weight.sum() * math.nan}, count=1)
    assert torch.equal(model.weight, torch.zeros(1, 3))


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="model requires a gradient"):
        make_loop(frozen=True)


# The run's folder ------------------------------------------------------------------------------------------------


def test_metrics_have_no_times_and_timing_has(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path, save_every=0)
    yielded = list(loop.run(step_of(model, loop)))
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == yielded
    assert [metrics["step"] for metrics in written] == [1, 2, 3, 4]
    assert [metrics["learning_rate"] for metrics in written] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert set(written[0]) == {"step", "loss", "grad_norm", "learning_rate"}
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [set(row) for row in timing] == [{"step", "seconds"}] * 4


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path, total=7, save_every=2, keep_checkpoints=2)
    list(loop.run(step_of(model, loop)))
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-6", "checkpoint-7"]


def test_metrics_that_are_not_numbers_are_null(tmp_path: Path) -> None:
    _, loop = make_loop(tmp_path, total=1)
    list(loop.run(lambda step: {"loss": math.nan}))
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, loop = make_loop(tmp_path)
    list(loop.run(step_of(model, loop)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_another_config_is_refused_with_the_names_of_its_fields(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path)
    list(loop.run(step_of(model, loop)))
    with pytest.raises(CheckpointError, match=r"Changed: adam_eps: 1e-08 -> 1e-05; learning_rate: 0.1 -> 0.2"):
        make_loop(tmp_path, learning_rate=0.2, adam_eps=1e-5, keep_checkpoints=9, save_every=1)


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path)
    list(loop.run(step_of(model, loop)))
    with pytest.raises(CheckpointError, match="resume='never'"):
        make_loop(tmp_path, resume="never")


def test_edited_metrics_are_noticed(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path)
    list(loop.run(step_of(model, loop)))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has 0 bytes, but had \d+"):
        make_loop(tmp_path)
