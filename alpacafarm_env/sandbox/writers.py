"""Writers of the sandbox: who wrote the demonstrations, and the stand-in for Davinci003."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..seeding import keyed_rng
from . import gold, tasks, world


@dataclass(frozen=True)
class Writer:
    """Habits of a writer; every field but `extra` is a probability."""

    complete: tuple[float, float]
    """Range of the share of the items asked for; drawn anew for each response."""
    true: float
    """That an item is true of the topic."""
    repeat: float
    """That an item is said again."""
    form: float
    """That the form asked for is kept."""
    courtesy: float
    """That there is an opener; half of it, that there is a closer."""
    extra: float
    """Mean number of items beyond those asked for."""


CROWD = Writer(complete=(0.0, 1.0), true=0.98, repeat=0.01, form=0.8, courtesy=0.15, extra=0.1)
"""Writes the demonstrations: terse, of mixed quality, as the instruction data of 2023 was."""
REFERENCE = Writer(complete=(0.3, 1.0), true=0.9, repeat=0.02, form=0.85, courtesy=0.1, extra=0.2)
"""The stand-in for Davinci003."""

API_MODELS: Final = {
    "gpt4": Writer(complete=(0.85, 1.0), true=0.98, repeat=0.0, form=0.97, courtesy=0.35, extra=0.2),
    "chatgpt": Writer(complete=(0.4, 1.0), true=0.91, repeat=0.02, form=0.85, courtesy=0.5, extra=0.3),
    "davinci001": Writer(complete=(0.0, 0.7), true=0.8, repeat=0.05, form=0.6, courtesy=0.05, extra=0.1),
}
"""Stand-ins for the models behind an API in the paper's table. Their habits are set so that their win rates come near
the published ones; that they do is no finding.
"""


def _pick(writer: Writer, task: tasks.Task, items: tuple[str, ...], rng: np.random.Generator, num: int) -> list[str]:
    """`num` items for one statement, some of them false or said twice."""
    # Facts come to mind in a conventional order, so a response keeps it: a subset of the true items, not a shuffle.
    kept = set(rng.permutation(len(items))[:num].tolist())
    pool = [item for place, item in enumerate(items) if place in kept]
    kinds = {category.name for category in world.CATEGORIES}
    related = [a.items for c in world.CATEGORIES for a in c.aspects if set(items) <= a.items]
    others = kinds if set(items) <= kinds else world.claim_words()
    wrong = sorted((frozenset().union(*related) or others) - task.expected)
    chosen: list[str] = []
    for _ in range(num):
        if chosen and rng.random() < writer.repeat:
            chosen.append(chosen[int(rng.integers(len(chosen)))])
        elif pool and (rng.random() < writer.true or not wrong):
            chosen.append(pool.pop(0))
        elif wrong:
            chosen.append(wrong[int(rng.integers(len(wrong)))])
    return chosen


def write(writer: Writer, instruction: str, rng: np.random.Generator) -> str:
    """A response to an instruction of the sandbox; ValueError for one of another world."""
    task = tasks.read(str(instruction))
    if task is None:
        raise ValueError(f"Expected an instruction of the sandbox, got {instruction!r}.")
    total = max(1, int(rng.binomial(task.count, rng.uniform(*writer.complete))) + int(rng.poisson(writer.extra)))
    # Every statement gets its share; the first statement of a classification is the kind itself.
    shares = np.bincount(np.arange(total) % len(task.statements), minlength=len(task.statements))
    form = task.form if rng.random() < writer.form else ("list", "sentence")[int(rng.integers(2))]
    if form == "any":
        form = ("list", "sentence")[int(rng.random() < 0.6)]
    lines: list[str] = []
    for k, (topic, verb, items) in enumerate(task.statements):
        chosen = _pick(writer, task, items, rng, min(int(shares[k]), max(1, len(items))))
        if not chosen:
            continue
        if form == "list":
            lines += [f"- {item}" for item in chosen]
        elif verb:
            subject = world.named(topic).capitalize() if k == 0 or rng.random() < 0.5 else "It"
            kind = verb == "is" and chosen[0] in {c.name for c in world.CATEGORIES}
            lines.append(f"{subject} {verb} {world.named_kind(chosen[0]) if kind else world.joined(chosen)}.")
        else:
            lines.append(f"The answer is {world.joined(chosen)}.")
    body = ("\n" if form == "list" else " ").join(lines)
    if rng.random() < writer.courtesy:
        body = f"{gold.OPENERS[int(rng.integers(len(gold.OPENERS)))]}{chr(10) if form == 'list' else ' '}{body}"
    if rng.random() < writer.courtesy / 2:
        body = f"{body}{chr(10) if form == 'list' else ' '}{gold.CLOSERS[int(rng.integers(len(gold.CLOSERS)))]}"
    return body


@dataclass(frozen=True)
class StandIn:
    """A writer of the sandbox in place of a model behind an API or of the crowd; it only acts."""

    name: str
    habits: Writer
    seed: int

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """The writer's responses, keyed on name, seed and instruction."""
        return tuple(write(self.habits, str(x), keyed_rng(self.seed, self.name, str(x))) for x in instructions)


def page(rng: np.random.Generator) -> tuple[str, str]:
    """Heading and text about a topic, true and false: what a language model reads before it sees any instruction."""
    category = world.CATEGORIES[int(rng.integers(len(world.CATEGORIES)))]
    topics = sorted(category.aspects[0].facts)
    topic = topics[int(rng.integers(len(topics)))]
    statements = []
    for aspect in category.aspects[: int(rng.integers(1, 3))]:
        own, others = list(aspect.facts[topic]), sorted(aspect.items)
        items = [
            (own if rng.random() < 0.7 else others)[int(rng.integers(len(own)))] for _ in range(int(rng.integers(1, 4)))
        ]
        if rng.random() < 0.3:
            statements.append("\n".join(f"- {item}" for item in items))
        else:
            statements.append(f"{world.named(topic).capitalize()} {aspect.verb} {world.joined(items)}.")
    return world.named(topic).capitalize(), "\n".join(statements)
