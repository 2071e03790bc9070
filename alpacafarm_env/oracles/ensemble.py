"""Several oracles as one: an ensemble of reward models is harder to exploit than any of its members.

Members that were trained on the same labels agree where the labels were, and drift apart where an optimizer has gone
beyond them. Taking the worst member's word, or a price for disagreement, makes going there less attractive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf, isnan, nan
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import did_you_mean
from .base import UNSCORED_REASON, DetailedOracle, RewardOracle, Verdicts, is_paid, judge

COMBINATIONS: Final = ("mean", "min", "uwo")
DISAGREEMENT: Final = "disagreement"
"""The detail of how far an ensemble's members are apart."""
DEFAULT_WEIGHT: Final = 0.5

NO_VERDICT = "no verdict"

Answers = Callable[[Sequence[str]], Sequence[Sequence[str]]]


class Ensemble(DetailedOracle):
    """Scores a response by all members and combines their scores.

    | combine | score | in the source |
    |---|---|---|
    | "mean" | mean of the members' scores | mean |
    | "min" | the lowest of them | worst-case optimization, WCO |
    | "uwo" | mean - weight * variance | uncertainty-weighted optimization, UWO |

    The variance is that of the population; `weight` is 0.5 by default. Members should score on one scale: nothing here
    rescales them. Each is asked once a batch; those that share a name are numbered: "a#1", "a#2". A response that one
    member has no verdict on has none (NaN).

    Details are `disagreement`, the population's standard deviation over the members; each member's score, under
    "score:" and its name; and `unscored_reason`. Of the members' own details, costs (`cost_*`) are summed, booleans are
    true if they are for any member, and any other stays one for each member, under its key, ":" and the member's name.

    Source: Coste, Anwar, Kirk, Krueger 2023 (arXiv 2310.02743), with a weight of 0.5 for best-of-n and 0.1 for PPO. (In
    their code the variance is divided by the number of members for best-of-n, as in the paper and here, and by one less
    for PPO.)

    Raises UnknownNameError, TypeError or ValueError for another `combine`, member or `weight`.
    """

    def __init__(
        self,
        members: Iterable[RewardOracle],
        combine: str = "mean",
        weight: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.members = tuple(members)
        for member in self.members:
            if not isinstance(member, RewardOracle):  # a judge compares pairs: its win rate is one
                raise TypeError(f"Members of an ensemble are oracles with name and score, got {member!r}.")
        if not self.members:
            raise ValueError("An ensemble needs one or more members, got none.")
        if combine not in COMBINATIONS:
            raise did_you_mean("combination", combine, COMBINATIONS)
        if weight is not None and not (combine == "uwo" and 0 <= weight < inf):
            raise ValueError(
                f"The weight, that of the variance, is 0 or more and goes with combine='uwo'; got {weight!r} with "
                f"{combine!r}."
            )
        self.combine = combine
        self.weight = DEFAULT_WEIGHT if weight is None else float(weight)
        self.member_names = _numbered([member.name for member in self.members])
        self.name = name or f"ensemble:{combine}{f'{self.weight:g}' if combine == 'uwo' else ''}"
        self.paid = is_paid(*self.members)

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The combined score of each response, [B]; NaN where a member has no verdict."""
        answers = [judge(member, instructions, responses) for member in self.members]
        scores = [answer.scores for answer in answers]
        # Added up member by member: a row's sum must not round differently with the size of its batch.
        mean = sum(scores[1:], scores[0]) / len(scores)
        variance = sum([(score - mean) ** 2 for score in scores], np.zeros(len(mean))) / len(scores)
        price = self.weight * variance if self.combine == "uwo" else 0.0
        combined = np.min(scores, axis=0) if self.combine == "min" else mean - price
        members = {f"score:{name}": score for name, score in zip(self.member_names, scores, strict=True)}
        own = {DISAGREEMENT: np.sqrt(variance), **members}
        return Verdicts(combined, own | self._member_details(answers) | own)  # first, and whatever members call theirs

    def _member_details(self, answers: Sequence[Verdicts]) -> dict[str, NDArray[Any]]:
        """The members' own details."""
        reasons = np.full(len(answers[0].scores), "", object)
        details: dict[str, NDArray[Any]] = {UNSCORED_REASON: reasons}
        for name, answer in zip(self.member_names, answers, strict=True):
            own = answer.details.get(UNSCORED_REASON, reasons)
            for row in np.flatnonzero(np.isnan(answer.scores) & (reasons == "")).tolist():
                reasons[row] = f"{name}: {own[row] or NO_VERDICT}"
            for key, detail in answer.details.items():
                if key == UNSCORED_REASON:
                    continue
                values = np.asarray(detail)
                if not key.startswith("cost_") and values.dtype != np.bool_:
                    details[f"{key}:{name}"] = values
                else:  # booleans are added by "or"
                    details[key] = details.get(key, np.zeros_like(values)) + values
        return details


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Names that differ: those that several members share get numbers, in the order of the members."""
    numbered: list[str] = []
    for name in names:
        free = (f"{name}#{number}" for number in count(1))
        numbered.append(next(new for new in free if new not in {*names, *numbered}) if names.count(name) > 1 else name)
    return tuple(numbered)


class BaselineSubtracted(DetailedOracle):
    """score(x, y) - mean over k of score(x, y_k(x)), where the y_k(x) are fixed answers to the instruction x.

    A reward model trained on preferences is determined up to a constant for each instruction. That constant does not
    matter to who is best on one instruction, but it differs between reward models, and hides what they disagree on
    about the answer where several are combined. Source: Eisenstein et al. 2023 (arXiv 2312.09244), who remove it in
    training.

    `answers` returns the fixed answers to each of B instructions: B lists of K texts, such as samples of the SFT
    policy. The deterministic `oracle` scores them once, or again where there was no verdict.
    """

    def __init__(self, oracle: RewardOracle, answers: Answers, *, name: str | None = None) -> None:
        self.oracle, self.name = oracle, name or oracle.name
        self.paid = is_paid(oracle)
        self._answers = answers
        self._levels: dict[str, float] = {}

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The differences [B]; NaN where the oracle has no verdict on the response or on a fixed answer.

        Raises:
            TypeError: `answers` returned texts instead of lists of texts.
            ValueError: It did not return one list for each instruction.
        """
        verdicts = judge(self.oracle, instructions, responses)
        if new := list({str(x): x for x in instructions if str(x) not in self._levels}.values()):
            levels = zip(map(str, new), self._measure(new), strict=True)
            self._levels.update((x, level) for x, level in levels if not isnan(level))  # others are asked again
        return Verdicts(verdicts.scores - [self._levels.get(str(x), nan) for x in instructions], verdicts.details)

    def _measure(self, instructions: Sequence[str]) -> list[float]:
        """Mean score of the fixed answers to each instruction, [B]."""
        fixed = self._answers(instructions)
        if any(isinstance(each, str) for each in fixed):  # its letters would be the answers
            raise TypeError("BaselineSubtracted: expected answers to return a list of texts for each instruction.")
        repeated = [x for x, texts in zip(instructions, fixed, strict=True) for _ in texts]
        scores = iter(judge(self.oracle, repeated, [text for texts in fixed for text in texts]).scores.tolist())
        return [fmean([next(scores) for _ in texts]) if texts else nan for texts in fixed]
