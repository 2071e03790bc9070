"""Rank correlations and their bootstrap: the vectorised ones against scipy, and what is drawn together."""

import math
import time

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import (
    Bootstrap,
    agreement,
    correlation,
    kendall_rows,
    pearson_rows,
    percentiles,
    spearman_rows,
)
from alpacafarm_env.seeding import keyed_rng


@pytest.mark.parametrize("levels", [4, 1000])  # with many ties, and with hardly any
def test_rows_of_coefficients_are_those_of_scipy(levels):
    x, y = np.random.default_rng(0).integers(0, levels, (2, 50, 9)).astype(float)
    rho = [stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    tau = [stats.kendalltau(a, b, variant="b").statistic for a, b in zip(x, y, strict=True)]
    assert spearman_rows(x, y) == pytest.approx(rho)
    assert kendall_rows(x, y) == pytest.approx(tau)
    assert [correlation("spearman", a, b) for a, b in zip(x, y, strict=True)] == pytest.approx(rho)
    assert [correlation("kendall", a, b) for a, b in zip(x, y, strict=True)] == pytest.approx(tau)
    pearson = [stats.pearsonr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert pearson_rows(x, y) == pytest.approx(pearson)
    assert correlation("r2", x[0], y[0]) == pytest.approx(pearson[0] ** 2)


def test_a_constant_has_no_correlation():
    x, y = np.array([[1.0, 1, 1], [1, 2, 3]]), np.array([[1.0, 2, 3], [3, 2, 1]])
    for rows in (spearman_rows, kendall_rows, pearson_rows):
        assert np.isnan(rows(x, y)).tolist() == [True, False]
    crumbs = np.full((1, 3), 0.1)  # its mean is rounded up
    assert crumbs.mean() != 0.1
    assert np.isnan(pearson_rows(crumbs, y[:1])).all()
    assert math.isnan(correlation("r2", x[0], y[0]))
    found = agreement({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert math.isnan(found.spearman.value)
    assert math.isnan(found.kendall.value)


def test_percentiles_are_of_what_is_known():
    values = np.array([*range(101), math.nan])
    assert percentiles(values) == [2.5, 97.5]
    assert percentiles(values, (0, 50, 100)) == [0, 50, 100]
    assert np.isnan(percentiles(values[-1:], (1, 2, 3))).tolist() == [True] * 3


def test_a_resample_is_the_mean_of_the_drawn_seeds_on_the_drawn_instructions():
    credits = np.random.default_rng(1).random((2, 30))
    credits[0, 3] = np.nan
    found = Bootstrap.of({"m": list(credits)}, seed=5, num=40).win_rates["m"]
    instructions = keyed_rng(5, "method ranking", "instructions").integers(0, 30, (40, 30))
    seeds = keyed_rng(5, "method ranking", "seeds", "m").integers(0, 2, (40, 2))
    expected = [
        100 * np.mean([np.nanmean(credits[seed, drawn]) for seed in chosen])
        for chosen, drawn in zip(seeds, instructions, strict=True)
    ]
    assert found == pytest.approx(expected)


def test_methods_share_the_drawn_instructions_but_not_the_seeds():
    one = (np.random.default_rng(2).random(400) < 0.5).astype(float)
    found = Bootstrap.of({"a": [one] * 3, "b": [one] * 3}, seed=0).win_rates
    assert found["a"] == pytest.approx(found["b"])  # equal seeds: only instructions vary, and they are the same
    assert found["a"].std() == pytest.approx(100 * one.std() / math.sqrt(400), rel=0.1)
    seeds = [np.full(400, level) for level in (0.0, 0.5, 1.0)]
    found = Bootstrap.of({"a": seeds, "b": seeds}, seed=0).win_rates  # only seeds vary, each method's by themselves
    assert abs(np.corrcoef(found["a"], found["b"])[0, 1]) < 0.1
    assert found["a"].std() == pytest.approx(100 * np.std([0, 0.5, 1]) / math.sqrt(3), rel=0.1)
    # A method without feedback gets the same draw in both rankings.
    assert found["b"].tolist() == Bootstrap.of({"b": seeds}, seed=0).win_rates["b"].tolist()
    assert found["b"].tolist() != Bootstrap.of({"b": seeds}, seed=4).win_rates["b"].tolist()


def test_an_interval_is_as_wide_as_the_order_is_uncertain():
    levels = {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.3}
    sure = Bootstrap.of({name: [np.full(20, level)] for name, level in levels.items()}, seed=0)
    found = agreement(levels, levels, sure, sure)
    assert (found.spearman.value, found.spearman.low, found.spearman.high) == pytest.approx((1, 1, 1))
    assert (found.kendall.value, found.kendall.low, found.kendall.high) == pytest.approx((1, 1, 1))

    rng = np.random.default_rng(0)
    credits = {name: [(rng.random(100) < 0.5).astype(float) for _ in range(3)] for name in "abcdef"}
    means = {name: float(np.mean(credits[name])) for name in credits}
    published = dict(zip(credits, range(6), strict=True))
    found = agreement(means, published, Bootstrap.of(credits, seed=0))
    assert found.methods == tuple(credits)
    assert found.spearman.low < found.spearman.value < found.spearman.high
    assert found.spearman.high - found.spearman.low > 0.5
    assert agreement(means, published).spearman.value == found.spearman.value
    assert math.isnan(agreement(means, published).spearman.low)


def test_intervals_are_percentiles_of_the_resampled_coefficients_ties_included():
    rng = np.random.default_rng(4)
    one, two = ({"a": 1.0, "b": 1.0, "c": 3.0, "d": 2.0}, {"a": 2.0, "b": 1.0, "c": 2.0, "d": 3.0})
    draws = [Bootstrap({name: rng.normal(level, 1, 500) for name, level in values.items()}) for values in (one, two)]
    found = agreement(one, two, *draws)
    x, y = (np.stack([draw.win_rates[name] for name in "abcd"], axis=1) for draw in draws)
    for coefficient, rows, exact in (
        (found.spearman, spearman_rows(x, y), stats.spearmanr([1, 1, 3, 2], [2, 1, 2, 3]).statistic),
        (found.kendall, kendall_rows(x, y), 2 / 5),  # 3 pairs agree, 1 differs; 5 are untied in each
    ):
        assert coefficient.value == pytest.approx(exact)
        assert (coefficient.low, coefficient.high) == pytest.approx(tuple(np.quantile(rows, [0.025, 0.975])))


def test_only_methods_that_have_both_count_and_there_must_be_three():
    found = agreement({"a": 1, "b": 2, "c": 3, "x": 0}, {"c": 1, "a": 2, "b": 3, "y": 4})
    assert found.methods == ("a", "b", "c")
    assert found.spearman.value == pytest.approx(-0.5)
    assert agreement({"a": 1, "b": 2, "x": 0}, {"a": 2, "b": 3, "y": 4}) is None


def test_the_full_study_is_resampled_in_seconds():
    rng = np.random.default_rng(0)
    credits = {f"m{i}": list((rng.random((3, 805)) < 0.04 + 0.06 * i).astype(float)) for i in range(14)}
    means = {name: float(np.mean(values)) for name, values in credits.items()}
    began = time.process_time()
    agreement(means, means, Bootstrap.of(credits, seed=0), Bootstrap.of(credits, seed=0))
    assert time.process_time() - began < 5
