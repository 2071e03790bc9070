"""Wordings: `read` inverts `draw`, checked against the words themselves, and answers None for everything else."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import tasks, world

FACTS = {(a.noun, topic): items for c in world.CATEGORIES for a in c.aspects for topic, items in a.facts.items()}
FORM = {"list": ("Use a list.", "Make it a list."), "sentence": ("Answer in a sentence.", "No lists, please.")}


def drawn(seed, template):
    return Instruction(*tasks.draw(np.random.default_rng(seed), template))


def words(text):
    return re.findall("[a-z]+", text.lower())


def topics_in(text):
    return [word for word in words(text) if word in world.topic_categories()]


def number_in(text):
    return next(world.NUMBER_WORDS.index(word) for word in words(text) if word in world.NUMBER_WORDS[2:])


def facts_asked(text, noun_text=None):
    """The facts of the topics and nouns that stand in a text, found without the patterns of `read`."""
    nouns = words(noun_text or text)
    return {
        item
        for topic in topics_in(text)
        for (noun, t), items in FACTS.items()
        if t == topic and noun in nouns
        for item in items
    }


def expected_and_count(template, ask):
    """What a drawn instruction asks for, read off its words."""
    request, given_words = ask.instruction, words(ask.input)
    if template.asks == "members":
        kind = next(c for c in world.CATEGORIES if c.plural in words(request))
        items = {word for word in given_words if word in kind.topics}
        return items, len(items)
    if template.asks == "given":
        items = {word for word in given_words if any(word in facts for facts in FACTS.values())}
        return items, len(items)
    count = number_in(request)
    if template.asks == "both":
        return {item for (_, topic), items in FACTS.items() if topic in topics_in(request) for item in items}, count
    if template.asks == "kind":
        kind = world.topic_categories()[given_words[-1]].name
        return facts_asked(ask.input, request) | {kind}, count + 1
    if template.asks == "more":
        return facts_asked(request) - set(given_words), count
    return facts_asked(request), count


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(tasks.TEMPLATES))
def test_read_inverts_the_wording_that_depends_on_its_generator_alone(seed, template):
    ask = drawn(seed, template)
    assert ask == drawn(seed, template)
    assert bool(ask.input) == template.with_input
    task = tasks.read(str(ask))
    assert task is not None, ask
    expected, count = expected_and_count(template, ask)
    assert (task.verb, task.expected, task.count) == (template.verb, expected, count)
    assert 1 <= task.count <= len(task.expected)
    assert {item for _, _, items in task.statements for item in items} == task.expected
    asked_form = next((form for form, texts in FORM.items() if ask.instruction.endswith(texts)), "any")
    if template.verb == "rewrite" and asked_form == "any":
        asked_form = "sentence" if ask.input.startswith("- ") else "list"  # the other form is the better one
    assert task.form == asked_form


def test_many_verbs_and_all_forms_and_greetings_occur():
    asks = [drawn(seed, template) for seed in range(40) for template in tasks.TEMPLATES]
    read = [tasks.read(str(ask)) for ask in asks]
    assert {task.verb for task in read} == {template.verb for template in tasks.TEMPLATES}
    assert len({template.verb for template in tasks.TEMPLATES}) == len(tasks.TEMPLATES) >= 15
    assert {task.form for task in read} == {"any", "list", "sentence"}
    texts = " ".join(map(str, asks))
    assert all(phrase in texts for phrase in tasks.wordings())


def test_a_task_read_by_hand():
    lion = ("meat", "zebra", "antelope", "buffalo", "gazelle", "carrion")
    fox = ("mice", "insects", "eggs", "berries", "worms", "pheasant")
    assert tasks.read("Please compare a lion and a fox by three foods. Use a list.") == tasks.Task(
        verb="compare",
        expected=frozenset(lion + fox),
        count=3,
        form="list",
        topics=("lion", "fox"),
        statements=(("lion", "eats", lion), ("fox", "eats", fox)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "What is the capital of France?",
        "List three traits of a unicorn.",  # no such topic
        "List three strings of a lion.",  # no such noun
        "List three sounds of a lion.",  # a noun of another kind of topic
        "Compare a lion and soup by two traits.",
        "List banana traits of a lion.",  # no number
        "List zero traits of a lion.",
        "List 3 traits of a lion.",
        "List three traits of a lion. Use a table.",
        "List three traits of a lion.\n\nItems: brave",  # that wording has no input
        "Pick all unicorns from the input.\n\nItems: lion, fox",
        "Pick all animals from the input.\n\nItems: piano, soup",  # nothing to pick
        "Pick all animals from the input.",  # the input is missing
        "Rewrite the input in a better form.\n\nHello, world!",
        "Continue the traits of a lion with two more.\n\nItems: brave, golden, proud, roaring, majestic, fierce",
        "Classify the input and add two of its traits.\n\nItem: a unicorn",
        "list three traits of a lion. List three traits of a lion.",
        "Décris un lion avec trois détails. 🦁",
    ],
)
def test_what_is_not_of_this_world_is_not_read(text):
    assert tasks.read(text) is None


@settings(max_examples=100)
@given(st.text())
@example("List three traits of " + "a lion " * 150_000)
def test_any_text_is_read_or_refused_without_an_error(text):
    assert tasks.read(text) is None
