"""Rows of the table, win rates by source, and the agreement of two evaluations over generators, with intervals.

The interval of a win rate is over the instructions, opinions and answers of all seeds averaged first. Those of
agreements come from resamples of instructions and seeds (`agreement`). Of rank correlations these are percentiles as
they are. For r^2 the percentiles of Fisher's z are shifted so that their median lies on the measured one, since
resampling adds noise to win rates that have it already: such intervals held the median r^2 of simulated evaluations of
8 to 20 generators in 88 to 90 %, plain percentiles in 60 to 91 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...statistics import win_rate
from ..harness.estimates import (
    FEWEST,
    TAILS,
    Bootstrap,
    correlation,
    kendall_rows,
    mean_known,
    pearson_rows,
    percentiles,
    spearman_rows,
)
from ..harness.study import Row

Array = NDArray[np.float64]
Credits = Mapping[str, Sequence[Array]]
"""Generator -> credits [B] of each seed, NaN = no verdict."""
NEARLY_1: Final = 1 - 1e-9
"""Correlations are kept below this one, of which Fisher's z is finite."""
UNKNOWN: Final = (math.nan, math.nan)


def make_row(
    figure: str,
    subject: str,
    other: str,
    value: float,
    bounds: Sequence[float] = UNKNOWN,
    *,
    standard_error: float = math.nan,
    n: int | None = None,
    models: int | None = None,
    paper: float | None = None,
) -> Row:
    """A figure of a subject against, within or under something else; what is not finite becomes an empty cell.

    Args:
        figure: What is measured.
        subject: Of what.
        other: Against, within or under what.
        value: The figure.
        bounds: Of its 95 % interval.
        standard_error: Of the value.
        n: Instructions behind it.
        models: Generators, or pairs of them, behind it.
        paper: What was published.
    """
    numbers = {"value": value, "low": bounds[0], "high": bounds[1], "standard_error": standard_error}
    known = {name: float(number) if math.isfinite(number) else None for name, number in numbers.items()}
    return {"figure": figure, "subject": subject, "other": other, **known, "n": n, "models": models, "paper": paper}


def placed(part: str, level: str, judge: str, rows: Iterable[Row]) -> list[Row]:
    """Rows of the table: with their part of it, their level and who judged ("" for nobody)."""
    return [{"part": part, "level": level, "judge": judge, **row} for row in rows]


def over_seeds(seeds: Sequence[Array]) -> Array:
    """Mean credit of each instruction [B] over the seeds; NaN where no seed has a verdict."""
    return mean_known(np.stack(seeds))


def rate_row(subject: str, other: str, credits: Array) -> Row:
    """A win rate in percent with its standard error and t-interval."""
    found = win_rate(credits)
    half = found.standard_error * float(stats.t.ppf(0.975, max(found.num_total - 1, 1)))
    known = not math.isnan(half)
    bounds = (max(found.win_rate - half, 0.0), min(found.win_rate + half, 100.0)) if known else UNKNOWN
    num, error = found.num_total, found.standard_error
    return make_row("win_rate", subject, other, found.win_rate, bounds, standard_error=error, n=num)


def source_rows(credits: Credits, sources: Sequence[str], resamples: int) -> list[Row]:
    """Win rates of each generator in all and in each source, r^2 of each two sources and of each with the rest.

    Args:
        credits: Of each generator.
        sources: Of each instruction, [B]; with one source alone there is nothing to compare.
        resamples: For the intervals of r^2.
    """
    which = np.array(sources)
    masks = {name: which == name for name in dict.fromkeys(sources)} if len(set(sources)) > 1 else {}
    parts = {
        name: {key: [row[mask] for row in seeds] for key, seeds in credits.items()} for name, mask in masks.items()
    }
    rows = []
    for generator, seeds in credits.items():
        mean = over_seeds(seeds)
        rows += [rate_row(generator, name, mean[mask]) for name, mask in {"all": slice(None), **masks}.items()]
    names = list(masks)
    for place, name in enumerate(names):
        rest = {key: [row[~masks[name]] for row in seeds] for key, seeds in credits.items()}
        rows += agreement_rows((name, "the other sources"), parts[name], rest, resamples=resamples)
        for other in names[place + 1 :]:
            rows += agreement_rows((name, other), parts[name], parts[other], ("r2",), resamples=resamples)
    return rows


def agreement_rows(
    names: tuple[str, str],
    one: Credits,
    two: Credits,
    figures: Sequence[str] = ("r2", "spearman"),
    *,
    same: bool = False,
    resamples: int,
    paper: float | None = None,
) -> list[Row]:
    """Rows of the agreement of two evaluations over the generators that both have; none for fewer than three.

    Args:
        names: Of the two evaluations.
        one: Credits of the first.
        two: Credits of the second.
        figures: Which of r2, spearman, kendall.
        same: Whether both are of the same instructions, in this order: they are resampled together then.
        resamples: Number of them.
        paper: r^2 as published.
    """
    both = [name for name in one if name in two]
    if len(both) < FEWEST:
        return []
    values, drawn = [], []
    for seed, credits in enumerate((one, two)):
        rates = Bootstrap.of({name: credits[name] for name in both}, seed=0 if same else seed, num=resamples).win_rates
        drawn.append(np.stack([rates[name] for name in both], axis=1))
        values.append(np.array([np.nanmean(over_seeds(credits[name])) for name in both]))
    n = min(len(credits[both[0]][0]) for credits in (one, two))
    return correlation_rows(names, values, drawn, figures, n=n, paper=paper)


def correlation_rows(
    names: tuple[str, str],
    values: Sequence[Array],
    resampled: Sequence[Array],
    figures: Sequence[str],
    *,
    n: int | None = None,
    paper: float | None = None,
) -> list[Row]:
    """Rows of the agreement of two columns of win rates [M], whose resamples are [R, M]."""
    x, y = values
    rows = []
    for figure in figures:
        bounds, known = bounds_of(figure, x, y, resampled), paper if figure == "r2" else None
        rows.append(make_row(figure, *names, correlation(figure, x, y), bounds, n=n, models=len(x), paper=known))
    return rows


def bounds_of(figure: str, x: Array, y: Array, resampled: Sequence[Array]) -> Sequence[float]:
    """The 95 % interval of an agreement of x and y [M] from their resamples [R, M]; NaN where nothing is known."""
    if figure != "r2":
        return percentiles((spearman_rows if figure == "spearman" else kendall_rows)(*resampled))
    measured = float(pearson_rows(x[None], y[None])[0])
    ends = percentiles(pearson_rows(*resampled), (TAILS[0], 50, TAILS[1]))
    low, middle, high = (float(np.arctanh(np.clip(end, -NEARLY_1, NEARLY_1))) for end in ends)
    shift = float(np.arctanh(np.clip(measured, -NEARLY_1, NEARLY_1))) - middle
    near, far = sorted(np.tanh([low + shift, high + shift]).tolist(), key=abs)
    return 0.0 if low + shift < 0 < high + shift else near**2, far**2
