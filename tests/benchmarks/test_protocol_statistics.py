"""Win rates by source and agreements against scipy and by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import Bootstrap, pearson_rows
from alpacafarm_env.benchmarks.protocol.statistics import (
    agreement_rows,
    bounds_of,
    make_row,
    over_seeds,
    rate_row,
    source_rows,
)

NAN = math.nan


def credits_of(rates, num, seed, seeds=1):
    rng = np.random.default_rng(seed)
    return {
        f"g{place}": [(rng.random(num) < rate).astype(float) for _ in range(seeds)] for place, rate in enumerate(rates)
    }


def test_a_cell_without_a_finite_number_is_empty():
    row = make_row("needed_for_90", "eval", "live", 0.5, (NAN, math.inf))
    assert [row[name] for name in ("value", "low", "high", "standard_error")] == [0.5, None, None, None]


def test_seeds_are_averaged_where_they_have_a_verdict():
    found = over_seeds([np.array([1, 0, NAN, NAN]), np.array([0, 0, 1, NAN])])
    np.testing.assert_array_equal(found, [0.5, 0, 1, NAN])


def test_a_win_rate_has_the_t_interval_of_scipy():
    values = np.array([1.0, 0, 0.5, 1, 1, 0, NAN])
    row = rate_row("m", "all", values)
    known = values[:6]
    low, high = stats.t.interval(0.95, 5, known.mean(), stats.sem(known))
    assert row["value"] == pytest.approx(100 * known.mean())
    assert row["standard_error"] == pytest.approx(100 * stats.sem(known))
    assert (row["low"], row["high"]) == pytest.approx((max(0, 100 * low), min(100, 100 * high)))
    assert row["n"] == 6


def test_win_rates_and_agreement_of_sources_by_hand():
    sources = ["a"] * 4 + ["b"] * 4
    credits = {
        "one": [np.array([1, 1, 1, 1, 0, 0, 0, 1.0])],
        "two": [np.array([1, 0, 0, 1, 0, 1, 0, 1.0])],
        "three": [np.array([0, 0, 0, 1, 1, 1, 1, 0.0])],
    }
    rows = source_rows(credits, sources, 50)
    rates = {(row["subject"], row["other"]): (row["value"], row["n"]) for row in rows if row["figure"] == "win_rate"}
    assert rates["one", "a"] == (100, 4)
    assert rates["one", "b"] == (25, 4)
    assert rates["two", "all"] == (50, 8)
    expected = stats.pearsonr([1, 0.5, 0.25], [0.25, 0.5, 0.75]).statistic ** 2
    told = {(row["figure"], row["subject"], row["other"]): row["value"] for row in rows}
    assert told["r2", "a", "b"] == pytest.approx(expected)
    assert told["spearman", "a", "the other sources"] == pytest.approx(-1)
    assert {row["figure"] for row in source_rows(credits, [""] * 8, 50)} == {"win_rate"}


def test_two_generators_give_no_agreement_and_a_generator_of_one_side_is_left_out():
    one, two = credits_of([0.2, 0.5, 0.8, 0.4], 50, 0), credits_of([0.2, 0.5], 60, 1)
    names = ("a", "b")
    assert agreement_rows(names, one, two, resamples=20) == []
    rows = agreement_rows(names, one, credits_of([0.2] * 3, 60, 1), resamples=20)
    assert {row["models"] for row in rows} == {3}
    assert {row["n"] for row in rows} == {50}


def test_verdicts_on_the_same_instructions_are_resampled_together():
    one = credits_of([0.2, 0.4, 0.5, 0.6, 0.8], 300, 0)
    flips = np.random.default_rng(1).random(300) < 0.1
    two = {name: [np.where(flips, 1 - seeds[0], seeds[0])] for name, seeds in one.items()}
    widths = []
    for same in (True, False):
        rows = agreement_rows(("a", "b"), one, two, ("r2",), same=same, resamples=300)
        widths.append(rows[0]["high"] - rows[0]["low"])
    assert widths[0] < widths[1]


RATES = np.linspace(0.1, 0.95, 15)


def intervals(num_tries=60):
    """r^2 of many pairs of evaluations of the same generators, with the interval of each and the plain percentiles."""
    values, bounds, plain = [], [], []
    for seed in range(num_tries):
        one, two = (credits_of(RATES, 300, 2 * seed + part) for part in (0, 1))
        row = agreement_rows(("a", "b"), one, two, ("r2",), resamples=200)[0]
        values.append(row["value"])
        bounds.append((row["low"], row["high"]))
        drawn = [Bootstrap.of(side, seed=part, num=200).win_rates for part, side in enumerate((one, two))]
        columns = [np.stack(list(each.values()), axis=1) for each in drawn]
        plain.append(np.percentile(pearson_rows(*columns) ** 2, (2.5, 97.5)))
    return np.median(values), np.array(bounds), np.array(plain)


def test_the_interval_of_r2_covers_where_plain_percentiles_do_not():
    middle, *both = intervals()
    covered, twin = (((each[:, 0] <= middle) & (middle <= each[:, 1])).mean() for each in both)
    assert covered >= 0.8
    assert twin < 0.75  # percentiles of the resamples as they are


def test_an_interval_that_spans_zero_correlation_begins_at_zero():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6))
    low, high = bounds_of("r2", x, y, tuple(rng.normal(size=(2, 300, 6))))
    assert low == 0
    assert 0 < high <= 1
