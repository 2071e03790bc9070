"""Keyed draws: uniform, of each pair alone, the other way for the pair swapped; verdicts of the right probability."""

import numpy as np
import pytest
from scipy.stats import chisquare

from alpacafarm_env.oracles.draws import KeyedDraws, probability


def pairs(count, instruction="Name a colour."):
    return [(instruction, f"answer {i}", f"reply {i * 7919 % count}") for i in range(count)]


def swapped(rows):
    return [(instruction, b, a) for instruction, a, b in rows]


def test_every_annotator_meets_a_thirteenth_of_one_instructions_pairs():
    drawn = KeyedDraws(0, "alpaca_farm").annotators(pairs(10_000), 13)
    assert chisquare(np.bincount(drawn, minlength=13)).pvalue > 0.01


@pytest.mark.parametrize("seed", [1, 2])
def test_half_of_the_pairs_are_shown_b_first_independently_of_the_annotator(seed):
    draws, rows = KeyedDraws(seed, "alpaca_farm"), pairs(10_000)
    shown, drawn = draws.b_first(rows), draws.annotators(rows, 2).astype(bool)
    cells = np.bincount(2 * shown + drawn, minlength=4)
    assert chisquare(cells).pvalue > 0.01


def test_swapping_a_pair_swaps_everything():
    """20,000 of 20,000: the same annotator sees the same text, so b is shown first exactly where it was not."""
    draws = KeyedDraws(3, "alpaca_farm")
    rows = [(f"Question {i % 40}", f"answer {i * 7919 % 20_000}", f"answer {i}x") for i in range(20_000)]
    assert (draws.annotators(rows, 13) == draws.annotators(swapped(rows), 13)).sum() == 20_000
    assert (draws.b_first(rows) != draws.b_first(swapped(rows))).sum() == 20_000


def test_swap_check_fails_on_the_twin_that_keys_on_the_ordered_pair():
    rows = pairs(1000)

    class Ordered(KeyedDraws):
        def b_first(self, rows):
            return self._uniforms("order", [("".join(row), "", "") for row in rows]) < 0.5

    twin = Ordered(0, "alpaca_farm")
    assert (twin.b_first(rows) != twin.b_first(swapped(rows))).sum() < 1000


def test_draws_depend_on_seed_pool_instruction_and_pair_and_on_nothing_else():
    rows = pairs(500)
    drawn = KeyedDraws(0, "alpaca_farm").annotators(rows, 13)
    for other in (KeyedDraws(1, "alpaca_farm"), KeyedDraws(0, "ann")):
        assert (other.annotators(rows, 13) == drawn).mean() < 0.2
    assert (KeyedDraws(0, "alpaca_farm").annotators(pairs(500, "Name a bird."), 13) == drawn).mean() < 0.2
    alone = [KeyedDraws(0, "alpaca_farm").annotators([row], 13)[0] for row in reversed(rows)]
    assert drawn.tolist() == alone[::-1]


def test_the_keys_parts_cannot_run_into_each_other():
    draws = KeyedDraws(0, "pool")
    rows = [("a", "b", "c"), ("ab", "", "c"), ("", "ab", "c"), ("a", "bc", "")]
    assert len(set(draws._uniforms("order", rows).tolist())) == 4


def log_odds(count, seed=0):
    """From impossible to certain."""
    return np.random.default_rng(seed).normal(0, 3, count)


@pytest.mark.parametrize("in_order", [True, False])
def test_b_wins_with_its_probability_whichever_text_it_is(in_order):
    """Within four standard deviations of the number of wins, and of their fit to the probabilities."""
    rows, odds = [row for row in pairs(40_000) if (row[1] <= row[2]) == in_order][:10_000], log_odds(10_000)
    rows = rows or [(i, b, a) for i, a, b in pairs(10_000)]
    wins, chances = KeyedDraws(0, "p").b_wins(rows, odds), probability(odds)
    for weights in (np.ones(len(rows)), chances - 0.5):
        deviation = np.sqrt((chances * (1 - chances) * weights**2).sum())
        assert abs(((wins - chances) * weights).sum()) < 4 * deviation


def test_swapping_a_pair_swaps_the_winner_exactly():
    """Also at odds so long that 1 - p is 0 or 1, and with draws at the very edge of the probability."""
    rows, draws = pairs(20_000), KeyedDraws(0, "p")
    edge = draws._uniforms("verdict", rows)
    edges = np.where([a <= b for _, a, b in rows], 1, -1) * (np.log(edge) - np.log1p(-edge))
    for odds in (log_odds(20_000), 1000 * log_odds(20_000), edges, np.zeros(20_000)):
        assert (draws.b_wins(rows, odds) != draws.b_wins(swapped(rows), -odds)).all()


def test_a_higher_chance_never_loses_a_pair_that_was_won():
    rows, odds = pairs(2000), log_odds(2000)
    low, high = (KeyedDraws(0, "p").b_wins(rows, odds + more) for more in (0.0, 0.7))
    assert (high >= low).all()
    assert 50 < (high > low).sum() < 1000


def test_certain_winners():
    """Warnings are errors here."""
    rows = pairs(500)
    for odds, expected in ((np.inf, True), (1e4, True), (-1e4, False), (-np.inf, False)):
        assert (KeyedDraws(0, "p").b_wins(rows, np.full(500, odds)) == expected).all()


def test_winner_annotator_and_order_are_drawn_independently():
    rows, draws = pairs(10_000), KeyedDraws(4, "p")
    drawn = [draws.annotators(rows, 2).astype(bool), draws.b_first(rows), draws.b_wins(rows, np.zeros(len(rows)))]
    cells = np.bincount(np.array(drawn).T @ [4, 2, 1], minlength=8)
    assert chisquare(cells).pvalue > 0.01


def test_probability_by_hand():
    np.testing.assert_allclose(probability(np.log([1, 3, 1 / 3])), [0.5, 0.75, 0.25])
    assert np.isnan(probability(np.array([np.nan]))).all()


def test_identical_responses_and_an_empty_batch_have_draws():
    draws = KeyedDraws(0, "pool")
    assert draws.b_first([("q", "x", "x")]).shape == (1,)
    assert draws.annotators([], 13).shape == (0,)
    assert draws.b_first([]).dtype == draws.b_wins([], np.empty(0)).dtype == bool


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="one or more annotators, got 0"):
        KeyedDraws(0, "pool").annotators([("q", "a", "b")], 0)


def test_a_text_beyond_utf8_has_draws_as_well():
    assert 0 <= KeyedDraws(0, "pool").annotators([("\ud800", "a", "b")], 13)[0] < 13
