"""Instructions of the sandbox: how a task is worded, and how `read` gets it back from the wording.

Gold hence needs nothing but the instruction's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from ..data.schema import shown
from ..errors import DataError
from . import world

Form = str  # "list", "sentence" or "any"

_FORMS: dict[str, Form] = {
    "": "any",
    " Use a list.": "list",
    " Make it a list.": "list",
    " Answer in a sentence.": "sentence",
    " No lists, please.": "sentence",
}
_POLITE = (
    *("", "Please ", "I need help. ", "Quick question. ", "For my homework: ", "Hi! "),
    *("Can you help me? ", "One more thing. "),
)


@dataclass(frozen=True)
class Template:
    """One wording of a task, with the slots {n} {noun} {topic} {other} {plural} {given}.

    `verb` is its root verb; `asks` names the rule by which the expected items follow from the slots.
    """

    verb: str
    text: str
    asks: str
    input: str = ""

    @property
    def with_input(self) -> bool:
        """Whether instructions of this wording have an input."""
        return bool(self.input)


TEMPLATES: tuple[Template, ...] = (
    Template("list", "List {n} {noun} of {topic}.", "facts"),
    Template("name", "Name {n} {noun} of {topic}.", "facts"),
    Template("give", "Give me {n} {noun} of {topic}.", "facts"),
    Template("suggest", "Suggest {n} {noun} of {topic} for a poster.", "facts"),
    Template("write", "Write down {n} {noun} of {topic}.", "facts"),
    Template("tell", "Tell me about the {noun} of {topic}, at least {n}.", "facts"),
    Template("explain", "Explain {topic} to a child by {n} {noun}.", "facts"),
    Template("describe", "Describe {topic} with {n} details.", "both"),
    Template("summarize", "Summarize {topic} in {n} facts.", "both"),
    Template("compare", "Compare {topic} and {other} by {n} {noun}.", "union"),
    Template("find", "Find {n} {noun} that fit {topic} or {other}.", "union"),
    Template("pick", "Pick all {plural} from the input.", "members", "Items: {given}"),
    Template("remove", "Remove everything but the {plural} from the input.", "members", "Items: {given}"),
    Template("rewrite", "Rewrite the input in a better form.", "given", "{given}"),
    Template("classify", "Classify the input and add {n} of its {noun}.", "kind", "Item: {topic}"),
    Template("continue", "Continue the {noun} of {topic} with {n} more.", "more", "Items: {given}"),
    Template("correct", "Correct the {noun} of {topic} in the input. Keep {n}.", "facts", "Items: {given}"),
)


@dataclass(frozen=True)
class Task:
    """The task of an instruction.

    `expected` are the items that count as true, `topics` the words that may be named without claiming anything.
    """

    verb: str
    expected: frozenset[str]
    count: int
    form: Form
    topics: tuple[str, ...]
    statements: tuple[tuple[str, str, tuple[str, ...]], ...]


def _aspect(category: world.Category, noun: str) -> world.Aspect | None:
    return next((aspect for aspect in category.aspects if aspect.noun == noun), None)


def _fields_task(template: Template, fields: dict[str, str], form: Form) -> Task | None:
    """The task behind a matched template; None when its slots make no sense (no number, a topic without that noun)."""
    given = tuple(re.findall(r"[a-z]+", fields.get("given", "")))
    if template.asks == "members":
        members = {c.plural: c.topics for c in world.CATEGORIES}.get(fields["plural"], ())
        words = tuple(word for word in given if word in members)
        return Task(template.verb, frozenset(words), len(words), form, (), (("", "", words),)) if words else None
    if template.asks == "given":
        words = tuple(word for word in given if word in world.claim_words() - set(world.topic_categories()))
        topics = tuple(word for word in given if word in world.topic_categories())
        wanted = form if form != "any" else ("sentence" if "- " in fields["given"] else "list")
        return Task(template.verb, frozenset(words), len(words), wanted, topics, (("", "", words),)) if words else None
    topics = tuple(re.sub(r"^(a|an) ", "", fields[slot]) for slot in ("topic", "other") if slot in fields)
    categories = world.topic_categories()
    if any(topic not in categories for topic in topics) or fields["n"] not in world.NUMBER_WORDS[1:]:
        return None
    category, count = categories[topics[0]], world.NUMBER_WORDS.index(fields["n"])
    aspect = _aspect(category, fields["noun"]) if "noun" in fields else category.aspects[0]
    if aspect is None or any(topic not in aspect.facts for topic in topics):
        return None
    chosen = category.aspects if template.asks == "both" else (aspect,)
    statements = tuple((topic, a.verb, a.facts[topic]) for topic in topics for a in chosen)
    expected = frozenset(item for _, _, items in statements for item in items)
    if template.asks == "kind":
        statements = ((topics[0], "is", (category.name,)), *statements)
        expected, count = expected | {category.name}, count + 1
    if template.asks == "more":
        expected -= set(given)
        statements = tuple((t, v, tuple(i for i in items if i not in given)) for t, v, items in statements)
    if not expected:  # everything that could be said is given already
        return None
    return Task(template.verb, expected, min(count, len(expected)), form, topics, statements)


@cache
def _patterns() -> tuple[tuple[Template, re.Pattern[str]], ...]:
    polite = "|".join(re.escape(p) for p in _POLITE)
    forms = "|".join(re.escape(f) for f in _FORMS)
    slots = {"topic": "[a-z ]+?", "other": "[a-z ]+?", "given": r"[\s\S]+"}  # the others are one word

    def pattern(text: str) -> str:
        return re.sub(r"\\\{(\w+)\\\}", lambda m: f"(?P<{m[1]}>{slots.get(m[1], '[a-z]+')})", re.escape(text))

    rows = []
    for template in TEMPLATES:
        tail = r"\n\n" + pattern(template.input) if template.input else ""
        head = pattern(template.text)
        first = f"(?:{head[0]}|{head[0].lower()}){head[1:]}"
        rows.append((template, re.compile(f"(?:{polite}){first}(?P<form>{forms}){tail}")))
    return tuple(rows)


@lru_cache(maxsize=200_000)
def read(instruction: str) -> Task | None:
    """The task of a text (input merged after a blank line); None when it is not of this world."""
    for template, pattern in _patterns():
        if match := pattern.fullmatch(instruction):
            fields = match.groupdict()
            return _fields_task(template, {k: v for k, v in fields.items() if v is not None}, _FORMS[fields["form"]])
    return None


def known(instruction: str) -> bool:
    """Whether an instruction is of the sandbox's world."""
    return read(str(instruction)) is not None


def refuse_foreign(instructions: Sequence[str]) -> None:
    """Raises DataError if gold or a simulated judge cannot read one of the instructions."""
    if foreign := [str(instruction) for instruction in instructions if not known(instruction)]:
        raise DataError(
            f"Expected instructions of the sandbox, but {len(foreign)} of {len(instructions)} are not, for instance "
            f"{shown(foreign[0])}. Gold and the simulated judges know the sandbox's world only: have other texts "
            "judged by {'reward_model': folder} or {'pool': 'alpaca_farm', 'base_url': url}."
        )


def _given(
    template: Template, category: world.Category, aspect: world.Aspect, topic: str, rng: np.random.Generator
) -> str:
    """The input of a task: words to pick from, a sentence to rewrite, items to continue or to correct."""
    true = list(rng.permutation(aspect.facts[topic]))
    if template.asks == "members":
        members = list(rng.choice(category.topics, size=int(rng.integers(2, 5)), replace=False))
        others = [t for t in world.topic_categories() if t not in category.topics]
        words = members + list(rng.choice(others, size=int(rng.integers(2, 4)), replace=False))
        return ", ".join(rng.permutation(words))
    if template.asks == "given":
        items = true[: int(rng.integers(2, 6))]
        if rng.random() < 0.5:
            return "\n".join(f"- {item}" for item in items)
        return f"{world.named(topic).capitalize()} {aspect.verb} {world.joined(items)}."
    if template.asks == "more":
        return ", ".join(true[: int(rng.integers(1, 3))])
    wrong = sorted(aspect.items - set(aspect.facts[topic]))
    mixed = true[: int(rng.integers(2, 4))] + list(rng.choice(wrong, size=int(rng.integers(1, 3)), replace=False))
    return ", ".join(rng.permutation(mixed))


def draw(rng: np.random.Generator, template: Template) -> tuple[str, str]:
    """Samples one (instruction, input) worded by `template`."""
    category = world.CATEGORIES[int(rng.integers(len(world.CATEGORIES)))]
    aspect = category.aspects[int(rng.integers(2))]
    topic, other = (str(t) for t in rng.choice(category.topics, size=2, replace=False))
    most = 4 if template.asks == "more" else 5  # of six true items, two may be given already
    fields = {
        "n": world.NUMBER_WORDS[int(rng.integers(2, most + 1))],
        "noun": aspect.noun,
        "topic": world.named(topic),
        "other": world.named(other),
        "plural": category.plural,
    }
    fields["given"] = _given(template, category, aspect, topic, rng) if "{given}" in template.input else ""
    polite = _POLITE[int(rng.integers(len(_POLITE)))]
    text = template.text.format(**fields)
    if polite.endswith(("Please ", ": ")):
        text = text[0].lower() + text[1:]
    form = list(_FORMS)[int(rng.choice(len(_FORMS), p=(0.4, 0.15, 0.15, 0.15, 0.15)))]
    return polite + text + form, template.input.format(**fields)


def wordings() -> tuple[str, ...]:
    """The fixed phrases around an instruction: greetings and the forms asked for."""
    return tuple(_POLITE) + tuple(_FORMS)
