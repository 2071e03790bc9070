"""Frames: what pandas would leave out silently is refused or counted."""

import math

import pytest

from alpacafarm_env.benchmarks.harness.estimates import estimates, frame_of, pivot

ROWS = [{"seed": seed, "method": method, "gold": 10.0 * seed} for method in ("b", "a") for seed in (0, 1)]


def test_a_pivot_keeps_the_order_of_the_rows():
    found = pivot(frame_of(ROWS), "seed", "method", "gold")
    assert list(found.columns) == ["b", "a"]
    assert found.loc[1].tolist() == [10, 10]


@pytest.mark.parametrize("rows", [ROWS[:-1], [*ROWS, ROWS[0]]], ids=["missing", "twice"])
def test_a_pivot_refuses_missing_and_double_rows(rows):
    with pytest.raises(ValueError, match="seed, method"):
        pivot(frame_of(rows), "seed", "method", "gold")


def test_an_estimate_counts_seeds_with_a_value():
    rows = [*ROWS, {"seed": 2, "method": "a", "gold": None}]
    found = estimates(frame_of(rows), ["method"], "gold")
    assert {key: (value.mean, value.num) for key, value in found.items()} == {("b",): (5, 2), ("a",): (5, 2)}
    (nothing,) = estimates(frame_of(rows[-1:]), ["method"], "gold").values()
    assert (math.isnan(nothing.mean), nothing.num) == (True, 0)
