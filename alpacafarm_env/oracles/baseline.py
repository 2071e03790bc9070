"""A reward less what it gives to fixed answers: without the part of a score that preferences do not decide.

A reward model trained on preferences is determined up to a constant for each instruction. That constant does not
matter to who is best on one instruction, but it differs between reward models, and hides what they disagree on about
the answer where several are combined by their minimum or variance.
Source: Eisenstein et al. 2023 (arXiv 2312.09244), who remove it in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from .base import DetailedOracle, RewardOracle, Verdicts, judge


class BaselineSubtracted(DetailedOracle):
    """score(x, y) - mean over k of score(x, y_k(x)), where the y_k(x) are fixed answers to the instruction x.

    Args:
        oracle: Deterministic; the fixed answers to an instruction are scored once, or again where there was no verdict.
        answers: A function of instructions [B] that returns the fixed answers to each: B lists of K answers, such as
            samples of the SFT policy. An instruction of an empty list has no level.
        name: The oracle's own by default.
    """

    def __init__(
        self, oracle: RewardOracle, answers: Callable[[Sequence[str]], Sequence[Sequence[str]]], name: str | None = None
    ) -> None:
        self.oracle, self.name = oracle, name or oracle.name
        self._answers = answers
        self._levels: dict[str, float] = {}

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The differences [B]; NaN where the oracle has no verdict on the response or on a fixed answer.

        Raises:
            TypeError: `answers` returned texts instead of lists of texts.
            ValueError: It did not return one list for each instruction.
        """
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
