"""Instructions that no split has: as "live users" of the sandbox would ask, and as the evaluation set asks.

Live users are given another mixture of all that varies in the world's instructions: a shift of frequencies, since gold
reads no other wordings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from ...data import Dataset
from ...instructions import Instruction
from ...sandbox import tasks, world
from ...sandbox.dataset import SEED, generate, reference
from ...seeding import keyed_rng
from ..harness.evaluation import subset

LIVE: Final = "live"
FRESH: Final = "fresh"
EVAL: Final = "eval"
WITH_INPUT: Final = 0.05
"""Share of live instructions with an input: who tries a demo seldom pastes something."""
VERBS: Final = {"explain": 6.0, "tell": 6.0, "write": 4.0, "give": 3.0, "suggest": 3.0, "rewrite": 3.0}
"""Root verbs that live users like; the others have weight 1."""
GREETINGS: Final = {"": 0.55, "Hi! ": 0.12, "Can you help me? ": 0.12, "Please ": 0.1}
"""Share of the greetings; the others share what is left. The splits have all eight alike."""
ASKS_FORM: Final = 0.2
"""Share that asks for a list or a sentence; 60 % of the splits' do."""
COUNTS: Final = {"two": 0.15, "three": 0.45, "four": 0.05, "five": 0.35}
"""Share of the numbers of items asked for; the splits have them alike."""
CATEGORIES: Final = {category.name: 1 / rank for rank, category in enumerate(world.CATEGORIES[::-1], start=1)}
"""Weight of the categories, the world's last one the most popular; the splits have them alike."""


@dataclass(frozen=True)
class Question:
    """A set of instructions and the responses to beat."""

    instructions: tuple[Instruction, ...]
    references: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instructions)


def questions(data: Dataset, num_eval: int, num_others: int) -> dict[str, Question]:
    """The three sets: evaluation instructions, live ones, fresh ones; subsets are evenly spread."""
    known = {str(row) for split in data.splits for row in data.instructions(split)}
    instructions, references = data.instructions(EVAL), data.references(EVAL)
    chosen = subset(len(instructions), num_eval)
    live, fresh = draw_live(num_others, known), draw_fresh(num_others, known)
    return {
        EVAL: Question(tuple(instructions[i] for i in chosen), tuple(references[i] for i in chosen)),
        LIVE: Question(live, tuple(map(reference, live))),
        FRESH: Question(fresh, tuple(map(reference, fresh))),
    }


def draw_fresh(num: int, known: Iterable[str]) -> tuple[Instruction, ...]:
    """The evaluation set drawn with another seed, without what is known, thinned out evenly to `num`."""
    taken = set(known)
    rows = [row for row in _another_evaluation() if str(row) not in taken]
    return tuple(rows[index] for index in subset(len(rows), num))


def draw_live(num: int, known: Iterable[str], seed: int = SEED) -> tuple[Instruction, ...]:
    """`num` instructions of live users, none of them known or twice.

    A wording is drawn by `VERBS` and `WITH_INPUT`; of it an instruction as the world draws them, kept with a chance
    that turns the world's frequencies into the ones above.
    """
    rng, seen = keyed_rng(seed, "instructions", LIVE), set(known)
    templates = tasks.TEMPLATES
    weights = np.array([VERBS.get(template.verb, 1.0) for template in templates])
    has_input = np.array([template.with_input for template in templates])
    for rows, share in ((has_input, WITH_INPUT), (~has_input, 1 - WITH_INPUT)):
        weights[rows] *= share / weights[rows].sum()
    found: list[Instruction] = []
    for template in (templates[i] for i in rng.choice(len(templates), size=num, p=weights)):
        while True:
            row = Instruction(*tasks.draw(rng, template), id=len(found), split=LIVE, source=LIVE)
            if str(row) not in seen and rng.random() < _chance(row):
                break
        seen.add(str(row))
        found.append(row)
    return tuple(found)


def greeting(row: Instruction) -> str:
    """How it begins, "" for none."""
    return max((text for text in _greetings() if row.instruction.startswith(text)), key=len)


def form(row: Instruction) -> str:
    """What it says of the form, "" for nothing."""
    return max((text for text in _forms() if row.instruction.endswith(text)), key=len)


def count(row: Instruction) -> str:
    """The number it asks for, "" where it names none."""
    words = row.instruction.rstrip(".").replace(",", " ").replace(".", " ").split()
    return next((word for word in words if word in COUNTS), "")


def category(row: Instruction) -> str:
    """What it is about: the category of most of its words."""
    homes = _homes()
    words = str(row).replace(",", " ").replace(".", " ").lower().split()
    return Counter(homes[word] for word in words if word in homes).most_common(1)[0][0]


def verb(row: Instruction) -> str:
    """Its root verb."""
    task = tasks.read(str(row))
    if task is None:
        raise ValueError(f"expected an instruction of the sandbox, got {str(row)!r}")
    return task.verb


PROPERTIES: Final[Mapping[str, Callable[[Instruction], str]]] = {
    "verb": verb,
    "input": lambda row: "with an input" if row.input else "without",
    "greeting": lambda row: greeting(row).strip() or "none",
    "form": lambda row: form(row).strip() or "none",
    "count": lambda row: count(row) or "none",
    "category": category,
}


def shares(rows: Sequence[Instruction]) -> dict[tuple[str, str], float]:
    """(property, value) -> share of the instructions."""
    return {
        (name, value): number / len(rows)
        for name, of in PROPERTIES.items()
        for value, number in Counter(map(of, rows)).items()
    }


def distances(one: Sequence[Instruction], two: Sequence[Instruction]) -> dict[str, float]:
    """Property -> total variation between two sets: 0 for equal shares, 1 for no value in common."""
    a, b = shares(one), shares(two)
    keys = sorted(a.keys() | b.keys())  # a sum in one order: a set's differs between processes
    return {name: sum(abs(a.get(key, 0) - b.get(key, 0)) for key in keys if key[0] == name) / 2 for name in PROPERTIES}


def _chance(row: Instruction) -> float:
    """With which a draw of the world is kept: wanted share over the world's share, scaled to 1 at the most."""
    rest = (1 - sum(GREETINGS.values())) / (len(_greetings()) - len(GREETINGS))
    wanted = GREETINGS.get(greeting(row), rest) / max(GREETINGS.values())
    # The world asks for a form in 60 % of its instructions: the ratio of the odds is what has to be mended.
    if form(row):
        wanted *= (ASKS_FORM / (1 - ASKS_FORM)) / (0.6 / 0.4)
    wanted *= COUNTS[number] / max(COUNTS.values()) if (number := count(row)) else 1.0
    return wanted * CATEGORIES[category(row)]


@cache
def _another_evaluation() -> tuple[Instruction, ...]:
    return tuple(generate(SEED + 1)[EVAL])


@cache
def _greetings() -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in tasks.wordings() if not text.startswith(" ")))


@cache
def _forms() -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in tasks.wordings() if not text or text.startswith(" ")))


@cache
def _homes() -> dict[str, str]:
    """Word -> the category it belongs to."""
    homes = {item: c.name for c in world.CATEGORIES for aspect in c.aspects for item in aspect.items}
    names = {name: c.name for c in world.CATEGORIES for name in (c.name, c.plural)}
    return {**homes, **names, **{topic: c.name for topic, c in world.topic_categories().items()}}
