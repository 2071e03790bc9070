"""PPO from live verdicts of annotators behind a server, against PPO from the same annotators in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode
from judge_twins import draw_by_request

from alpacafarm_env import sandbox
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO, PPOConfig
from alpacafarm_env.annotators import JudgeServer

SMALL = replace(
    PPOConfig.sandbox(),
    total_steps=5,
    rollout_batch_size=32,
    minibatch_size=32,
    num_epochs=1,
    max_response_tokens=24,
)


class Recorder(gym.vector.VectorWrapper):  # type: ignore[type-arg]
    """Keeps every response with its reward."""

    def __init__(self, env: gym.vector.VectorEnv) -> None:  # type: ignore[type-arg]
        super().__init__(env)
        self.scored: list[tuple[str, float]] = []

    def step(self, actions):
        result = self.env.step(actions)
        self.scored += zip(actions, result[1].tolist(), strict=True)
        return result


def trained(
    oracle: Mapping[str, Any], *, seed: int
) -> tuple[list[tuple[str, float]], list[dict[str, float]], list[Any]]:
    """Responses with rewards, metrics and final weights of five steps on AlpacaFarm-Annotators-v0."""
    env = Recorder(
        gym.make_vec("AlpacaFarm-Annotators-v0", num_envs=32, autoreset_mode=AutoresetMode.DISABLED, oracle=oracle)
    )
    agent = PPO(env, sandbox.POLICY, value_init=sandbox.REWARD_MODEL, config=SMALL, seed=seed)
    metrics = [
        # Beside the rewards stands what an oracle says of itself: its name at least differs.
        {name: value for name, value in update.items() if not name.startswith("info/")}
        for update in agent.updates()
    ]
    weights = [p.detach() for model in (agent.policy.model, agent.value_model) for p in model.parameters()]
    return env.scored, metrics, weights


def live(server: JudgeServer, folder: Path, *, seed: int) -> dict[str, Any]:
    return {
        "pool": "ann",
        "models": "sandbox",
        "base_url": server.base_url,
        "ledger": str(folder / "ledger.sqlite"),
        "seed": seed,
    }


@cache
def offline(seed: int) -> tuple[Any, Any, Any]:
    """The same with the pool in this process: AlpacaFarm-Annotators-v0's own oracle."""
    return trained({"name": "annotators", "seed": seed}, seed=seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_five_steps_with_live_rewards_end_as_those_with_the_pool_in_process(tmp_path: Path, seed: int) -> None:
    with JudgeServer(seed=99) as server:
        scored, metrics, weights = trained(live(server, tmp_path, seed=seed), seed=seed)
        assert server.stats()["answered"] > 40
    assert scored == offline(seed)[0]
    assert metrics == offline(seed)[1]
    assert all(torch.equal(p, q) for p, q in zip(weights, offline(seed)[2], strict=True))


def test_rewards_of_a_server_that_draws_by_the_request_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: equal rewards above are no accident of a short run."""
    draw_by_request(monkeypatch)
    with JudgeServer(seed=99) as server:
        scored, *_ = trained(live(server, tmp_path, seed=0), seed=0)
        assert server.stats()["answered"] > 40
    assert scored != offline(0)[0]


def test_the_runs_are_worth_comparing() -> None:
    """Rewards of both kinds, and weights that have moved."""
    scored, metrics, weights = offline(0)
    assert len(scored) == 5 * 32
    assert {0.0, 1.0} <= {reward for _, reward in scored} <= {0.0, 0.5, 1.0}
    assert [update["step"] for update in metrics] == [1, 2, 3, 4, 5]
    shipped = LanguageModel.from_pretrained(sandbox.POLICY).model.parameters()
    assert not any(torch.equal(p, q) for p, q in zip(weights, shipped, strict=False))
