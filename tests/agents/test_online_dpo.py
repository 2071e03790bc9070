"""Online DPO: whose word decides a pair, and what is left out."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_worlds import ASCII, Picky, Share, load_policy, make_env

from alpacafarm_env.agents import OnlineDPO, OnlineDPOConfig
from alpacafarm_env.errors import DataError, UnscoredError
from alpacafarm_env.oracles import HigherReward
from alpacafarm_env.oracles.base import OracleError


def agent_of(folder: Path, oracle: Share | None = None, judge: object = None, **changes: object) -> OnlineDPO:
    sizes = {"total_steps": 10, "rollout_batch_size": 64, "minibatch_size": 64, "learning_rate": 1e-2}
    config = OnlineDPOConfig(**{**sizes, "warmup_steps": 0, "max_response_tokens": 12, **changes})
    env = make_env(64, oracle or Share(ASCII), on_unscored="truncate")
    return OnlineDPO(env, load_policy(folder, max_response_tokens=12), judge=judge, config=config)


class Opposite:
    """Prefers what the reward does not."""

    name = "opposite"

    def compare(self, instructions: Sequence[str], first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        return 1 - HigherReward(Share(ASCII)).compare(instructions, first, second)


class Certain(Opposite):
    """Answers what is no probability."""

    def compare(self, instructions: Sequence[str], first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        return np.full(len(first), 2.0)


class Undecided(Opposite):
    """Finds all responses alike."""

    def compare(self, instructions: Sequence[str], first: Sequence[str], second: Sequence[str]) -> np.ndarray:
        return np.full(len(first), 0.5)


def test_the_reward_rises_and_by_an_opposite_judge_it_falls(policy_folder: Path) -> None:
    by_reward, by_judge = (list(agent_of(policy_folder, judge=judge).updates()) for judge in (None, Opposite()))
    assert by_reward[-1]["score/mean"] > by_reward[0]["score/mean"] + 0.05
    assert by_judge[-1]["score/mean"] < by_judge[0]["score/mean"] - 0.05
    assert by_reward[0]["score/mean"] == by_judge[0]["score/mean"]
    assert by_reward[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference
    assert all(math.isfinite(value) for value in by_reward[-1].values())


def test_pairs_without_a_better_response_are_left_out(policy_folder: Path) -> None:
    agent = agent_of(policy_folder, Picky(ASCII), total_steps=1)
    (metrics,) = agent.updates()
    assert 0 < metrics["pairs/judged"] < (1 - metrics["score/unscored"])
    with pytest.raises(UnscoredError, match="no pair"):
        agent_of(policy_folder, judge=Undecided(), total_steps=1).learn()


def test_what_is_no_judge_is_refused(policy_folder: Path) -> None:
    with pytest.raises(TypeError, match="judge"):
        agent_of(policy_folder, judge="gold")
    with pytest.raises(OracleError, match="from 0 to 1"):
        agent_of(policy_folder, judge=Certain(), total_steps=1).learn()


def test_responses_that_fill_the_model_leave_no_room(policy_folder: Path) -> None:
    with pytest.raises(DataError, match="room"):
        agent_of(policy_folder, max_response_tokens=100_000)


def test_chosen_and_rejected_answer_one_instruction(policy_folder: Path) -> None:
    agent = agent_of(policy_folder, Picky(ASCII))
    rollouts, scores, numbers, _ = agent._collector.collect(agent._loop, 1)
    pairs, _ = agent._prepare(rollouts, *agent._judged(rollouts, scores, numbers))
    assert len(pairs.chosen)
    for chosen, rejected in zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True):
        assert rollouts.instructions[chosen] == rollouts.instructions[rejected]
        assert scores[chosen] > scores[rejected]
    assert torch.unique(torch.cat([pairs.chosen, pairs.rejected])).numel() == 2 * len(pairs.chosen)
