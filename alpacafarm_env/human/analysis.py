"""People's labels by the figures of `annotators.analysis`, beside the verdicts that the pairs came with.

Longer and list are those of the released analysis: labels are about responses of real models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from ..annotators.analysis import Array, Opinions, Pairs, agreement, figures, majority
from ..data.dataset import merged
from ..data.files import read_records
from ..data.schema import Field, Row, check_rows, is_text
from ..oracles.stored import LABEL
from ..tables import format_table
from .pairs import JUDGED, VERDICT, side

Kind = Literal["people", "judge", "annotator"]
OF_ONE: Final = ("agreement", "prefers_first", "prefers_longer", "prefers_lists")
"""Figures of one annotator, who has one opinion on a pair."""
_FIELDS: Final = (
    *LABEL,
    Field("shown_first", "output_1 or output_2", lambda value: value in (None, "output_1", "output_2"), None),
    # What tells a person's label from a judge's verdict, and a file of labels from one of pairs.
    Field("raw_preference", "a person's grade, 1 to 4", lambda value: type(value) is int and 1 <= value <= 4),
    replace(VERDICT, name=JUDGED[0]),
    Field(JUDGED[1], "a name", is_text, ""),
)


@dataclass(frozen=True)
class Labels:
    """The labels of n pairs; arrays are [annotators, n], NaN where somebody did not label a pair."""

    pairs: Pairs
    people: Opinions
    judge: Opinions
    """The one verdict that each pair came with, [1, n]; NaN without one."""
    judge_name: str

    @property
    def names(self) -> list[str]:
        """The annotators'."""
        return sorted({str(name) for name in self.people.annotator.ravel().tolist()})

    def figures(self) -> dict[tuple[Kind, str], dict[str, Array]]:
        """(kind, name) -> figure -> its value for each pair, [n]: all people, the judge if any, and each annotator.

        The people's agreement is each one's with the majority of the others. So is a single annotator's, who has
        `agreement_with_judge` beside it; the judge's is with the majority of all.
        """
        found: dict[tuple[Kind, str], dict[str, Array]] = {("people", ""): figures(self.people, self.pairs, None)}
        if not np.isnan(self.judge.votes).all():
            found["judge", self.judge_name] = figures(self.judge, self.pairs, majority(self.people.votes))
        for name in self.names:
            others = np.where(self.people.annotator == name, np.nan, self.people.votes)
            own = figures(self.people.by(name), self.pairs, majority(others))
            judged = agreement(self.people.by(name).votes, 2 * self.judge.votes[0] - 1)
            found["annotator", name] = {**{figure: own[figure] for figure in OF_ONE}, "agreement_with_judge": judged}
        return found


def load_labels(path: Path) -> Labels:
    """The labels of a file, as `annotate-human` writes it.

    Raises:
        DataError: It cannot be read, or labels are faulty; names them.
    """
    return labels_of(check_rows(read_records(path), _FIELDS, str(path)))


def labels_of(rows: Sequence[Row]) -> Labels:
    """Labels from checked records; somebody's second label of a pair counts as another annotator's."""
    places: dict[tuple[str, str, str], int] = {}
    voices: dict[tuple[str, int], int] = {}
    times: dict[tuple[str, int], int] = defaultdict(int)
    cells = []
    for row in rows:
        place = places.setdefault((merged(row), row["output_1"], row["output_2"]), len(places))
        who = row["annotator"]
        voice = voices.setdefault((who, times[who, place]), len(voices))
        times[who, place] += 1
        cells.append((voice, place, row))
    votes, first, cost = np.full((3, len(voices), len(places)), np.nan)
    judged, unknown = np.full((2, 1, len(places)), np.nan)
    for voice, place, row in cells:
        votes[voice, place] = row["preference"] - 1
        if row["shown_first"]:
            first[voice, place] = row["shown_first"] == f"output_{int(row['preference'])}"
        if better := side(row[JUDGED[0]]):
            judged[0, place] = better - 1
    names = np.array([[name] * len(places) for name, _ in voices])
    judge_names = sorted({row[JUDGED[1]] for row in rows if row[JUDGED[1]]})
    name = judge_names[0] if len(judge_names) == 1 else ""
    return Labels(
        replace(Pairs.of(list(places)), published=True),
        Opinions(votes, first, cost, names),
        Opinions(judged, unknown, unknown, np.full(judged.shape, name)),
        name,
    )


def table(labels: Labels) -> str:
    """The figures as text: means over the pairs that each is about, and how many these are."""
    found = {" ".join(filter(None, who)): values for who, values in labels.figures().items()}
    figures = list(dict.fromkeys(figure for values in found.values() for figure in values))
    cells = {figure: {who: _shown(values.get(figure)) for who, values in found.items()} for figure in figures}
    rows = [{"figure": figure, **row} for figure, row in cells.items() if any(row.values())]
    return format_table(("figure", *found), rows)


def _shown(values: Array | None) -> str:
    if values is None or np.isnan(values).all():
        return ""
    return f"{np.nanmean(values):.3f} ({int((~np.isnan(values)).sum())})"
