"""Win rates, length control and intervals against hand-computed and published numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from alpacafarm_env.statistics import (
    LEADERBOARD_COLUMNS,
    LENGTH_PRECISION,
    LENGTH_WEIGHT,
    PERCENT,
    POSITIVE,
    SHARE,
    interval,
    leaderboard_row,
    length_controlled_win_rate,
    wilson,
    win_rate,
)

GPT4 = {"weight": LENGTH_WEIGHT, "precision": LENGTH_PRECISION}


def test_win_rate_equals_the_upstream_example():
    summary = win_rate([0, 1, 1, 0.5, 0.5, math.nan, math.nan, 0.2, 0.9])
    assert summary.win_rate == pytest.approx(58.5714, abs=5e-5)
    assert summary.standard_error == pytest.approx(15.0283, abs=5e-5)
    counts = (summary.num_wins, summary.num_losses, summary.num_draws, summary.num_total, summary.num_unscored)
    assert counts == (3, 2, 2, 7, 2)
    assert summary.row()["n_wins_base"] == 2
    summary = win_rate([1, 1, 0, 1])
    assert summary.win_rate == 75
    assert summary.standard_error == pytest.approx(100 * 0.5 / 2)  # sd = sqrt(3 / 4 / 3) = 0.5, n = 4
    assert math.isnan(win_rate([math.nan]).win_rate)
    assert math.isnan(win_rate([1.0]).standard_error)


def test_bounds_are_all_lost_and_all_won():
    assert win_rate([1, 0, 0.5, math.nan, 0.9, math.nan]).bounds == pytest.approx((240 / 6, 440 / 6))
    assert win_rate([1, 0.5]).bounds == (75, 75)
    assert win_rate([math.nan]).bounds == (0, 100)
    assert all(map(math.isnan, win_rate([]).bounds))


def test_a_leaderboard_row():
    credits, responses, references = [1, 0, math.nan, 0.5], ["a", "bb", "cccc", "d"], ["aaa", "b", "c", "dd"]
    row = leaderboard_row("me", credits, responses, references)
    assert tuple(row) == LEADERBOARD_COLUMNS
    assert (row["generator"], row["win_rate"], row["n_total"], row["avg_length"]) == ("me", 50, 3, 2)
    found = length_controlled_win_rate(credits, [1, 2, 4, 1], [3, 1, 1, 2])
    assert (row["length_controlled_winrate"], row["lc_low"], row["lc_high"]) == (found.mean, found.low, found.high)
    found = length_controlled_win_rate(credits, [1, 2, 4, 1], [3, 1, 1, 2], **GPT4)
    row = leaderboard_row("me", credits, responses, references, "alpaca_eval_gpt4")
    assert (row["length_controlled_winrate"], row["lc_low"], row["lc_high"]) == (found.mean, found.low, found.high)


def test_credits_outside_their_range_are_refused():
    for credits in ([1.5], [-0.1], [math.inf], [[0.5]]):
        with pytest.raises(ValueError, match="credits"):
            win_rate(credits)


def judged_by_length(theta, beta, num, seed):
    """Credits of a judge that sees little but length, lengths, and those of the reference."""
    rng = np.random.default_rng(seed)
    references = rng.integers(100, 900, size=num)
    lengths = references + rng.choice([1, 1, -1], size=num) * rng.integers(50, 400, size=num)
    gaps = (references - lengths).astype(float)
    chances = 1 / (1 + np.exp(-theta * np.tanh(gaps / gaps.std(ddof=1)) - beta))
    return (rng.random(num) < chances).astype(float), lengths, references


def test_length_control_removes_the_effect_of_length():
    credits, lengths, references = judged_by_length(-3, 0, 4000, 0)  # longer in two thirds of the rows
    assert win_rate(credits).win_rate > 60
    assert length_controlled_win_rate(credits, lengths, references, precision=0).mean == pytest.approx(50, abs=3)
    credits, lengths, references = judged_by_length(0, math.log(4), 4000, 0)
    plain = length_controlled_win_rate(credits, lengths, references, precision=0)
    assert plain.mean == pytest.approx(100 * credits.mean(), abs=1)


def test_the_prior_decides_where_the_verdicts_say_little():
    credits, lengths, references = judged_by_length(0, 0, 40, 0)
    found = [
        length_controlled_win_rate(credits, lengths, references, weight=-1.6, precision=each)
        for each in (0, 10, 1000, 1e6)
    ]
    gaps = np.tanh((references - lengths) / (references - lengths).std(ddof=1))

    def excess(beta):  # by the score equation of a known weight
        return (1 / (1 + np.exp(1.6 * gaps - beta)) - credits).sum()

    known = 100 / (1 + math.exp(-brentq(excess, -9, 9)))
    assert found[-1].mean == pytest.approx(known, abs=0.01)
    assert sorted(each.mean for each in found) == [each.mean for each in found[::-1]]


def test_the_interval_of_length_control_covers_what_it_should():
    rng, hits, num = np.random.default_rng(0), 0, 400
    for seed in range(num):
        theta = rng.normal(LENGTH_WEIGHT, LENGTH_PRECISION**-0.5)
        found = length_controlled_win_rate(*judged_by_length(theta, 0.8, 120, seed), **GPT4)
        hits += found.low <= 100 / (1 + math.exp(-0.8)) <= found.high
        assert found.low < found.mean < found.high
    assert 0.925 <= hits / num <= 0.975  # 95 %, within two standard errors


@pytest.mark.parametrize("theta", [0, -1.6, -3])
def test_without_a_known_judge_it_covers_as_well(theta):
    found = [length_controlled_win_rate(*longer_throughout(theta, 200, seed)) for seed in range(200)]
    assert np.mean([each.low <= 100 / (1 + math.exp(-0.8)) <= each.high for each in found]) >= 0.91


def longer_throughout(theta, num, seed):
    """Credits of a judge with such a taste for length, of responses that are nearly all longer than the reference."""
    rng = np.random.default_rng(seed)
    references = rng.normal(1000, 200, num).round()
    lengths = references + rng.normal(300, 200, num).round()
    gaps = references - lengths
    chance = 1 / (1 + np.exp(-(theta * np.tanh(gaps / gaps.std(ddof=1)) + 0.8)))
    return (rng.random(num) < chance).astype(float), lengths, references


def test_length_control_is_antisymmetric_and_knows_its_ends():
    credits, a, b = np.array([1, 0, 1, 1, 0.5]), [10, 30, 25, 60, 5], [12, 20, 20, 20, 20]
    there, back = length_controlled_win_rate(credits, a, b), length_controlled_win_rate(1 - credits, b, a)
    assert there.mean + back.mean == pytest.approx(100, abs=1e-3)
    assert there.low + back.high == pytest.approx(100, abs=1e-3)
    assert 50 < there.mean < 100
    won = length_controlled_win_rate([1] * 20, range(20), [4] * 20)
    assert won.mean > 99.9
    assert 50 < won.low < 95  # 83.9 by Wilson's interval of 20 in 20, without lengths
    parted = length_controlled_win_rate([1, 0, 1, 0, 0.5], [50, 20, 90, 10, 30], [30] * 5, precision=0)
    assert parted.high - parted.low > 40  # length tells all of five verdicts apart
    assert length_controlled_win_rate([1, 1, 0, 0], [4, 5, 1, 2], [3] * 4).mean == pytest.approx(50, abs=1e-4)
    equal = length_controlled_win_rate([1, 0, 0.5], [3, 3, 3], [3, 3, 3])  # no length to control for
    assert equal.mean == pytest.approx(50, abs=1e-4)
    one = length_controlled_win_rate([0.7], [3], [9])
    assert (one.mean, one.num, math.isnan(one.low)) == (pytest.approx(70, abs=0.1), 1, True)


def test_length_control_drops_unscored_rows():
    lengths, references = [5, 50, 30, 20, 44], [30, 30, 31, 29, 30]
    kept = length_controlled_win_rate([1, 0, 1, 0, math.nan], lengths, references)
    assert (0 < kept.mean < 100, kept.num) == (True, 4)
    assert kept != length_controlled_win_rate([1, 0, 1, 0, 1], lengths, references)
    # Lengths are in units of their spread over all rows, these included.
    wider = length_controlled_win_rate([1, 0, 1, 0, math.nan], [5, 50, 30, 20, 244], references)
    assert wider.mean != pytest.approx(kept.mean, abs=0.1)
    assert math.isnan(length_controlled_win_rate([math.nan] * 2, [1, 2], [3, 4]).mean)
    for lengths, references in (([1, 2, 3], [1, 2, 3]), ([1, math.nan], [1, 2])):
        with pytest.raises(ValueError, match="lengths"):
            length_controlled_win_rate([1, 0], lengths, references)
    for wrong in ({"precision": -1}, {"weight": math.nan}, {"precision": 1e300}, {"weight": "x"}, {"weight": 1e6}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            length_controlled_win_rate([1, 0], [1, 2], [3, 4], **wrong)


def test_t_interval_by_hand():
    result = interval([1, 2, 3, 4])  # sd = 1.29099, t(0.975, 3) = 3.18245
    assert (result.mean, result.num) == (2.5, 4)
    assert result.high - result.mean == pytest.approx(3.18245 * 1.29099 / 2, abs=1e-4)
    assert result.mean - result.low == pytest.approx(result.high - result.mean)
    one = interval([7.0])
    assert one.mean == 7
    assert math.isnan(one.low)
    assert math.isnan(one.high)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_intervals_of_shares_stay_between_0_and_1(values):
    found = interval(values, bounds=SHARE)
    assert 0 <= found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high <= 1


def test_the_logit_scale_by_hand():
    found = interval([0.2, 0.3, 0.4], bounds=SHARE)  # sd = 0.1, t(0.975, 2) = 4.30265
    reach = 4.30265 * 0.1 / math.sqrt(3) / (0.3 * 0.7)
    ends = [1 / (1 + math.exp(-(math.log(3 / 7) + sign * reach))) for sign in (-1, 1)]
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, *ends), abs=1e-6)
    percent = interval([20, 30, 40], bounds=PERCENT)
    assert (percent.low, percent.high) == pytest.approx((100 * found.low, 100 * found.high))
    narrow, plain = interval([0.5, 0.501, 0.502], bounds=SHARE), interval([0.5, 0.501, 0.502])
    assert (narrow.low, narrow.high) == pytest.approx((plain.low, plain.high), abs=1e-6)


def test_intervals_of_certain_shares_are_cut():
    found, plain = interval([0.99, 1.0], bounds=SHARE), interval([0.99, 1.0])
    assert (found.low, found.high) == (plain.low, 1)
    assert found.low > 0.9
    ended = interval([1.0, 1.0], bounds=SHARE)
    assert (ended.low, ended.high) == (1, 1)
    rounded = interval([1 - 1e-16, 1 - 2e-16], bounds=(-1, 1))
    assert (rounded.low, rounded.high) == pytest.approx((1, 1))


def test_intervals_are_cut_at_their_bounds():
    wide, cut = interval([0.1, 7.0]), interval([0.1, 7.0], bounds=POSITIVE)
    assert wide.low < 0
    assert (cut.low, cut.high) == (0, wide.high)
    assert interval([-0.02, -0.01], bounds=POSITIVE).low == 0  # a mean of k1 estimates may lie below 0
    beyond = interval([-0.05, -0.06, -0.055], bounds=(0, math.inf))
    assert beyond.low < beyond.mean < beyond.high


def test_wilson_interval_is_that_of_the_literature():
    # Newcombe 1998, Stat. Med. 17:857, table I, method 3 (score without continuity correction).
    table = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (correct, num), expected in table.items():
        assert wilson(correct, num) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("values", [[], [1, math.nan], [0.5, 1.5]])
def test_intervals_refuse_what_has_no_meaning(values):
    with pytest.raises(ValueError, match="expected"):
        interval(values, bounds=SHARE)
