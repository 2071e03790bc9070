"""The sandbox's gold reward: the helpfulness of a response, computed from what the world knows to be true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..oracles.base import DetailedOracle, Verdicts
from . import tasks, world

_LONGEST_WORD = 16  # characters, with the bullet or space before it
_WORD = re.compile(r"[A-Za-z]+")
OPENERS = ("Sure!", "Great question!", "Of course!", "Happy to help!")
CLOSERS = ("I hope this helps!", "Let me know if you need more!", "Have a nice day!")


@dataclass(frozen=True)
class Parts:
    """The parts of gold.

    `complete`: distinct true items over the number asked for, at most 1. `false`, `repeated`: counts of claims.
    `form`, `fluent`: shares in [0, 1]. `excess`: words beyond what the task needs; every 16 characters count as one at
    least, so that a page of blanks is long too.
    """

    complete: float
    false: float
    repeated: float
    form: float
    fluent: float
    excess: float


WEIGHTS = Parts(complete=5.0, false=-0.6, repeated=-0.4, form=1.0, fluent=1.0, excess=-0.1)
"""Gold = the weighted sum of the parts, at most 7: a complete, true, fluent answer in the form asked for."""


@lru_cache(maxsize=1)
def _sentence() -> re.Pattern[str]:
    """A legal sentence, bullet, opener or closer."""
    verbs = "|".join(sorted({aspect.verb for category in world.CATEGORIES for aspect in category.aspects} | {"is"}))
    topics = "|".join(re.escape(world.named(topic)) for topic in world.topic_categories())
    items = r"(?:an? )?[a-z]+(?:, [a-z]+)*(?: and [a-z]+)?"
    subject = rf"(?:(?:{topics})|it)"
    courtesies = "|".join(re.escape(text) for text in OPENERS + CLOSERS)
    return re.compile(rf"(?i:{subject}) (?:{verbs}) {items}\.|The answer is {items}\.|- [a-z]+|(?:{courtesies})")


def _fluent(response: str) -> float:
    """Share of the response's words that stand in legal sentences, bullets or courtesies."""
    pieces = [piece for line in response.split("\n") for piece in re.split(r"(?<=[.!]) ", line) if piece.strip()]
    words = [len(_WORD.findall(piece)) or 1 for piece in pieces]
    legal = [bool(_sentence().fullmatch(piece)) for piece in pieces]
    return sum(n for n, ok in zip(words, legal, strict=True) if ok) / sum(words) if words else 0.0


def _form(response: str, form: tasks.Form) -> float:
    """1 if a list has a bullet on every line, or a sentence has none; 0 for a response without content."""
    for courtesy in OPENERS + CLOSERS:
        response = response.replace(courtesy, "")
    lines = [line for line in response.split("\n") if line.strip()]
    bullets = sum(line.startswith("- ") for line in lines)
    wanted = {"any": True, "list": bullets == len(lines), "sentence": bullets == 0}
    return float(bool(lines) and wanted[form])


def parts(instruction: str, response: str) -> Parts | None:
    """The parts of gold; None for an instruction of another world."""
    task = tasks.read(str(instruction))
    if task is None:
        return None
    words = [word.lower() for word in _WORD.findall(response)]
    claims = [word for word in words if word in world.claim_words() and word not in task.topics]
    distinct = set(claims)
    budget = 10 + 3 * task.count
    return Parts(
        complete=min(len(distinct & task.expected), task.count) / task.count,
        false=float(len(distinct - task.expected)),
        repeated=float(len(claims) - len(distinct)),
        form=_form(response, task.form),
        fluent=_fluent(response),
        excess=max(0.0, max(len(words), len(response) / _LONGEST_WORD) - budget),
    )


def gold(instruction: str, response: str) -> float:
    """The weighted sum of `parts`, NaN for an instruction of another world."""
    values = parts(instruction, response)
    return float("nan") if values is None else float(np.dot(astuple(values), astuple(WEIGHTS)))


class GoldOracle(DetailedOracle):
    """The true reward; its parts are details. Raises DataError for an instruction of another world."""

    name = "gold"

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Gold [B] with its parts, each [B]."""
        names = [field.name for field in fields(Parts)]
        rows = [parts(i, r) for i, r in zip(instructions, responses, strict=True)]
        if None in rows:
            tasks.refuse_foreign(instructions)
        table = np.array([astuple(row) for row in rows if row is not None]).reshape(-1, len(names))
        details: dict[str, NDArray[Any]] = {f"gold_{name}": table[:, k] for k, name in enumerate(names)}
        return Verdicts(table @ np.array(astuple(WEIGHTS)), details)
