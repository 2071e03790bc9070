"""Best-of-n curves over all n at once, how far they fall, and errors over repeats and instructions together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np

from ...statistics import Interval
from .features import Array

NUM_FOLDS = 5
"""Parts of the instructions: the peak of one is chosen on the others."""


@dataclass(frozen=True)
class Curves:
    """Expectations over all choices of n of m candidates, of which the one with the highest proxy is taken.

    Each is [..., m], for n = 1 .. m. Where a candidate has no gold (NaN) it takes no part, and n ends at the number of
    those that do: beyond, the last value is repeated; NaN where none has any.
    """

    gold: Array
    proxy: Array
    kl: Array
    """Kullback-Leibler divergence of the choice from the uniform one, nats; at most log n - (n - 1) / n + O(1 / m)."""


def best_of_n(proxy: Array, gold: Array) -> Curves:
    """The exact curves of candidates [..., m], drawn without replacement; equal proxies share their chances.

    Of m candidates in ascending order the j-th is the best of n with chance C(j - 1, n - 1) / C(m, n).
    """
    shape = np.broadcast_shapes(np.shape(proxy), np.shape(gold))
    proxies, golds = (np.broadcast_to(each, shape).reshape(-1, shape[-1]) for each in (proxy, gold))
    tables = np.full((3, *golds.shape), np.nan)
    present = ~np.isnan(golds)
    for count in np.unique(present.sum(axis=1)).tolist():
        rows = present.sum(axis=1) == count
        if count:
            held = [each[rows][present[rows]].reshape(-1, count) for each in (proxies, golds)]
            found = _whole_curves(*held)
            tables[:, rows, :count] = found
            tables[:, rows, count:] = found[:, :, -1:]
    gold_curve, proxy_curve, kl = tables.reshape(3, *shape)
    return Curves(gold_curve, proxy_curve, kl)


def _whole_curves(proxy: Array, gold: Array) -> Array:
    """Gold, proxy and KL [3, B, m] of candidates [B, m] that all have a gold."""
    order = np.argsort(proxy, axis=1, kind="stable")
    ranked, values = (np.take_along_axis(each, order, axis=1) for each in (proxy, gold))
    chances = np.broadcast_to(rank_chances(proxy.shape[1]), (len(proxy), proxy.shape[1], proxy.shape[1]))
    if (tied := (np.diff(ranked, axis=1) == 0).any(axis=1)).any():
        chances = chances.copy()
        for row in np.flatnonzero(tied):
            _, start, size = np.unique(ranked[row], return_index=True, return_counts=True)
            chances[row] = np.repeat(np.add.reduceat(chances[row], start, axis=1) / size, size, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(chances > 0, chances * np.log(chances * proxy.shape[1]), 0)
    return np.stack([np.einsum("bnj,bj->bn", chances, each) for each in (values, ranked)] + [logs.sum(axis=2)])


@cache
def rank_chances(num: int) -> Array:
    """[num, num]: the chance that the best of n (row n - 1) of `num` candidates is the j-th in ascending order."""
    table = [[math.comb(j, n - 1) / math.comb(num, n) for j in range(num)] for n in range(1, num + 1)]
    return np.array(table, dtype=np.float64)


def policy_kl(n: Array | Sequence[int]) -> Array:
    """KL of the best of n samples from the policy that drew them, nats: log n - (n - 1) / n, or hardly less.

    Source: Stiennon et al. 2020 (arXiv 2009.01325); Beirami et al. 2024 (arXiv 2401.01879) on where it is less.
    """
    num = np.asarray(n, dtype=np.float64)
    return np.asarray(np.log(num) - (num - 1) / num)


def drop_and_peak(values: Array) -> tuple[Array, Array]:
    """How far curves fall from their peak to their end, and what they have gained at it, both [R, I].

    The peak for a fold of instructions (dealt in turn) is that of the mean curve over other repeats and other folds, so
    that the noise that chose it is not the noise in the value at it. With one repeat, or one fold, that repeat or fold
    chooses itself. A negative drop is a curve that rises from where the others peak; its mean is right where the true
    curve has one peak, and at most 0 where it rises to its end.

    Args:
        values: Gold [R, I, K], of R repeats and I instructions along n = 1 .. K; no NaN.
    """
    folds = np.arange(values.shape[1]) % min(NUM_FOLDS, values.shape[1])
    sums = np.stack([values[:, folds == fold].sum(axis=1) for fold in range(folds.max() + 1)], axis=1)
    others = sums.sum(axis=0) - sums if len(values) > 1 else sums
    if others.shape[1] > 1:
        others = others.sum(axis=1, keepdims=True) - others
    at = others.argmax(axis=2)[:, folds]
    top = np.take_along_axis(values, at[..., None], axis=2)[..., 0]
    return np.asarray(top - values[..., -1]), np.asarray(top - values[..., 0])


def slope(values: Array, at: Sequence[float]) -> Array:
    """Least-squares slope [...] of values [F, ...] by `at` [F]."""
    centred = np.asarray(at, dtype=np.float64) - np.mean(at)
    return np.asarray(np.tensordot(centred / (centred**2).sum(), values, axes=1))


def gao(distance: Array, gained: Array) -> tuple[Array, Array]:
    """Alpha and beta [...] of gold [..., K] gained as d (alpha - beta d), d = sqrt(KL) [K], by least squares.

    Source: Gao, Schulman and Hilton 2022 (arXiv 2210.10760).
    """
    solved = gained @ np.linalg.pinv(np.stack([distance, -(distance**2)], axis=1)).T
    return solved[..., 0], solved[..., 1]


@dataclass(frozen=True)
class TwoWay(Interval):
    """The mean of a table of repeats by instructions, with a 95 % interval for others of both; `num` repeats."""

    standard_error: float
    chance: float
    """Two-sided p-value of a mean of 0."""
    within: float = math.nan
    """The smallest bound that two one-sided tests at 5 % find the mean within (Schuirmann 1987)."""

    @classmethod
    def of(cls, table: Array) -> Self:
        """Of values [R, I] that differ by repeat, by instruction and by both.

        The squared error is that of the repeats' means plus that of the instructions' means less that of their
        interaction, which both contain; not below the larger of both. t has Satterthwaite's degrees of freedom, R - 1
        at least. Without a second repeat, or instruction, NaN.

        Source: Cameron, Gelbach and Miller 2011, J. Bus. Econ. Stat.; Owen 2007 (Ann. Appl. Stat.) on its bias.
        """
        from scipy import stats

        num, size = table.shape
        mean = float(table.mean())
        if min(num, size) < 2:
            return cls(mean, math.nan, math.nan, num, math.nan, math.nan)
        rows, columns = table.mean(axis=1), table.mean(axis=0)
        by_row, by_column = rows.var(ddof=1) / num, columns.var(ddof=1) / size
        rest = table - rows[:, None] - columns + mean
        both = (rest**2).sum() / ((num - 1) * (size - 1)) / (num * size)
        variance = max(by_row + by_column - both, by_row, by_column)
        if variance <= (1e-12 * max(1.0, abs(mean))) ** 2:
            return cls(mean, mean, mean, num, 0.0, float(abs(mean) < 1e-12), abs(mean))
        freedom = max(num - 1, variance**2 / (by_row**2 / (num - 1) + by_column**2 / (size - 1)))
        error = math.sqrt(variance)
        less, half = (float(stats.t.ppf(level, freedom)) * error for level in (0.95, 0.975))
        chance = float(2 * stats.t.sf(abs(mean) / error, freedom))
        return cls(mean, mean - half, mean + half, num, error, chance, abs(mean) + less)
