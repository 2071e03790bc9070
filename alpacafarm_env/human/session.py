"""The order of work: the qualification, the order of the pairs and of their outputs, and progress.

Single responses go the same way as pairs.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..errors import DataError
from ..seeding import keyed_uniforms
from .store import Answer, Part, Store, now
from .tasks import SINGLES, Task, agrees, form_of

QUALIFIED_FROM: Final = 0.70
"""Least agreement with the key of the qualification set. Source: Dubois et al. 2023 (arXiv 2305.14387), appendix D."""
LEAST_SECONDS: Final = 0.3
"""An answer that comes sooner after its page is the second of a double click, and means the page before."""
MOST_CHARS: Final = 60
"""Most characters of an annotator's name."""
NOTES: Final = {
    "again": "That one was answered before, and that answer stands. Undo takes back the last one.",
    "soon": "That came too soon after the page to be about it, so nothing was done.",
    "reason": "What is skipped is skipped for a reason, and nothing of the qualification set is.",
    "nothing": "There is nothing to undo.",
    "moved": "That came from a page before this one, and nothing was taken back.",
}
"""Reasons against something that an annotator did."""
MOST_CRITIQUE: Final = 1500
"""Characters of a critique."""


@dataclass(frozen=True)
class Standing:
    """Where an annotator stands."""

    part: Part
    pair: Task | None
    """The task to judge now; None: nothing is left, or the qualification was not passed."""
    shown_first: int
    """1 or 2: the output on the left, or above."""
    num_done: int
    num_pairs: int
    """Tasks of this part."""
    last_answer: int
    """The number of the last answer in this part, which undo takes back; 0 if there is none."""
    agreement: float
    """With the key, of the whole qualification set; NaN as long as it is not done, or without one."""
    qualified: bool
    """False only for somebody who did the whole qualification set and is kept out."""

    @property
    def can_undo(self) -> bool:
        """Not once the result of the qualification is known."""
        return self.num_done > 0 and not (self.part == "qualification" and self.pair is None)


class Session:
    """The pairs or single responses, the qualification set ([] for none) and the database.

    Raises:
        DataError: The database has answers of the other kind, or to a qualification set, and none is given.
    """

    def __init__(self, store: Store, pairs: Sequence[Task], qualification: Sequence[Task] = ()) -> None:
        self.store = store
        self.parts: dict[Part, Sequence[Task]] = {"qualification": qualification, "labels": pairs}
        self._orders: dict[tuple[str, Part], list[Task]] = {}
        self.rates = any(len(pair.outputs) == 1 for pair in pairs)
        stored = store.all()
        if any((form_of(each.record) is SINGLES) != self.rates for each in stored):
            kinds = ("ratings of responses", "labels of pairs")
            has, wanted = kinds[self.rates], kinds[not self.rates]
            raise DataError(f"{store.path}: expected {wanted}, got {has}. Give another --out.")
        if not qualification and any(each.answer.part == "qualification" for each in stored):
            text = "expected --qualification, as people have answered such a set, got none: who failed would be let in"
            raise DataError(f"{store.path}: {text}. Give that file, or another --out.")
        for part, tasks in self.parts.items():
            store.refresh(part, tasks)

    def standing(self, annotator: str) -> Standing:
        """Where an annotator stands, from what is stored alone."""
        answers = self.store.answers(annotator)
        agreement = key_agreement(self.parts["qualification"], answers)
        qualified = not agreement < QUALIFIED_FROM
        testing = bool(self.parts["qualification"]) and (math.isnan(agreement) or not qualified)
        part: Part = "qualification" if testing else "labels"
        done = {answer.pair: answer for answer in answers if answer.part == part}
        order = self._order(annotator, part)
        open_pairs = [pair for pair in order if pair.key not in done]
        pair = open_pairs[0] if open_pairs else None
        return Standing(
            part=part,
            pair=pair,
            shown_first=self.shown_first(annotator, pair) if pair else 1,
            num_done=len(order) - len(open_pairs),
            num_pairs=len(order),
            last_answer=next(reversed(done.values())).id if done else 0,
            agreement=agreement,
            qualified=qualified,
        )

    def shown_first(self, annotator: str, pair: Task) -> int:
        """1 or 2: the output shown first, keyed on (seed, annotator, pair); 1 if there is one alone."""
        if len(pair.outputs) == 1:
            return 1
        return 1 + int(keyed_uniforms(self.store.seed, "human order", [(annotator, pair.key)])[0] >= 0.5)

    def answer(
        self,
        annotator: str,
        key: str,
        seconds: float,
        *,
        choice: int | None = None,
        reason: str = "",
        critique: str = "",
    ) -> str:
        """Stores what an annotator said of the pair that is theirs now; of `NOTES` what speaks against it, or "".

        Args:
            annotator: Whose answer it is.
            key: The pair's.
            seconds: Since it was shown.
            choice: 1: the output shown first is clearly better, 2: slightly, 3: the other slightly, 4: clearly; or the
                rating of a single response.
            reason: Why the pair is skipped, if there is no choice.
            critique: What is to be said of a single response; cut at `MOST_CRITIQUE` characters.
        """
        standing = self.standing(annotator)
        if standing.pair is None or standing.pair.key != key:
            return "again"
        if seconds < LEAST_SECONDS:
            return "soon"
        if choice is None and (not reason.strip() or standing.part == "qualification"):
            return "reason"
        grade = None if choice is None else choice if standing.shown_first == 1 else 5 - choice
        why = reason.strip()[:500] if choice is None else None
        words = "" if choice is None else critique.replace("\r\n", "\n").strip()[:MOST_CRITIQUE]
        given = Answer(annotator, standing.part, key, standing.shown_first, grade, why, round(seconds, 3), now(), words)
        self.store.add(given, standing.pair)
        return ""

    def undo(self, annotator: str, key: str, seconds: float) -> str:
        """Takes back an annotator's last answer; of `NOTES` what speaks against it, or "".

        Args:
            annotator: Whose answer it is.
            key: Of the pair that is theirs now; "" at the end.
            seconds: Since it was shown.
        """
        standing = self.standing(annotator)
        if key != (standing.pair.key if standing.pair else ""):
            return "moved"
        if seconds < LEAST_SECONDS:
            return "soon"
        # By its number: several such calls at once, which all see one standing, take back one answer.
        return "" if standing.can_undo and self.store.undo(standing.last_answer) else "nothing"

    def _order(self, annotator: str, part: Part) -> list[Task]:
        if (annotator, part) not in self._orders:
            pairs = self.parts[part]
            rows = [(annotator, pair.key) for pair in pairs]
            order = np.argsort(keyed_uniforms(self.store.seed, f"human {part}", rows), kind="stable").tolist()
            self._orders[annotator, part] = [pairs[row] for row in order]
        return self._orders[annotator, part]


def key_agreement(qualification: Sequence[Task], answers: Sequence[Answer]) -> float:
    """The share of a qualification set that somebody answered as its key; NaN as long as not all is answered."""
    given = {answer.pair: answer.grade for answer in answers if answer.part == "qualification"}
    if not qualification or any(pair.key not in given for pair in qualification):
        return math.nan
    return sum(bool(agrees(pair.record, given[pair.key] or 0)) for pair in qualification) / len(qualification)


def read_name(text: str) -> str:
    """An annotator's name, tidied.

    Raises:
        DataError: It is empty, too long, or has characters that cannot be seen.
    """
    name = re.sub(r"\s+", " ", unicodedata.normalize("NFC", text)).strip()
    if not 0 < len(name) <= MOST_CHARS or not name.isprintable():
        raise DataError(f"Expected a name of 1 to {MOST_CHARS} characters that can be seen, got {text[:80]!r}.")
    return name
