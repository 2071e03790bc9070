"""A centred oracle: differences to fixed answers, levels asked once, and what an instruction's constant does."""

import copy

import numpy as np
import pytest

from alpacafarm_env.oracles import BaselineSubtracted, Verdicts, judge

LEVELS = {"i": 10.0, "j": -3.0}


class Leveled:
    """Length of the response, plus a constant of the instruction; counts what it is asked."""

    name, levels = "leveled", LEVELS

    def __init__(self):
        self.calls = []

    def judge(self, instructions, responses):
        self.calls.append(list(zip(instructions, responses, strict=True)))
        level = np.array([self.levels[x] for x in instructions])
        lengths = np.array([float(len(y)) for y in responses])
        return Verdicts(np.where(lengths > 5, np.nan, level + lengths), {"length": lengths})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def two_letters(instructions):
    return [["ab"] for _ in instructions]


def test_a_score_is_the_difference_to_the_mean_of_the_fixed_answers():
    oracle = Leveled()
    fixed = {"i": ["a", "abcd"], "j": ("ab",)}  # mean lengths 2.5 and 2
    centred = BaselineSubtracted(oracle, lambda asked: [fixed[x] for x in asked])
    found = judge(centred, ["i", "j", "i"], ["abcd", "", "toolong"])
    np.testing.assert_array_equal(found.scores, [1.5, -2.0, np.nan])
    np.testing.assert_array_equal(found.details["length"], [4.0, 0.0, 7.0])
    assert centred.name == "leveled"
    assert BaselineSubtracted(oracle, two_letters, name="other").name == "other"
    assert copy.deepcopy(centred) is centred


def test_a_level_is_asked_once():
    oracle = Leveled()
    centred = BaselineSubtracted(oracle, two_letters)
    centred.score(["i", "j", "i"], ["a", "b", "c"])
    centred.score(["j"], ["abc"])
    assert oracle.calls == [[("i", "a"), ("j", "b"), ("i", "c")], [("i", "ab"), ("j", "ab")], [("j", "abc")]]
    assert centred.score([], []).shape == (0,)


@pytest.mark.parametrize("answers", [["ab", "toolong"], []], ids=["no verdict on one", "none at all"])
def test_without_a_level_there_is_no_verdict(answers):
    fixed = [answers]
    centred = BaselineSubtracted(Leveled(), lambda asked: fixed * len(asked))
    assert np.isnan(centred.score(["i"], ["a"])).all()
    fixed[0] = ["ab"]  # an outage that is over
    assert centred.score(["i"], ["a"]).tolist() == [-1.0]


def test_answers_of_another_shape_are_refused():
    for answers, error, fact in (
        (["ab", "ab"], TypeError, "'ab'"),
        ([None] * 2, TypeError, "None"),
        ([["ab"]], ValueError, "2 .* 1"),
    ):
        with pytest.raises(error, match=fact):
            BaselineSubtracted(Leveled(), lambda asked, answers=answers: answers).score(["i", "j"], ["a", "a"])
