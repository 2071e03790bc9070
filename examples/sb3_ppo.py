"""Stable-Baselines3's PPO trains a language model, token by token.

    pip install ".[sb3]"
    python examples/sb3_ppo.py

`AlpacaFarm-Token-v0` gives arrays and takes one token a step. `agents.sb3` makes the language model the library's
policy, with a KL penalty to the model it starts from. Before and after, the model answers instructions of val; the
surrogate's score (trained on) and gold (what was meant) are printed.
"""

from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

import alpacafarm_env  # noqa: F401  # registers the environments
from alpacafarm_env.agents import sb3
from alpacafarm_env.wrappers.vector import AddScore


@dataclass
class Options:
    """Stable-Baselines3's PPO on AlpacaFarm-Token-v0."""

    tokens: int = 20_480
    """Tokens sampled in all: five rollouts of 64 from each environment."""
    num_envs: int = 64
    kl_coef: float = 0.05
    """β, reward units a nat."""
    num_eval: int = 256
    """Instructions of val."""
    seed: int = 0
    monitor: Path = Path("results/sb3_ppo")
    """Where each episode's reward, length and gold are written: this name and .monitor.csv."""


def evaluate(when: str, agent: PPO, options: Options) -> None:
    """Prints a row: surrogate and gold of one response to each instruction."""
    val = AddScore(gym.make_vec("AlpacaFarm-PPO-v0", num_envs=options.num_eval, split="val", autoreset_mode="Disabled"))
    instructions, _ = val.reset(seed=0)
    generator = torch.Generator().manual_seed(options.seed)
    responses = agent.policy.language_model.generate(instructions, generator=generator, temperature=0.7).texts
    _, proxy, _, _, infos = val.step(responses)
    gold = infos["gold_reward"]
    errors = [scores.std(ddof=1) / options.num_eval**0.5 for scores in (proxy, gold)]
    print(f"{when:6}  {proxy.mean():6.2f} ({errors[0]:.2f})  {gold.mean():6.2f} ({errors[1]:.2f})")


def main(options: Options) -> None:
    """Trains, and evaluates before and after."""
    envs = AddScore(gym.make_vec("AlpacaFarm-Token-v0", num_envs=options.num_envs))
    options.monitor.parent.mkdir(parents=True, exist_ok=True)
    envs = VecMonitor(sb3.TokenVecEnv(envs), str(options.monitor), info_keywords=("gold_reward",))
    agent = PPO(env=envs, **sb3.keywords(kl_coef=options.kl_coef, seed=options.seed))  # your model: keywords(folder)
    print(f"val, n = {options.num_eval}, standard errors over instructions in parentheses")
    print("        proxy          gold")
    evaluate("before", agent, options)
    agent.learn(options.tokens, sb3.ScoresCallback(), progress_bar=False)
    evaluate("after", agent, options)
    print(f"episodes: {options.monitor}.monitor.csv")
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Options))
