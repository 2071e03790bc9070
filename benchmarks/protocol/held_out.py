"""Instructions that no split has: as held-out users of the sandbox ask them, and as the evaluation set asks.

Held-out users ("live" in the tables) ask with other frequencies of all that varies in the world's instructions, but
with its wordings, since gold reads no others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...instructions import Instruction
from ...sandbox import SANDBOX, tasks, world
from ...sandbox.dataset import SEED, generate, reference, template_weights
from ...seeding import keyed_rng
from ..experiment.evaluation import subset

LIVE: Final = "live"
FRESH: Final = "fresh"
EVAL: Final = "eval"
WITH_INPUT: Final = 0.05
"""Share with an input: few people who try a demo paste something."""
VERBS: Final = {"explain": 6.0, "tell": 6.0, "write": 4.0, "give": 3.0, "suggest": 3.0, "rewrite": 3.0}
"""Weights of root verbs, 1 for all others."""
GREETINGS: Final = {"": 0.55, "Hi! ": 0.12, "Can you help me? ": 0.12, "Please ": 0.1}
"""Shares; the other greetings have equal parts of the rest."""
ASKS_FORM: Final = 0.2
"""Share that asks for a list or a sentence; 60 % in the splits, where all else is equally frequent."""
COUNTS: Final = {"two": 0.15, "three": 0.45, "four": 0.05, "five": 0.35}
CATEGORIES: Final = {category.name: 1 / rank for rank, category in enumerate(world.CATEGORIES[::-1], start=1)}
_OPENINGS: Final = {text for text in tasks.wordings() if not text.startswith(" ")}
_ENDINGS: Final = {text for text in tasks.wordings() if not text or text.startswith(" ")}
_HOMES: Final = {
    **{item: each.name for each in world.CATEGORIES for aspect in each.aspects for item in aspect.items},
    **{name: each.name for each in world.CATEGORIES for name in (each.name, each.plural, *each.topics)},
}
"""Word -> its category."""


@dataclass(frozen=True)
class Question:
    """A set of instructions and the responses to beat."""

    instructions: tuple[Instruction, ...]
    references: tuple[str, ...]


def questions(num_eval: int, num_others: int) -> dict[str, Question]:
    """Evaluation instructions (evenly spread), held-out users' and fresh ones; the latter two are in no split."""
    taken = {str(row) for split in SANDBOX.splits for row in SANDBOX.instructions(split)}
    every = SANDBOX.instructions(EVAL)
    rows = {EVAL: tuple(every[i] for i in subset(len(every), num_eval)), LIVE: draw_live(num_others, taken)}
    # The evaluation set drawn with another seed.
    fresh = [row for row in generate(SEED + 1)[EVAL] if str(row) not in taken]
    rows[FRESH] = tuple(fresh[i] for i in subset(len(fresh), num_others))
    return {which: Question(each, tuple(map(reference, each))) for which, each in rows.items()}


def draw_live(num: int, taken: Iterable[str]) -> tuple[Instruction, ...]:
    """`num` different instructions of held-out users, none of them in `taken`.

    A wording is drawn by `VERBS` and `WITH_INPUT`. Instructions with it, drawn as the world draws them, are kept with
    probabilities that turn the world's frequencies into those above.
    """
    rng, seen = keyed_rng(SEED, "instructions", LIVE), set(taken)
    weights = template_weights(VERBS, WITH_INPUT)
    rows: list[Instruction] = []
    for place in rng.choice(len(weights), size=num, p=weights):
        while True:
            drawn = tasks.draw(rng, tasks.TEMPLATES[place])
            row = Instruction(*drawn, id=len(rows), split=LIVE, source=LIVE)
            if str(row) not in seen and rng.random() < _chance(row):
                break
        seen.add(str(row))
        rows.append(row)
    return tuple(rows)


def _chance(row: Instruction) -> float:
    """Wanted share over the world's share, scaled to 1 at most."""
    said = properties(row)
    rest = (1 - sum(GREETINGS.values())) / (len(_OPENINGS) - len(GREETINGS))
    chance = GREETINGS.get(said["greeting"], rest) / max(GREETINGS.values())
    if said["form"]:  # 60 % of the world's instructions: it is the odds that must change
        chance *= (ASKS_FORM / (1 - ASKS_FORM)) / (0.6 / 0.4)
    chance *= COUNTS[said["count"]] / max(COUNTS.values()) if said["count"] else 1.0
    return chance * CATEGORIES[said["category"]]


def properties(row: Instruction) -> dict[str, str]:
    """Input, greeting, form, number of items asked for and category, as the text has them; "" for none."""
    count = (word for word in _words(row.instruction) if word in COUNTS)
    categories = Counter(_HOMES[word] for word in _words(str(row).lower()) if word in _HOMES)
    return {
        "input": "with an input" if row.input else "without",
        "greeting": max((text for text in _OPENINGS if row.instruction.startswith(text)), key=len),
        "form": max((text for text in _ENDINGS if row.instruction.endswith(text)), key=len),
        "count": next(count, ""),
        "category": categories.most_common(1)[0][0],
    }


def shares(rows: Sequence[Instruction]) -> dict[tuple[str, str], float]:
    """(property, value) -> share of the instructions; the root verb is a property too."""
    verbs = (task.verb for row in rows if (task := tasks.read(str(row))))
    counts = Counter(("verb", verb) for verb in verbs)
    counts.update((name, value.strip() or "none") for row in rows for name, value in properties(row).items())
    return {key: number / len(rows) for key, number in counts.items()}


def distances(one: Sequence[Instruction], two: Sequence[Instruction]) -> dict[str, float]:
    """Property -> total variation between two sets: 0 for equal shares, 1 for no value in common."""
    a, b = shares(one), shares(two)
    keys = sorted(a.keys() | b.keys())  # sums in one order: that of a set differs between processes
    names = dict.fromkeys(name for name, _ in a)
    return {name: sum(abs(a.get(key, 0) - b.get(key, 0)) for key in keys if key[0] == name) / 2 for name in names}


def _words(text: str) -> list[str]:
    return text.replace(",", " ").replace(".", " ").split()
