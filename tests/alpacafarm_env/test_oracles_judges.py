"""WinRate, noise, both orders and pools: whom they ask, what it costs, and the noise's arithmetic."""

import math
from types import MappingProxyType

import numpy as np
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.oracles import BothOrders, Flip, Pool, Verdicts, WinRate, compare, judge

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

    @property
    def num_rows(self):
        return sum(map(len, self.rows))


class Costly(Judge):
    blank = MappingProxyType({"annotator": "", "cost_usd": 0.0})

    def judge(self, instructions, a, b):
        scores = self.compare(instructions, a, b)
        return Verdicts(scores, {"annotator": np.full(len(a), self.name), "cost_usd": np.full(len(a), 0.5)})


def second_wins(instruction, a, b):
    """Prefers the text "second ..." wherever it stands."""
    return float(b.startswith("second"))


def first_shown_wins(instruction, a, b):
    """A pure liking for the first position."""
    return 0.0


# ------------------------------------------------------------------------------------------------------------- WinRate


def test_win_rate_asks_once_and_only_about_what_is_open():
    referee = Judge(0.75)
    oracle = WinRate(referee, {"i": "reference", "j": "reference"})
    verdicts = judge(oracle, ["i", "j", "k", "j"], ["reference", "better", "better", ""])
    np.testing.assert_array_equal(verdicts.scores, [0.5, 0.75, math.nan, 0.75])
    assert referee.rows == [[("j", "reference", "better"), ("j", "reference", "")]]
    assert verdicts.details["unscored_reason"].tolist() == ["", "", "no reference response for this instruction", ""]


def test_win_rate_asks_nobody_if_nothing_is_open():
    referee = Judge(0.75)
    np.testing.assert_array_equal(WinRate(referee, {"i": "r"}).score(["i", "k"], ["r", "x"]), [0.5, math.nan])
    assert referee.rows == []


def test_win_rate_of_an_empty_reference():
    """An empty reference is a reference, and an empty response equals it."""
    np.testing.assert_array_equal(WinRate(Judge(1.0), {"i": ""}).score(["i", "i"], ["", "x"]), [0.5, 1.0])


def test_details_reach_the_top_and_are_blank_where_nobody_was_asked():
    oracle = WinRate(Costly(1.0), {"i": "reference"})
    details = judge(oracle, ["i", "i", "k"], ["reference", "x", "x"]).details
    assert details["annotator"].tolist() == ["", "judge", ""]
    assert details["cost_usd"].tolist() == [0.0, 0.5, 0.0]


def test_a_judge_without_a_verdict_leaves_the_row_open():
    verdicts = judge(WinRate(Judge(math.nan), {"i": "r"}), ["i"], ["x"])
    assert math.isnan(verdicts.scores[0])
    assert verdicts.details["unscored_reason"].tolist() == ["the judge gave no verdict"]


# ---------------------------------------------------------------------------------------------------------------- Flip


def test_flip_rate_and_calls():
    """Mixture of AlpacaFarm: 2p of the rows get a coin and cost nothing, p of all come out flipped."""
    referee = Judge(second_wins)
    verdicts = compare(Flip(referee, 0.25, seed=7), INSTRUCTIONS, A, B)
    flipped = 1 - verdicts.scores.mean()
    assert abs(flipped - 0.25) < 3 * math.sqrt(0.25 * 0.75 / N)
    assert abs(referee.num_rows / N - 0.5) < 3 * math.sqrt(0.25 / N)
    assert len(referee.rows) == 1
    assert referee.num_rows == N - verdicts.details["noised"].sum()
    assert abs(verdicts.scores[verdicts.details["noised"]].mean() - 0.5) < 3 * math.sqrt(0.25 / (N / 2))


def test_noise_algebra():
    """Agreement with a fixed target a' = 0.25 + 0.5 a; two noised copies disagree with probability 0.375 + 0.25 v."""
    agreement, disagreement = 0.65, 0.26
    target = np.random.default_rng(0).random(N) < 0.5
    truth = dict(zip(INSTRUCTIONS, target, strict=True))
    draws = np.random.default_rng(1).random((2, N))
    agrees = dict(zip(INSTRUCTIONS, draws[0] < agreement, strict=True))
    noisy = Flip(Judge(lambda i, a, b: float(truth[i] == agrees[i])), 0.25, seed=1)
    agreed = (noisy.compare(INSTRUCTIONS, A, B) == target).mean()
    assert abs(agreed - (0.25 + 0.5 * agreement)) < 3 * math.sqrt(0.25 / N)

    differs = dict(zip(INSTRUCTIONS, draws[1] < disagreement, strict=True))
    one = Flip(Judge(lambda i, a, b: float(truth[i])), 0.25, seed=2).compare(INSTRUCTIONS, A, B)
    two = Flip(Judge(lambda i, a, b: float(truth[i] != differs[i])), 0.25, seed=3).compare(INSTRUCTIONS, A, B)
    assert abs((one != two).mean() - (0.375 + 0.25 * disagreement)) < 3 * math.sqrt(0.25 / N)


def test_flip_of_zero_is_the_judge():
    referee = Judge(lambda instruction, a, b: len(instruction) / 16)
    np.testing.assert_array_equal(Flip(referee, 0.0).compare(INSTRUCTIONS, A, B), referee.compare(INSTRUCTIONS, A, B))
    assert len(referee.rows[0]) == N


def test_flip_of_a_half_is_a_coin_that_asks_nobody():
    referee = Judge(1.0)
    scores = Flip(referee, 0.5).compare(INSTRUCTIONS, A, B)
    assert referee.rows == []
    assert abs(scores.mean() - 0.5) < 3 * math.sqrt(0.25 / N)


def test_swapping_a_pair_swaps_its_verdict():
    noisy = Flip(Judge(second_wins), 0.25, seed=4)
    np.testing.assert_array_equal(noisy.compare(INSTRUCTIONS, A, B), 1 - noisy.compare(INSTRUCTIONS, B, A))


def test_noise_depends_on_seed_and_responses_not_on_the_instruction_alone():
    noisy = Flip(Judge(second_wins), 0.25, seed=5)
    one = noisy.compare(INSTRUCTIONS, A, B)
    assert abs((one != Flip(Judge(second_wins), 0.25, seed=6).compare(INSTRUCTIONS, A, B)).mean() - 0.375) < 0.011
    same_instruction = compare(noisy, ["Ask"] * 2000, A[:2000], B[:2000])
    assert abs(same_instruction.details["noised"].mean() - 0.5) < 3 * math.sqrt(0.25 / 2000)


def test_identical_responses_stay_ties_under_any_noise():
    referee = Judge(1.0)
    verdicts = compare(Flip(referee, 0.5), INSTRUCTIONS[:100], A[:100], A[:100])
    assert (verdicts.scores == 0.5).all()
    assert not verdicts.details["noised"].any()
    assert referee.rows == []


def test_noise_on_noise_is_marked_by_both():
    inner = Flip(Judge(second_wins), 0.25, seed=1)
    both = compare(Flip(inner, 0.25, seed=1), INSTRUCTIONS, A, B).details["noised"]
    single = compare(inner, INSTRUCTIONS, A, B).details["noised"]
    assert both[single].all()
    # A row is left alone by both with probability 1/2 * 1/2.
    assert abs(both.mean() - 0.75) < 3 * math.sqrt(0.75 * 0.25 / N)


@pytest.mark.parametrize("p", [-0.01, 0.51, math.nan])
def test_flip_needs_a_probability_up_to_a_half(p):
    with pytest.raises(ValueError, match="from 0 to 0.5"):
        Flip(Judge(), p)


# --------------------------------------------------------------------------------------------------- both orders, pools


def test_both_orders_cancel_a_liking_for_one_position_in_one_call():
    referee = Costly(first_shown_wins)
    verdicts = compare(BothOrders(referee), INSTRUCTIONS[:3], A[:3], B[:3])
    assert verdicts.scores.tolist() == [0.5, 0.5, 0.5]
    assert not verdicts.details["orders_agree"].any()
    assert verdicts.details["cost_usd"].tolist() == [1.0, 1.0, 1.0]
    assert len(referee.rows) == 1
    assert referee.rows[0][3:] == [(i, b, a) for i, a, b in referee.rows[0][:3]]


def test_both_orders_keep_a_real_preference():
    verdicts = compare(BothOrders(Judge(second_wins)), INSTRUCTIONS[:3], A[:3], B[:3])
    assert verdicts.scores.tolist() == [1.0, 1.0, 1.0]
    assert verdicts.details["orders_agree"].all()


def test_a_pool_spreads_pairs_evenly_and_asks_each_member_once():
    members = [Costly(p, name) for p, name in ((0.0, "no"), (0.5, "perhaps"), (1.0, "yes"))]
    verdicts = compare(Pool(members, seed=2), INSTRUCTIONS, A, B)
    for member, p in zip(members, (0.0, 0.5, 1.0), strict=True):
        own = verdicts.details["annotator"] == member.name
        assert abs(own.mean() - 1 / 3) < 3 * math.sqrt(2 / 9 / N)
        assert (verdicts.scores[own] == p).all()
        assert len(member.rows) == 1
    assert (verdicts.details["cost_usd"] == 0.5).all()


def test_a_pool_joins_members_that_say_different_things():
    pool = Pool([Costly(1.0, "costly"), Judge(0.0, "free")])
    details = compare(pool, INSTRUCTIONS[:50], A[:50], B[:50]).details
    assert set(details["annotator"].tolist()) == {"costly", "free"}
    np.testing.assert_array_equal(details["cost_usd"], np.where(details["annotator"] == "costly", 0.5, 0.0))


@pytest.mark.parametrize("members", [[], [Judge(), Judge()]])
def test_a_pool_needs_members_with_names_of_their_own(members):
    with pytest.raises(ValueError, match="one or more annotators with different names"):
        Pool(members)


def test_noise_over_noise_has_coins_of_its_own():
    instructions = [f"ask {i}" for i in range(20_000)]
    a, b = ["x"] * len(instructions), ["y"] * len(instructions)
    for always in (0.0, 1.0):
        twice = Flip(Flip(Judge(always), 0.25), 0.1)
        expected = 0.25 * 0.9 + 0.75 * 0.1  # one of the two flips, not both
        share = float(np.mean(twice.compare(instructions, a, b) != always))
        assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / len(instructions)) ** 0.5)


def test_both_orders_of_a_judge_that_shuffles_by_itself_are_refused():
    for name in ("sim_eval", "sim_ann", "human"):
        with pytest.raises(ValueError, match="draws the order of a pair itself"):
            BothOrders(sandbox.judge(name))
