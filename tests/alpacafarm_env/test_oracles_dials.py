"""Judges with set faults: margins by hand, what draws share, and what each dial leaves of the agreement with gold."""

import math

import numpy as np
import pytest
from scipy.special import expit

from alpacafarm_env import sandbox
from alpacafarm_env.errors import FieldError
from alpacafarm_env.oracles import Dialed, FunctionOracle, HigherReward, Verdicts, make_judge

N = 4_000
MANY = [f"Ask {i}" for i in range(N)]
SHORT, LONG = "x" * 10, "y" * 30
"""LONG is one doubling longer, as lengths are counted from -10 on."""


def digits(instructions, responses):
    """The number at a response's end."""
    return [float(text.rpartition("=")[2] or 0) if "=" in text else 0.0 for text in responses]


GOLD = HigherReward(FunctionOracle(digits))


def one(a, b, **dials):
    """The verdict on a pair, and on the swapped one."""
    judge = Dialed(GOLD, **dials)
    there, back = (judge.compare(["Ask"], [x], [y])[0] for x, y in ((a, b), (b, a)))
    assert there + back == 1
    return there


def test_a_taste_wins_where_it_outweighs_the_reward():
    assert one("a=1", "b=2") == 1
    assert one("a=2", "b=2") == 0.5
    # 30 and 10 characters: a doubling, at the price of a reward of 1.
    long, short = "y" * 28 + "=0", "x" * 8 + "=1"
    assert [one(short, long, length_bias=each) for each in (0, 0.9, 1.1, -3)] == [0, 0, 1, 0]
    plain, listed = "- x".replace("- ", "") + "=1", "- x=0"
    assert [one(plain, listed, list_bias=each, length_bias=0) for each in (0.9, 1.1)] == [0, 1]
    assert one(plain + "\n1. y=1", listed, list_bias=5) == 0  # both have one


def test_position_decides_ties_and_a_known_order_is_kept():
    judge = Dialed(GOLD, position_bias=0.5)
    asked = judge.judge(MANY, ["a=1"] * N, ["b=1"] * N)
    first = np.where(asked.details["shown_first"] == "b", asked.scores, 1 - asked.scores)
    assert (first == 1).all()
    assert asked.scores.mean() == pytest.approx(0.5, abs=0.03)
    assert (judge.compare(MANY, ["a=1"] * N, ["b=2"] * N) == 1).all()

    class Shows:
        """Says that it showed b first, but for the first pair, about which it was not asked."""

        name = "shows"

        def compare(self, instructions, a, b):
            return self.judge(instructions, a, b).scores

        def judge(self, instructions, a, b):
            shown = np.array(["b"] * len(a), dtype="<U1")
            shown[0] = ""
            return Verdicts(np.full(len(a), 0.5), {"shown_first": shown})

    asked = Dialed(Shows(), position_bias=0.5).judge(MANY, ["a"] * N, ["b"] * N)
    assert (asked.scores[1:] == 1).all()
    assert asked.details["shown_first"][0] in ("a", "b")


def test_temperature_draws_from_the_logistic_chance():
    share = Dialed(GOLD, temperature=2).compare(MANY, ["a=1"] * N, ["b=2"] * N)
    assert share.mean() == pytest.approx(expit(0.5), abs=4 * 0.5 / math.sqrt(N))
    wrong = [Dialed(GOLD, temperature=each).compare(MANY, ["a=1"] * N, ["b=2"] * N) == 0 for each in (0.5, 2, 9)]
    assert (wrong[0] <= wrong[1]).all()
    assert (wrong[1] <= wrong[2]).all()
    other = Dialed(GOLD, temperature=2, seed=1).compare(MANY, ["a=1"] * N, ["b=2"] * N)
    assert 0.2 < (share != other).mean() < 0.7


def test_annotators_and_instructions_have_tastes_of_their_own():
    asked = Dialed(GOLD, annotator_noise=1, num_annotators=40).judge(MANY, [SHORT] * N, [LONG] * N)
    likes = {who: set(asked.scores[asked.details["dialed_annotator"] == who]) for who in range(40)}
    assert all(len(votes) == 1 for votes in likes.values())  # each always likes the same length
    assert 8 <= sum(votes == {1.0} for votes in likes.values()) <= 32
    asked = Dialed(GOLD, instruction_noise=1)
    pairs = [(SHORT + str(k), LONG + str(k)) for k in range(5)]
    votes = np.array([asked.compare(MANY, [a] * N, [b] * N) for a, b in pairs])
    assert (votes == votes[0]).all()  # all labels of an instruction share it
    assert votes[0].mean() == pytest.approx(0.5, abs=0.04)
    assert one(SHORT, "z" * 10, annotator_noise=9, instruction_noise=9) == 0.5  # no difference that one could like


def test_a_verdict_is_a_margin_of_one_and_none_stays_none():
    class Knows:
        name = "knows"

        def compare(self, instructions, a, b):
            return np.array([math.nan, 1, 0.75, 0.5])[: len(a)]

    batch = ["Ask"] * 4, [LONG] * 3 + ["same"], [SHORT] * 3 + ["same"]
    votes = Dialed(Knows(), length_bias=0.7).compare(*batch)  # -0.7 for the short b
    np.testing.assert_array_equal(votes, [math.nan, 1, 0, 0.5])


def test_dials_by_name():
    named = make_judge({"judge": "gold", "length_bias": 0.5, "flip": 0.1, "seed": 3}, dataset=sandbox.SANDBOX)
    assert named.name == "gold+length_bias0.5+flip0.1"
    assert make_judge({"judge": "gold", "length_bias": 0.0}, dataset=sandbox.SANDBOX).name == "gold"
    wrongs = ({"temperature": -1}, {"length_bias": math.nan}, {"num_annotators": 0}, {"annotator_noise": "x"})
    for wrong in (*wrongs, {"num_annotators": 10**30}, {"instruction_noise": 1e308}, {"list_bias": -1e308}):
        with pytest.raises(FieldError, match=next(iter(wrong))):
            make_judge({"judge": "gold", **wrong}, dataset=sandbox.SANDBOX)
    for wrong in ({"temperature": -1}, {"list_bias": math.inf}, {"num_annotators": 0}, {"length_bias": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Dialed(GOLD, **wrong)
