"""People's labels, as `alpacafarm annotate-human` collects them, by the figures of the simulated judges.

They are about pairs of one's own, so the paper's values stand beside them without a tolerance.
"""

import hashlib
from pathlib import Path
from typing import Final

from ...human.labels import load_labels
from ..harness.study import Row
from .rows import TARGETS, Target, rows_of

LEVEL: Final = "people"
_NAMES: Final = {"people": "people", "judge": "their pairs' judge", "annotator": "people"}
_LIKE: Final = {"people": "human", "judge": "sim_gpt4"}
"""The paper's judge that a kind of ours is put next to."""


def labels_digest(path: Path) -> str:
    """Hash of a file of labels, hexadecimal; DataError if it is faulty."""
    load_labels(path)  # now, and not after the other judges' minutes
    return hashlib.sha256(path.read_bytes()).hexdigest()


def people_rows(path: Path) -> list[Row]:
    """The rows of all people, of the judge whose verdicts the pairs came with, and of each annotator.

    Raises:
        DataError: The file is faulty.
    """
    rows = []
    for (kind, name), found in load_labels(path).figures().items():
        targets = TARGETS.get(_LIKE.get(kind, ""), {})
        judge = f"{_NAMES[kind]} {name}".strip()
        rows += rows_of(judge, [found], LEVEL, {figure: Target(target.paper) for figure, target in targets.items()})
    return rows
