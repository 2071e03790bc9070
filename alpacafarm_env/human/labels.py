"""People's answers: records in AlpacaFarm's schema, one a label; each annotator in a line; figures of all.

A record is its pair's, as it came, followed by

| field | value |
|---|---|
| preference | 1 or 2: the better output; what training takes |
| raw_preference | 1: output_1 is clearly better, 2: slightly, 3: output_2 slightly, 4: clearly |
| annotator | the name |
| shown_first | "output_1" or "output_2" |
| seconds | from the page's being sent to the answer |
| answered_at | ISO 8601, UTC |

and, where the pair came with a verdict, `judge_preference` and `judge`. A skipped pair has no preference, so it goes
into a file of its own, with `reason`. The record of a single response is followed by `rating` (1 to 7), `critique`
(words, or ""), `annotator`, `seconds` and `answered_at`, and by `judge_rating` and `judge`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from ..annotators.analysis import Array, Opinions, Pairs, agreement, figures, majority
from ..cli.annotations import write_annotations
from ..data.dataset import merged
from ..data.files import read_records, stem_of
from ..data.schema import Field, check_rows, is_text
from ..errors import DataError
from ..oracles.stored import LABEL
from ..statistics import wilson
from ..terminal import format_table
from .session import QUALIFIED_FROM, key_agreement
from .store import Store, Stored
from .tasks import PAIRS, SKIPPED, Task, agrees, form_of, side

Who = Literal["people", "judge", "annotator"]
NEAR_CHANCE: Final = 0.55
"""Agreement with a judge up to which an annotator is flagged: the paper left one near 50 % out."""
LEAST_COMPARED: Final = 20
"""Pairs compared, below which nobody is flagged."""
OF_ONE: Final = ("agreement", "prefers_first", "prefers_longer", "prefers_lists")
"""Figures of one annotator, who has one opinion on a pair."""
_PREFERENCE, _JUDGE = PAIRS.judged
_FIELDS: Final = (
    *LABEL,
    Field("shown_first", "output_1 or output_2", lambda value: value in (None, "output_1", "output_2"), None),
    # What tells a person's label from a judge's verdict, and a file of labels from one of pairs.
    Field("raw_preference", "a person's grade, 1 to 4", lambda value: type(value) is int and 1 <= value <= 4),
    replace(PAIRS.verdict, name=_PREFERENCE),
    Field(_JUDGE, "a name", is_text, ""),
)


def write_labels(out: Path, stored: Sequence[Stored]) -> list[Path]:
    """Writes the labels, and the skipped pairs beside them; returns the files, none for what there is none of.

    Args:
        out: The file of the labels; its suffix gives the format, as in `write_annotations`.
        stored: All answers. Those of the qualification are no labels.

    Raises:
        DataError: A file could not be written.
    """
    answers = [each for each in stored if each.answer.part == "labels"]
    files: dict[Path, list[dict[str, Any]]] = {out: [], skipped_path(out): []}
    for each in answers:
        files[skipped_path(out) if each.answer.grade is None else out].append(_record(each))
    for path, records in files.items():
        if records or path.exists():  # what was there before may be undone by now
            write_annotations(path, records)
    return [path for path, records in files.items() if records]


def check_kept(out: Path, database: Path) -> None:
    """Refuses to overwrite labels or skipped pairs that are not in the database, which may be missing.

    Raises:
        DataError: There are some.
        AlpacaFarmError: As of `Store`.
    """
    kept = set()
    if database.exists():
        with Store(database) as store:
            kept = store.times()
    for path in (out, skipped_path(out)):
        records = read_records(path) if path.exists() and path.stat().st_size else []
        lost = sum((record["annotator"], record["answered_at"]) not in kept for record in records)  # type: ignore[index]
        if lost:
            raise DataError(
                f"{path}: expected records that are in {database}, got {lost} of {len(records)} that are not, which "
                "would be lost. Put their database there, or give another --out."
            )


def skipped_path(out: Path) -> Path:
    """Where the skipped pairs go: labels_skipped.json beside labels.json."""
    stem = stem_of(out) or ""
    return out.with_name(f"{stem}_skipped{out.name.removeprefix(stem)}")


def _record(stored: Stored) -> dict[str, Any]:
    """The record of a label or of a skipped task, see above."""
    answer, form = stored.answer, form_of(stored.record)
    judged = {name: value for name, value in stored.record.items() if name in form.judged}
    own = {name: value for name, value in stored.record.items() if name not in judged}
    values = {**vars(answer), "preference": answer.better, "raw_preference": answer.grade, "rating": answer.grade}
    values["shown_first"] = f"output_{answer.shown_first}"
    if answer.grade is None:
        return {**own, **{name: values[name] for name in SKIPPED}}
    return {**own, **{name: values[name] for name in form.added}, **judged}


def annotators(stored: Sequence[Stored], qualification: Sequence[Task] = ()) -> list[dict[str, object]]:
    """A row of the table for everybody who answered anything, by name.

    Agreement with the judge is of labels whose task came with a verdict, ties left out. The flag is a reason against
    somebody, or ""; for ratings chance is not defined, so their agreement flags nobody.
    """
    rows: list[dict[str, object]] = []
    for name in sorted({each.answer.annotator for each in stored}):
        own = [each for each in stored if each.answer.annotator == name]
        given = [each for each in own if each.answer.part == "labels"]
        labels = [each for each in given if each.answer.grade is not None]
        verdicts = [agrees(each.record, each.answer.grade or 0) for each in labels]
        agreed, compared = verdicts.count(True), len(verdicts) - verdicts.count(None)
        low, high = wilson(agreed, compared) if compared else (math.nan, math.nan)
        passed = key_agreement(qualification, [each.answer for each in own])
        near = compared >= LEAST_COMPARED and agreed <= NEAR_CHANCE * compared and form_of(labels[0].record) is PAIRS
        row = {
            "annotator": name,
            "labels": len(labels),
            "skipped": len(given) - len(labels),
            "seconds": f"{statistics.median(each.answer.seconds for each in labels):.1f}" if labels else "",
            "qualification": "" if math.isnan(passed) else f"{passed:.0%}",
            "agrees with judge": f"{agreed / compared:.0%} [{low:.0%}, {high:.0%}] of {compared}" if compared else "",
            "flag": "not qualified" if passed < QUALIFIED_FROM else "near chance" if near else "",
        }
        rows.append(row)
    return rows


def summary(stored: Sequence[Stored], qualification: Sequence[Task] = ()) -> list[str]:
    """Lines of text: a table of the annotators, what the flags mean, why pairs were skipped."""
    rows = annotators(stored, qualification)
    if not rows:
        return ["Nobody has answered anything yet."]
    lines = [format_table(tuple(rows[0]), rows)]
    if any(row["flag"] == "near chance" for row in rows):
        lines.append(
            f"near chance: agrees with the judge of the pairs in {NEAR_CHANCE:.0%} or less of {LEAST_COMPARED} or "
            "more. The paper left such an annotator out."
        )
    reasons = Counter(each.answer.reason for each in stored if each.answer.reason is not None)
    return [*lines, *(f"skipped {count} times: {reason}" for reason, count in reasons.most_common())]


@dataclass(frozen=True)
class Labels:
    """The labels of n pairs, beside the verdicts that these came with; arrays are [annotators, n], NaN for no label.

    Longer and list are those of the released analysis: labels are about responses of real models.
    """

    pairs: Pairs
    people: Opinions
    judge: Opinions
    """The one verdict that each pair came with, [1, n]; NaN without one."""
    judge_name: str

    def figures(self) -> dict[tuple[Who, str], dict[str, Array]]:
        """(kind, name) -> figure -> its value for each pair, [n]: all people, the judge if any, and each annotator.

        The people's agreement is each one's with the majority of the others. So is a single annotator's, who has
        `agreement_with_judge` beside it; the judge's is with the majority of all.
        """
        table: dict[tuple[Who, str], dict[str, Array]] = {("people", ""): figures(self.people, self.pairs, None)}
        if not np.isnan(self.judge.votes).all():
            table["judge", self.judge_name] = figures(self.judge, self.pairs, majority(self.people.votes))
        for name in sorted({str(name) for name in self.people.annotator.ravel().tolist()}):
            others = np.where(self.people.annotator == name, np.nan, self.people.votes)
            own = figures(self.people.by(name), self.pairs, majority(others))
            judged = agreement(self.people.by(name).votes, 2 * self.judge.votes[0] - 1)
            table["annotator", name] = {**{figure: own[figure] for figure in OF_ONE}, "agreement_with_judge": judged}
        return table


def load_labels(path: Path) -> Labels:
    """The labels of a file, as `annotate-human` writes it; somebody's second label of a pair counts as another's.

    Raises:
        DataError: It cannot be read, or labels are faulty; names them.
    """
    rows = check_rows(read_records(path), _FIELDS, str(path))
    texts = [(merged(row), row["output_1"], row["output_2"]) for row in rows]
    places = {pair: place for place, pair in enumerate(dict.fromkeys(texts))}
    firsts = {"output_1": 1.0, "output_2": 2.0}
    table = pd.DataFrame(
        {
            "place": [places[pair] for pair in texts],
            "who": [row["annotator"] for row in rows],
            "vote": [row["preference"] - 1.0 for row in rows],
            "shown": [firsts.get(row["shown_first"], math.nan) for row in rows],
            "judged": [float(side(row[_PREFERENCE]) or math.nan) for row in rows],
        }
    )
    table["first"] = (table["shown"] == table["vote"] + 1).astype(float).where(table["shown"].notna())
    table["time"] = table.groupby(["who", "place"]).cumcount()
    votes, first = (table.pivot(index=["who", "time"], columns="place", values=name) for name in ("vote", "first"))
    judged = table.groupby("place")["judged"].last().to_numpy()[None] - 1  # the last that there is
    unknown = np.full_like(judged, math.nan)
    names = np.array([[who] * len(places) for who, _ in votes.index])
    judges = sorted({row[_JUDGE] for row in rows if row[_JUDGE]})
    name = judges[0] if len(judges) == 1 else ""
    return Labels(
        replace(Pairs.of(list(places)), published=True),
        Opinions(votes.to_numpy(), first.to_numpy(), np.full(votes.shape, math.nan), names),
        Opinions(judged, unknown, unknown, np.full(judged.shape, name)),
        name,
    )
