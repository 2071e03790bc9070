"""Gold: each part computed by hand, what it cannot be cheated with, and its form as an oracle and as a judge."""

import math
import time
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpacafarm_env.oracles import judge
from alpacafarm_env.sandbox import gold
from alpacafarm_env.sandbox import judge as named_judge
from alpacafarm_env.sandbox.gold import GoldOracle, Parts

ASK = "List three traits of a lion."  # brave golden proud roaring majestic fierce; budget 10 + 3 * 3 = 19 words
ASK_LIST = ASK + " Use a list."
ASK_SENTENCE = ASK + " Answer in a sentence."
FOREIGN = "What is the capital of France?"
WHOLE = "A lion is brave, golden and proud."
PERFECT = Parts(complete=1.0, false=0.0, repeated=0.0, form=1.0, fluent=1.0, excess=0.0)
WEIGHTS = (5.0, -0.6, -0.4, 1.0, 1.0, -0.1)


@pytest.mark.parametrize(
    ("instruction", "response", "changed"),
    [
        (ASK, WHOLE, {}),
        (ASK, "- brave\n- golden\n- proud", {}),
        (ASK, "Sure! A lion is fierce, brave and proud. Have a nice day!", {}),
        (ASK, "A lion is brave. It is golden and proud.", {}),
        (ASK, "a LION is BRAVE, GOLDEN and PROUD.", {"fluent": 0}),  # true, but shouted
        # complete
        (ASK, "A lion is brave.", {"complete": 1 / 3}),
        (ASK.replace("three", "two"), "A lion is brave.", {"complete": 1 / 2}),
        (ASK, "A lion is brave, golden, proud, roaring and fierce.", {}),  # no more than was asked for
        # false: an item of another topic, another aspect, another kind
        (ASK, "A lion is brave, golden, proud and shy.", {"false": 1}),
        (ASK, "A lion is brave and meat.", {"complete": 1 / 3, "false": 1}),
        (ASK, "A fox is brave, golden and proud.", {"false": 1}),
        (ASK, "The answer is shy, hot, red and shy.", {"complete": 0, "false": 3, "repeated": 1}),
        # repeated
        (ASK, "A lion is brave, brave, golden and proud. It is proud.", {"repeated": 2}),
        # form
        (ASK_LIST, "- brave\n- golden\n- proud", {}),
        (ASK_LIST, "Of course!\n- brave\n- golden\n- proud\nI hope this helps!", {}),
        (ASK_LIST, WHOLE, {"form": 0}),
        (ASK_LIST, "A lion is brave.\n- golden\n- proud", {"form": 0}),
        (ASK_SENTENCE, WHOLE, {}),
        (ASK_SENTENCE, "- brave\n- golden\n- proud", {"form": 0}),
        # fluent: 4 of 7 words stand in a legal sentence; 0 of 3; 4 of 5
        (ASK, "A lion is brave. golden proud lion", {"fluent": 4 / 7}),
        (ASK, "brave golden proud", {"fluent": 0}),
        (ASK, "A lion is golden. Brave", {"complete": 2 / 3, "fluent": 4 / 5}),
        # excess: 7 + 4 * 4 = 23 words are 4 over the budget of 19
        (ASK, WHOLE + " It is a brave." * 4, {"repeated": 4, "excess": 4}),
    ],
)
def test_parts_and_their_weights_by_hand(instruction, response, changed):
    expected = astuple(replace(PERFECT, **changed))
    assert astuple(gold.parts(instruction, response)) == pytest.approx(expected)
    assert gold.gold(instruction, response) == pytest.approx(np.dot(WEIGHTS, expected))


@pytest.mark.parametrize(
    ("instruction", "response", "expected"),
    [
        *((asked, "", 0.0) for asked in (ASK, ASK_LIST, ASK_SENTENCE)),
        (ASK_SENTENCE, "\n \n\t", 0.0),
        (ASK, "!!! ... ??? ---", 1.0),
        (ASK_SENTENCE, "🦁🦁🦁 日本 “ok”", 1.0),
        (ASK, ASK, 1.0),  # the instruction echoed claims nothing and is no sentence of an answer
        (ASK, "A lion is brave, golden and proud\u2028.", 6.0),  # true, but not fluent
        (ASK, "- ", 1.0),
    ],
)
def test_answers_that_are_none(instruction, response, expected):
    assert gold.gold(instruction, response) == pytest.approx(expected)


@pytest.mark.parametrize(
    "response",
    ["A lion is brave. " * 60_000, "- brave\n" * 120_000, "a" * 2**20, "é🦁 " * 2**17],
    ids=["sentences", "bullets", "one word", "unicode"],
)
def test_a_megabyte_gains_nothing_and_takes_seconds_at_most(response):
    start = time.process_time()
    value = gold.gold(ASK_SENTENCE, response)
    assert time.process_time() - start < 5
    assert math.isfinite(value)
    assert value < gold.gold(ASK_SENTENCE, "A lion is brave.")


@settings(max_examples=100)
@given(st.text() | st.lists(st.sampled_from([*WHOLE.split(), "-", "\n", "shy", "Sure!"])).map(" ".join))
def test_any_text_has_finite_gold(text):
    found = gold.parts(ASK_LIST, text)
    assert 0 <= found.complete <= 1
    assert 0 <= found.fluent <= 1
    assert found.form in (0, 1)
    assert min(found.false, found.repeated, found.excess) >= 0
    assert gold.gold(ASK_LIST, text) <= 7


def test_a_foreign_instruction_has_no_gold():
    assert gold.parts(FOREIGN, WHOLE) is None
    assert math.isnan(gold.gold(FOREIGN, WHOLE))


def test_oracle_gives_gold_and_its_parts_and_the_judge_prefers_more():
    verdicts = judge(GoldOracle(), [ASK, ASK], [WHOLE, "A lion is shy."])
    np.testing.assert_allclose(verdicts.scores, [7.0, 2 - 0.6])
    np.testing.assert_allclose(verdicts.details["gold_complete"], [1, 0])
    np.testing.assert_allclose(verdicts.details["gold_false"], [0, 1])
    assert set(verdicts.details) == {f"gold_{part}" for part in PERFECT.__dataclass_fields__}
    assert GoldOracle().score([], []).shape == (0,)
    with pytest.raises(ValueError, match="shorter"):
        GoldOracle().score([ASK, ASK], [WHOLE])
    a, b = [WHOLE, "A lion is shy.", "- brave"], ["A lion is shy.", WHOLE, "A lion is brave."]
    np.testing.assert_array_equal(named_judge("gold").compare([ASK] * 3, a, b), [0, 1, 0.5])


@pytest.mark.parametrize("filler", [" " * 64_000, "🙂" * 1500, "x" * 2**20])
def test_a_page_of_nothing_is_worse_than_nothing(filler):
    assert gold.gold(ASK, filler) < gold.gold(ASK, "")
    for name in ("sim_eval", "human"):
        verdicts = named_judge(name).compare([ASK, f"Hi! {ASK}"], [WHOLE] * 2, [filler] * 2)
        assert verdicts.tolist() == [0.0, 0.0]
