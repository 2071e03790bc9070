"""Means over seeds, drops, Holm's method, rank correlations and their bootstrap, against scipy and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import (
    Estimate,
    agreement,
    correlation,
    correlations,
    drop,
    holm,
    other_peaks,
    resampled,
    sampled_methods,
)
from alpacafarm_env.seeding import keyed_rng
from alpacafarm_env.statistics import Interval


def test_an_estimate_is_mean_standard_error_and_t_interval():
    some = Estimate.of(np.array([1.0, np.nan, 2.0, 3.0]))
    assert (some.mean, some.num, some.clear) == (2, 3, False)
    assert some.standard_error == pytest.approx(1 / math.sqrt(3))
    assert some.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)  # t(0.975, 2)
    assert some.ratio == pytest.approx(2 * math.sqrt(3))
    # Of three seeds t(0.975, 2) = 4.30 standard errors are needed: sqrt(3) x for x - 1, x, x + 1.
    assert [Estimate.of(np.array([x - 1, x, x + 1])).clear for x in (2.4, 2.6, -2.6)] == [False, True, True]
    one, none, equal = (Estimate.of(np.array(values)) for values in ([5.0, np.nan], [np.nan], [0.1] * 3))
    assert (one.mean, one.num, one.clear) == (5, 1, False)
    assert (none.num, none.clear) == (0, False)
    assert (equal.standard_error, equal.clear) == (0, True)
    assert all(map(math.isnan, (one.standard_error, none.mean, equal.ratio)))


def test_a_peak_is_chosen_on_the_other_seeds():
    # Sums: 6, 9, 8. Without seed 0: 5, 4, 6; without seed 1: 3, 7, 5; without seed 2: 4, 7, 5.
    gold = np.array([[1.0, 5.0, 2.0], [3.0, 2.0, 3.0], [2.0, 2.0, 3.0]])
    assert other_peaks(gold).tolist() == [2, 1, 1]
    assert drop(gold).tolist() == [0.0, -1.0, -1.0]


def test_holm_keeps_what_is_clear_among_all():
    """p of the t-tests of means 1, 2, 3 and 4 standard errors, 9 degrees of freedom: .343, .077, .015, .003."""
    unit = np.arange(10.0) - 4.5
    unit /= Estimate.of(unit).standard_error
    assert holm([unit + 2, unit + 4, unit + 1, unit + 3]) == [False, True, False, True]
    assert holm([unit + 2.5, unit + 4, unit + 2.5, unit + 2.5]) == [False, True, False, False]  # .034 is above .05 / 3
    assert holm([np.zeros(3), np.ones(3)]) == [False, True]
    assert holm([]) == []


@pytest.mark.parametrize("levels", [4, 1000])  # with many ties, and with hardly any
def test_correlations_of_rows_are_those_of_scipy(levels):
    x, y = np.random.default_rng(0).integers(0, levels, (2, 50, 9)).astype(float)
    tests = {"spearman": stats.spearmanr, "kendall": stats.kendalltau, "r2": stats.pearsonr}
    for figure, test in tests.items():
        expected = [test(a, b).statistic for a, b in zip(x, y, strict=True)]
        assert correlations(figure, x, y) == pytest.approx(expected)
        assert correlation(figure, x[0], y[0]) == pytest.approx(expected[0] ** (2 if figure == "r2" else 1))


@pytest.mark.parametrize("figure", ["spearman", "kendall", "r2"])
def test_a_constant_has_no_correlation(figure):
    # The mean of 0.1, 0.1, 0.1 is rounded up.
    x, y = np.array([[0.1] * 3, [1, 2, 3]]), np.array([[1.0, 2, 3], [3, 2, 1]])
    assert np.isnan(correlations(figure, x, y)).tolist() == [True, False]


def test_resamples_are_means_of_drawn_seeds_on_drawn_instructions():
    credits = np.random.default_rng(1).random((2, 30))
    credits[0, 3] = np.nan
    instructions = keyed_rng(5, "method ranking", "instructions").integers(0, 30, (40, 30))
    seeds = keyed_rng(5, "method ranking", "seeds", "m").integers(0, 2, (40, 2))
    expected = [
        100 * np.mean([np.nanmean(credits[seed, drawn]) for seed in chosen])
        for chosen, drawn in zip(seeds, instructions, strict=True)
    ]
    assert resampled({"m": list(credits)}, seed=5, num=40)["m"] == pytest.approx(expected)


def test_intervals_are_percentiles_of_resampled_coefficients():
    rng = np.random.default_rng(4)
    one, two = ({"a": 1.0, "b": 1.0, "c": 3.0, "d": 2.0}, {"a": 2.0, "b": 1.0, "c": 2.0, "d": 3.0})
    draws = [{name: rng.normal(level, 1, 500) for name, level in values.items()} for values in (one, two)]
    x, y = (np.stack([draw[name] for name in "abcd"], axis=1) for draw in draws)
    agreed = agreement(one, two, *draws)
    for figure, exact in (("spearman", stats.spearmanr([1, 1, 3, 2], [2, 1, 2, 3]).statistic), ("kendall", 2 / 5)):
        assert agreed[figure].mean == pytest.approx(exact)
        ends = np.quantile(correlations(figure, x, y), [0.025, 0.975])
        assert (agreed[figure].low, agreed[figure].high) == pytest.approx(tuple(ends))
    assert math.isnan(agreement(one, two)["spearman"].low)


def test_three_methods_with_both_make_an_agreement():
    agreed = agreement({"a": 1, "b": 2, "c": 3, "x": 0}, {"c": 1, "a": 2, "b": 3, "y": 4})
    assert (agreed["spearman"].mean, agreed["spearman"].num) == (pytest.approx(-0.5), 3)
    assert agreement({"a": 1, "b": 2, "x": 0}, {"a": 2, "b": 3, "y": 4}) is None


def test_sampling_methods_widens_with_fewer_methods():
    few, many = (sampled_methods(Interval(0.8, 0.7, 0.9, num)) for num in (5, 50))
    assert few.low < many.low < 0.8 < many.high < few.high
    assert math.isnan(sampled_methods(Interval(0.8, 0.7, 0.9, 3)).low)
