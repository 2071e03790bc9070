"""What people answered as records in AlpacaFarm's schema, one a label.

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

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..cli.annotation_files import write_annotations
from ..data.files import read_records, stem_of
from ..errors import DataError
from . import pairs, singles
from .store import Store, Stored


def write_labels(out: Path, stored: Sequence[Stored], *, without: Collection[str] = ()) -> list[Path]:
    """Writes the labels, and the skipped pairs beside them; returns the files, none for what there is none of.

    Args:
        out: The file of the labels; its suffix gives the format, as in `write_annotations`.
        stored: All answers. Those of the qualification are no labels.
        without: Annotators to leave out.

    Raises:
        DataError: A file could not be written.
    """
    answers = [each for each in stored if each.answer.part == "labels" and each.answer.annotator not in without]
    labels = [label(each) for each in answers if each.answer.grade is not None]
    skipped = [skip(each) for each in answers if each.answer.grade is None]
    files = {out: labels, skipped_path(out): skipped}
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
    known = set()
    if database.exists():
        with Store(database) as store:
            known = store.times()
    for path in (out, skipped_path(out)):
        records = read_records(path) if path.exists() and path.stat().st_size else []
        lost = sum((record["annotator"], record["answered_at"]) not in known for record in records)  # type: ignore[index]
        if lost:
            raise DataError(
                f"{path}: expected records that are in {database}, got {lost} of {len(records)} that are not, which "
                "would be lost. Put their database there, or give another --out."
            )


def skipped_path(out: Path) -> Path:
    """Where the skipped pairs go: labels_skipped.json beside labels.json."""
    stem = stem_of(out) or ""
    return out.with_name(f"{stem}_skipped{out.name.removeprefix(stem)}")


def label(stored: Stored) -> dict[str, Any]:
    """The record of a label, see above."""
    answer = stored.answer
    own, judged = _split(stored.record)
    if stored.is_rating:
        rated = (answer.grade, answer.critique, answer.annotator, answer.seconds, answer.answered_at)
        return {**own, **dict(zip(singles.FIELDS, rated, strict=True)), **judged}
    shown = f"output_{answer.shown_first}"
    values = (answer.better, answer.grade, answer.annotator, shown, answer.seconds, answer.answered_at)
    return {**own, **dict(zip(pairs.FIELDS, values, strict=True)), **judged}


def skip(stored: Stored) -> dict[str, Any]:
    """The record of a skipped pair."""
    answer = stored.answer
    told = {"reason": answer.reason, "annotator": answer.annotator, "answered_at": answer.answered_at}
    return {**_split(stored.record)[0], **told}


def _split(record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pair's or response's own fields, and those of the verdict that it came with."""
    judged = {name: value for name, value in record.items() if name in (*pairs.JUDGED, *singles.JUDGED)}
    return {name: value for name, value in record.items() if name not in judged}, judged
