"""Win rates, agreements and paired tests against scipy and by hand."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.protocol import analysis
from alpacafarm_env.seeding import keyed_rng

NAN = math.nan


def credits_of(rates, num, seed=0, seeds=1):
    rng = np.random.default_rng(seed)
    return {
        f"g{place}": {k: (rng.random(num) < rate).astype(float) for k in range(seeds)}
        for place, rate in enumerate(rates)
    }


def told(rows, figure, subject=analysis.ALL):
    return [row for row in rows if (row["figure"], row["subject"]) == (figure, subject)]


def test_a_win_rate_has_the_t_interval_of_scipy():
    known = np.array([1.0, 0, 0.5, 1, 1, 0])
    row = analysis.rate_row("m", "all", np.append(known, NAN))
    low, high = stats.t.interval(0.95, 5, known.mean(), stats.sem(known))
    assert (row["value"], row["n"]) == (pytest.approx(100 * known.mean()), 6)
    assert row["standard_error"] == pytest.approx(100 * stats.sem(known))
    assert (row["low"], row["high"]) == pytest.approx((max(0, 100 * low), min(100, 100 * high)))


def test_win_rates_and_agreement_of_sources_by_hand():
    verdicts = {"one": [1, 1, 1, 1, 0, 0, 0, 1], "two": [1, 0, 0, 1, 0, 1, 0, 1], "three": [0, 0, 0, 1, 1, 1, 1, 0]}
    credits = {name: {0: np.array(row, dtype=float)} for name, row in verdicts.items()}
    rows = analysis.source_rows(credits, ["a"] * 4 + ["b"] * 4, 50)
    found = {(row["figure"], row["subject"], row["other"]): (row["value"], row["n"]) for row in rows}
    assert found["win_rate", "one", "a"] == (100, 4)
    assert found["win_rate", "one", "b"] == (25, 4)
    assert found["win_rate", "two", "all"] == (50, 8)
    expected = stats.pearsonr([1, 0.5, 0.25], [0.25, 0.5, 0.75]).statistic ** 2
    assert found["r2", "a", "b"] == (pytest.approx(expected), 4)
    assert found["spearman", "a", "the other sources"] == (pytest.approx(-1), 4)
    assert {row["figure"] for row in analysis.source_rows(credits, [""] * 8, 50)} == {"win_rate"}


def test_verdicts_on_the_same_instructions_are_resampled_together():
    one = credits_of([0.2, 0.4, 0.5, 0.6, 0.8], 300)
    flips = np.random.default_rng(1).random(300) < 0.1
    two = {name: {0: np.where(flips, 1 - seeds[0], seeds[0])} for name, seeds in one.items()}
    (alike,), (apart,) = (
        analysis.agreement_rows({"a": one, "b": two}, 300, ("r2",), same=same) for same in (True, False)
    )
    assert alike["high"] - alike["low"] < apart["high"] - apart["low"]


def test_an_interval_that_spans_zero_correlation_begins_at_zero():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6))
    low, high = analysis.bounds_of("r2", x, y, tuple(rng.normal(size=(2, 300, 6))))
    assert low == 0
    assert 0 < high <= 1


def test_p_values_are_scipys_on_the_first_of_each_shuffle():
    rows = np.array([seeds[0] for seeds in credits_of([0.3, 0.5, 0.6], 60).values()])
    rows[0, :7], rows[2, 50:55] = NAN, 0.5
    pairs = [*combinations(rows, 2)]
    found = analysis.p_values(np.stack([one - two for one, two in pairs], axis=1), [10, 25, 60], 2)
    for repeat in range(2):
        order = keyed_rng(0, "paired tests", repeat).permutation(60)
        for place, size in enumerate((10, 25, 60)):
            expected = [
                stats.ttest_rel(one[order[:size]], two[order[:size]], nan_policy="omit").pvalue for one, two in pairs
            ]
            assert found[repeat, place].tolist() == pytest.approx(expected), (repeat, size)


def test_without_spread_equal_models_are_equal_and_others_are_not():
    gaps = np.stack([np.zeros(30), np.ones(30)], axis=1)
    np.testing.assert_array_equal(analysis.p_values(gaps, [10, 30], 1)[0], [[1, 0], [1, 0]])


def test_the_size_needed_is_the_one_from_which_on_the_share_stays():
    shares = np.array([[0.5, 0.95, 0.8, 0.9], [0.9, 0.9, 0.9, 1.0], [0.1, 0.95, 0.95, 0.85]])
    assert analysis.needed(shares, [50, 100, 200, 400]).tolist() == [400, 50, math.inf]


def test_models_that_are_the_same_are_called_different_in_one_of_twenty():
    credits = {f"g{place}": dict(enumerate(np.random.default_rng(place).random((4, 300)))) for place in range(12)}
    rows = analysis.null_rows(credits, repeats=3)
    assert 0.01 < rows[-1]["value"] < 0.15  # 72 pairs of 12 independent groups
    assert {row["subject"] for row in rows} == {analysis.SAME}
    assert [row["n"] for row in rows][-3:] == [200, 250, 300]
    apart = {"g": {0: np.arange(300) % 2.0, 1: np.ones(300)}}
    assert analysis.null_rows(apart, repeats=3)[-1]["value"] == 1
    assert analysis.null_rows({"g": {0: np.ones(5)}}, repeats=1) == []


def test_far_models_are_told_apart_early_and_equal_ones_never():
    rows = analysis.pair_rows(credits_of([0.1, 0.5, 0.9], 400), repeats=5)
    assert told(rows, "needed_for_90")[0]["value"] == 25
    assert told(rows, "told_apart")[-1]["value"] == 1
    (never,) = told(analysis.pair_rows(credits_of([0.5] * 3, 400), repeats=5), "needed_for_90")
    assert (never["value"], never["other"]) == (None, "not reached")


def test_pairs_are_counted_in_the_band_of_their_gap():
    place = np.arange(200)
    rates = {"a": 0, "b": 3, "c": 60}  # gaps of 1.5 and about 30 points
    rows = analysis.pair_rows({name: {0: (place < rate) * 1.0} for name, rate in rates.items()}, repeats=2)
    counts = {row["subject"]: row["models"] for row in rows if row["figure"] == "told_apart"}
    assert counts == {analysis.ALL: 3, "gap 0 to 2 points": 1, "gap 10 to 100 points": 2}
    (whole,) = {row["subject"] for row in analysis.pair_rows({"a": {0: place * 0.0}, "b": {0: place**0.0}}, 1)} - {
        analysis.ALL
    }
    assert whole == "gap 10 to 100 points"


def test_sets_of_ten_need_more_than_ten_models():
    assert not told(analysis.pair_rows(credits_of([0.5] * 10, 40), repeats=1), "told_apart", analysis.SETS)
    rows = analysis.pair_rows(credits_of(np.linspace(0.05, 0.95, 12), 400), repeats=2)
    whole, sets = (told(rows, "told_apart", subject)[-1] for subject in (analysis.ALL, analysis.SETS))
    assert sets["value"] == pytest.approx(whole["value"], abs=0.03)
    assert sets["low"] <= sets["value"] <= sets["high"]
    assert sets["models"] == 45
