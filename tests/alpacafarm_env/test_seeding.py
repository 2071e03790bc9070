"""Keyed draws: uniform, of each pair alone, the other way for the pair swapped, and the same in every process."""

import numpy as np
import pytest
from scipy.stats import chisquare

from alpacafarm_env.oracles.judges import KeyedDraws, probability
from alpacafarm_env.seeding import keyed_rng, keyed_uniforms

KEY = (3, "flip", "a", 7)


def test_keyed_values_are_pinned():
    """Stored noise would change meaning if they did: on any platform, and in any process, whose hash seeds differ."""
    assert keyed_uniforms(7, "order", [("a", "b"), ("ab",)]).tolist() == [0.3818125450763139, 0.41315400037832295]
    assert keyed_rng(0, "stream", 1).integers(2**32) == 1176685646


def test_keyed_rng_depends_on_its_whole_key():
    keys = [KEY, KEY, (4, *KEY[1:]), (*KEY[:3], 8), KEY[:3], (3, "flipa", 7), (*KEY[:3], "7"), (3, "a", "flip", 7)]
    drawn = [keyed_rng(*key).random() for key in keys]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == len(set(keys))


def test_a_uniform_does_not_depend_on_its_batch():
    rows = [(f"instruction {i}", "response") for i in range(50)]
    one_by_one = [keyed_uniforms(1, "flip", [row])[0] for row in reversed(rows)]
    np.testing.assert_array_equal(keyed_uniforms(1, "flip", rows), one_by_one[::-1])
    assert 0 <= keyed_uniforms(0, "s", [("\ud800", "")])[0] < 1
    assert keyed_uniforms(0, "s", []).shape == (0,)


def pairs(count, instruction="Name a colour."):
    return [(instruction, f"answer {i}", f"reply {i * 7919 % count}") for i in range(count)]


def swapped(rows):
    return [(instruction, b, a) for instruction, a, b in rows]


def log_odds(count):
    """From impossible to certain."""
    return np.random.default_rng(0).normal(0, 3, count)


@pytest.mark.parametrize("seed", [1, 4])
def test_draws_are_even_and_independent(seed):
    draws, rows = KeyedDraws(seed, "alpaca_farm"), pairs(10_000)
    assert chisquare(np.bincount(draws.annotators(rows, 13), minlength=13)).pvalue > 0.01
    drawn = [draws.annotators(rows, 2).astype(bool), draws.b_first(rows), draws.b_wins(rows, np.zeros(len(rows)))]
    assert chisquare(np.bincount(np.array(drawn).T @ [4, 2, 1], minlength=8)).pvalue > 0.01


def test_swapping_a_pair_swaps_the_winner_exactly():
    """Also at odds so long that 1 - p is 0 or 1, and with draws at the very edge of the probability."""
    rows, draws = pairs(10_000), KeyedDraws(0, "p")
    edge = draws._uniforms("verdict", rows)
    edges = np.where([a <= b for _, a, b in rows], 1, -1) * (np.log(edge) - np.log1p(-edge))
    for odds in (log_odds(10_000), 1000 * log_odds(10_000), edges, np.zeros(10_000)):
        assert (draws.b_wins(rows, odds) != draws.b_wins(swapped(rows), -odds)).all()


@pytest.mark.parametrize("in_order", [True, False])
def test_b_wins_with_its_probability(in_order):
    """Within four standard deviations of the number of wins, and of their fit to the probabilities."""
    rows, odds = pairs(10_000), log_odds(10_000)  # in order, as "answer" comes before "reply"
    rows = rows if in_order else swapped(rows)
    wins, chances = KeyedDraws(0, "p").b_wins(rows, odds), probability(odds)
    for weights in (np.ones(len(rows)), chances - 0.5):
        deviation = np.sqrt((chances * (1 - chances) * weights**2).sum())
        assert abs(((wins - chances) * weights).sum()) < 4 * deviation


def test_higher_chances_keep_their_wins():
    rows, odds = pairs(2000), log_odds(2000)
    low, high = (KeyedDraws(0, "p").b_wins(rows, odds + more) for more in (0.0, 0.7))
    assert (high >= low).all()
    assert 50 < (high > low).sum() < 1000
