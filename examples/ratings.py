"""Ratings or pairs: does a reward model learn more from ratings of single responses than from the pairs they make?

    python examples/ratings.py

Three reward models learn from the same pairs of responses, by the same simulated human raters:

    ratings    each response with its rating, by least squares
    binarized  each pair with the response that was rated higher, by Bradley-Terry; equally rated pairs are left out
    choices    each pair with the response that a rater prefers when shown both, by Bradley-Terry

A rating is one look at one response, a choice one look at two: the first two have two looks at a pair, the third one.
Accuracy is how often the higher score is the higher gold, on pairs of the policy's own responses.

Measured in the sandbox (a simulation) with 10000 pairs, 3 seeds of 2000 test pairs, 95 % t-intervals over seeds:
ratings 76.7 [76.4, 76.9] %, binarized 76.4 [76.1, 76.6] %, choices 76.4 [74.7, 78.1] %. Ratings less their pairs:
0.3 [-0.2, 0.8] points, not clearly apart. More: docs/studies/ratings.md.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import tyro

from alpacafarm_env import sandbox
from alpacafarm_env.agents import LanguageModel, RatingModeling, RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.loop import keyed_generator
from alpacafarm_env.instructions import Preference
from alpacafarm_env.oracles import rated
from alpacafarm_env.sandbox.dataset import label


@dataclass
class Options:
    """Reward models fitted to ratings, to the pairs that these make, and to choices."""

    num: int = 2000
    """Pairs of responses to learn from, of the split preference."""
    num_test: int = 1000
    """Pairs of samples to instructions of val."""
    seed: int = 0


def records(num: int, seed: int) -> dict[str, list]:
    """The same pairs of responses as ratings, as the pairs that these settle, and as choices."""
    data = sandbox.SANDBOX
    instructions, pairs = data.instructions("preference")[:num], data.pairs()[:num]
    twice = [instruction for instruction in instructions for _ in range(2)]
    ratings, _ = rated(sandbox.raters("human", seed), twice, [response for pair in pairs for response in pair])
    looks = zip(instructions, pairs, ratings[::2], ratings[1::2], strict=True)
    binarized = [Preference(x, pair, 1 + (b.rating > a.rating)) for x, pair, a, b in looks if a.rating != b.rating]
    return {
        "ratings": ratings,
        "binarized": binarized,
        "choices": label(instructions, pairs, sandbox.judge("human", seed)),
    }


def main(options: Options) -> None:
    """Fits the three and compares each with gold."""
    instructions = sandbox.SANDBOX.instructions("val")[: options.num_test]
    policy, draws = LanguageModel.from_pretrained(sandbox.POLICY), keyed_generator(options.seed, "test pairs")
    texts = policy.generate(instructions, generator=draws, num_samples=2).texts
    sides = texts[::2], texts[1::2]
    gold = np.subtract(*(sandbox.gold_oracle().score(instructions, side) for side in sides))
    print(f"{np.count_nonzero(gold)} test pairs of unequal gold, one seed; standard errors in parentheses")
    print("trained on   records   accuracy, %")
    for name, rows in records(options.num, options.seed).items():
        config = RewardModelingConfig.sandbox()
        if name == "ratings":  # as many responses an update as of pairs
            config = replace(config, batch_size=2 * config.batch_size)
        modeling = RatingModeling if name == "ratings" else RewardModeling
        model = modeling(sandbox.POLICY, rows, config=config, seed=options.seed)
        for _ in model.updates():
            pass
        scores = np.subtract(*(model.score(instructions, side) for side in sides))
        right = (scores * gold > 0)[gold != 0]  # pairs of equal gold have no right answer
        print(f"{name:10}  {len(rows):8}    {100 * right.mean():.1f} ({100 * right.std() / len(right) ** 0.5:.1f})")


if __name__ == "__main__":
    torch.set_num_threads(1)  # models this small lose by more on a busy machine
    main(tyro.cli(Options))
