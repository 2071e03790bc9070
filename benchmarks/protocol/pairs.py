"""How many instructions tell two models apart: paired t-tests of all pairs of models on growing subsets.

Of a shuffled evaluation set the first n instructions are taken, for growing n; the share of pairs that a two-sided test
at p < .05 tells apart is averaged over shuffles. Upstream asks the same of one shuffle: the least n at which the 90 %
quantile of the pairs' p-values is below .05, which is the n at which 90 % of the pairs are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from scipy import stats

from ...seeding import keyed_rng
from ...statistics import wilson
from ..harness.estimates import percentiles
from ..harness.study import Row
from .statistics import UNKNOWN, Array, make_row

SIZES: Final = (25, 50, 100, 150, 200, 250, 300, 350, 400, 450, 500, 550, 600, 650, 700, 750, 805)
"""Numbers of instructions tried, as far as there are that many."""
ALPHA: Final = 0.05
WANTED: Final = 0.9
"""Share of pairs to be told apart."""
UPSTREAM: Final = 300
"""Instructions of 805 that upstream's analysis says tell 90 % of its model pairs apart."""
BANDS: Final = ((0.0, 2.0), (2.0, 5.0), (5.0, 10.0), (10.0, 100.0))
"""Gaps of two win rates on all instructions, in points, whose pairs are counted apart."""
BAND_NAMES: Final = tuple(f"gap {low:g} to {high:g} points" for low, high in BANDS)
POWER: Final = 0.8
SET_SIZE: Final = 10
NUM_SETS: Final = 500
ALL: Final = "all pairs"
SAME: Final = "same generator, two seeds"
SETS: Final = f"sets of {SET_SIZE} models"


def sizes_of(num: int) -> list[int]:
    """The sizes tried with `num` instructions; the last one is all of them."""
    return [*(size for size in SIZES if size < num), num]


def p_values(gaps: Array, sizes: Sequence[int], repeats: int) -> Array:
    """Two-sided p of paired t-tests on the first instructions of `repeats` shuffles: [repeats, sizes, pairs].

    A row without a verdict for one of the two is left out of that pair; without spread p is 1 for equal means, else 0.
    One pass of running totals gives all sizes; scipy's test would read the instructions anew for each.

    Args:
        gaps: Differences [B, pairs], NaN = one of the two has no verdict.
        sizes: Rising numbers of instructions, the last at most B.
        repeats: Number of shuffles.
    """
    found = np.empty((repeats, len(sizes), gaps.shape[1]))
    starts = [0, *sizes[:-1]]
    for repeat in range(repeats):
        drawn = gaps[keyed_rng(0, "paired tests", repeat).permutation(len(gaps))[: sizes[-1]]]
        known, filled = (~np.isnan(drawn)).astype(float), np.nan_to_num(drawn)
        num, total, squares = (np.add.reduceat(x, starts, axis=0).cumsum(axis=0) for x in (known, filled, filled**2))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / num
            variance = np.maximum(squares - num * mean**2, 0) / (num - 1)
            p = 2 * stats.t.sf(np.abs(mean / np.sqrt(variance / num)), num - 1)
        # Rounding leaves crumbs of variance where all differences are equal.
        found[repeat] = np.where(variance < 1e-12, np.abs(mean) < 1e-12, p)
    return found


def needed(shares: Array, sizes: Sequence[int]) -> Array:
    """The least size from which on the share stays at `WANTED` or above, of each row [R, sizes]; inf if never."""
    stays = np.logical_and.accumulate((shares >= WANTED)[:, ::-1], axis=1)[:, ::-1]
    return np.where(stays.any(axis=1), np.array(sizes, dtype=float)[stays.argmax(axis=1)], np.inf)


def pair_rows(credits: Sequence[Mapping[str, Array]], repeats: int) -> list[Row]:
    """All rows about telling models apart; none without two models.

    Args:
        credits: Credits [B] of each model, once for each evaluation (seed); pairs are of one evaluation.
        repeats: Shuffles.
    """
    if not credits or len(credits[0]) < 2:
        return []
    gaps = np.stack([each[a] - each[b] for each in credits for a, b in combinations(each, 2)], axis=1)
    sizes = sizes_of(len(gaps))
    p = p_values(gaps, sizes, repeats)
    rows = curve_rows(ALL, p, sizes)
    band = np.digitize(100 * np.abs(np.nanmean(gaps, axis=0)), [low for low, _ in BANDS[1:]])
    for place, name in enumerate(BAND_NAMES):
        if (chosen := band == place).any():
            rows += curve_rows(name, p[:, :, chosen], sizes)
    rows += [_power_row(gaps, size) for size in dict.fromkeys((min(UPSTREAM, len(gaps)), len(gaps)))]
    one_of_many = len(credits) == 1 and len(credits[0]) > SET_SIZE
    return rows + (_set_rows(p, sizes, len(credits[0])) if one_of_many else [])


def null_rows(credits: Mapping[str, Sequence[Array]], repeats: int) -> list[Row]:
    """The same of pairs that do not differ: a generator with two seeds. About 5 % are called different."""
    gaps = [one - two for seeds in credits.values() for one, two in combinations(seeds, 2)]
    if not gaps:
        return []
    sizes = sizes_of(len(gaps[0]))
    return curve_rows(SAME, p_values(np.stack(gaps, axis=1), sizes, repeats), sizes)[: len(sizes)]


def curve_rows(subject: str, p: Array, sizes: Sequence[int]) -> list[Row]:
    """Share of the pairs told apart at each size, with the middle 95 % of the shuffles; then the size for 90 %."""
    shares, pairs = (p < ALPHA).mean(axis=2), p.shape[2]
    bounds = [*(percentiles(column) for column in shares.T[:-1]), UNKNOWN]  # all shuffles of all instructions are one
    rows = [
        make_row("told_apart", subject, "", column.mean(), ends, n=size, models=pairs)
        for size, column, ends in zip(sizes, shares.T, bounds, strict=True)
    ]
    low, value, high = np.percentile(needed(shares, sizes), (2.5, 50, 97.5), method="nearest").tolist()
    other, paper = "not reached" if math.isinf(value) else "", UPSTREAM if subject == ALL else None
    last = make_row("needed_for_90", subject, other, value, (low, high), n=sizes[-1], models=pairs, paper=paper)
    return [*rows, last]


def _power_row(gaps: Array, size: int) -> Row:
    """The gap that a t-test at p < .05 finds with a chance of 80 %, by the pairs' median spread."""
    spread = np.nanstd(gaps, axis=0, ddof=1)
    factor = stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(POWER)
    low, middle, high = 100 * factor * np.percentile(spread, (2.5, 50, 97.5)) / math.sqrt(size)
    return make_row("gap_found_4_of_5", ALL, "", middle, (low, high), n=size, models=gaps.shape[1])


def _set_rows(p: Array, sizes: Sequence[int], num_models: int) -> list[Row]:
    """Share told apart and size needed within random sets of few models: how much the choice of models decides."""
    by_pair = (p < ALPHA).mean(axis=0)  # [sizes, pairs]
    square = np.zeros((num_models, num_models), dtype=int)
    square[np.triu_indices(num_models, 1)] = np.arange(by_pair.shape[1])
    rng, inside, shares = keyed_rng(0, "sets of models"), np.triu_indices(SET_SIZE, 1), []
    for _ in range(NUM_SETS):
        chosen = np.sort(rng.choice(num_models, SET_SIZE, replace=False))
        shares.append(by_pair[:, square[np.ix_(chosen, chosen)][inside]].mean(axis=1))
    table = np.array(shares)
    rows = [
        make_row("told_apart", SETS, "", column.mean(), percentiles(column), n=size, models=len(inside[0]))
        for size, column in zip(sizes, table.T, strict=True)
    ]
    reached = float((needed(table, sizes) <= UPSTREAM).mean())
    bounds = wilson(NUM_SETS * reached, NUM_SETS)
    return [*rows, make_row("sets_that_need_300_or_fewer", SETS, "", reached, bounds, n=UPSTREAM, models=NUM_SETS)]


def by_seed(credits: Mapping[str, Mapping[int, Array]]) -> list[dict[str, Array]]:
    """Generator -> seed -> credits, turned into one evaluation a seed, of the seeds that all have."""
    first, *others = credits.values()
    common = [seed for seed in first if all(seed in seeds for seeds in others)]
    return [{name: seeds[seed] for name, seeds in credits.items()} for seed in common]
