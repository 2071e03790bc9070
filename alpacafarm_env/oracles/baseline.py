"""A reward less what it gives to fixed answers: without the part of a score that preferences do not decide.

Preferences compare answers to one instruction, so a reward model that is trained on them is determined up to a constant
for each instruction. That constant does not matter to who is best among answers to one instruction, but it differs from
one reward model to the next, and where several are combined by their minimum or variance it stands before what they
disagree on about the answer. Source: Eisenstein et al. 2023 (arXiv 2312.09244), who remove it in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from .base import NoDeepCopy, RewardOracle, Verdicts, judge


class BaselineSubtracted(NoDeepCopy):
    """score(x, y) - mean over k of score(x, y_k(x)), where the y_k(x) are fixed answers to the instruction x.

    Args:
        oracle: Scores all of them. It must be deterministic; the fixed answers to an instruction are scored once,
            or again where there was no verdict on one.
        answers: A function of instructions [B] that returns the fixed answers to each: B lists of K answers, such as
            samples of the SFT policy. The more, the better the level is known; an instruction of an empty list has no
            level.
        name: The oracle's name; the oracle's own by default.
    """

    def __init__(
        self,
        oracle: RewardOracle,
        answers: Callable[[Sequence[str]], Sequence[Sequence[str]]],
        *,
        name: str | None = None,
    ) -> None:
        self.oracle, self.name = oracle, name or oracle.name
        self._answers = answers
        self._levels: dict[str, float] = {}

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """The differences [B]; NaN where the oracle has no verdict on the response or on a fixed answer.

        Raises:
            TypeError: `answers` returned texts instead of lists of texts.
            ValueError: It did not return one list for each instruction.
        """
        return self.judge(instructions, responses).scores

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The same with the oracle's details of the responses; asks it once about them and once about new levels."""
        found = judge(self.oracle, instructions, responses)
        if new := list({str(x): x for x in instructions if str(x) not in self._levels}.values()):
            known = zip(map(str, new), self._measure(new), strict=True)
            self._levels.update((x, level) for x, level in known if not math.isnan(level))  # others are asked again
        return Verdicts(found.scores - [self._levels.get(str(x), math.nan) for x in instructions], found.details)

    def _measure(self, instructions: Sequence[str]) -> list[float]:
        """Mean score of the fixed answers to each instruction, [B]."""
        found = list(self._answers(instructions))
        if wrong := [each for each in found if isinstance(each, str) or not isinstance(each, Iterable)]:
            raise TypeError(
                f"BaselineSubtracted: expected answers to return a list of texts for each instruction, got {wrong[0]!r}"
            )
        fixed = [list(each) for each in found]
        if len(fixed) != len(instructions):
            raise ValueError(
                f"BaselineSubtracted: expected answers to return {len(instructions)} lists, got {len(fixed)}"
            )
        asked = [x for x, answers in zip(instructions, fixed, strict=True) for _ in answers]
        scores = iter(judge(self.oracle, asked, [text for answers in fixed for text in answers]).scores.tolist())
        return [fmean([next(scores) for _ in answers]) if answers else math.nan for answers in fixed]
