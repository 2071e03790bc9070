"""SFT's answers as the measure of the study's rewards: what 0 and 1 mean, and what an instruction's own level is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ... import sandbox
from ...agents import LanguageModel
from ...agents.loop import keyed_generator
from ...agents.reward_modeling import scale_of
from ...oracles.base import NoDeepCopy, RewardOracle
from ...sandbox import dataset as texts
from ..harness.reward_models import MAX_RESPONSE_TOKENS, sample

NUM_SAMPLES: Final = 4
"""SFT's answers to each instruction that sets a reward's scale."""


def answers(instructions: Sequence[str], num_samples: int) -> list[list[str]]:
    """So many of SFT's answers to each instruction, at temperature 1: the same whatever else is asked."""
    known = _answers(num_samples)
    if new := list({str(each): each for each in instructions if str(each) not in known}.values()):
        generators = [keyed_generator(texts.SEED, "level", str(each)) for each in new]
        found = _policy().generate(new, generator=generators, num_samples=num_samples).texts
        known.update((str(each), found[i * num_samples :][:num_samples]) for i, each in enumerate(new))
    return [list(known[str(each)]) for each in instructions]


class StandardizedOracle(NoDeepCopy):
    """An oracle in units of SFT: 0 is its answers' mean score, 1 their standard deviation within an instruction.

    As the study's reward models are, so that one KL penalty pulls equally hard against both.

    Args:
        oracle: Any.
        num_val: Instructions of val whose answers set the scale.

    Raises:
        ValueError: It scores all answers to an instruction alike, or has no verdict on one.
    """

    def __init__(self, oracle: RewardOracle, num_val: int = 500) -> None:
        self.oracle, self.name = oracle, oracle.name
        val = sandbox.SANDBOX.instructions("val")[:num_val]
        asked = [instruction for instruction in val for _ in range(NUM_SAMPLES)]
        scores = oracle.score(asked, sample(_policy(), val, "calibration", NUM_SAMPLES))
        self.mean, self.std = scale_of(scores, NUM_SAMPLES)
        if not 0 < self.std < math.inf:
            raise ValueError(
                f"{self.name}: expected a score of each of SFT's answers, and other ones for other answers to an "
                f"instruction, got a standard deviation of {self.std!r}."
            )

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """(score - mean) / std, [B]."""
        scores: NDArray[np.float64] = (self.oracle.score(instructions, responses) - self.mean) / self.std
        return scores


@cache
def _policy() -> LanguageModel:
    return LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)


@cache
def _answers(num_samples: int) -> dict[str, tuple[str, ...]]:
    return {}
