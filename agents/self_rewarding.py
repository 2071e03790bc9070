"""Self-rewarding: a policy answers, rates its own answers, and learns by DPO to prefer those that it rates highest.

Source: Yuan et al. 2024, "Self-Rewarding Language Models" (arXiv 2401.10020). First it learns to answer and to rate:

    SFT(policy, [*demonstrations, *rating_demonstrations(ratings)]).learn()
    for round in self_rewarding(policy, instructions):
        print(round.number, len(round.preferences))

A round then is, on new instructions:

1. several responses to each, sampled from the policy as it is;
2. the oracle's score of each: the expected rating by the policy itself (`PolicyRating`), unless another is given;
3. the best against the worst response of an instruction, where they differ, as a `Preference`;
4. `DPO` on them, from the policy as it is, which is also the reference.

Deviations, besides those of `best_of_n`, `dpo` and `oracles.policies`:

1. Sampling is from the policy's whole distribution; theirs keeps the top 90 % (top-p 0.9).
2. They have a language model write new instructions, by examples; here they are given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from ..instructions import Instruction, Preference
from ..oracles.base import RewardOracle
from ..oracles.policies import PolicyRating
from ..seeding import keyed_rng
from .best_of_n import BestOfN, BestOfNConfig, BestOfNSamples
from .dpo import DPO, DPOConfig
from .language_model import LanguageModel
from .policy_agent import fitting
from .settings import Count, Positive, Settings


@dataclass(frozen=True, kw_only=True)
class SelfRewardingConfig(Settings):
    """Settings of self-rewarding rounds; the defaults are those of Yuan et al. for LLaMA 2 70B."""

    num_rounds: Count = 2
    """Rounds of sampling, rating and DPO."""
    num_samples: Annotated[int, Field(ge=2)] = 4
    """Responses to each instruction; 2 or more."""
    num_instructions: Count | None = None
    """Instructions of a round; None: all there are, in equal parts. No instruction is in two rounds."""
    temperature: Positive = 0.7
    """Sampling temperature."""
    max_response_tokens: Count | None = None
    """Longest response; None: the policy's limit."""
    sample_batch_size: Count = 256
    """Rows decoded together: memory and speed only."""
    dpo: DPOConfig = field(default_factory=lambda: DPOConfig(batch_size=16, learning_rate=1e-6))
    """Settings of each round's DPO."""

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores."""
        dpo = replace(DPOConfig.sandbox(), batch_size=32)
        return cls(num_rounds=3, num_instructions=300, temperature=1.0, dpo=dpo)


@dataclass(frozen=True)
class Round:
    """A round's samples and the pairs that it learned from; `number` counts from 1."""

    number: int
    samples: BestOfNSamples
    """The responses of the policy as it was before the round, and the oracle's scores of them."""
    preferences: tuple[Preference, ...]


def self_rewarding(
    policy: LanguageModel,
    instructions: Sequence[Instruction],
    oracle: RewardOracle | None = None,
    *,
    config: SelfRewardingConfig | None = None,
    seed: int = 0,
) -> Iterator[Round]:
    """Trains the policy in place, one round at a time; a round is yielded when its DPO is done.

    Args:
        policy: Has learned to answer and, for its own ratings, to rate.
        instructions: What to respond to, in an order drawn by the seed; those whose prompts the policy cannot read are
            left out, with a warning.
        oracle: Who scores instead of the policy itself, such as the policy of another time, from its folder.
        config: Settings.
        seed: Keys every draw.

    Raises:
        ValueError: There are fewer instructions than the rounds need, or the scores prefer no response to another.
    """
    config = config or SelfRewardingConfig()
    oracle = PolicyRating(policy) if oracle is None else oracle
    kept = fitting(policy, instructions, who="Self-rewarding", width=config.max_response_tokens)
    count = config.num_instructions or len(kept) // config.num_rounds
    if not 0 < count * config.num_rounds <= len(kept):
        raise ValueError(
            f"Self-rewarding needs {max(1, count) * config.num_rounds} instructions, {max(1, count)} in each of "
            f"{config.num_rounds} rounds, got {len(kept)} that the policy can read."
        )
    order = keyed_rng(seed, "self-rewarding", "instructions").permutation(len(kept)).tolist()
    sampling = BestOfNConfig(
        num_samples=config.num_samples,
        temperature=config.temperature,
        max_response_tokens=config.max_response_tokens,
        batch_size=config.sample_batch_size,
    )
    for number in range(1, config.num_rounds + 1):
        own = int(keyed_rng(seed, "self-rewarding", number).integers(2**31))
        chosen = [instructions[kept[place]] for place in order[(number - 1) * count : number * count]]
        samples = BestOfN(policy, oracle, config=sampling, seed=own).sample(chosen)
        preferences = best_against_worst(samples)
        if not preferences:
            raise ValueError(
                f"Round {number}: of {len(chosen)} instructions the oracle {oracle.name!r} scored no two responses "
                "differently, so there is nothing to learn from. A policy that rates must have learned to, by SFT on "
                "`rating_demonstrations`."
            )
        for _ in DPO(policy, preferences, config=config.dpo, seed=own).updates():
            pass
        yield Round(number, samples, preferences)


def best_against_worst(samples: BestOfNSamples) -> tuple[Preference, ...]:
    """For each instruction its response of the highest score, preferred to that of the lowest; of equals the first.

    Instructions all of whose scored responses have one score are left out. They must be `Instruction`s.
    """
    preferences = []
    for instruction, responses, scores in zip(samples.instructions, samples.responses, samples.rewards, strict=True):
        scored = np.flatnonzero(~np.isnan(scores))
        if len(scored) and np.ptp(scores[scored]) > 0:
            best, worst = scored[scores[scored].argmax()], scored[scores[scored].argmin()]
            assert isinstance(instruction, Instruction)
            preferences.append(Preference(instruction, (responses[best], responses[worst]), 1))
    return tuple(preferences)
