"""Losses, gradients and advantages of TRL's and verl's group methods, and of TRL's KTO, on ragged batches are ours.

Each is skipped where the library is not installed.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alpacafarm_env.agents import KTOConfig
from alpacafarm_env.agents.group_policy import (
    DrGRPOConfig,
    GroupPolicyConfig,
    GRPOConfig,
    RLOOConfig,
    group_advantages,
    group_sums,
)
from alpacafarm_env.agents.kto import kto_loss
from alpacafarm_env.agents.losses import place_scores, returns_to_go
from alpacafarm_env.agents.rollouts import length_mask, unpad

pytestmark = pytest.mark.filterwarnings("default")  # of other libraries'

LONGEST = 12
MODES: dict[str, tuple[GroupPolicyConfig, dict[str, Any]]] = {
    "grpo": (GRPOConfig(kl_coef=0.0), {"loss_type": "grpo"}),
    "grpo with KL": (GRPOConfig(kl_coef=0.04), {"loss_type": "grpo", "beta": 0.04}),
    "bnpo": (GRPOConfig(kl_coef=0.0, loss_mean="token"), {"loss_type": "bnpo"}),
    "dr_grpo": (DrGRPOConfig(), {"loss_type": "dr_grpo"}),
    "dapo": (
        GRPOConfig(kl_coef=0.1, loss_mean="token", clip_high=0.28),
        {"loss_type": "dapo", "beta": 0.1, "high": 0.28},
    ),
    "gspo": (
        GRPOConfig(kl_coef=0.0, ratio="response_mean", clip=3e-4, clip_high=4e-4),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "low": 3e-4, "high": 4e-4},
    ),
    "gspo with KL": (
        GRPOConfig(kl_coef=0.04, ratio="response_mean", clip=3e-4, clip_high=4e-4),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "low": 3e-4, "high": 4e-4, "beta": 0.04},
    ),
    "two-sided": (GRPOConfig(kl_coef=0.0, dual_clip=1.5), {"loss_type": "grpo", "delta": 1.5}),
    "rloo": (replace(RLOOConfig(), kl_coef=0.0), {}),
}


def theirs(logprobs: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any], **mode: Any) -> torch.Tensor:
    """The loss by the trainer's own method, which is given what it would have computed or drawn."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    trainer = trl.GRPOTrainer if mode else trl.RLOOTrainer
    itself = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=mode.get("delta"), steps_per_generation=1),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        epsilon_low=mode.get("low", 0.2),
        epsilon_high=mode.get("high", 0.2),
        beta=mode.get("beta", 0.0),
        loss_type=mode.get("loss_type"),
        importance_sampling_level=mode.get("importance_sampling_level", "token"),
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
    )
    loss: torch.Tensor = trainer._compute_loss(itself, None, inputs)
    return loss


def drawn_batch(seed: int, spread: float) -> tuple[torch.Tensor, ...]:
    """Lengths and mask of eight responses, their log-probabilities when sampled, by the reference and now; advantages.

    Only the lengths and the mask are no float64; log-probabilities are [8, T].
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (8,), generator=generator)
    mask = length_mask(lengths)
    old, ref, new = (torch.randn(mask.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return (
        lengths,
        mask,
        old - 3,
        old - 3 + 0.3 * ref,
        old - 3 + spread * new,
        torch.randn(8, generator=generator).double(),
    )


def apart_from(
    name: str, config: GroupPolicyConfig, loss_of: Callable[..., torch.Tensor], spread: float = 0.3
) -> float:
    """The largest difference of losses and of gradients in 20 batches."""
    largest = 0.0
    for seed in range(20):
        lengths, mask, old, ref, new, advantages = drawn_batch(seed, spread)
        own, other = unpad(new, lengths).requires_grad_(), new.clone().requires_grad_()
        flat = [unpad(each, lengths) for each in (old, ref, advantages[:, None].expand(mask.shape))]
        loss = group_sums(own, *flat, lengths, config, longest=LONGEST)["loss"]
        loss = loss / (mask.sum() if config.loss_mean == "token" else len(lengths))
        given = loss_of(other, mask, old, ref, advantages)
        torch.autograd.backward([loss, given])
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.abs().max() > 1e-3
        apart = [float((loss - given).detach().abs()), float((own.grad - unpad(other.grad, lengths)).abs().max())]
        largest = max(largest, *apart)
    print(f"{name}: largest difference {largest:.1e}")
    return largest


@pytest.mark.parametrize("name", MODES)
def test_losses_and_gradients_are_trls(name: str) -> None:
    config, mode = MODES[name]

    def loss_of(
        logprobs: torch.Tensor, mask: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        empty = torch.zeros(8, 0, dtype=torch.int64)
        inputs = {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": mask.long(),
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "old_logps": (old * mask).sum(1),
            "ref_per_token_logps": ref,
            "num_items_in_batch": mask.sum(),
        }
        return theirs(logprobs, mask, inputs, **mode)

    assert apart_from(f"TRL, {name}", config, loss_of, 1e-3 if "gspo" in name else 0.3) < 1e-6


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.75)])
def test_ktos_loss_and_gradient_are_trls(weights: tuple[float, float]) -> None:
    """By the trainer's own method, on a model whose log-probabilities are given; in some batches z is 0."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    config, largest, kls = KTOConfig(beta=0.2, good_weight=weights[0], bad_weight=weights[1]), 0.0, []
    for seed in range(20):
        _, mask, _, near, new, draws = drawn_batch(seed, 0.3)
        wide = torch.cat([torch.zeros(8, 1), mask], 1).long()
        own, other = (new.clone().requires_grad_() for _ in range(2))
        unrelated = draws[:4]

        def model(*, labels: torch.Tensor, other: torch.Tensor = other, **_: Any) -> SimpleNamespace:
            shown = other.masked_fill(labels[:, 1:] == -100, 0)
            return SimpleNamespace(log_probs=shown, entropy=0 * shown.detach(), mean_logits=shown.detach())

        good = torch.arange(8) % 3 > 0
        itself = SimpleNamespace(
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
            calculate_KL=True,
            _compute_kl_logps=lambda model, batch, unrelated=unrelated: unrelated,
            aux_loss_enabled=False,
            precompute_ref_logps=True,
            loss_type="kto",
            beta=config.beta,
            desirable_weight=config.good_weight,
            undesirable_weight=config.bad_weight,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
        )
        batch = {
            "input_ids": wide,
            "attention_mask": wide,
            "completion_mask": wide,
            "label": good,
            "ref_logps": (near * mask).sum(1),
            "ref_KL_logps": torch.zeros(4, dtype=torch.float64),
        }
        given = trl.KTOTrainer._compute_loss(itself, model, batch, False)
        kl = max(0.0, float(unrelated.mean()))
        loss = kto_loss(((own - near) * mask).sum(1), good, kl, config).mean()
        torch.autograd.backward([loss, given])
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.abs().max() > 1e-3
        kls.append(kl)
        apart = [float((loss - given).detach().abs()), float((own.grad - other.grad).abs().max())]
        largest = max(largest, *apart)
    print(f"TRL, kto: largest difference {largest:.1e}")
    assert largest < 1e-6
    assert 0 < sum(kl == 0 for kl in kls) < len(kls)


VERL: dict[str, tuple[str, str, GroupPolicyConfig]] = {
    "token-mean": ("vanilla", "token-mean", GRPOConfig(kl_coef=0.0, loss_mean="token", dual_clip=3.0)),
    "clip higher": ("vanilla", "token-mean", GRPOConfig(kl_coef=0.0, loss_mean="token", dual_clip=3.0, clip_high=0.28)),
    "seq-mean-token-mean": ("vanilla", "seq-mean-token-mean", GRPOConfig(kl_coef=0.0, dual_clip=3.0)),
    "seq-mean-token-sum-norm": ("vanilla", "seq-mean-token-sum-norm", DrGRPOConfig(dual_clip=3.0)),
    "gspo": (
        "gspo",
        "seq-mean-token-mean",
        GRPOConfig(kl_coef=0.0, ratio="response_mean", clip=3e-4, clip_high=4e-4),
    ),
}


@pytest.mark.parametrize("name", VERL)
def test_losses_and_gradients_are_verls(name: str) -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    workers = pytest.importorskip("verl.workers.config", reason="verl is not installed")
    kind, mean, config = VERL[name]
    actor = workers.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio=config.clip,
        clip_ratio_low=config.clip,
        clip_ratio_high=config.clip_high or config.clip,
    )
    object.__setattr__(actor, "global_batch_info", {"loss_scale_factor": LONGEST})

    def loss_of(
        logprobs: torch.Tensor, mask: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        wide = advantages[:, None].expand(mask.shape)
        given: torch.Tensor = algorithms.get_policy_loss_fn(kind)(old, logprobs, wide, mask.double(), mean, actor)[0]
        return given

    assert apart_from(f"verl, {name}", config, loss_of, 1e-3 if kind == "gspo" else 0.3) < 1e-6


def test_advantages_are_verls() -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
    kinds = {
        "grpo": (algorithms.compute_grpo_outcome_advantage, GRPOConfig(scale_eps=1e-6), {}),
        "dr_grpo": (
            algorithms.compute_grpo_outcome_advantage,
            DrGRPOConfig(),
            {"norm_adv_by_std_in_grpo": False},
        ),
        "rloo": (algorithms.compute_rloo_outcome_advantage, RLOOConfig(), {}),
    }
    groups = torch.arange(8) // 4
    for seed in range(20):
        lengths, mask, *_, scores = drawn_batch(seed, 0.3)
        rewards = place_scores(scores, mask)
        for name, (theirs, config, options) in kinds.items():
            given, _ = theirs(rewards.clone(), mask.double(), groups.numpy(), **options)
            own = group_advantages(scores, groups, config)[:, None] * mask
            torch.testing.assert_close(own, given, rtol=0, atol=1e-6, msg=name)
        given, _ = algorithms.compute_reinforce_plus_plus_outcome_advantage(
            rewards.clone(), mask.double(), config=SimpleNamespace(gamma=1.0)
        )
        torch.testing.assert_close(returns_to_go(rewards, mask), given, rtol=0, atol=1e-6)
        assert len(lengths) == 8
