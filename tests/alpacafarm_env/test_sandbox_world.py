"""The sandbox's world: its facts are unambiguous, and nothing a polite answer says is a claim by accident."""

import re
from collections import Counter

from alpacafarm_env.sandbox import gold, world

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


def test_names_and_lists_in_words():
    assert [world.named(topic) for topic in ("lion", "oak", "soup", "chess")] == ["a lion", "an oak", "soup", "chess"]
    kinds = [world.named_kind(kind) for kind in ("animal", "tool", "instrument")]
    assert kinds == ["an animal", "a tool", "an instrument"]
    assert [world.joined("xyz"[:count]) for count in range(4)] == ["", "x", "x and y", "x, y and z"]
