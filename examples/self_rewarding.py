"""Self-rewarding: the policy rates its own answers and learns from its ratings; gold tells what came of it.

    python examples/self_rewarding.py

By SFT on ratings of the simulated human raters, mixed with demonstrations, the policy learns to rate: it is M1. A round
samples 4 responses to each of 300 new instructions, has them rated by the policy as it is, and is DPO on the best rated
against the worst. `--judge raters` has the rounds rated by the raters themselves.

Measured in the sandbox (a simulation), 3 seeds, 95 % t-intervals over seeds: after three rounds gold is +0.64 [0.52,
0.75] above M1's 4.62. That is not clearly apart from rounds that the raters rated, +0.01 [-0.09, 0.12]. On its own
samples its agreement with gold falls from the first round to the last, by 6.8 [3.3, 10.2] points: what the rounds make
better are its answers, not its ratings. More: docs/studies/self_rewarding.md.
Source: Yuan et al. 2024, "Self-Rewarding Language Models" (arXiv 2401.10020).
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import tyro

from alpacafarm_env import sandbox
from alpacafarm_env.agents import SFT, LanguageModel
from alpacafarm_env.agents.loop import keyed_generator
from alpacafarm_env.agents.self_rewarding import SelfRewardingConfig, self_rewarding
from alpacafarm_env.agents.sft import FineTuningConfig
from alpacafarm_env.oracles import rated
from alpacafarm_env.oracles.policies import rating_demonstrations
from alpacafarm_env.seeding import keyed_rng


@dataclass
class Options:
    """Rounds of self-rewarding."""

    judge: Literal["self", "raters"] = "self"
    """Who rates the samples of the rounds."""
    rounds: int = 3
    num_instructions: int = 300
    """Of a round."""
    num_ratings: int = 6000
    num_demonstrations: int = 1500
    """Of answers, mixed with the ratings."""
    num_eval: int = 500
    """Instructions of val."""
    seed: int = 0


def lessons(options: Options) -> list:
    """Demonstrations of answers and of ratings, drawn by the seed."""
    data, rng = sandbox.SANDBOX, keyed_rng(options.seed, "lessons")
    responses = [(x, y) for x, pair in zip(data.instructions("preference"), data.pairs(), strict=True) for y in pair]
    drawn = [responses[row] for row in rng.permutation(len(responses))[: options.num_ratings]]
    ratings, _ = rated(sandbox.raters("human", options.seed), *map(list, zip(*drawn, strict=True)))
    answers = data.demonstrations("sft")
    answers = [answers[row] for row in rng.permutation(len(answers))[: options.num_demonstrations]]
    return [*answers, *rating_demonstrations(ratings)]


def agreement(scores: np.ndarray, gold: np.ndarray) -> float:
    """Share of the pairs of different gold in the rows of [N, k] that the scores order as gold does; ties half."""
    first, second = np.triu_indices(scores.shape[1], 1)
    gaps, truth = (table[:, first] - table[:, second] for table in (scores, gold))
    scored = ~np.isnan(gaps) & (truth != 0)
    return float((np.sign(gaps * truth)[scored].mean() + 1) / 2)


def main(options: Options) -> None:
    """Teaches the policy to rate, then makes the rounds."""
    policy, gold = LanguageModel.from_pretrained(sandbox.POLICY), sandbox.gold_oracle()
    val = sandbox.SANDBOX.instructions("val")[: options.num_eval]

    def evaluate(name: str, agreed: str = "") -> None:
        # The same draws each time, so that differences are due to the policy.
        draws = torch.rand(len(val), policy.max_response_tokens, generator=keyed_generator(options.seed, "val"))
        texts = policy.generate(val, generator=draws, temperature=0.7).texts
        scores, length = gold.score(val, texts), np.mean([len(text) for text in texts])
        print(f"{name:6}  {scores.mean():5.2f} ({scores.std() / len(val) ** 0.5:.2f})  {length:10.1f}  {agreed:>12}")

    print(f"val, n = {len(val)}, one seed; standard errors over instructions in parentheses")
    print("policy   gold         characters  agreement, %")
    evaluate("SFT")
    config = replace(FineTuningConfig.sandbox(), epochs=2, learning_rate=1e-3)
    for _ in SFT(policy, lessons(options), config=config, seed=options.seed).updates():
        pass
    evaluate("M1")
    settings = replace(
        SelfRewardingConfig.sandbox(), num_rounds=options.rounds, num_instructions=options.num_instructions
    )
    judge = None if options.judge == "self" else sandbox.raters("human", options.seed)
    unlabeled = sandbox.SANDBOX.instructions("unlabeled")
    for done in self_rewarding(policy, unlabeled, judge, config=settings, seed=options.seed):
        samples = done.samples
        rows = [(x, y) for x, texts in zip(samples.instructions, samples.responses, strict=True) for y in texts]
        truth = gold.score(*map(list, zip(*rows, strict=True))).reshape(samples.rewards.shape)
        evaluate(f"M{done.number + 1}", f"{100 * agreement(samples.rewards, truth):.1f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # models this small lose by more on a busy machine
    main(tyro.cli(Options))
