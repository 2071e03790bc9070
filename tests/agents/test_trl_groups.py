"""Losses and gradients of TRL's group methods on ragged batches are ours. Skipped where TRL is not installed."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alpacafarm_env.agents.group_policy import DrGRPOConfig, GroupPolicyConfig, GRPOConfig, RLOOConfig, group_sums
from alpacafarm_env.agents.rollouts import length_mask, unpad

trl = pytest.importorskip("trl", reason="TRL is not installed")
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


@pytest.mark.parametrize("name", MODES)
def test_losses_and_gradients_are_ours(name: str) -> None:
    config, mode = MODES[name]
    largest = 0.0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LONGEST + 1, (8,), generator=generator)
        mask = length_mask(lengths)

        def drawn(scale: float, like: torch.Tensor = mask, generator: torch.Generator = generator) -> torch.Tensor:
            return scale * torch.randn(like.shape, generator=generator, dtype=torch.float64)

        old = drawn(1) - 3
        ref, new, advantages = old + drawn(0.3), old + drawn(0.3 if "gspo" not in name else 1e-3), drawn(1)[:, 0]
        own, other = unpad(new, lengths).requires_grad_(), new.clone().requires_grad_()
        flat = [unpad(each, lengths) for each in (old, ref, advantages[:, None].expand(mask.shape))]
        loss = group_sums(own, *flat, lengths, config, longest=LONGEST)["loss"]
        loss = loss / (mask.sum() if config.loss_mean == "token" else len(lengths))
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
        given = theirs(other, mask, inputs, **mode)
        torch.autograd.backward([loss, given])
        assert own.grad is not None
        assert other.grad is not None
        apart = [float((loss - given).detach().abs()), float((own.grad - unpad(other.grad, lengths)).abs().max())]
        assert own.grad.abs().max() > 1e-3
        largest = max(largest, *apart)
    print(f"{name}: largest difference from TRL {trl.__version__}: {largest:.1e}")
    assert largest < 1e-6
