"""Rows of the table: win rates, agreement of two evaluations over generators, paired tests of generators.

report.html.j2 says how each is measured.
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
TAILS: Final = (2.5, 50, 97.5)
_UNKNOWN: Final = (math.nan, math.nan)


def make_row(
    figure: str, subject: str, other: str, value: float, bounds: Sequence[float] = _UNKNOWN, **more: float | None
) -> Row:
    """A figure of a subject against, within or under `other`, with its 95 % interval; what is not finite is left empty.

    More: standard_error, the number of instructions n, of models (or pairs of them), and the paper's value.
    """
    numbers = {"value": value, "low": bounds[0], "high": bounds[1], "standard_error": more.pop("standard_error", None)}
    known = {key: float(x) if x is not None and math.isfinite(x) else None for key, x in numbers.items()}
    rest = dict.fromkeys(("n", "models", "paper")) | more
    return {"figure": figure, "subject": subject, "other": other, **known, **rest}


def placed(part: str, level: str, judge: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with their part of the table, level and judge ("" for none)."""
    return [{"part": part, "level": level, "judge": judge, **row} for row in rows]


def over_seeds(seeds: Mapping[int, Array]) -> Array:
    """Mean credit of each instruction [B] over the seeds; NaN where no seed has a verdict."""
    return mean_known(np.stack([*seeds.values()]))


def on(credits: Credits, rows: NDArray[np.bool_] | slice) -> Credits:
    """The credits on some of the instructions."""
    return {name: {seed: row[rows] for seed, row in seeds.items()} for name, seeds in credits.items()}


def rate_row(subject: str, other: str, credits: Array) -> Row:
    """A win rate in percent with its standard error and t-interval."""
    found = win_rate(credits)
    num, error = found.num_total, found.standard_error
    half = error * float(stats.t.ppf(0.975, max(num - 1, 1)))
    bounds = _UNKNOWN if math.isnan(half) else (max(found.win_rate - half, 0.0), min(found.win_rate + half, 100.0))
    return make_row("win_rate", subject, other, found.win_rate, bounds, standard_error=error, n=num)


def source_rows(credits: Credits, sources: Sequence[str], resamples: int) -> list[Row]:
    """Win rates of each generator, in all and by source [B], and the agreement of the sources."""
    which = np.array(sources)
    masks = {name: which == name for name in dict.fromkeys(sources)} if len(set(sources)) > 1 else {}
    rows = []
    for generator, seeds in credits.items():
        mean = over_seeds(seeds)
        rows += [rate_row(generator, name, mean[mask]) for name, mask in {"all": slice(None), **masks}.items()]
    for place, (name, mask) in enumerate(masks.items()):
        own, rest = on(credits, mask), on(credits, ~mask)
        rows += agreement_rows({name: own, "the other sources": rest}, resamples)
        for other in [*masks][place + 1 :]:
            rows += agreement_rows({name: own, other: on(credits, masks[other])}, resamples, ("r2",))
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
    one, two = sides.values()
    both = [name for name in one if name in two]
    if len(both) < estimates.FEWEST:
        return []
    (x, xs, num), (y, ys, other_num) = (
        _resampled({generator: side[generator] for generator in both}, name, 0 if same else seed, resamples)
        for seed, (name, side) in enumerate(sides.items())
    )
    first, second = sides
    rows = []
    for figure in figures:
        value, bounds = estimates.correlation(figure, x, y), bounds_of(figure, x, y, (xs, ys))
        known, n = paper if figure == "r2" else None, min(num, other_num) or None
        rows.append(make_row(figure, first, second, value, bounds, n=n, models=len(both), paper=known))
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
    drawn = estimates.Bootstrap.of(lists, seed=seed, num=resamples).win_rates
    means = np.stack([over_seeds(seeds) for seeds in side.values()])
    return np.nanmean(means, axis=1), np.stack([drawn[generator] for generator in side], axis=1), means.shape[1]


def bounds_of(figure: str, x: Array, y: Array, resampled: Sequence[Array]) -> Sequence[float]:
    """The 95 % interval of an agreement of x and y [M] by resamples [R, M]; NaN where nothing is known.

    For r^2 it is shifted on the scale of Fisher's z so that its median is the measured one, since resampling adds noise
    to win rates that have it already.
    """
    if figure != "r2":
        rows = estimates.spearman_rows if figure == "spearman" else estimates.kendall_rows
        return estimates.percentiles(rows(*resampled))
    drawn = estimates.percentiles(estimates.pearson_rows(*resampled), TAILS)
    ends = np.array([*drawn, *estimates.pearson_rows(x[None], y[None])])
    low, middle, high, measured = np.arctanh(np.clip(ends, -1 + 1e-9, 1 - 1e-9)).tolist()  # clipped to stay finite
    shift = measured - middle
    near, far = sorted(np.tanh([low + shift, high + shift]).tolist(), key=abs)
    return 0.0 if low + shift < 0 < high + shift else near**2, far**2


def p_values(gaps: Array, sizes: Sequence[int], repeats: int) -> Array:
    """Two-sided p of paired t-tests on the first instructions of each shuffle: [repeats, sizes, pairs].

    `gaps` are differences [B, pairs], NaN = a verdict is missing, which is left out; `sizes` rise to at most B. Without
    spread p is 1 for equal means, else 0. Running totals give all sizes in one pass, unlike scipy's test.
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
        # Where all differences are equal, rounding leaves a tiny variance.
        found[repeat] = np.where(variance < 1e-12, np.abs(mean) < 1e-12, p)
    return found


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
        low, middle, high = spread / math.sqrt(size)
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


def _curve_rows(subject: str, p: Array, sizes: Sequence[int]) -> list[Row]:
    """Share of the pairs told apart by each size, with the middle 95 % of the shuffles; then the size for 90 %."""
    shares, pairs = (p < ALPHA).mean(axis=2), p.shape[2]
    # With all instructions all shuffles are one.
    bounds = [*(estimates.percentiles(column) for column in shares.T[:-1]), _UNKNOWN]
    rows = [
        make_row("told_apart", subject, "", column.mean(), ends, n=size, models=pairs)
        for size, column, ends in zip(sizes, shares.T, bounds, strict=True)
    ]
    low, value, high = np.percentile(needed(shares, sizes), TAILS, method="nearest").tolist()
    other, paper = "not reached" if math.isinf(value) else "", UPSTREAM if subject == ALL else None
    return [
        *rows,
        make_row("needed_for_90", subject, other, value, (low, high), n=sizes[-1], models=pairs, paper=paper),
    ]


def _set_rows(p: Array, sizes: Sequence[int], num_models: int) -> list[Row]:
    """Share told apart and size needed within random sets of few models: how much the choice of models matters."""
    by_pair = (p < ALPHA).mean(axis=0)  # [sizes, pairs]
    square = np.zeros((num_models, num_models), dtype=int)
    square[np.triu_indices(num_models, 1)] = np.arange(by_pair.shape[1])
    rng, inside, shares = keyed_rng(0, "sets of models"), np.triu_indices(SET_SIZE, 1), []
    for _ in range(NUM_SETS):
        chosen = np.sort(rng.choice(num_models, SET_SIZE, replace=False))
        shares.append(by_pair[:, square[np.ix_(chosen, chosen)][inside]].mean(axis=1))
    table = np.array(shares)
    rows = [
        make_row("told_apart", SETS, "", column.mean(), estimates.percentiles(column), n=size, models=len(inside[0]))
        for size, column in zip(sizes, table.T, strict=True)
    ]
    reached = float((needed(table, sizes) <= UPSTREAM).mean())
    bounds = wilson(NUM_SETS * reached, NUM_SETS)
    return [*rows, make_row("sets_that_need_300_or_fewer", SETS, "", reached, bounds, n=UPSTREAM, models=NUM_SETS)]
