"""What the tests of Quark share: small agents, their gradients, and jobs for other processes."""

import os
from pathlib import Path
from typing import Any

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
