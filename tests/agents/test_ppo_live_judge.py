"""PPO from live verdicts of annotators behind a server, against PPO from the same annotators in this process."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode

from alpacafarm_env import sandbox
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO, PPOConfig
from alpacafarm_env.annotators import JudgeServer

SIZES = {"rollout_batch_size": 32, "minibatch_size": 32, "num_epochs": 1, "max_response_tokens": 24}


class Recorder(gym.vector.VectorWrapper):  # type: ignore[type-arg]
    """Keeps every response with its reward."""

    def __init__(self, env: gym.vector.VectorEnv) -> None:  # type: ignore[type-arg]
        super().__init__(env)
        self.scored: list[tuple[str, float]] = []

    def step(self, actions):
        result = self.env.step(actions)
        self.scored += zip(actions, result[1].tolist(), strict=True)
        return result


def trained(oracle: Mapping[str, Any]) -> tuple[list[tuple[str, float]], list[dict[str, float]], list[Any]]:
    """Responses with rewards, metrics and final weights of two steps on AlpacaFarm-Annotators-v0."""
    env = Recorder(
        gym.make_vec("AlpacaFarm-Annotators-v0", num_envs=32, autoreset_mode=AutoresetMode.DISABLED, oracle=oracle)
    )
    config = replace(PPOConfig.sandbox(), total_steps=2, **SIZES)
    agent = PPO(env, sandbox.POLICY, value_init=sandbox.REWARD_MODEL, config=config)
    # Without what an oracle says of itself: its name at least differs.
    metrics = [{k: value for k, value in update.items() if not k.startswith("info/")} for update in agent.updates()]
    weights = [p.detach() for model in (agent.policy.model, agent.value_model) for p in model.parameters()]
    return env.scored, metrics, weights


def test_steps_with_live_rewards_end_as_those_with_the_pool_in_process(tmp_path: Path) -> None:
    expected, offline_metrics, offline_weights = trained({"name": "annotators", "seed": 0})
    assert len(expected) == 2 * 32
    assert {0.0, 1.0} <= {reward for _, reward in expected} <= {0.0, 0.5, 1.0}
    shipped = LanguageModel.from_pretrained(sandbox.POLICY).model.parameters()
    assert not any(torch.equal(p, q) for p, q in zip(offline_weights, shipped, strict=False))
    with JudgeServer(seed=99) as server:
        model = {"pool": "ann", "models": "sandbox", "base_url": server.base_url}
        scored, metrics, weights = trained({**model, "ledger": str(tmp_path / "ledger.sqlite"), "seed": 0})
        assert server.stats()["answered"] > 16
    assert scored == expected
    assert metrics == offline_metrics
    assert all(torch.equal(p, q) for p, q in zip(weights, offline_weights, strict=True))
