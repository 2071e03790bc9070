"""Recorded judgements replayed: what a real judge once said about published outputs, and nothing else.

A response that was never judged gets no guess: it has no verdict, and the detail `unscored_reason` says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .base import UNSCORED_REASON, DetailedJudge, DetailedOracle, Verdicts, unscored

if TYPE_CHECKING:
    from ..data.recorded import RecordedDataset

NEVER_JUDGED = "this response was never judged: a recorded oracle only replays stored judgements"
NO_CLEAR_VERDICT = "judged, but without one clear verdict (none was given, or the stored ones differ)"
NO_REFERENCE_IN_PAIR = "neither response is the instruction's reference: only such pairs were judged"


class Recorded(DetailedOracle):
    """The stored credit of a response against its reference, in [0, 1]; NaN = never judged, or no clear verdict.

    `generator` replays only the judgements of one generator's responses. Without it a text that two generators wrote
    and the judge credited differently has no clear verdict.
    """

    def __init__(self, dataset: RecordedDataset, *, generator: str | None = None, name: str = "recorded") -> None:
        self._dataset = dataset
        self.generator = generator
        self.name = name

    @cached_property
    def verdicts(self) -> Mapping[tuple[str, str], float]:
        """The stored credits by (instruction, response)."""
        chosen = () if self.generator is None else (self.generator,)
        return self._dataset.recorded_verdicts(*chosen)

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The stored credit of each response, [B] in [0, 1]; NaN = no verdict."""
        return _verdicts([self.credit(*row) for row in zip(instructions, responses, strict=True)])

    def credit(self, instruction: str, response: str) -> tuple[float, str]:
        """The credit of one response, and what to say if it is NaN."""
        credit = self.verdicts.get((instruction, response))
        return (math.nan, NEVER_JUDGED) if credit is None else (credit, NO_CLEAR_VERDICT)


class RecordedJudge(DetailedJudge):
    """The same judgements as a `PreferenceOracle`, for pairs of which one response is the instruction's reference."""

    name = "recorded"

    def __init__(self, dataset: RecordedDataset, *, generator: str | None = None) -> None:
        self._dataset = dataset
        self._recorded = Recorded(dataset, generator=generator)
        self.blank = {UNSCORED_REASON: ""}

    @cached_property
    def _references(self) -> dict[str, str]:
        return dict(zip(self._dataset.instructions("eval"), self._dataset.references("eval"), strict=True))

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """The stored P(b preferred), [B] in [0, 1]; NaN = no verdict."""
        return _verdicts([self._preference(*row) for row in zip(instructions, a, b, strict=True)])

    def _preference(self, instruction: str, a: str, b: str) -> tuple[float, str]:
        reference = self._references.get(instruction)
        if a == b:
            return 0.5, ""
        if a == reference:
            return self._recorded.credit(instruction, b)
        if b == reference:
            credit, reason = self._recorded.credit(instruction, a)
            return 1 - credit, reason
        return math.nan, NO_REFERENCE_IN_PAIR


def _verdicts(rows: Sequence[tuple[float, str]]) -> Verdicts:
    scores = np.array([score for score, _ in rows], np.float64)
    return unscored(Verdicts(scores), np.array([reason for _, reason in rows], str))
