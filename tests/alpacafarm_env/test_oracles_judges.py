"""WinRate, noise, both orders, pools and replays: whom they ask, what it costs, and the arithmetic of the noise."""

import math
from types import MappingProxyType

import numpy as np
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.oracles import BothOrders, Flip, Recorded, RecordedJudge, Verdicts, WinRate, compare, judge
from alpacafarm_env.oracles.stored import NEVER_JUDGED, NO_CLEAR_VERDICT, NO_REFERENCE_IN_PAIR

N = 20_000
INSTRUCTIONS = [f"Ask {i}" for i in range(N)]
A = [f"first {i}" for i in range(N)]
B = [f"second {i}" for i in range(N)]


class Judge:
    """P(b preferred) = p, counting calls and rows; `p` may be a function of a row."""

    def __init__(self, p=1.0, name="judge"):
        self.p = p if callable(p) else lambda instruction, a, b: p
        self.name = name
        self.rows = []

    def compare(self, instructions, a, b):
        self.rows.append(list(zip(instructions, a, b, strict=True)))
        return np.array([self.p(*row) for row in self.rows[-1]])


class Costly(Judge):
    blank = MappingProxyType({"annotator": "", "cost_usd": 0.0})

    def judge(self, instructions, a, b):
        scores = self.compare(instructions, a, b)
        return Verdicts(scores, {"annotator": np.full(len(a), self.name), "cost_usd": np.full(len(a), 0.5)})


def second_wins(instruction, a, b):
    """Prefers the text "second ..." wherever it stands."""
    return float(b.startswith("second"))


def close(share, expected, num=N):
    """Within three standard deviations of a share of `num`."""
    return abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / num)


def test_win_rate_asks_once_about_open_rows():
    referee = Costly(0.75)
    oracle = WinRate(referee, {"i": "reference", "j": "reference"})
    verdicts = judge(oracle, ["i", "j", "k", "j"], ["reference", "better", "better", ""])
    np.testing.assert_array_equal(verdicts.scores, [0.5, 0.75, math.nan, 0.75])
    assert referee.rows == [[("j", "reference", "better"), ("j", "reference", "")]]
    assert [bool(reason) for reason in verdicts.details["unscored_reason"]] == [False, False, True, False]
    # Details reach the top and are blank where nobody was asked.
    assert verdicts.details["annotator"].tolist() == ["", "judge", "", "judge"]
    assert verdicts.details["cost_usd"].tolist() == [0.0, 0.5, 0.0, 0.5]
    np.testing.assert_array_equal(oracle.score(["i", "k"], ["reference", "x"]), [0.5, math.nan])
    assert len(referee.rows) == 1  # nothing was open
    empty = WinRate(Judge(1.0), {"i": ""})  # an empty reference is one, and an empty response equals it
    np.testing.assert_array_equal(empty.score(["i", "i"], ["", "x"]), [0.5, 1.0])


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5])
def test_flip_rate_and_calls(p):
    """Mixture of AlpacaFarm: 2p of the rows get a coin and cost nothing, p of all come out flipped."""
    referee = Judge(second_wins)
    verdicts = compare(Flip(referee, p, seed=7), INSTRUCTIONS, A, B)
    noised = verdicts.details.get("noised", np.zeros(N, dtype=bool))
    assert p in (0, 0.5) or close(noised.mean(), 2 * p)
    assert noised.all() == (p == 0.5)
    assert noised.any() == (p > 0)
    assert [len(rows) for rows in referee.rows] == [N - noised.sum()][: p < 0.5]
    assert (verdicts.scores[~noised] == 1).all()
    assert p == 0 or close(1 - verdicts.scores.mean(), p)
    assert p == 0 or close(verdicts.scores[noised].mean(), 0.5, noised.sum())


def test_noise_depends_on_seed_and_responses():
    one, other = (Flip(Judge(second_wins), 0.25, seed=seed) for seed in (5, 6))
    differ = one.compare(INSTRUCTIONS, A, B) != other.compare(INSTRUCTIONS, A, B)
    assert close(differ.mean(), 0.375)
    same_instruction = compare(one, ["Ask"] * 2000, A[:2000], B[:2000])
    assert close(same_instruction.details["noised"].mean(), 0.5, 2000)


@pytest.mark.parametrize("always", [0.0, 1.0])
def test_nested_noise_has_coins_of_its_own(always):
    inner = Flip(Judge(always), 0.25, seed=1)
    once, twice = (compare(noisy, INSTRUCTIONS, A, B) for noisy in (inner, Flip(inner, 0.1, seed=1)))
    assert twice.details["noised"][once.details["noised"]].all()
    assert close(twice.details["noised"].mean(), 1 - 0.5 * 0.8)  # left alone by both
    assert close((twice.scores != always).mean(), 0.25 * 0.9 + 0.75 * 0.1)  # one of the two flips, not both


@pytest.mark.parametrize("p", [-0.01, 0.51, math.nan])
def test_flip_needs_a_probability_up_to_a_half(p):
    with pytest.raises(ValueError, match="from 0 to 0.5"):
        Flip(Judge(), p)


@pytest.mark.parametrize(("p", "score"), [(0.0, 0.5), (second_wins, 1.0)], ids=["likes a place", "likes a text"])
def test_both_orders_cancel_a_position_bias(p, score):
    referee = Costly(p)
    verdicts = compare(BothOrders(referee), INSTRUCTIONS[:3], A[:3], B[:3])
    assert verdicts.scores.tolist() == [score] * 3
    assert (verdicts.details["orders_agree"] == (score == 1.0)).all()
    assert verdicts.details["cost_usd"].tolist() == [1.0, 1.0, 1.0]
    (rows,) = referee.rows
    assert rows[3:] == [(i, b, a) for i, a, b in rows[:3]]


@pytest.mark.parametrize("name", ["sim_eval", "sim_ann", "human"])
def test_both_orders_refuse_judges_that_shuffle(name):
    with pytest.raises(ValueError, match="order"):
        BothOrders(sandbox.judge(name))


BY_GENERATOR = {
    "good": {("i", "fine"): 1.0, ("j", "fair"): 0.0, ("j", "reference"): 0.5},
    "other": {("i", "fine"): 0.0},
}


class Dataset:
    """Two generators wrote "fine", and the judge credited it differently."""

    num_reads = 0

    def recorded_verdicts(self, generator=None):
        self.num_reads += 1
        if generator is not None:
            return BY_GENERATOR[generator]
        return {**BY_GENERATOR["good"], ("i", "fine"): math.nan}

    def instructions(self, split):
        return ("i", "j")

    def references(self, split):
        return ("reference", "reference")


def test_replays_what_is_stored_and_nothing_else():
    dataset = Dataset()
    oracle = Recorded(dataset)
    verdicts = judge(oracle, ["i", "j", "j", "j", "i"], ["fine", "fair", "reference", "fine", "fair"])
    np.testing.assert_array_equal(verdicts.scores, [math.nan, 0.0, 0.5, math.nan, math.nan])
    assert verdicts.details["unscored_reason"].tolist() == [NO_CLEAR_VERDICT, "", "", NEVER_JUDGED, NEVER_JUDGED]

    assert dataset.num_reads == 1


def test_recorded_judges_find_references_in_either_place():
    recorded = RecordedJudge(Dataset(), generator="good")
    a = ["reference", "fine", "fair", "fine", "same"]
    b = ["fine", "reference", "reference", "fair", "same"]
    verdicts = compare(recorded, ["i", "i", "j", "i", "i"], a, b)
    np.testing.assert_array_equal(verdicts.scores, [1.0, 0.0, 1.0, math.nan, 0.5])
    assert verdicts.details["unscored_reason"].tolist() == ["", "", "", NO_REFERENCE_IN_PAIR, ""]
