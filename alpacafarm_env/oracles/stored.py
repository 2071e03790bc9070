"""Stored verdicts, replayed: real judges' judgements, people's labels and ratings, and the references.

A response or a pair that nobody has judged gets no guess: it has no verdict, and the detail `unscored_reason` says so.
People's labels and ratings are what `alpacafarm annotate-human` collects.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..data.dataset import merged
from ..data.files import read_records
from ..data.load import RATED
from ..data.schema import PREFERENCE, Field, Row, check_rows, is_text
from ..errors import DataError
from ..instructions import RATINGS, Critique, Instruction, Rating
from .base import (
    UNSCORED_REASON,
    DetailedJudge,
    DetailedOracle,
    OracleError,
    RewardOracle,
    Verdicts,
    judge,
    shorten,
    unscored,
)

if TYPE_CHECKING:
    from ..data import Dataset
    from ..data.recorded import RecordedDataset

NEVER_JUDGED = "this response was never judged: a recorded oracle only replays stored judgements"
NO_CLEAR_VERDICT = "judged, but without one clear verdict (none was given, or the stored ones differ)"
NO_REFERENCE_IN_PAIR = "neither response is the instruction's reference: only such pairs were judged"
NEVER_LABELLED: Final = "nobody has labelled this pair"
NEVER_RATED: Final = "nobody has rated this response"
LABEL: Final = (*PREFERENCE, Field("annotator", "a name", is_text, ""))


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
        ratings: A file of ratings, see `data.load`. It is read when the oracle is first asked.
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
        by_response = defaultdict[tuple[str, str], list[Row]](list)
        for row in check_rows(read_records(self.path), RATED, str(self.path)):
            if row["rating"] is not None:
                by_response[merged(row), row["output"]].append(row)
        return dict(by_response)

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """The mean rating of each response, [B] in 1 to 7; NaN = no rating."""
        rows = [self.ratings.get(key, []) for key in zip(map(str, instructions), responses, strict=True)]
        scores = [float(np.mean([row["rating"] for row in ratings])) if ratings else math.nan for ratings in rows]
        critiques = ["\n".join(row["critique"] for row in ratings if row["critique"]) for ratings in rows]
        details = {"num_labels": np.array([len(ratings) for ratings in rows]), "critique": np.array(critiques, object)}
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


class References(Mapping[str, str]):
    """The references of a dataset by instruction, read a split at a time when they are first asked for.

    An `Instruction` is looked up in its own split (DataError if that has none); any other text in all splits that have
    references. Of several references to one instruction the first counts, with a warning.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._splits: dict[str, dict[str, str]] = {}

    def __getitem__(self, instruction: str) -> str:
        split = getattr(instruction, "split_name", "")
        if split in self._dataset.splits:
            return self._of(split)[instruction]
        return self._all[instruction]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _of(self, split: str) -> dict[str, str]:
        if split not in self._splits:
            first = self._splits[split] = {}
            rows = list(zip(self._dataset.instructions(split), self._dataset.references(split), strict=True))
            if passed := sum(first.setdefault(instruction, reference) != reference for instruction, reference in rows):
                text = f"{passed} of {len(rows)} references of {split} are passed over"
                warnings.warn(f"{text}: their instruction stands above with another one, which counts.", stacklevel=4)
        return self._splits[split]

    @cached_property
    def _all(self) -> dict[str, str]:
        references: dict[str, str] = {}
        for split in self._dataset.splits:
            with suppress(DataError):  # a split without references answers no question
                references |= self._of(split)
        return references


def rated(
    oracle: RewardOracle, instructions: Sequence[Instruction], responses: Sequence[str]
) -> tuple[list[Rating], list[Critique]]:
    """The ratings, and the critiques where it gives any, of an oracle such as {"rating": "human"}; one call.

    Responses without a verdict are left out, with a warning.

    Raises:
        OracleError: A score is no whole number from 1 to 7.
    """
    verdicts = judge(oracle, instructions, responses)
    scored = np.isfinite(verdicts.scores)
    if wrong := [score for score in verdicts.scores[scored].tolist() if score not in RATINGS]:
        raise OracleError(f"Expected whole ratings from 1 to 7 of {oracle.name!r}, got {wrong[0]}.")
    if not scored.all():
        unscored = shorten(responses[int(np.flatnonzero(~scored)[0])])
        count = f"{(~scored).sum()} of {len(scored)} responses"
        warnings.warn(f"{oracle.name!r} gave no rating of {count}, for instance {unscored}.", stacklevel=2)
    said = verdicts.details.get("critique", np.full(len(scored), ""))
    rows = [row for row in zip(instructions, responses, verdicts.scores.tolist(), said, scored, strict=True) if row[-1]]
    ratings = [Rating(ask, response, int(score)) for ask, response, score, *_ in rows]
    return ratings, [Critique(ask, response, str(text)) for ask, response, _, text, _ in rows if text]
