"""Each annotator in a line: how much, how fast, and how they agree with the key and with the judge of the pairs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ..statistics import wilson
from ..tables import format_table
from . import pairs, singles
from .session import QUALIFIED_FROM, key_agreement
from .store import Stored
from .task import Task

NEAR_CHANCE: Final = 0.55
"""Agreement with a judge up to which an annotator is flagged: the paper left one near 50 % out."""
LEAST_COMPARED: Final = 20
"""Pairs compared, below which nobody is flagged."""


@dataclass(frozen=True)
class Annotator:
    """What one annotator did."""

    name: str
    num_labels: int
    num_slight: int
    """Labels that say slightly better."""
    num_skipped: int
    seconds: float
    """Median for a label; NaN without one."""
    qualification: float
    """Agreement with the key; NaN without a set, or as long as it is not done."""
    num_agreed: int
    num_compared: int
    """Labels of pairs that came with a verdict, ties left out, and how many of these are for the same output. Ratings
    of responses that came with one, and how many of these are near it."""
    mean_rating: float
    """NaN without ratings."""

    @property
    def agreement(self) -> float:
        """With the judge of the pairs; NaN without one."""
        return self.num_agreed / self.num_compared if self.num_compared else math.nan

    @property
    def flag(self) -> str:
        """What speaks against an annotator, or ""."""
        if self.qualification < QUALIFIED_FROM:
            return "not qualified"
        if not math.isnan(self.mean_rating):
            return ""  # nobody has said what chance is there
        return "near chance" if self.num_compared >= LEAST_COMPARED and self.agreement <= NEAR_CHANCE else ""


def annotators(stored: Sequence[Stored], qualification: Sequence[Task] = ()) -> list[Annotator]:
    """Everybody who answered anything, by name."""
    names = sorted({each.answer.annotator for each in stored})
    return [
        _annotator(name, [each for each in stored if each.answer.annotator == name], qualification) for name in names
    ]


def summary(
    stored: Sequence[Stored], qualification: Sequence[Task] = (), *, without: Collection[str] = ()
) -> list[str]:
    """Lines of text: a table of the annotators, what the flags mean, why pairs were skipped.

    Those `without` whom labels are exported are in the table, flagged "left out".
    """
    found = annotators(stored, qualification)
    if not found:
        return ["Nobody has answered anything yet."]
    rows = [_row(each) | ({"flag": "left out"} if each.name in without else {}) for each in found]
    columns = dict.fromkeys(name for row in rows for name in row)
    lines = [format_table(tuple(columns), rows)]
    if near := [each.name for each in found if each.flag == "near chance"]:
        options = " ".join(f"--without {name!r}" for name in near)
        lines.append(
            f"near chance: agrees with the judge of the pairs in {NEAR_CHANCE:.0%} or less of {LEAST_COMPARED} or "
            f"more. The paper left such an annotator out: {options}"
        )
    if out := [each.name for each in found if each.flag == "not qualified"]:
        lines.append(
            f"not qualified: below {QUALIFIED_FROM:.0%} of the qualification set, given no pairs: {', '.join(out)}"
        )
    reasons = Counter(each.answer.reason for each in stored if each.answer.reason is not None)
    return [*lines, *(f"skipped {count} times: {reason}" for reason, count in reasons.most_common())]


def _annotator(name: str, stored: Sequence[Stored], qualification: Sequence[Task]) -> Annotator:
    given = [each for each in stored if each.answer.part == "labels"]
    labels = [each for each in given if each.answer.grade is not None]
    agreed = [agrees for each in labels if (agrees := _agrees(each)) is not None]
    ratings = [each.answer.grade or 0 for each in labels if each.is_rating]
    return Annotator(
        name=name,
        num_labels=len(labels),
        num_slight=sum(each.answer.grade in (2, 3) for each in labels if not each.is_rating),
        num_skipped=len(given) - len(labels),
        seconds=statistics.median(each.answer.seconds for each in labels) if labels else math.nan,
        qualification=key_agreement(qualification, [each.answer for each in stored]),
        num_agreed=sum(agreed),
        num_compared=len(agreed),
        mean_rating=statistics.fmean(ratings) if ratings else math.nan,
    )


def _agrees(stored: Stored) -> bool | None:
    """Whether a label agrees with the verdict that came with its pair or response; None without one, or for a tie."""
    if stored.is_rating:
        other = stored.record.get(singles.JUDGED[0])
        return None if other is None else singles.near(stored.answer.grade or 0, other)
    preferred = pairs.side(stored.record.get(pairs.JUDGED[0]))
    return stored.answer.better == preferred if preferred else None


def _row(found: Annotator) -> dict[str, object]:
    share = f"{found.num_slight / found.num_labels:.0%}" if found.num_labels else ""
    rates = not math.isnan(found.mean_rating)
    agreement = ""
    if found.num_compared:
        low, high = wilson(found.num_agreed, found.num_compared)
        agreement = f"{found.agreement:.0%} [{low:.0%}, {high:.0%}] of {found.num_compared}"
    return {
        "annotator": found.name,
        "labels": found.num_labels,
        **({"mean rating": f"{found.mean_rating:.2f}"} if rates else {"slightly": share}),
        "skipped": found.num_skipped,
        "seconds": "" if math.isnan(found.seconds) else f"{found.seconds:.1f}",
        "qualification": "" if math.isnan(found.qualification) else f"{found.qualification:.0%}",
        "agrees with judge": agreement,
        "flag": found.flag,
    }
