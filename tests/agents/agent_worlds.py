"""Every agent, small: what makes each, by the name that tests call it; oracles and helpers of their tests."""

from __future__ import annotations

import json
import os
import runpy
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Paid, Share, TinyDataset, load_policy, make_env, small_ppo
from torch import Tensor

from alpacafarm_env.agents import (
    DPO,
    PPO,
    SFT,
    BestOfN,
    BestOfNConfig,
    BinaryFeedME,
    BinaryFeedMEConfig,
    BinaryRewardConditioning,
    DPOConfig,
    Quark,
    QuarkConfig,
    RewardConditioningConfig,
    RewardModeling,
    RewardModelingConfig,
    SFTConfig,
)
from alpacafarm_env.agents.expert_iteration import ExpertIteration, ExpertIterationConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.quark import DataPool, quark_sums
from alpacafarm_env.agents.rollouts import Rollouts, micro_batches
from alpacafarm_env.instructions import Instruction

INSTRUCTIONS = tuple(Instruction(text, id=10 + i) for i, text in enumerate(TEXTS))
DEADLINE_S = 300


class Counting(Share):
    """Counts the instructions it is shown: each is scored when it is sampled, and then only."""

    def __init__(self) -> None:
        super().__init__(ASCII)
        self.asked: list[str] = []

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        self.asked += dict.fromkeys(instructions)
        return super().score(instructions, responses)


class Silent(Share):
    """Gives no verdict on anything said to one instruction, or to all."""

    def __init__(self, *about: str) -> None:
        super().__init__(ASCII)
        self.about = about or TEXTS

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        silent = np.array([instruction in self.about for instruction in instructions])
        return np.where(silent, np.nan, super().score(instructions, responses))


def small_expert(**changes: Any) -> ExpertIterationConfig:
    """Two rounds of three chunks and four updates."""
    sft = SFTConfig(epochs=2, batch_size=3, learning_rate=3e-3, save_every=2)
    settings: dict[str, Any] = {"num_samples": 4, "num_rounds": 2, "instructions_per_step": 2, "sft": sft}
    return ExpertIterationConfig(**{**settings, **changes})


def make_expert_iteration(policy: LanguageModel | Path, out: Path | None = None, **changes: Any) -> ExpertIteration:
    if isinstance(policy, Path):
        policy = load_policy(policy)
    settings = {"instructions": INSTRUCTIONS, "oracle": Share(ASCII), "config": small_expert(), "seed": 3, **changes}
    return ExpertIteration(policy, settings.pop("instructions"), settings.pop("oracle"), out=out, **settings)


def train_expert_iteration(policy_folder: Path, out: Path) -> None:
    """A run that may be killed, slow enough that it will be."""
    for _ in make_expert_iteration(policy_folder, out).updates():
        time.sleep(0.05)


def read(out: Path, number: int = 1) -> list[dict[str, Any]]:
    """All best responses of a round, in order."""
    files = sorted((out / f"round-{number}").glob("chunk-*.json"))
    return [best for file in files for best in json.loads(file.read_text())["best"]]


def files(out: Path) -> dict[str, bytes]:
    """Everything a run leaves that sampling and training decide."""
    kept = [
        path for path in out.rglob("*") if path.suffix in (".safetensors", ".jsonl") and path.name != "timing.jsonl"
    ]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}


def weights(agent: ExpertIteration) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in agent.policy.model.named_parameters()}


def small_quark(**changes: Any) -> QuarkConfig:
    """16 responses a step, the best 4 in updates of 2, two epochs."""
    settings: dict[str, Any] = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 2, "learning_rate": 1e-3}
    return QuarkConfig(**{"warmup_steps": 0, **settings, **changes})


def prepared(policy: LanguageModel, **changes: Any) -> tuple[Quark, Rollouts, Tensor, DataPool, dict[str, float]]:
    """An agent before its first update, what it sampled, and its pool."""
    agent = Quark(make_env(16), policy, config=small_quark(**changes))
    rollouts, scores, numbers, collected = agent._collector.collect(agent._loop, 1)
    pool, metrics = agent._prepare(1, rollouts, scores, numbers)
    return agent, rollouts, scores, pool, {**collected, **metrics}


def gradients(
    agent: Quark, pool: DataPool, *, micro_batch_tokens: int = 4096
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of the mean loss over the trained rows, and the means."""
    rows = pool.own(pool.trained)
    means = agent._loop.accumulate(
        [rows[part] for part in micro_batches(pool.read.total_lengths[rows], micro_batch_tokens)],
        lambda part: quark_sums(agent.policy, pool, part, agent.config),
        count=int(pool.read.lengths[rows].sum()),
    )
    found = {name: p.grad.clone() for name, p in agent._loop.parameters.items() if p.grad is not None}
    agent._loop._optimizer.zero_grad()
    return found, means


PREFERENCES = TinyDataset().preferences()
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reinforce.py"


def _small(agent: Any, config: Any, data: Any, policy: Path, out: Path | None = None, *, seed: int = 0, **changes: Any):
    """Six steps, or of twice the data more."""
    settings = config(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2, **changes)
    return agent(load_policy(policy, max_response_tokens=16), data, config=settings, seed=seed, out=out)


def _online(agent: Any, config: Any, policy: Path, out: Path | None = None, *, seed: int = 0, **changes: Any) -> Any:
    """Four steps; each process has its share of 16 environments."""
    env = make_env(16 // int(os.environ.get("WORLD_SIZE", "1")))
    settings = config(total_steps=4, save_every=2, **changes)
    return agent(env, load_policy(policy), config=settings, seed=seed, out=out)


def _by_path(agent: Any, config: Any, policy: Path, out: Path | None = None, *, seed: int = 0) -> Any:
    """Three steps of two minibatches, small enough that rounding stays rounding; policy by path, paid oracle."""
    env = make_env(16 // int(os.environ.get("WORLD_SIZE", "1")), Paid(ASCII))
    settings = config(total_steps=3, learning_rate=2e-4, max_response_tokens=4)
    return agent(env, str(policy), config=settings, seed=seed, out=out)


def _reward_modeling(policy: Path, out: Path | None = None, *, seed: int = 0) -> RewardModeling:
    config = RewardModelingConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)
    return RewardModeling(policy, PREFERENCES, config=config, seed=seed, out=out)


def _best_of_n(policy: Path, *, seed: int = 0) -> BestOfN:
    config = BestOfNConfig(num_samples=4)
    return BestOfN(load_policy(policy), Share(ASCII), config=config, seed=seed)


def _reinforce(policy: Path, *, seed: int = 0) -> Any:
    """The example of an agent of one's own."""
    made = runpy.run_path(str(EXAMPLE))["Reinforce"]
    return made(make_env(), load_policy(policy), seed=seed, num_steps=4)


Make = Callable[..., Any]
RUNS: dict[str, Make] = {
    "sft": partial(_small, SFT, SFTConfig, DEMONSTRATIONS),
    "dpo": partial(_small, DPO, DPOConfig, PREFERENCES),
    "binary_feedme": partial(_small, BinaryFeedME, BinaryFeedMEConfig, PREFERENCES),
    "reward_conditioning": partial(_small, BinaryRewardConditioning, RewardConditioningConfig, PREFERENCES),
    "ppo": partial(_online, PPO, small_ppo),
    "quark": partial(_online, Quark, small_quark),
    "quark_of_all_quantiles": partial(_online, Quark, partial(small_quark, best_quantile_only=False, minibatch_size=8)),
    "expert_iteration": partial(make_expert_iteration, oracle=Paid(ASCII)),
}
"""Those with checkpoints."""
ACTORS: dict[str, Make] = {**RUNS, "best_of_n": _best_of_n, "reinforce": _reinforce}
RUNS["reward_modeling"] = _reward_modeling
EXACT: dict[str, Make] = {
    "ppo_by_path": partial(_by_path, PPO, small_ppo),
    "quark_by_path": partial(_by_path, Quark, small_quark),
    "ppo_in_shards": partial(_by_path, PPO, partial(small_ppo, sharding="full", micro_batch_tokens=64)),
}
"""Runs that two processes do as one does, to six digits after the point."""
