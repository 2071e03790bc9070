"""Live users' instructions: new, readable, and of the mixture that is said."""

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.protocol import live as protocol_live
from alpacafarm_env.benchmarks.protocol.live import (
    ASKS_FORM,
    COUNTS,
    EVAL,
    FRESH,
    GREETINGS,
    LIVE,
    WITH_INPUT,
    category,
    count,
    distances,
    draw_live,
    form,
    greeting,
    questions,
    shares,
    verb,
)
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import SANDBOX, tasks
from alpacafarm_env.sandbox.dataset import EVAL_SOURCES, reference


@pytest.fixture(scope="module")
def asked():
    return questions(SANDBOX, 100, 300)


def test_live_and_fresh_instructions_are_in_no_split_and_not_twice(asked):
    known = {str(row) for split in SANDBOX.splits for row in SANDBOX.instructions(split)}
    for which in (LIVE, FRESH):
        texts = {str(row) for row in asked[which].instructions}
        assert len(texts) == len(asked[which]) == 300
        assert not texts & known
        assert all(tasks.read(text) is not None for text in texts)
    assert {str(row) for row in asked[EVAL].instructions} <= known


def test_a_known_instruction_is_not_drawn_again():
    taken = {str(row) for row in draw_live(30, ())[:5]}
    assert not taken & {str(row) for row in draw_live(30, taken)}  # the same draws, were they not known


def test_the_same_seed_draws_the_same():
    assert draw_live(20, ()) == draw_live(20, ())
    assert draw_live(20, ()) != draw_live(20, (), seed=1)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lambda row: bool(row.input), WITH_INPUT),
        (lambda row: not greeting(row), GREETINGS[""]),
        (lambda row: bool(form(row)), ASKS_FORM),
    ],
)
def test_shares_are_those_that_are_said(asked, of, expected):
    found = sum(map(of, asked[LIVE].instructions))
    assert stats.binomtest(found, 300, expected).pvalue > 0.001


def test_numbers_are_asked_for_as_often_as_is_said(asked):
    numbers = [number for row in asked[LIVE].instructions if (number := count(row))]
    # Of "continue" at most four are asked for: those are too few to matter here.
    seen = np.array([numbers.count(word) for word in COUNTS])
    assert stats.chisquare(seen, np.array(list(COUNTS.values())) * seen.sum()).pvalue > 0.001


def test_live_users_differ_and_fresh_ones_do_not(asked):
    far, near = (distances(asked[EVAL].instructions, asked[which].instructions) for which in (LIVE, FRESH))
    assert all(far[name] > 0.2 for name in ("verb", "greeting", "form", "count", "category", "input")), far
    assert all(near[name] < far[name] for name in far)
    assert set(distances(asked[EVAL].instructions, asked[EVAL].instructions).values()) == {0.0}


def test_fresh_ones_have_the_five_sources_and_everyone_a_reference(asked):
    assert {row.source for row in asked[FRESH].instructions} == set(EVAL_SOURCES)
    for question in asked.values():
        assert len(question.references) == len(question)
    assert asked[LIVE].references[0] == reference(asked[LIVE].instructions[0])
    stored = dict(zip(SANDBOX.instructions(EVAL), SANDBOX.references(EVAL), strict=True))
    assert all(stored[row] == text for row, text in zip(asked[EVAL].instructions, asked[EVAL].references, strict=True))


def test_properties_are_read_from_the_text():
    row = Instruction("Can you help me? List three traits of a lion. Use a list.")
    found = (greeting(row), form(row), count(row), category(row), verb(row))
    assert found == ("Can you help me? ", " Use a list.", "three", "animal", "list")
    bare = Instruction("Pick all animals from the input.", "Items: lion, soup, fox")
    assert (greeting(bare), form(bare), count(bare), category(bare), verb(bare)) == ("", "", "", "animal", "pick")
    with pytest.raises(ValueError, match="expected an instruction of the sandbox"):
        verb(Instruction("Hello?"))


def test_shares_of_a_property_sum_to_one(asked):
    found = shares(asked[LIVE].instructions)
    for name in protocol_live.PROPERTIES:
        assert sum(share for (which, _), share in found.items() if which == name) == pytest.approx(1)
