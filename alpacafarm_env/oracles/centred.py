"""A reward less what it gives to a fixed answer: the part of a reward model's score that preferences do not decide.

Preferences compare answers to one instruction, so a reward model that is trained on them is determined up to a constant
for each instruction. That constant does not matter to who is best among answers to one instruction, but it differs from
one reward model to the next, and where several are combined by their minimum or variance it stands before what they
disagree on about the answer. Source: Eisenstein et al. 2023 (arXiv 2312.09244), who remove it in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .base import RewardOracle, Shared, Verdicts, judge


class Centred(Shared):
    """score(x, y) - score(x, y0(x)), where y0(x) is a fixed answer to the instruction x.

    Args:
        oracle: Scores both. It must be deterministic; the fixed answer to an instruction is scored once,
            or again where there was no verdict on it.
        answer: y0, a function of instructions [B] that returns answers [B]: the SFT policy's likeliest, for instance.
        name: The oracle's name; the oracle's own by default.
    """

    def __init__(
        self, oracle: RewardOracle, answer: Callable[[Sequence[str]], Sequence[str]], *, name: str | None = None
    ) -> None:
        self.oracle, self.name = oracle, name or oracle.name
        self._answer = answer
        self._levels: dict[str, float] = {}

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """The differences [B]; NaN where the oracle has no verdict on either."""
        return self.judge(instructions, responses).scores

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The same with the oracle's details of the responses; asks it once about them and once about new levels."""
        found = judge(self.oracle, instructions, responses)
        if new := list({str(x): x for x in instructions if str(x) not in self._levels}.values()):
            levels = judge(self.oracle, new, self._answer(new)).scores
            known = zip(map(str, new), levels.tolist(), strict=True)
            self._levels.update((x, level) for x, level in known if not math.isnan(level))  # others are asked again
        return Verdicts(found.scores - [self._levels.get(str(x), math.nan) for x in instructions], found.details)
