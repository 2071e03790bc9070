"""The sandbox's world: its facts are unambiguous, and nothing a polite answer says is a claim by accident."""

import re
from collections import Counter

import pytest

from alpacafarm_env.sandbox import gold, world

ASPECTS = [(category, aspect) for category in world.CATEGORIES for aspect in category.aspects]


def test_eight_categories_of_two_aspects_four_topics_and_six_facts():
    assert len(world.CATEGORIES) == 8
    for category, aspect in ASPECTS:
        assert len(category.topics) == 4
        assert tuple(aspect.facts) == category.topics
        assert all(len(set(items)) == 6 for items in aspect.facts.values())


def test_every_fact_is_true_of_one_topic_in_one_way():
    """Else an item could be true and false at once, or count twice."""
    counts = Counter(item for _, aspect in ASPECTS for items in aspect.facts.values() for item in items)
    assert len(counts) == 8 * 2 * 4 * 6
    assert set(counts.values()) == {1}


def test_facts_and_names_are_single_lower_case_words():
    assert all(re.fullmatch("[a-z]+", word) for word in world.claim_words())


def test_claim_words_are_the_facts_the_topics_and_the_kinds():
    facts = {item for _, aspect in ASPECTS for item in aspect.items}
    topics = {topic for category in world.CATEGORIES for topic in category.topics}
    kinds = {name for category in world.CATEGORIES for name in (category.name, category.plural)}
    assert world.claim_words() == facts | topics | kinds
    assert not facts & topics
    assert not facts & kinds
    assert set(world.topic_categories()) == topics


def test_courtesies_verbs_and_articles_claim_nothing():
    verbs = " ".join(aspect.verb for _, aspect in ASPECTS)
    spoken = " ".join([*gold.OPENERS, *gold.CLOSERS, verbs, "The answer is a and an", "It"]).lower()
    assert not set(re.findall("[a-z]+", spoken)) & world.claim_words()


@pytest.mark.parametrize(
    ("topic", "phrase"), [("lion", "a lion"), ("oak", "an oak"), ("soup", "soup"), ("chess", "chess")]
)
def test_named(topic, phrase):
    assert world.named(topic) == phrase


@pytest.mark.parametrize(
    ("kind", "phrase"), [("animal", "an animal"), ("tool", "a tool"), ("instrument", "an instrument")]
)
def test_named_kind(kind, phrase):
    assert world.named_kind(kind) == phrase


@pytest.mark.parametrize(
    ("items", "text"), [([], ""), (["x"], "x"), (["x", "y"], "x and y"), (("x", "y", "z"), "x, y and z")]
)
def test_joined(items, text):
    assert world.joined(items) == text
