"""Paired tests against scipy, and what is said of models that are the same, near and far."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.protocol.pairs import (
    ALL,
    SAME,
    SETS,
    by_seed,
    needed,
    null_rows,
    p_values,
    pair_rows,
    sizes_of,
)
from alpacafarm_env.seeding import keyed_rng

NAN = math.nan


def models(rates, num=400, seed=0):
    rng = np.random.default_rng(seed)
    return {f"m{place}": (rng.random(num) < rate).astype(float) for place, rate in enumerate(rates)}


def told(rows, figure, subject=ALL):
    return [row for row in rows if (row["figure"], row["subject"]) == (figure, subject)]


def test_p_values_are_scipys_on_the_first_of_each_shuffle():
    credits = models([0.3, 0.5, 0.6], 60)
    credits["m0"][:7] = NAN
    credits["m2"][50:55] = 0.5
    gaps = np.stack([credits[one] - credits[two] for one, two in combinations(credits, 2)], axis=1)
    found = p_values(gaps, [10, 25, 60], 3)
    for repeat in range(3):
        order = keyed_rng(0, "paired tests", repeat).permutation(60)
        for place, size in enumerate((10, 25, 60)):
            for pair, (one, two) in enumerate(combinations(credits, 2)):
                a, b = (credits[name][order[:size]] for name in (one, two))
                expected = stats.ttest_rel(a, b, nan_policy="omit").pvalue
                assert found[repeat, place, pair] == pytest.approx(expected), (repeat, size, one, two)


def test_without_spread_equal_models_are_equal_and_others_are_not():
    gaps = np.stack([np.zeros(30), np.ones(30)], axis=1)
    np.testing.assert_array_equal(p_values(gaps, [10, 30], 1)[0], [[1, 0], [1, 0]])


def test_the_size_needed_is_the_one_from_which_on_the_share_stays():
    shares = np.array([[0.5, 0.95, 0.8, 0.9], [0.9, 0.9, 0.9, 1.0], [0.1, 0.95, 0.95, 0.85]])
    assert needed(shares, [50, 100, 200, 400]).tolist() == [400, 50, math.inf]


def test_sizes_end_with_all():
    assert sizes_of(201)[-3:] == [150, 200, 201]
    assert sizes_of(805)[-2:] == [750, 805]
    assert sizes_of(20) == [20]


def test_models_that_are_the_same_are_called_different_in_one_of_twenty():
    credits = {f"g{place}": list(models([0.4] * 4, 300, place).values()) for place in range(12)}
    rows = null_rows(credits, repeats=3)
    # 72 pairs of 12 independent groups.
    assert 0.01 < rows[-1]["value"] < 0.15
    assert {row["subject"] for row in rows} == {SAME}
    apart = {"g": [*models([0.2, 0.6], 300).values()]}
    assert null_rows(apart, repeats=3)[-1]["value"] == 1  # the twin: they do differ
    assert null_rows({"g": [np.ones(5)]}, repeats=1) == []


def test_far_models_are_told_apart_early_and_equal_ones_never():
    rows = pair_rows([models([0.1, 0.5, 0.9])], repeats=5)
    assert told(rows, "needed_for_90")[0]["value"] == 25
    assert told(rows, "told_apart")[-1]["value"] == 1
    same = pair_rows([models([0.5, 0.5, 0.5])], repeats=5)
    never = told(same, "needed_for_90")[0]
    assert (never["value"], never["other"]) == (None, "not reached")


def test_pairs_are_counted_in_the_band_of_their_gap():
    base = np.zeros(200)
    near, far = base.copy(), base.copy()
    near[:3], far[:60] = 1, 1  # 1.5 and 30 points
    rows = pair_rows([{"a": base, "b": near, "c": far}], repeats=2)
    whole = pair_rows([{"a": base, "b": base + 1}], repeats=2)
    assert {row["models"] for row in told(whole, "told_apart", "gap 10 to 100 points")} == {1}
    counts = {row["subject"]: row["models"] for row in told(rows, "told_apart", "gap 0 to 2 points")}
    assert counts == {"gap 0 to 2 points": 1}
    assert {row["models"] for row in told(rows, "told_apart", "gap 10 to 100 points")} == {2}
    assert not told(rows, "told_apart", "gap 2 to 5 points")


def test_the_gap_found_is_that_of_the_normal_approximation():
    credits = models([0.5, 0.5], 10_000)
    row = told(pair_rows([credits], repeats=1), "gap_found_4_of_5")[-1]
    spread = (credits["m0"] - credits["m1"]).std(ddof=1)
    assert row["value"] == pytest.approx(100 * 2.8016 * spread / 100, rel=1e-3)
    rng = np.random.default_rng(1)
    found = [stats.ttest_1samp(rng.normal(row["value"] / 100, spread, 10_000), 0).pvalue < 0.05 for _ in range(300)]
    assert 0.7 < np.mean(found) < 0.9


def test_sets_of_ten_need_more_than_ten_models():
    assert not told(pair_rows([models([0.5] * 10, 40)], repeats=1), "told_apart", SETS)
    rows = pair_rows([models(np.linspace(0.05, 0.95, 12), 400)], repeats=2)
    whole, sets = (told(rows, "told_apart", subject)[-1] for subject in (ALL, SETS))
    assert sets["value"] == pytest.approx(whole["value"], abs=0.03)
    assert sets["low"] <= sets["value"] <= sets["high"]
    assert sets["models"] == 45


def test_an_evaluation_a_seed():
    one, two, three = np.zeros(2), np.ones(2), np.full(2, 0.5)
    found = by_seed({"a": {1: one, 2: two}, "b": {0: three, 1: one, 2: three}})
    assert [list(each) for each in found] == [["a", "b"], ["a", "b"]]
    assert found[0]["b"] is one  # of the same seed, not of the same place
    assert found[1]["b"] is three
    assert by_seed({"a": {0: one}, "b": {1: two}}) == []


@pytest.mark.parametrize("credits", [[], [{"alone": np.ones(30)}]])
def test_without_two_models_there_is_nothing_to_tell(credits):
    assert pair_rows(credits, repeats=1) == []
