"""Group policy gradients: losses and advantages by other people's numbers, and what each method leaves out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_worlds import ASCII, Picky, Share, load_policy, make_env

from alpacafarm_env.agents.group_policy import (
    DAPOConfig,
    DrGRPOConfig,
    GroupPolicy,
    GroupPolicyConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    group_advantages,
    group_loss,
    group_sums,
)
from alpacafarm_env.agents.losses import equal_groups, gae, place_scores, returns_to_go
from alpacafarm_env.agents.rollouts import length_mask

METHODS = (GRPOConfig, DrGRPOConfig, DAPOConfig, GSPOConfig, RLOOConfig, ReinforcePPConfig)
LENGTHS = torch.tensor([3, 2, 1, 3])
RATIOS = torch.tensor([1.1, 0.7, 1.5, 0.9, 1.3, 1.25, 1.0, 1.4, 0.5], dtype=torch.float64)


def loss_of(config: GroupPolicyConfig, rewards: list[float], longest: int = 4) -> float:
    """The loss of the golden vector's ratios."""
    scores = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(scores, torch.zeros(4), config).repeat_interleave(LENGTHS)
    old = torch.zeros_like(RATIOS)
    sums = group_sums(RATIOS.log(), old, old, advantages, LENGTHS, replace(config, kl_coef=0.0), longest=longest)
    return float(sums["loss"]) / (len(RATIOS) if config.loss_mean == "token" else len(LENGTHS))


@pytest.mark.parametrize(
    ("config", "rewards", "expected"),
    [
        (GRPOConfig(), [6, 3, 2, 1], 0.04436016),
        (GRPOConfig(loss_mean="token"), [6, 3, 2, 1], -0.06943329),
        (DrGRPOConfig(), [6, 3, 2, 1], -0.084375),
        (DAPOConfig(), [6, 3, 2, 1], -0.08177699),
        (GSPOConfig(), [6, 3, 2, 1], 0.02872224),
        (RLOOConfig(), [6, 3, 2, 1], -0.205),
        (GRPOConfig(loss_mean="token"), [1, 2, 3, 6], 0.04628886),
        (GRPOConfig(loss_mean="token", scale_eps=1e-6, dual_clip=3.0), [1, 2, 3, 6], 0.04629098),
    ],
)
def test_losses_are_those_of_trl_and_verl(config: GroupPolicyConfig, rewards: list[float], expected: float) -> None:
    """TRL 1.16.0's `_compute_loss`; the last one is verl's token mean."""
    assert loss_of(config, rewards) == pytest.approx(expected, abs=2e-8)


def test_advantages_are_those_of_trl_verl_and_skyrl() -> None:
    scores = torch.tensor([6.0, 3, 2, 1], dtype=torch.float64)
    others = group_advantages(scores, torch.full((4,), 7), RLOOConfig())
    torch.testing.assert_close(others, torch.tensor([4, 0, -4 / 3, -8 / 3], dtype=torch.float64))
    # What SkyRL's test_ppo_utils.py expects, of two groups and a response that is alone.
    pairs = group_advantages(torch.tensor([6.0, 3, 3, 6, 9]), torch.tensor([0, 0, 1, 1, 2]), RLOOConfig())
    torch.testing.assert_close(pairs, torch.tensor([3.0, -3, -3, 3, 0]))
    returns = gae(torch.tensor([[1.0, 2, 3]]), torch.tensor([[0.5, 1, 1.5]]), lam=0.5)[1]
    torch.testing.assert_close(returns, torch.tensor([[3.625, 4.25, 3]]))
    mask = length_mask(LENGTHS)
    to_go = returns_to_go(place_scores(torch.tensor([1.0, 2, 3, 6], dtype=torch.float64), mask), mask)
    rows = [row[:length].unique().item() for row, length in zip(to_go, LENGTHS, strict=True)]
    assert rows == pytest.approx([-0.93380, -0.49147, -0.04915, 1.27783], abs=1e-5)


def test_skyrls_dual_clip() -> None:
    """SkyRL's test_losses.py: advantages [1, -1, -4], ratios [.5, 1, 10]."""
    config = GRPOConfig(dual_clip=3.0, clip=0.2)
    advantages, one = torch.tensor([1.0, -1, -4]), torch.ones(3, dtype=torch.int64)
    loss, clipped = group_loss(torch.tensor([0.5, 1, 10]).log(), torch.zeros(3), advantages, one, config)
    torch.testing.assert_close(loss, torch.tensor([-0.5, 1, 12]))
    assert clipped.tolist() == [False, False, True]


def test_equal_rewards_and_groups_of_one_teach_nothing() -> None:
    """Leave-one-out with a standard deviation gives +-10^6 where rewards are equal but for rounding elsewhere."""
    groups = torch.tensor([0, 0, 0, 5])
    for config in (GRPOConfig(), DrGRPOConfig(), RLOOConfig(), RLOOConfig(scale="group")):
        advantages = group_advantages(torch.tensor([0.1, 0.1, 0.1, 3.0], dtype=torch.float64), groups, config)
        assert advantages.abs().max() < 1e-9


def test_equal_rewards_are_told_although_their_mean_is_rounded() -> None:
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.3, 0.1]).double(), torch.tensor([0, 0, 0, 4, 4, 4])
    assert (rewards[:3].mean() - 0.1).abs() > 0  # why differences from it do not tell
    assert equal_groups(rewards, groups).tolist() == [True] * 3 + [False] * 3


def small(kind: type[GroupPolicyConfig], **changes: object) -> GroupPolicyConfig:
    sizes = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 8, "max_response_tokens": 12}
    group = 1 if kind is ReinforcePPConfig else 4
    return kind.sandbox(**{**sizes, "num_generations": group, "learning_rate": 3e-3, **changes})


@pytest.mark.parametrize("kind", METHODS)
def test_each_method_raises_the_reward(kind: type[GroupPolicyConfig], policy_folder: Path) -> None:
    policy = load_policy(policy_folder, max_response_tokens=12)
    sizes = {"rollout_batch_size": 64, "minibatch_size": 64, "total_steps": 12, "kl_coef": 0.0}
    agent = GroupPolicy(make_env(64, Share(ASCII)), policy, config=small(kind, **sizes, learning_rate=1e-2))
    metrics = list(agent.updates())
    assert metrics[-1]["score/mean"] > metrics[0]["score/mean"] + 0.05
    assert all(math.isfinite(value) for value in metrics[-1].values())
    assert metrics[-1]["kl/k1"] > 0


def test_a_step_is_the_same_in_any_micro_batches(policy_folder: Path) -> None:
    """Weights of tokens and rows add up over micro-batches as over the whole minibatch."""
    weights = []
    for budget in (64, 4096):
        policy = load_policy(policy_folder, max_response_tokens=12)
        config = small(DrGRPOConfig, micro_batch_tokens=budget, total_steps=1)
        GroupPolicy(make_env(16, Share(ASCII)), policy, config=config).learn()
        weights.append(torch.cat([each.flatten() for each in policy.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=2e-4)


def test_responses_of_a_group_answer_one_instruction(policy_folder: Path) -> None:
    agent = GroupPolicy(make_env(16, Share(ASCII)), load_policy(policy_folder), config=small(GRPOConfig))
    rollouts, _, _, _ = agent._collector.collect(agent._loop, 1)
    groups = [set(rollouts.instructions[first : first + 4]) for first in range(0, 16, 4)]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) > 1
    with pytest.raises(ValueError, match="num_generations must be a divisor"):
        GroupPolicy(make_env(2), load_policy(policy_folder), config=small(GRPOConfig))


def test_unscored_responses_are_left_out_of_their_groups(policy_folder: Path) -> None:
    agent = GroupPolicy(
        make_env(16, Picky(ASCII), on_unscored="truncate"), load_policy(policy_folder), config=small(DAPOConfig)
    )
    for metrics in agent.updates():
        assert 0 < metrics["score/unscored"] < 1
        assert math.isfinite(metrics["loss"])


def test_no_kl_to_go_without_a_kl_in_the_reward() -> None:
    with pytest.raises(ValueError, match="kl_in"):
        GRPOConfig(to_go=True)
