"""What the tests of Quark share: small agents, their gradients, and jobs for other processes."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_worlds import ASCII, First, load_policy, make_env
from torch import Tensor

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.quark import Pool, Quark, QuarkConfig, quark_sums
from alpacafarm_env.agents.rollouts import Rollouts, micro_batches


def small(**changes: Any) -> QuarkConfig:
    """16 responses a step, the best 4 in updates of 2, two epochs."""
    settings: dict[str, Any] = {"total_steps": 2, "rollout_batch_size": 16, "minibatch_size": 2, "learning_rate": 1e-3}
    return QuarkConfig(**{"warmup_steps": 0, **settings, **changes})


def prepared(policy: LanguageModel, **changes: Any) -> tuple[Quark, Rollouts, Tensor, Pool, dict[str, float]]:
    """An agent before its first update, what it sampled, and its pool."""
    agent = Quark(make_env(16), policy, config=small(**changes))
    rollouts, scores, numbers, collected = agent._collector.collect(1)
    pool, metrics = agent._prepare(1, rollouts, scores, numbers)
    return agent, rollouts, scores, pool, {**collected, **metrics}


def gradients(
    agent: Quark, pool: Pool, *, micro_batch_tokens: int = 4096
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


# Jobs that run in processes of their own -------------------------------------------------------------------------


def train_in_a_world(policy_folder: Path, target: Path) -> None:
    """The gradient of the first pool, its rows, and the weights after two steps, as this world computes them."""
    tensors: dict[str, Tensor] = {}
    for mode, best_quantile_only in (("best", True), ("all", False)):
        config = small(minibatch_size=3, best_quantile_only=best_quantile_only, kl_coef=1.0)
        env = make_env(16 // int(os.environ["WORLD_SIZE"]))
        agent = Quark(env, load_policy(policy_folder), config=config, seed=2)
        rollouts, scores, numbers, _ = agent._collector.collect(1)
        pool, metrics = agent._prepare(1, rollouts, scores, numbers)
        tensors |= {f"{mode}.{name}": gradient for name, gradient in gradients(agent, pool)[0].items()}
        tensors |= {f"{mode}.{name}": torch.tensor(value) for name, value in metrics.items()}
        tensors[f"{mode}.rows"] = torch.from_numpy(pool.trained)
        agent.learn()
        tensors |= {f"trained.{mode}.{name}": p.detach().clone() for name, p in agent._loop.parameters.items()}
    if agent._loop.processes.is_main:
        save_file(tensors, target)


def train_where_one_has_no_score(policy_folder: Path, target: Path) -> None:
    """Two steps in which only the second process has scores, and few."""
    rank = int(os.environ["RANK"])
    oracle = First(ASCII)
    oracle.num_scored = (0, 5)[rank]
    env = make_env(8, oracle, on_unscored="truncate")
    agents = (
        Quark(env, load_policy(policy_folder), config=small(best_quantile_only=only, minibatch_size=1))
        for only in (True, False)
    )
    (target / str(rank)).write_text(repr([list(agent.updates()) for agent in agents]))
