"""REINFORCE in the sandbox: an agent of one's own in one file.

    python examples/reinforce.py

The policy answers instructions of `AlpacaFarm-PPO-v0`, and each answer's log-probability is raised by how far its
reward lies above the batch's mean. Text goes to the environment; tokens stay in the model. On other instructions the
surrogate's score (the proxy, which is trained on) is printed beside gold (what was meant): with no KL penalty the proxy
rises to the end, and gold falls.
Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
"""

from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

import alpacafarm_env  # noqa: F401  # registers the environments
from alpacafarm_env import sandbox
from alpacafarm_env.agents import PolicyActor
from alpacafarm_env.agents.loop import keyed_generator
from alpacafarm_env.agents.rollouts import segment_sum
from alpacafarm_env.benchmarks.harness.plots import Curve, Panel, draw, write_png
from alpacafarm_env.benchmarks.methods import Method
from alpacafarm_env.wrappers.vector import AddScore


@dataclass
class Options:
    """REINFORCE on AlpacaFarm-PPO-v0."""

    steps: int = 40
    batch_size: int = 64
    learning_rate: float = 2e-4
    evaluate_every: int = 10
    num_eval: int = 256
    """Instructions of val."""
    seed: int = 0
    plot: Path = Path("results/reinforce.png")


# --8<-- [start:agent]
class Reinforce(PolicyActor):
    """REINFORCE with the batch's mean as its baseline."""

    def __init__(self, env, policy, *, seed=0, num_steps=10, learning_rate=2e-4):
        super().__init__(policy, seed=seed)
        self.env, self.num_steps, self.learning_rate = env, num_steps, learning_rate

    def updates(self):
        """Yields the metrics of one step after the other."""
        optimizer = torch.optim.AdamW(self.policy.model.parameters(), lr=self.learning_rate)
        for step in range(1, self.num_steps + 1):
            instructions, _ = self.env.reset(seed=step * self.env.num_envs)  # slot i is seeded by this plus i
            rollouts = self.policy.generate(instructions, generator=keyed_generator(self.seed, step))
            rewards = torch.tensor(self.env.step(rollouts.texts)[1], dtype=torch.float32)
            logprobs = segment_sum(self.policy.logprobs(rollouts), rollouts.lengths)  # of whole responses
            loss = -((rewards - rewards.mean()) * logprobs).mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            yield {"step": step, "reward": rewards.mean().item(), "tokens": len(rollouts.tokens)}


METHOD = Method("reinforce", "REINFORCE", lambda job: Reinforce(job.env(64), job.policy(), seed=job.seed))
# --8<-- [end:agent]


def main(options: Options) -> None:
    """Trains, evaluates, draws."""
    env = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=options.batch_size, autoreset_mode="Disabled")
    agent = Reinforce(
        env, sandbox.POLICY, seed=options.seed, num_steps=options.steps, learning_rate=options.learning_rate
    )
    val = AddScore(gym.make_vec("AlpacaFarm-PPO-v0", num_envs=options.num_eval, split="val", autoreset_mode="Disabled"))
    curve = []

    def evaluate(step: int) -> None:
        instructions, _ = val.reset(seed=0)
        _, proxy, _, _, infos = val.step(agent.act(instructions))
        gold, length = infos["gold_reward"], infos["response_length"]
        errors = [scores.std(ddof=1) / options.num_eval**0.5 for scores in (proxy, gold)]
        curve.append((step, proxy.mean(), gold.mean(), *errors))
        scores = f"{proxy.mean():6.2f} ({errors[0]:.2f})  {gold.mean():6.2f} ({errors[1]:.2f})"
        print(f"{step:4}  {scores}  {length.mean():10.0f}")

    print(f"val, n = {options.num_eval}, standard errors over instructions in parentheses")
    print("step  proxy          gold           characters")
    evaluate(0)
    for metrics in agent.updates():
        if metrics["step"] % options.evaluate_every == 0 or metrics["step"] == options.steps:
            evaluate(metrics["step"])

    steps, proxy, gold, *errors = np.array(curve).T[:, None]  # [1, K] each, as of one seed
    panels = [
        Panel("step", "surrogate's score", [Curve("proxy, trained on", steps[0], proxy)]),
        Panel("step", "gold reward", [Curve("gold, never seen", steps[0], gold)]),
    ]
    largest = " and ".join(f"{error.max():.2f}" for error in errors)
    note = f"Sandbox, a simulation. n = {options.num_eval} instructions of val, temperature 0.7, one seed; "
    note += f"standard errors over instructions up to {largest}."
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    write_png(options.plot, draw(panels, "REINFORCE on AlpacaFarm-PPO-v0", note))
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # models this small lose by more on a busy machine
    main(tyro.cli(Options))
