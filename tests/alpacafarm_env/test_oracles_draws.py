"""Keyed draws: uniform, of each pair alone, the other way for the pair swapped; verdicts of the right probability."""

import numpy as np
import pytest
from scipy.stats import chisquare

from alpacafarm_env.oracles.draws import KeyedDraws, probability


def pairs(count, instruction="Name a colour."):
    return [(instruction, f"answer {i}", f"reply {i * 7919 % count}") for i in range(count)]


def swapped(rows):
    return [(instruction, b, a) for instruction, a, b in rows]


def log_odds(count):
    """From impossible to certain."""
    return np.random.default_rng(0).normal(0, 3, count)


@pytest.mark.parametrize("seed", [1, 4])
def test_annotator_order_and_winner_are_drawn_evenly_and_independently(seed):
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
def test_b_wins_with_its_probability_whichever_text_it_is(in_order):
    """Within four standard deviations of the number of wins, and of their fit to the probabilities."""
    rows, odds = pairs(10_000), log_odds(10_000)  # in order, as "answer" comes before "reply"
    rows = rows if in_order else swapped(rows)
    wins, chances = KeyedDraws(0, "p").b_wins(rows, odds), probability(odds)
    for weights in (np.ones(len(rows)), chances - 0.5):
        deviation = np.sqrt((chances * (1 - chances) * weights**2).sum())
        assert abs(((wins - chances) * weights).sum()) < 4 * deviation


def test_a_higher_chance_never_loses_a_pair_that_was_won():
    rows, odds = pairs(2000), log_odds(2000)
    low, high = (KeyedDraws(0, "p").b_wins(rows, odds + more) for more in (0.0, 0.7))
    assert (high >= low).all()
    assert 50 < (high > low).sum() < 1000


def test_probability_by_hand():
    np.testing.assert_allclose(probability(np.log([1, 3, 1 / 3])), [0.5, 0.75, 0.25])
    assert np.isnan(probability(np.array([np.nan]))).all()


def test_identical_responses_texts_beyond_utf8_and_an_empty_batch_have_draws_and_an_empty_pool_none():
    draws = KeyedDraws(0, "pool")
    assert draws.b_first([("q", "x", "x")]).shape == (1,)
    assert 0 <= draws.annotators([("\ud800", "a", "b")], 13)[0] < 13
    assert draws.annotators([], 13).shape == (0,)
    assert draws.b_first([]).dtype == draws.b_wins([], np.empty(0)).dtype == bool
    with pytest.raises(ValueError, match="got 0"):
        draws.annotators([("q", "a", "b")], 0)
