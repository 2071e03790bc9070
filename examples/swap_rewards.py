"""The same policy under two rewards: a wrapper swaps them, and gold stands beside the proxy.

    python examples/swap_rewards.py

PPO trains the sandbox's policy twice, with equal settings and seeds, and no KL penalty that would hold it back: by the
surrogate, a reward model of noisy labels, and by gold, which nobody has outside a sandbox. Both scores are reported in
both runs. By the surrogate, the surrogate's score rises further, and gold soon falls: over-optimization.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

import alpacafarm_env  # noqa: F401  # registers the environments
from alpacafarm_env import sandbox
from alpacafarm_env.agents import PPO, PPOConfig
from alpacafarm_env.benchmarks.harness.plots import Curve, Panel, draw, write_png
from alpacafarm_env.wrappers.vector import AddScore, GoldReward, SurrogateReward


@dataclass
class Options:
    """PPO by the surrogate and by gold."""

    steps: int = 12
    batch_size: int = 128
    """Responses a step."""
    learning_rate: float = 4e-4
    kl_coef: float = 0.0
    seed: int = 0
    plot: Path = Path("results/swap_rewards.png")


def main(options: Options) -> None:
    """Trains twice and draws."""
    config = replace(
        PPOConfig.sandbox(),
        total_steps=options.steps,
        rollout_batch_size=options.batch_size,
        minibatch_size=options.batch_size // 2,
        learning_rate=options.learning_rate,
        schedule="constant",
        kl_coef=options.kl_coef,
    )
    curves = {}
    for reward in (SurrogateReward, GoldReward):
        envs = gym.make_vec("AlpacaFarm-PPO-v0", options.batch_size, autoreset_mode="Disabled")
        envs = reward(envs)  # the outermost of them decides
        envs = AddScore(AddScore(envs, key="proxy", oracle="surrogate"), key="gold")  # reported in infos
        agent = PPO(envs, sandbox.POLICY, value_init=sandbox.REWARD_MODEL, config=config, seed=options.seed)
        print(f"{reward.__name__}\nstep   proxy    gold  KL, nats")
        rows = []
        for metrics in agent.updates():
            row = [metrics[key] for key in ("step", "info/proxy", "info/gold", "kl/k1")]
            print("{:4}  {:6.2f}  {:6.2f}  {:8.1f}".format(*row))
            rows.append(row)
        curves[reward.__name__] = np.array(rows).T[:, None]

    labels = {1: "surrogate's score (proxy)", 2: "gold reward"}
    panels = [
        Panel("step", label, [Curve(name, columns[0][0], columns[measure]) for name, columns in curves.items()])
        for measure, label in labels.items()
    ]
    note = f"Sandbox, a simulation. n = {options.batch_size} responses a step, temperature 1; one seed, so no interval."
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    write_png(options.plot, draw(panels, "The same PPO under two rewards", note))
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # models this small lose by more on a busy machine
    main(tyro.cli(Options))
