"""PPO from live verdicts of annotators behind a server, against PPO from the same annotators in this process."""

from collections.abc import Mapping
from dataclasses import replace
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


def trained(
    oracle: Mapping[str, Any], *, seed: int, total_steps: int = 3
) -> tuple[list[tuple[str, float]], list[dict[str, float]], list[Any]]:
    """Responses with rewards, metrics and final weights of some steps on AlpacaFarm-Annotators-v0."""
    env = Recorder(
        gym.make_vec("AlpacaFarm-Annotators-v0", num_envs=32, autoreset_mode=AutoresetMode.DISABLED, oracle=oracle)
    )
    config = replace(PPOConfig.sandbox(), total_steps=total_steps, **SIZES)
    agent = PPO(env, sandbox.POLICY, value_init=sandbox.REWARD_MODEL, config=config, seed=seed)
    metrics = [
        # Beside the rewards stands what an oracle says of itself: its name at least differs.
        {name: value for name, value in update.items() if not name.startswith("info/")}
        for update in agent.updates()
    ]
    weights = [p.detach() for model in (agent.policy.model, agent.value_model) for p in model.parameters()]
    return env.scored, metrics, weights


def live(server: JudgeServer, folder: Path, *, seed: int) -> dict[str, Any]:
    model = {"pool": "ann", "models": "sandbox", "base_url": server.base_url}
    return {**model, "ledger": str(folder / "ledger.sqlite"), "seed": seed}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_with_live_rewards_end_as_those_with_the_pool_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """And those of a server that draws by the request, the twin, do not: equal ones are no accident of a short run."""
    # AlpacaFarm-Annotators-v0's own oracle
    expected, offline_metrics, offline_weights = trained({"name": "annotators", "seed": seed}, seed=seed)
    assert len(expected) == 3 * 32
    assert {0.0, 1.0} <= {reward for _, reward in expected} <= {0.0, 0.5, 1.0}
    shipped = LanguageModel.from_pretrained(sandbox.POLICY).model.parameters()
    assert not any(torch.equal(p, q) for p, q in zip(offline_weights, shipped, strict=False))
    with JudgeServer(seed=99) as server:
        scored, metrics, weights = trained(live(server, tmp_path / "1", seed=seed), seed=seed)
        assert server.stats()["answered"] > 24
    assert scored == expected
    assert metrics == offline_metrics
    assert all(torch.equal(p, q) for p, q in zip(weights, offline_weights, strict=True))
    draw_by_request(monkeypatch)
    with JudgeServer(seed=99) as server:
        scored, *_ = trained(live(server, tmp_path / "2", seed=seed), seed=seed, total_steps=1)
        assert server.stats()["answered"] > 8
    assert scored != expected[:32]
