"""What best-of-n does to a policy: how far it moves it, and what any smaller n would have given.

Sources: Beirami et al. 2024 (arXiv:2401.01879) for the divergence; Nakano et al. 2021 (arXiv:2112.09332, appendix I)
and Gao, Schulman and Hilton 2022 (arXiv:2210.10760) for the estimator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def best_of_n_kl(n: int) -> float:
    """Upper bound of KL(best-of-n policy || policy) in nats, for n of 1 or more: log n - (n - 1) / n.

    Exact for a policy whose responses all have different rewards and tiny probabilities. Where a text comes up several
    times among the n, the divergence is smaller (Beirami et al.).
    """
    if n < 1:
        raise ValueError(f"best_of_n_kl: n must be 1 or more, got {n!r}")
    return math.log(n) - (n - 1) / n


def best_of_k(rewards: ArrayLike, values: ArrayLike, ks: Sequence[int]) -> NDArray[np.float64]:
    """What the best of k would be worth, for several k from 1 to n, from one pool of n samples for each instruction.

    The unbiased estimator: the mean over all sets of k of the n samples of the value of the set's best by reward. In
    ascending order sample i is the best in C(i-1, k-1) of C(n, k) sets. Equal rewards share their chance evenly, so the
    order of the samples does not matter, to the last bit.

    Args:
        rewards: [N, n], what the best is chosen by; NaN = unscored, left out of the pool. ValueError if infinite.
        values: [N, n], what the best is worth: gold, or the rewards again.
        ks: Sizes.

    Returns:
        [len(ks), N] float64. NaN where an instruction has fewer than k scored samples, or where one that can be the
        best of k has no value.
    """
    reward, value = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if reward.ndim != 2 or reward.shape != value.shape:
        raise ValueError(
            f"best_of_k: expected rewards and values of one shape [N, n], got {reward.shape}, {value.shape}"
        )
    if np.isinf(reward).any():
        raise ValueError("best_of_k: rewards must be finite, or NaN for an unscored sample; got an infinity")
    if wrong := [k for k in ks if not 1 <= k <= reward.shape[1]]:
        raise ValueError(f"best_of_k: each k must be from 1 to the {reward.shape[1]} samples there are, got {wrong}")
    means = np.full((len(ks), len(reward)), np.nan)
    scored = ~np.isnan(reward)
    counts = scored.sum(axis=1)
    # Instructions with equally many scored samples, nearly always all of them, share their weights.
    for count in np.unique(counts[counts > 0]):
        rows = np.flatnonzero(counts == count)
        pools = [_tied_means(reward[row, scored[row]], value[row, scored[row]]) for row in rows]
        for j, k in enumerate(ks):
            if k <= count:
                means[j, rows] = _weigh(np.stack(pools), _weights(int(count), k))
    return means


def _tied_means(reward: NDArray[np.float64], value: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values in ascending order of reward, those of equal rewards replaced by their mean."""
    order = np.lexsort((value, reward))  # by value within equal rewards, so that the sums below have one order
    _, group, size = np.unique(reward[order], return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.bincount(group, weights=value[order]) / size
    return means[group]


def _weights(n: int, k: int) -> NDArray[np.float64]:
    """C(i-1, k-1) / C(n, k) for i = 1..n, built from the top: no binomial is ever formed, so none overflows."""
    i = np.arange(n, 1, -1)
    descending = k / n * np.cumprod(np.concatenate([[1.0], np.maximum(i - k, 0) / (i - 1)]))
    return descending[::-1]


def _weigh(pools: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, n] and [n] -> [N]; a value of weight 0 does not count, even if it is NaN."""
    used = weights > 0
    means: NDArray[np.float64] = (pools[:, used] * weights[used]).sum(axis=1)
    return means
