"""The golden vectors of AlpacaFarm's released PPO code: clamped KL, unmasked whitening, whole-rollout normalisation."""

import pytest
import torch
from torch import Tensor

from alpacafarm_env.agents.losses import gae, masked_moments, missing_eos_penalty, shape_rewards, stops_after, whiten


def close(actual: Tensor, expected: object, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


@pytest.fixture
def alpaca_farm() -> dict[str, Tensor]:
    """Eight rows of three slots; the even rows end with a pad, where both logprobs are 0."""
    row, slot = torch.arange(8.0)[:, None], torch.arange(3.0)[None]
    pad = (row % 2 == 0) & (slot == 2)
    return {
        "logprobs": -(1 + 0.1 * row + 0.2 * slot).masked_fill(pad, 0),
        "ref_logprobs": -(1.3 + 0.05 * row + 0.25 * slot).masked_fill(pad, 0),
        "scores": torch.linspace(-1, 1, 8),
        "values": 0.1 * row - 0.05 * slot,
        "mask": ~pad,
    }


def alpaca_farm_rewards(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    inputs = (batch[name] for name in ("scores", "logprobs", "ref_logprobs", "mask"))
    return shape_rewards(*inputs, kl_coef=0.02, kind="clamped_k1")


def test_alpaca_farm_shaped_rewards(alpaca_farm: dict[str, Tensor]) -> None:
    rewards, kl = alpaca_farm_rewards(alpaca_farm)
    close(kl[[0, 7]], [[0.3, 0.35, 0], [0, 0, 0.05]])
    close(rewards[[0, 7]], [[-0.006, -1.007, 0], [0, 0, 0.999]])
    mean, variance = masked_moments(rewards)  # no mask: pads count, as in the released code
    close(mean, -0.0027083, atol=1e-7)
    close(variance.sqrt(), 0.3792299, atol=1e-7)


def test_alpaca_farm_whitened_rewards_returns_and_advantages(alpaca_farm: dict[str, Tensor]) -> None:
    rewards = whiten(alpaca_farm_rewards(alpaca_farm)[0], shift_mean=False)
    close(rewards[[0, 7]], [[-0.0113882, -2.6509480, 0.0044333], [0.0044333, 0.0044333, 2.6387193]])
    advantages, returns = gae(rewards, alpaca_farm["values"], gamma=1.0, lam=1.0)
    close(returns[[0, 7]], [[-2.6579030, -2.6465147, 0.0044333], [2.6475861, 2.6431527, 2.6387193]])
    expected = [[-1.7503567, -1.7058785, 0.2510650], [1.5865020, 1.6195168, 1.6525316]]
    close(whiten(advantages)[[0, 7]], expected)


def test_alpaca_farm_discounted_without_reward_whitening(alpaca_farm: dict[str, Tensor]) -> None:
    rewards, _ = alpaca_farm_rewards(alpaca_farm)
    advantages, returns = gae(rewards, alpaca_farm["values"], gamma=0.99, lam=0.95)
    close(returns[7], [0.9437636, 0.9692595, 0.999])
    close(whiten(advantages)[7], [1.3161868, 1.5092179, 1.7131015])


def test_alpaca_farm_stop_token_penalty() -> None:
    tokens, scores = torch.tensor([[1, 2, 9], [9, 1, 1], [1, 1, 1]]), torch.tensor([1.0, 2.0, 3.0])
    assert missing_eos_penalty(scores, stops_after(tokens, {9}), value=-1).tolist() == [1, 2, -1]
    assert missing_eos_penalty(scores, stops_after(tokens, {9}, index=1), value=-1).tolist() == [1, -1, -1]
    assert stops_after(tokens, [2, 9]).tolist() == [True, True, False]  # any of them stops
