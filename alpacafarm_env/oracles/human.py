"""What people said of pairs and responses, replayed: what `python -m alpacafarm_env annotate-human` collects."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np

from ..data.dataset import merged
from ..data.files import read_records
from ..data.ratings import RATED
from ..data.schema import PREFERENCE, Field, Row, check_rows, is_text
from .base import DetailedJudge, DetailedOracle, Verdicts, unscored

NEVER_LABELLED: Final = "nobody has labelled this pair"
NEVER_RATED: Final = "nobody has rated this response"
LABEL: Final = (*PREFERENCE, Field("annotator", "a name", is_text, ""))


class HumanJudge(DetailedJudge):
    """A judge that answers with people's labels: P(b preferred) is the share of them for b, NaN for an unlabelled pair.

    Binary labels count, each annotator's alike. A pair is found in either order, and identical responses are a tie.
    Adds the details `num_labels` and `unscored_reason`.

    Args:
        labels: A file of labels: instruction, input (optional), output_1, output_2, preference (1 or 2). It is read
            when the judge is first asked.
    """

    def __init__(self, labels: str | PathLike[str]) -> None:
        self.path = Path(labels).expanduser()
        self.name = f"human:{self.path.name.partition('.')[0]}"
        self.blank = {"num_labels": 0, "unscored_reason": ""}

    @cached_property
    def votes(self) -> Counter[tuple[str, str, str]]:
        """How many preferred the third text to the second, by (instruction, worse, better).

        Raises:
            DataError: The file cannot be read, or labels are faulty; names them.
        """
        return Counter(_ballot(row) for row in read_labels(self.path))

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """The share of the labels of each pair that prefer b, [B] in [0, 1]; NaN = no label."""
        rows = list(zip(map(str, instructions), a, b, strict=True))
        for_b = np.array([self.votes[ask, x, y] for ask, x, y in rows], np.float64)
        num = for_b + [self.votes[ask, y, x] for ask, x, y in rows]
        scores = np.where(num > 0, for_b / np.maximum(num, 1), math.nan)
        same = np.array([x == y for _, x, y in rows], bool)
        verdicts = Verdicts(np.where(same, 0.5, scores), {"num_labels": num.astype(np.int64)})
        return unscored(verdicts, np.array(NEVER_LABELLED))


class HumanRatings(DetailedOracle):
    """An oracle that answers with people's ratings: the mean of a response's, 1 to 7; NaN for one that has none.

    Adds the details `num_labels`, `critique` (theirs, a line each) and `unscored_reason`.

    Args:
        ratings: A file of ratings, see `data.ratings`. It is read when the oracle is first asked.
    """

    def __init__(self, ratings: str | PathLike[str]) -> None:
        self.path = Path(ratings).expanduser()
        self.name = f"human_rating:{self.path.name.partition('.')[0]}"

    @cached_property
    def ratings(self) -> dict[tuple[str, str], list[Row]]:
        """The ratings of each (instruction, response).

        Raises:
            DataError: The file cannot be read, or ratings are faulty; names them.
        """
        found = defaultdict[tuple[str, str], list[Row]](list)
        for row in check_rows(read_records(self.path), RATED, str(self.path)):
            if row["rating"] is not None:
                found[merged(row), row["output"]].append(row)
        return dict(found)

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The mean rating of each response, [B] in 1 to 7; NaN = no rating."""
        rows = [self.ratings.get(asked, []) for asked in zip(map(str, instructions), responses, strict=True)]
        scores = [float(np.mean([row["rating"] for row in found])) if found else math.nan for found in rows]
        critiques = ["\n".join(row["critique"] for row in found if row["critique"]) for found in rows]
        details = {"num_labels": np.array([len(found) for found in rows]), "critique": np.array(critiques, object)}
        return unscored(Verdicts(np.array(scores), details), np.array(NEVER_RATED))


def read_labels(path: Path) -> list[Row]:
    """The labels of a file, checked.

    Raises:
        DataError: The file cannot be read, or labels are faulty; names them.
    """
    return check_rows(read_records(path), LABEL, str(path))


def _ballot(row: Row) -> tuple[str, str, str]:
    outputs = row["output_1"], row["output_2"]
    better = int(row["preference"]) - 1
    return merged(row), outputs[1 - better], outputs[better]
