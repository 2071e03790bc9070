"""Every agent, small: what makes each, by the name that tests call it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from expert_worlds import make as make_expert_iteration
from quark_worlds import small as small_quark
from tiny_worlds import ASCII, DEMONSTRATIONS, Share, TinyDataset, load_policy, make_env, small_ppo

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
    RewardConditioningConfig,
    RewardModeling,
    RewardModelingConfig,
    SFTConfig,
)

PREFERENCES = TinyDataset().preferences()
README = Path(__file__).resolve().parents[2] / "README.md"


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
    """Three steps of two minibatches, small enough that rounding stays rounding; the policy is given as a path."""
    env = make_env(16 // int(os.environ.get("WORLD_SIZE", "1")))
    settings = config(total_steps=3, learning_rate=2e-4, max_response_tokens=4)
    return agent(env, str(policy), config=settings, seed=seed, out=out)


def _reward_modeling(policy: Path, out: Path | None = None, *, seed: int = 0) -> RewardModeling:
    config = RewardModelingConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)
    return RewardModeling(policy, PREFERENCES, config=config, seed=seed, out=out)


def _best_of_n(policy: Path, *, seed: int = 0) -> BestOfN:
    config = BestOfNConfig(num_samples=4)
    return BestOfN(load_policy(policy), Share(ASCII), config=config, seed=seed)


def _reinforce(policy: Path, *, seed: int = 0) -> Any:
    """README's agent of one's own."""
    block = re.search(
        r"^```python\n((?:(?!^```).*\n)*class Reinforce(?:.*\n)*?)^```$", README.read_text(), re.MULTILINE
    )
    assert block is not None
    names: dict[str, Any] = {"__name__": "reinforce"}
    exec(compile(block[1], "README.md", "exec"), names)
    return names["Reinforce"](make_env(), load_policy(policy), seed=seed, num_steps=4)


Make = Callable[..., Any]
RUNS: dict[str, Make] = {
    "sft": partial(_small, SFT, SFTConfig, DEMONSTRATIONS),
    "dpo": partial(_small, DPO, DPOConfig, PREFERENCES),
    "binary_feedme": partial(_small, BinaryFeedME, BinaryFeedMEConfig, PREFERENCES),
    "reward_conditioning": partial(_small, BinaryRewardConditioning, RewardConditioningConfig, PREFERENCES),
    "ppo": partial(_online, PPO, small_ppo),
    "quark": partial(_online, Quark, small_quark),
    "quark_of_all_quantiles": partial(_online, Quark, partial(small_quark, best_quantile_only=False, minibatch_size=8)),
    "expert_iteration": make_expert_iteration,
}
"""Those with checkpoints."""
ACTORS: dict[str, Make] = {**RUNS, "best_of_n": _best_of_n, "reinforce": _reinforce}
RUNS["reward_modeling"] = _reward_modeling
EXACT: dict[str, Make] = {
    "ppo_by_path": partial(_by_path, PPO, small_ppo),
    "quark_by_path": partial(_by_path, Quark, small_quark),
}
"""Runs that two processes do as one does, to six digits after the point."""
