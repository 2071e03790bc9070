"""The loop, its optimizer and the settings: what a run leaves, refuses and resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_worlds import DEMONSTRATIONS, TEMPLATE, build_llama
from torch import nn

from alpacafarm_env.agents.api_policy import APIPolicyConfig
from alpacafarm_env.agents.best_of_n import BestOfNConfig
from alpacafarm_env.agents.dpo import DPOConfig
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.group_policy import GRPOConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.loop import Loop, Resume, epoch_batch, keyed_generator
from alpacafarm_env.agents.online_dpo import OnlineDPOConfig
from alpacafarm_env.agents.ppo import PPOConfig
from alpacafarm_env.agents.quark import QuarkConfig
from alpacafarm_env.agents.reward_modeling import RewardModelingConfig
from alpacafarm_env.agents.settings import TrainingConfig, schedule_factor
from alpacafarm_env.agents.sft import SFT, BinaryFeedMEConfig, RewardConditioningConfig, SFTConfig
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


def run(model: nn.Linear, loop: Loop) -> Iterator[dict[str, float]]:
    for step in loop:
        rows = torch.randn(5, 3, generator=keyed_generator(0, "rows", step))
        sums = lambda r, rows=rows: {"loss": (model(rows[r]) - 1).square().sum()}
        yield loop.log(loop.update([torch.arange(5)], sums, count=5))


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


def test_a_model_that_cannot_be_checkpointed_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        make_loop(gradient_checkpointing=True)


def test_a_step_without_its_log_is_an_error() -> None:
    _, loop = make_loop()
    with pytest.raises(RuntimeError, match=r"step 1.*Loop\.log"):
        for _ in loop:
            pass


def test_metrics_have_no_times_and_timing_has(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path, save_every=0)
    yielded = list(run(model, loop))
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == yielded
    assert [metrics["step"] for metrics in written] == [1, 2, 3, 4]
    assert [metrics["learning_rate"] for metrics in written] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert set(written[0]) == {"step", "loss", "grad_norm", "learning_rate"}
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [set(row) for row in timing] == [{"step", "seconds", "update", "peak_gb"}] * 4


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path, total=7, save_every=2, keep_checkpoints=2)
    list(run(model, loop))
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-6", "checkpoint-7"]


def test_metrics_that_are_not_numbers_are_null(tmp_path: Path) -> None:
    _, loop = make_loop(tmp_path, total=1)
    for _ in loop:
        loop.log({"loss": math.nan})
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()


def test_another_config_is_refused_with_the_names_of_its_fields(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path)
    list(run(model, loop))
    with pytest.raises(CheckpointError, match=r"Changed: adam_eps: 1e-08 -> 1e-05; learning_rate: 0.1 -> 0.2"):
        make_loop(tmp_path, learning_rate=0.2, adam_eps=1e-5, keep_checkpoints=9, save_every=1, micro_batch_tokens=9)


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path)
    list(run(model, loop))
    with pytest.raises(CheckpointError, match="resume='never'"):
        make_loop(tmp_path, resume="never")


def test_edited_metrics_are_noticed(tmp_path: Path) -> None:
    model, loop = make_loop(tmp_path)
    list(run(model, loop))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has 0 bytes, but had \d+"):
        make_loop(tmp_path)


STEPS = 60


def train(tokenizer, dtype, out=None, *, stop=STEPS, **settings):
    model = build_llama(len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)  # to the sizes of real models' weights, 0.02
    policy = LanguageModel(model.to(torch.bfloat16).to(dtype), tokenizer, TEMPLATE)
    start = weights(policy)
    config = SFTConfig(
        learning_rate=3e-6, schedule="constant", epochs=STEPS, batch_size=len(DEMONSTRATIONS), **settings
    )
    agent = SFT(policy, DEMONSTRATIONS, config=config, out=out)
    assert agent.num_steps == STEPS
    for metrics in agent.updates():
        if metrics["step"] == stop:
            break
    return agent, weights(policy) - start


def weights(policy):
    return torch.cat([parameter.detach().float().flatten() for parameter in policy.model.parameters()])


def test_many_small_updates_in_bfloat16_move_the_weights_as_in_float32(tokenizer):
    (_, exact), (agent, moved) = (train(tokenizer, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in agent.policy.model.parameters()} == {torch.bfloat16}
    masters = torch.cat([master.detach().flatten() for master in agent._loop.parameters.values()])
    far = masters - (weights(agent.policy) - moved)  # from the same start, before rounding
    assert torch.corrcoef(torch.stack([far, exact]))[0, 1] > 0.95
    along = (moved @ exact) / (exact @ exact)  # of the weights themselves, each rounded to its nearest neighbour
    assert 0.9 < along < 1.1


def test_moments_and_masters_are_float32_and_of_float32_weights_there_are_none(tokenizer, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        agent, _ = train(tokenizer, dtype, tmp_path / str(dtype), stop=2, save_every=2)
        folder = tmp_path / str(dtype) / "checkpoint-2"
        assert {value.dtype for value in load_file(folder / "optimizer.safetensors").values()} == {torch.float32}
        assert (folder / "masters.safetensors").exists() == (dtype == torch.bfloat16)
        if dtype == torch.float32:
            assert all(
                p is agent._loop.parameters[f"policy.{name}"] for name, p in agent.policy.model.named_parameters()
            )


def test_a_resumed_run_in_bfloat16_is_the_uninterrupted_one(tokenizer, tmp_path: Path):
    whole, _ = train(tokenizer, torch.bfloat16, tmp_path / "whole", stop=9, save_every=3)
    train(tokenizer, torch.bfloat16, tmp_path / "cut", stop=4, save_every=3)
    again, _ = train(tokenizer, torch.bfloat16, tmp_path / "cut", stop=9, save_every=3)
    for name, master in whole._loop.parameters.items():
        assert torch.equal(again._loop.parameters[name], master), name
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert json.loads(lines[0].splitlines()[-1])["step"] == 9


def test_weights_that_are_read_in_between_are_trained_on(tokenizer, tmp_path: Path):
    agent, _ = train(tokenizer, torch.bfloat16, stop=1)
    other = LanguageModel(build_llama(len(tokenizer), seed=1).to(torch.bfloat16), tokenizer, TEMPLATE)
    other.save(tmp_path)
    agent.load(tmp_path)
    next(agent.updates())
    torch.testing.assert_close(weights(agent.policy), weights(other), atol=1e-3, rtol=1e-2)


INF, NAN = math.inf, math.nan
BAD: dict[Any, dict[str, tuple[object, ...]]] = {
    TrainingConfig: {
        "learning_rate": (0.0, NAN),
        "max_grad_norm": (-1.0,),
        "micro_batch_tokens": (0,),
        "keep_checkpoints": (0,),
        "save_every": ("2", -1),
        "schedule": ("lienar",),
        "precision": ("fp16",),
    },
    PPOConfig: {
        "total_steps": (2.5, 0),
        "num_epochs": (True,),
        "minibatch_size": (100,),  # of 512
        "kl_coef": (INF, -0.1),
        "kl_estimator": ("k33",),
        "target_kl": ("6", 0.0),
        "gamma": (None, 1.1),
    },
    QuarkConfig: {
        "num_quantiles": (0, 513),  # of 512
        "best_quantile_only": ("yes", 1),
        "kl_coef": (-0.1,),
    },
    DPOConfig: {"beta": (0.0,), "label_smoothing": (0.5,)},
    OnlineDPOConfig: {"rollout_batch_size": (15,), "minibatch_size": (7,)},
    GRPOConfig: {"num_generations": (3, 1), "minibatch_size": (7,), "kl_estimator": ("k4",)},
    BestOfNConfig: {"num_samples": (0,), "temperature": (0.0, NAN)},
    ExpertIterationConfig: {"num_samples": (0,), "learning_rate": (1e-3,)},  # it goes into sft=
    RewardModelingConfig: {"max_length": (1,), "eval_every": (-1,)},
    APIPolicyConfig: {"top_p": (0.0, 1.1), "max_tokens_field": ("n_predict",), "seed": ("1",), "deadline_s": (INF,)},
}


@pytest.mark.parametrize(("config", "field"), [(config, field) for config, bad in BAD.items() for field in bad])
def test_a_bad_setting_is_named(config: Any, field: str) -> None:
    for value in BAD[config][field]:
        with pytest.raises(ValueError) as told:  # noqa: PT011 - which one is asserted below
            config(**{field: value})
        assert repr(value) in str(told.value)
        assert field in str(told.value) or field == "kl_estimator"


@pytest.mark.parametrize("config", [*BAD, SFTConfig, BinaryFeedMEConfig, RewardConditioningConfig])
def test_presets_are_settings_of_their_own_class(config: Any) -> None:
    for preset in ("paper", "sandbox") if config is not TrainingConfig else ():
        assert type(getattr(config, preset)()) is config
