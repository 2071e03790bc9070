"""The divergence and the estimator of best-of-n, against enumeration."""

import math
from itertools import combinations

import numpy as np
import pytest

from alpacafarm_env.agents.best_of_n_analysis import best_of_k, best_of_n_kl

EXACT_KL = {  # on K equally likely responses with different rewards
    10_000: {2: 0.19315, 4: 0.63629, 16: 1.83509, 64: 3.17451},
    8: {2: 0.187, 4: 0.625, 16: 1.680, 64: 2.078},
}


def best_of_n_law(probabilities, n):
    """P(the best of n draws is outcome i), outcomes in ascending order of reward."""
    cumulative = np.concatenate([[0.0], np.cumsum(probabilities)])
    return np.diff(cumulative**n)


def brute_force(rewards, values, k):
    """The mean over all sets of k of a set's value: the mean value of its samples of the highest reward."""
    sets = list(combinations(range(len(rewards)), k))
    total = 0.0
    for chosen in sets:
        top = max(rewards[i] for i in chosen)
        tied = [i for i in chosen if rewards[i] == top]
        total += sum(values[i] for i in tied) / len(tied)
    return total / len(sets)


@pytest.mark.parametrize(("size", "n"), [(size, n) for size in EXACT_KL for n in EXACT_KL[size]])
def test_kl_is_a_bound_and_tight_where_responses_are_rare(size, n):
    law = best_of_n_law(np.full(size, 1 / size), n)
    law = law[law > 0]
    exact = float(np.sum(law * np.log(law * size)))
    digits = 5e-4 if size == 8 else 5e-6
    assert exact == pytest.approx(EXACT_KL[size][n], abs=digits)
    assert exact < best_of_n_kl(n)
    if size == 10_000:
        assert best_of_n_kl(n) == pytest.approx(exact, abs=1e-3)
    else:
        assert exact < best_of_n_kl(n) - 0.005


def test_kl_of_one_sample_is_0_and_n_grows_it():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(1024) == pytest.approx(math.log(1024) - 1023 / 1024)
    assert [best_of_n_kl(n) for n in range(1, 50)] == sorted(best_of_n_kl(n) for n in range(1, 50))
    with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
        best_of_n_kl(0)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
@pytest.mark.parametrize("seed", range(5))
def test_the_win_rate_against_one_sample_is_at_most_n_of_n_plus_1(n, seed):
    probabilities = np.random.default_rng(seed).dirichlet(np.full(6, 0.5))
    below = np.concatenate([[0.0], np.cumsum(probabilities)[:-1]])
    win_rate = float(best_of_n_law(probabilities, n) @ (below + probabilities / 2))
    assert win_rate == pytest.approx(0.5) if n == 1 else 0.5 < win_rate <= n / (n + 1)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("ties", [False, True])
def test_estimator_equals_all_subsets(size, ties):
    rng = np.random.default_rng(size)
    rewards = rng.integers(0, 3, (6, size)).astype(float) if ties else rng.normal(size=(6, size))
    values = rng.normal(size=(6, size))
    ks = range(1, size + 1)
    expected = [[brute_force(r, v, k) for r, v in zip(rewards, values, strict=True)] for k in ks]
    np.testing.assert_allclose(best_of_k(rewards, values, ks), expected, rtol=0, atol=1e-12)


def test_ends_of_the_range():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(3, 1024)), rng.normal(size=(3, 1024))
    one, every = best_of_k(rewards, values, (1, 1024))
    np.testing.assert_allclose(one, values.mean(axis=1), atol=1e-12)
    np.testing.assert_array_equal(every, values[np.arange(3), rewards.argmax(axis=1)])


def test_monotone_in_the_proxy_also_for_many_samples():
    rewards = np.random.default_rng(1).normal(size=(4, 12_600)).round(2)  # equals among them
    means = best_of_k(rewards, rewards, [2**i for i in range(14)])
    assert (np.diff(means, axis=0) > 0).all()
    assert np.isfinite(means).all()


def test_unbiased_for_the_best_of_k_fresh_draws():
    """Its mean over many pools is the expectation over fresh draws, known here: the best of k uniforms is k/(k+1)."""
    rewards = np.random.default_rng(2).random((4000, 12))
    means = best_of_k(rewards, rewards, (1, 3, 12))
    for k, mean in zip((1, 3, 12), means, strict=True):
        assert abs(mean.mean() - k / (k + 1)) < 4 * mean.std() / math.sqrt(len(mean))


def test_order_of_the_samples_does_not_matter_to_the_last_bit():
    rng = np.random.default_rng(3)
    rewards, values = rng.integers(0, 4, (5, 40)).astype(float), rng.normal(size=(5, 40))
    order = rng.permutation(40)
    expected = best_of_k(rewards, values, (1, 2, 7, 40))
    np.testing.assert_array_equal(best_of_k(rewards[:, order], values[:, order], (1, 2, 7, 40)), expected)


def test_unscored_samples_are_not_in_the_pool():
    rewards = np.array([[3.0, np.nan, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [np.nan] * 4])
    values = np.array([[30.0, np.nan, 10.0, 20.0], [10.0, 20.0, 30.0, 40.0], [0.0] * 4])
    found = best_of_k(rewards, values, (1, 2, 4))
    expected = [[20.0, 25.0, np.nan], [brute_force([3, 1, 2], [30, 10, 20], 2), 100 / 3, np.nan], [np.nan, 40, np.nan]]
    np.testing.assert_allclose(found, expected)


def test_a_missing_value_counts_only_where_it_can_be_the_best():
    found = best_of_k([[1.0, 2.0, 3.0]], [[np.nan, 5.0, 7.0]], (1, 2, 3))
    assert math.isnan(found[0, 0])
    np.testing.assert_allclose(found[1:, 0], [(5 + 7 + 7) / 3, 7.0])


@pytest.mark.parametrize(
    ("rewards", "values", "ks", "message"),
    [
        ([1.0], [1.0], (1,), r"one shape \[N, n\], got \(1,\), \(1,\)"),
        ([[1.0, 2.0]], [[1.0]], (1,), r"got \(1, 2\), \(1, 1\)"),
        ([[1.0, np.inf]], [[1.0, 1.0]], (1,), "finite"),
        ([[1.0, 2.0]], [[1.0, 2.0]], (0, 1, 3), r"from 1 to the 2 samples there are, got \[0, 3\]"),
    ],
)
def test_bad_input_is_refused(rewards, values, ks, message):
    with pytest.raises(ValueError, match=message):
        best_of_k(rewards, values, ks)
