"""The sandbox's words: the facts are unambiguous, `read` inverts `draw`, and writers say what gold rewards."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import gold, tasks, world, writers

FORM = {"list": ("Use a list.", "Make it a list."), "sentence": ("Answer in a sentence.", "No lists, please.")}


def drawn(seed, template):
    return Instruction(*tasks.draw(np.random.default_rng(seed), template))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(tasks.TEMPLATES))
def test_read_inverts_the_wording_that_depends_on_its_generator_alone(seed, template):
    ask = drawn(seed, template)
    assert ask == drawn(seed, template)
    assert bool(ask.input) == template.with_input
    task = tasks.read(str(ask))
    assert task is not None, ask
    assert task.verb == template.verb
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


ASPECTS = [(category, aspect) for category in world.CATEGORIES for aspect in category.aspects]
ITEMS = [item for _, aspect in ASPECTS for items in aspect.facts.values() for item in items]


def test_every_fact_is_true_of_one_topic_in_one_way():
    """Else an item could be true and false at once, or count twice."""
    assert set(Counter(ITEMS).values()) == {1}
    assert len(ITEMS) == 8 * 2 * 4 * 6
    assert all(tuple(aspect.facts) == category.topics for category, aspect in ASPECTS)
    assert all(len(items) == 6 for _, aspect in ASPECTS for items in aspect.facts.values())


def test_claim_words_are_the_facts_the_topics_and_the_kinds_each_a_lower_case_word():
    topics = {topic for category in world.CATEGORIES for topic in category.topics}
    kinds = {name for category in world.CATEGORIES for name in (category.name, category.plural)}
    assert world.claim_words() == set(ITEMS) | topics | kinds
    assert not set(ITEMS) & (topics | kinds)
    assert set(world.topic_categories()) == topics
    assert all(re.fullmatch("[a-z]+", word) for word in world.claim_words())


def test_courtesies_verbs_and_articles_claim_nothing():
    verbs = " ".join(aspect.verb for _, aspect in ASPECTS)
    spoken = " ".join([*gold.OPENERS, *gold.CLOSERS, verbs, "The answer is a and an", "It"]).lower()
    assert not set(re.findall("[a-z]+", spoken)) & world.claim_words()


PERFECT = writers.Writer(complete=(1.0, 1.0), true=1.0, repeat=0.0, form=1.0, courtesy=0.0, extra=0.0)
ASK = "List three traits of a lion."


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(tasks.TEMPLATES))
def test_writers_are_fluent_and_a_perfect_one_earns_everything(seed, template):
    """Gold and the writers agree on what a sentence is, so that what the policy learns to say can be fluent."""
    ask = drawn(seed, template)
    for writer in (writers.CROWD, writers.REFERENCE):
        response = writers.write(writer, ask, np.random.default_rng(seed))
        assert response == response.strip() != ""
        assert gold.parts(ask, response).fluent == 1.0, response
    found = gold.parts(ask, writers.write(PERFECT, ask, np.random.default_rng(seed)))
    assert (found.false, found.repeated, found.form, found.fluent, found.excess) == (0, 0, 1, 1, 0)
    # A classification's kind is one statement and its facts another; a writer shares the items out evenly over both.
    assert found.complete == 1 or template.asks == "kind"


def test_the_generator_decides_and_a_foreign_instruction_is_refused():
    texts = [writers.write(writers.REFERENCE, ASK, np.random.default_rng(seed)) for seed in (1, 1, 2, 3, 4, 5)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2
    with pytest.raises(ValueError, match="'What is up"):
        writers.write(PERFECT, "What is up?", np.random.default_rng(0))
