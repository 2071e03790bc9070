"""The divergence and the estimator of best-of-n, against enumeration."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpacafarm_env.agents.best_of_n_analysis import best_of_k, best_of_n_kl

NAN = math.nan


@pytest.mark.parametrize(
    ("size", "n", "kl"),  # on that many equally likely responses with different rewards
    [
        *((10_000, n, kl) for n, kl in ((2, 0.19315), (4, 0.63629), (16, 1.83509), (64, 3.17451))),
        *((8, n, kl) for n, kl in ((2, 0.187), (4, 0.625), (16, 1.680), (64, 2.078))),
    ],
)
def test_kl_is_a_bound_and_tight_where_responses_are_rare(size, n, kl):
    law = np.diff(np.linspace(0, 1, size + 1) ** n)  # P(the best of n draws is outcome i), by ascending reward
    law = law[law > 0]
    exact = float(np.sum(law * np.log(law * size)))
    assert exact == pytest.approx(kl, abs=5e-4 if size == 8 else 5e-6)
    assert exact < best_of_n_kl(n)
    assert best_of_n_kl(n) < exact + 1e-3 if size == 10_000 else best_of_n_kl(n) > exact + 0.005


def test_kl_of_one_sample_is_0_and_n_grows_it():
    assert best_of_n_kl(1) == 0.0
    assert [best_of_n_kl(n) for n in range(1, 50)] == sorted(best_of_n_kl(n) for n in range(1, 50))
    with pytest.raises(ValueError, match="got 0"):
        best_of_n_kl(0)


def brute_force(rewards, values, k):
    """The mean over all sets of k scored samples of a set's value: the mean value of its samples of highest reward."""
    sets = list(combinations([i for i, reward in enumerate(rewards) if not math.isnan(reward)], k))
    total = 0.0
    for chosen in sets:
        tied = [values[i] for i in chosen if rewards[i] == max(rewards[j] for j in chosen)]
        total += sum(tied) / len(tied)
    return total / len(sets) if sets else NAN


@settings(max_examples=60)
@given(st.data())
def test_estimator_equals_all_subsets_in_any_order(data):
    """With equals among the rewards and samples that have none."""
    size = data.draw(st.integers(1, 7))
    reward = st.one_of(st.integers(0, 3).map(float), st.floats(-9, 9), st.just(NAN))
    rewards = np.array(data.draw(st.lists(reward, min_size=size, max_size=size)))
    values = np.array(data.draw(st.lists(st.floats(-9, 9), min_size=size, max_size=size)))
    ks = range(1, size + 1)
    found = best_of_k(rewards[None], values[None], ks)
    np.testing.assert_allclose(found[:, 0], [brute_force(rewards, values, k) for k in ks], rtol=0, atol=1e-12)
    order = data.draw(st.permutations(range(size)))
    np.testing.assert_array_equal(best_of_k(rewards[None, order], values[None, order], ks), found)  # to the last bit


def test_many_samples_stay_finite_and_monotone_and_the_ends_are_the_mean_and_the_best():
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(4, 12_600)).round(2), rng.normal(size=(4, 12_600))  # equals among them
    means = best_of_k(rewards, rewards, [2**i for i in range(14)])
    assert (np.diff(means, axis=0) > 0).all()
    assert np.isfinite(means).all()
    rewards = rng.normal(size=(4, 12_600))
    one, every = best_of_k(rewards, values, (1, 12_600))
    np.testing.assert_allclose(one, values.mean(axis=1), atol=1e-12)
    np.testing.assert_array_equal(every, values[np.arange(4), rewards.argmax(axis=1)])


def test_unbiased_for_the_best_of_k_fresh_draws():
    """Its mean over many pools is the expectation over fresh draws, known here: the best of k uniforms is k/(k+1)."""
    rewards = np.random.default_rng(2).random((4000, 12))
    for k, mean in zip((1, 3, 12), best_of_k(rewards, rewards, (1, 3, 12)), strict=True):
        assert abs(mean.mean() - k / (k + 1)) < 4 * mean.std() / math.sqrt(len(mean))


def test_a_missing_value_counts_only_where_it_can_be_the_best():
    found = best_of_k([[1.0, 2.0, 3.0]], [[NAN, 5.0, 7.0]], (1, 2, 3))
    assert math.isnan(found[0, 0])
    np.testing.assert_allclose(found[1:, 0], [(5 + 7 + 7) / 3, 7.0])


@pytest.mark.parametrize(
    ("rewards", "values", "ks", "told"),
    [
        ([1.0], [1.0], (1,), r"\[N, n\], got \(1,\), \(1,\)"),
        ([[1.0, 2.0]], [[1.0]], (1,), r"got \(1, 2\), \(1, 1\)"),
        ([[1.0, np.inf]], [[1.0, 1.0]], (1,), "finite"),
        ([[1.0, 2.0]], [[1.0, 2.0]], (0, 1, 3), r"2 samples.*\[0, 3\]"),
    ],
)
def test_bad_input_is_refused(rewards, values, ks, told):
    with pytest.raises(ValueError, match=told):
        best_of_k(rewards, values, ks)
