"""Rows of the table: win rates, agreement of two evaluations over generators, paired tests of generators.

method.txt.j2 says how each is measured.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...seeding import keyed_rng
from ...statistics import mean_known, wilson, win_rate
from ..harness import estimates
from ..harness.study import Row

Array = NDArray[np.float64]
Credits = Mapping[str, Mapping[int, Array]]
"""Generator -> seed -> credits [B], NaN = no verdict."""
Rates = Mapping[str, tuple[float, float]]
"""Generator -> win rate in percent and its standard error."""
SIZES: Final = (25, *range(50, 751, 50), 805)
"""Numbers of instructions in paired tests, as far as there are that many."""
ALPHA: Final = 0.05
WANTED: Final = 0.9
"""Share of pairs to be told apart."""
UPSTREAM: Final = 300
"""Instructions of 805 that, by upstream's analysis, tell 90 % of its model pairs apart."""
GAPS: Final = (0, 2, 5, 10, 100)
"""Edges, in points, of the bands in which pairs are counted by their gap on all instructions."""
BANDS: Final = tuple(f"gap {low} to {high} points" for low, high in pairwise(GAPS))
POWER: Final = 0.8
SET_SIZE: Final = 10
NUM_SETS: Final = 500
ALL: Final = "all pairs"
SAME: Final = "same generator, two seeds"
SETS: Final = f"sets of {SET_SIZE} models"
OTHERS: Final = "the other sources"
TAILS: Final = (2.5, 50, 97.5)
_UNKNOWN: Final = (math.nan, math.nan)


def make_row(
    figure: str, subject: str, other: str, value: float, bounds: Sequence[float] = _UNKNOWN, **more: float | None
) -> Row:
    """A figure of a subject against, within or under `other`, with its 95 % interval; what is not finite is left empty.

    More: standard_error, the number of instructions n, of models (or pairs of them), and the paper's value.
    """
    row = {"value": value, "low": bounds[0], "high": bounds[1], "standard_error": None}
    row |= dict.fromkeys(("n", "models", "paper")) | more
    finite = {name: each if each is None or math.isfinite(each) else None for name, each in row.items()}
    return {"figure": figure, "subject": subject, "other": other, **finite}


def placed(part: str, level: str, judge: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with their part of the table, level and judge ("" for none)."""
    return [{"part": part, "level": level, "judge": judge, **row} for row in rows]


def over_seeds(seeds: Mapping[int, Array]) -> Array:
    """Mean credit of each instruction [B] over the seeds; NaN where no seed has a verdict."""
    return mean_known(np.stack([*seeds.values()]))


def select(credits: Credits, rows: NDArray[np.bool_] | slice) -> Credits:
    """The credits on some of the instructions."""
    return {name: {seed: row[rows] for seed, row in seeds.items()} for name, seeds in credits.items()}


def rate_row(subject: str, other: str, credits: Array) -> Row:
    """A win rate in percent with its standard error and t-interval."""
    rate = win_rate(credits)
    half = rate.standard_error * stats.t.ppf(0.975, max(rate.num_total - 1, 1))
    bounds = np.clip([rate.win_rate - half, rate.win_rate + half], 0, 100).tolist()
    return make_row(
        "win_rate", subject, other, rate.win_rate, bounds, standard_error=rate.standard_error, n=rate.num_total
    )


def source_rows(credits: Credits, sources: Sequence[str], resamples: int) -> list[Row]:
    """Win rates of each generator, in all and by source [B], and the agreement of the sources."""
    which = np.array(sources)
    masks = {name: which == name for name in dict.fromkeys(sources)} if len(set(sources)) > 1 else {}
    rows = [
        rate_row(generator, name, over_seeds(seeds)[mask])
        for generator, seeds in credits.items()
        for name, mask in {"all": slice(None), **masks}.items()
    ]
    for place, (name, mask) in enumerate(masks.items()):
        own = select(credits, mask)
        rows += agreement_rows({name: own, OTHERS: select(credits, ~mask)}, resamples)
        for other in [*masks][place + 1 :]:
            rows += agreement_rows({name: own, other: select(credits, masks[other])}, resamples, ("r2",))
    return rows


def agreement_rows(
    sides: Mapping[str, Credits | Rates],
    resamples: int,
    figures: Sequence[str] = ("r2", "spearman"),
    *,
    same: bool = False,
    paper: float | None = None,
) -> list[Row]:
    """Agreement of two named evaluations over the generators that both have; no rows for fewer than three.

    `figures` are of r2, spearman and kendall. `same`: both are of the same instructions in the same order, which are
    resampled together. `paper` is the published r^2.
    """
    (first, one), (second, two) = sides.items()
    both = [name for name in one if name in two]
    if len(both) < estimates.FEWEST:
        return []
    x, xs, num = _resampled({name: one[name] for name in both}, first, 0, resamples)
    y, ys, other_num = _resampled({name: two[name] for name in both}, second, 0 if same else 1, resamples)
    rows = []
    for figure in figures:
        more = {"n": min(num, other_num) or None, "models": len(both), "paper": paper if figure == "r2" else None}
        bounds = bounds_of(figure, x, y, (xs, ys))
        rows.append(make_row(figure, first, second, estimates.correlation(figure, x, y), bounds, **more))
    return rows


def _resampled(side: Any, name: str, seed: int, resamples: int) -> tuple[Array, Array, int]:
    """Win rates [M], resamples [R, M] and the number of instructions, 0 for a table.

    A table is resampled by its standard errors, as independent normal variables.
    """
    if isinstance(next(iter(side.values())), tuple):
        rates, errors = np.array([*side.values()]).T
        normal = keyed_rng(0, "published tables", name).standard_normal((resamples, len(rates)))
        return rates, rates + errors * normal, 0
    lists = {generator: [*seeds.values()] for generator, seeds in side.items()}
    drawn = estimates.resampled(lists, seed=seed, num=resamples)
    means = np.stack([over_seeds(seeds) for seeds in side.values()])
    return np.nanmean(means, axis=1), np.stack([drawn[generator] for generator in side], axis=1), means.shape[1]


def bounds_of(figure: str, x: Array, y: Array, resampled: Sequence[Array]) -> Sequence[float]:
    """The 95 % interval of an agreement of x and y [M] by resamples [R, M]; NaN where nothing is known.

    For r^2 it is shifted on the scale of Fisher's z so that its median is the measured one, since resampling adds noise
    to win rates that have it already.
    """
    if figure != "r2":
        return estimates.percentiles(estimates.correlations(figure, *resampled))
    drawn = estimates.percentiles(estimates.correlations(figure, *resampled), TAILS)
    ends = np.array([*drawn, *estimates.correlations(figure, x[None], y[None])])
    low, middle, high, measured = np.arctanh(np.clip(ends, -1 + 1e-9, 1 - 1e-9)).tolist()  # clipped to stay finite
    shift = measured - middle
    near, far = sorted(np.tanh([low + shift, high + shift]).tolist(), key=abs)
    return 0.0 if low + shift < 0 < high + shift else near**2, far**2


def p_values(gaps: Array, sizes: Sequence[int], repeats: int) -> Array:
    """Two-sided p of paired t-tests on the first instructions of each shuffle: [repeats, sizes, pairs].

    `gaps` are differences [B, pairs], NaN = a verdict is missing, which is left out; `sizes` are at most B.
    """
    p_by_size = np.empty((repeats, len(sizes), gaps.shape[1]))
    for repeat in range(repeats):
        shuffled = np.ma.masked_invalid(gaps[keyed_rng(0, "paired tests", repeat).permutation(len(gaps))])
        for place, size in enumerate(sizes):
            drawn = shuffled[:size]
            p = np.ma.masked_invalid(stats.mstats.ttest_1samp(drawn, 0).pvalue)
            # Equal differences have no spread and no t: 0 is no difference, anything else is one for certain.
            differs = (drawn.count(axis=0) > 1) & (np.ma.filled(drawn.mean(axis=0), 0) != 0)
            p_by_size[repeat, place] = np.where(np.ma.getmaskarray(p), ~differs, p.filled(1))
    return p_by_size


def needed(shares: Array, sizes: Sequence[int]) -> Array:
    """The least size from which on the share stays at `WANTED` or above, for each row [R, sizes]; inf if never."""
    stays = np.logical_and.accumulate((shares >= WANTED)[:, ::-1], axis=1)[:, ::-1]
    return np.where(stays.any(axis=1), np.array(sizes, dtype=float)[stays.argmax(axis=1)], np.inf)


def pair_rows(credits: Credits, repeats: int) -> list[Row]:
    """All rows on telling generators apart, by the seeds that all have; none for fewer than two generators."""
    common = [seed for seed in next(iter(credits.values()), ()) if all(seed in seeds for seeds in credits.values())]
    if len(credits) < 2 or not common:
        return []
    pairs = [*combinations(credits.values(), 2)]
    gaps = np.stack([one[seed] - two[seed] for seed in common for one, two in pairs], axis=1)
    sizes, p = _tested(gaps, repeats)
    rows = _curve_rows(ALL, p, sizes)
    band = np.digitize(100 * np.abs(np.nanmean(gaps, axis=0)), GAPS[1:-1])
    for place in np.unique(band):
        rows += _curve_rows(BANDS[place], p[:, :, band == place], sizes)
    # The gap that a test finds with a chance of `POWER`, by the pairs' median spread.
    factor = stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(POWER)
    spread = 100 * factor * np.percentile(np.nanstd(gaps, axis=0, ddof=1), TAILS)
    for size in dict.fromkeys((min(UPSTREAM, len(gaps)), len(gaps))):
        low, middle, high = (spread / math.sqrt(size)).tolist()
        rows.append(make_row("gap_found_4_of_5", ALL, "", middle, (low, high), n=size, models=gaps.shape[1]))
    one_of_many = len(common) == 1 and len(credits) > SET_SIZE
    return rows + (_set_rows(p, sizes, len(credits)) if one_of_many else [])


def null_rows(credits: Credits, repeats: int) -> list[Row]:
    """The same for pairs that do not differ, a generator with two seeds: about 5 % are called different."""
    gaps = [one - two for seeds in credits.values() for one, two in combinations(seeds.values(), 2)]
    if not gaps:
        return []
    sizes, p = _tested(np.stack(gaps, axis=1), repeats)
    return _curve_rows(SAME, p, sizes)[: len(sizes)]


def _tested(gaps: Array, repeats: int) -> tuple[list[int], Array]:
    sizes = [*(size for size in SIZES if size < len(gaps)), len(gaps)]
    return sizes, p_values(gaps, sizes, repeats)


def _told_apart(subject: str, shares: Array, sizes: Sequence[int], models: int) -> list[Row]:
    """Mean share told apart by each size, with the middle 95 % of its rows [R, sizes]."""
    return [
        make_row("told_apart", subject, "", column.mean(), estimates.percentiles(column), n=size, models=models)
        for size, column in zip(sizes, shares.T, strict=True)
    ]


def _curve_rows(subject: str, p: Array, sizes: Sequence[int]) -> list[Row]:
    """Share of the pairs told apart by each size, with the middle 95 % of the shuffles; then the size for 90 %."""
    shares, pairs = (p < ALPHA).mean(axis=2), p.shape[2]
    rows = _told_apart(subject, shares, sizes, pairs)
    rows[-1] |= {"low": None, "high": None}  # with all instructions all shuffles are one
    low, value, high = np.percentile(needed(shares, sizes), TAILS, method="nearest").tolist()
    other, paper = "not reached" if math.isinf(value) else "", UPSTREAM if subject == ALL else None
    counts = {"n": sizes[-1], "models": pairs, "paper": paper}
    return [*rows, make_row("needed_for_90", subject, other, value, (low, high), **counts)]


def _set_rows(p: Array, sizes: Sequence[int], num_models: int) -> list[Row]:
    """Share told apart and size needed within random sets of few models: how much the choice of models matters."""
    by_pair = (p < ALPHA).mean(axis=0)  # [sizes, pairs]
    square = np.zeros((num_models, num_models), dtype=int)
    square[np.triu_indices(num_models, 1)] = np.arange(by_pair.shape[1])
    rng, inside = keyed_rng(0, "sets of models"), np.triu_indices(SET_SIZE, 1)
    sets = [np.sort(rng.choice(num_models, SET_SIZE, replace=False)) for _ in range(NUM_SETS)]
    shares = np.array([by_pair[:, square[np.ix_(each, each)][inside]].mean(axis=1) for each in sets])
    reached = float((needed(shares, sizes) <= UPSTREAM).mean())
    bounds = wilson(NUM_SETS * reached, NUM_SETS)
    needs = make_row("sets_that_need_300_or_fewer", SETS, "", reached, bounds, n=UPSTREAM, models=NUM_SETS)
    return [*_told_apart(SETS, shares, sizes, len(inside[0])), needs]
