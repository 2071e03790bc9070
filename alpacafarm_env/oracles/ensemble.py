"""Several oracles as one: an ensemble of reward models is harder to exploit than any of its members.

Members that were trained on the same labels agree where the labels were, and drift apart where an optimizer has gone
beyond them. Taking the worst member's word, or a price for disagreement, makes going there less attractive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import UnknownNameError, did_you_mean
from .base import UNSCORED_REASON, DetailedOracle, PreferenceOracle, RewardOracle, Verdicts, judge

COMBINATIONS: Final = ("mean", "min", "uwo")
DEFAULT_WEIGHT: Final = 0.5

NO_VERDICT = "no verdict"


class Ensemble(DetailedOracle):
    """Scores a response by all members and combines their scores.

    | combine | score | in the source |
    |---|---|---|
    | "mean" | mean of the members' scores | mean |
    | "min" | the lowest of them | worst-case optimization, WCO |
    | "uwo" | mean - weight * variance | uncertainty-weighted optimization, UWO |

    The variance is that of the population. Members should score on one scale: nothing here rescales them. A response
    that one member has no verdict on has none (NaN).

    Details are `disagreement`, the population's standard deviation over the members; each member's score, under
    "score:" and its name; and `unscored_reason`. Of the members' own details, costs (`cost_*`) are summed, booleans are
    true if they are for any member, and any other stays one for each member, under its key, ":" and the member's name.

    Source: Coste, Anwar, Kirk, Krueger 2023 (arXiv 2310.02743), with a weight of 0.5 for best-of-n and 0.1 for PPO. (In
    their code the variance is divided by the number of members for best-of-n, as in the paper and here, and by one less
    for PPO.)

    Args:
        members: Each is asked once a batch. Those that share a name are numbered: "a#1", "a#2".
        combine: One of the table.
        weight: Of the variance, 0 or more; 0.5 by default. With "uwo" only.
        name: "ensemble:", `combine` and the weight by default.

    Raises:
        UnknownNameError: There is no such way to combine.
        TypeError: A member scores nothing.
        ValueError: There is no member, or `weight` is out of range, or given where it does nothing.
    """

    def __init__(
        self,
        members: Iterable[RewardOracle],
        combine: str = "mean",
        weight: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.members = _checked(members)
        if combine == "wco":  # the closest name, by its letters, would be another thing
            raise UnknownNameError("Unknown combination 'wco': the worst case is called 'min'.")
        if combine not in COMBINATIONS:
            raise did_you_mean("combination", combine, COMBINATIONS)
        if weight is not None and combine != "uwo":
            raise ValueError(
                f"The weight, that of the variance, goes with combine='uwo'; got {weight!r} with {combine!r}."
            )
        if weight is not None and not 0 <= weight < inf:
            raise ValueError(f"The weight of the variance must be 0 or a positive number, got {weight!r}.")
        self.combine = combine
        self.weight = DEFAULT_WEIGHT if weight is None else float(weight)
        self.member_names = _numbered([member.name for member in self.members])
        self.name = name or f"ensemble:{combine}{f'{self.weight:g}' if combine == 'uwo' else ''}"

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The combined score of each response, [B]; NaN where a member has no verdict."""
        answers = [judge(member, instructions, responses) for member in self.members]
        scores = [answer.scores for answer in answers]
        # Added up member by member: a row's sum must not round differently with the size of its batch.
        mean = sum(scores[1:], scores[0]) / len(scores)
        variance = sum([(score - mean) ** 2 for score in scores], np.zeros(len(mean))) / len(scores)
        if self.combine == "mean":
            combined = mean
        elif self.combine == "min":
            combined = np.min(scores, axis=0)
        else:
            combined = mean - self.weight * variance
        members = {f"score:{name}": score for name, score in zip(self.member_names, scores, strict=True)}
        own = {"disagreement": np.sqrt(variance), **members}
        return Verdicts(combined, own | self._told(answers) | own)  # first, and whatever members call theirs

    def _told(self, answers: Sequence[Verdicts]) -> dict[str, NDArray[Any]]:
        """The members' own details."""
        reasons = np.full(len(answers[0].scores), "", object)
        told: dict[str, NDArray[Any]] = {UNSCORED_REASON: reasons}
        for name, answer in zip(self.member_names, answers, strict=True):
            own = answer.details.get(UNSCORED_REASON, reasons)
            for row in np.flatnonzero(np.isnan(answer.scores) & (reasons == "")).tolist():
                reasons[row] = f"{name}: {own[row] or NO_VERDICT}"
            for key, detail in answer.details.items():
                if key == UNSCORED_REASON:
                    continue
                values = np.asarray(detail)
                if not key.startswith("cost_") and values.dtype != np.bool_:
                    told[f"{key}:{name}"] = values
                elif key in told:
                    told[key] = told[key] + values if key.startswith("cost_") else told[key] | values
                else:
                    told[key] = values
        return told


def _checked(given: Iterable[Any]) -> tuple[RewardOracle, ...]:
    members = tuple(given)
    for member in members:
        if not isinstance(member, RewardOracle):
            advice = ": it compares pairs; give the win rate by it" if isinstance(member, PreferenceOracle) else ""
            raise TypeError(f"Members of an ensemble are oracles with name and score, got {member!r}{advice}.")
    if not members:
        raise ValueError("An ensemble needs one or more members, got none.")
    return members


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Names that differ: those that several members share get numbers, in the order of the members."""
    told: list[str] = []
    for name in names:
        free = (f"{name}#{number}" for number in count(1))
        told.append(next(new for new in free if new not in {*names, *told}) if names.count(name) > 1 else name)
    return tuple(told)
