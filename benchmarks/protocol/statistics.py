"""Arithmetic of the evaluation protocol: rows, win rates by source, agreement of two evaluations over generators.

The interval of a win rate is its mean plus and minus t times its standard error over the instructions, opinions and
answers of all seeds averaged first. Those of agreements come from 2,000 resamples (200 in a quick run), which draw
instructions and seeds with replacement (`agreement`), generators not: they speak of these generators. Resampling
adds noise to win rates that have it already, so resampled agreements are too low. Of rank correlations the percentiles
are taken as they are, and lean towards lower agreement. For r^2 the percentiles of Fisher's z of the correlation are
shifted so that their median lies on the measured one; of simulated evaluations of 8 to 20 generators such intervals
held the median r^2 in 88 to 90 %, plain percentiles in 60 to 91 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ...statistics import win_rate
from ..harness.agreement import (
    FEWEST,
    TAILS,
    Bootstrap,
    correlation,
    kendall_rows,
    pearson_rows,
    percentiles,
    spearman_rows,
)
from ..harness.estimates import mean_known
from ..harness.study import Row

Array = NDArray[np.float64]
Credits = Mapping[str, Sequence[Array]]
"""Generator -> credits [B] of each seed, NaN = no verdict."""
COLUMNS: Final = (
    "part", "level", "judge", "figure", "subject", "other", "value", "low", "high", "standard_error", "n", "models",
    "paper",
)  # fmt: skip
CONFIDENCE: Final = 0.95
NEARLY_1: Final = 1 - 1e-9
"""Correlations are kept below this one, of which Fisher's z is finite."""


def make_row(
    part: str,
    level: str,
    judge: str,
    figure: str,
    subject: str,
    other: str,
    value: float,
    *,
    bounds: Sequence[float] = (math.nan, math.nan),
    standard_error: float = math.nan,
    n: int | None = None,
    models: int | None = None,
    paper: float | None = None,
) -> Row:
    """A row of the table; what is NaN becomes an empty cell.

    Args:
        part: sources, live, mixture, judges or pairs.
        level: sandbox or recorded.
        judge: Who judged, "" where nobody did.
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
    known = {name: None if math.isnan(number) else float(number) for name, number in numbers.items()}
    words = {"part": part, "level": level, "judge": judge, "figure": figure, "subject": subject, "other": other}
    return {**words, **known, "n": n, "models": models, "paper": paper}


def over_seeds(seeds: Sequence[Array]) -> Array:
    """Mean credit of each instruction [B] over the seeds; NaN where no seed has a verdict."""
    return mean_known(np.stack(seeds))


def rate_row(part: str, level: str, judge: str, subject: str, other: str, credits: Array) -> Row:
    """A win rate in percent with its standard error and interval."""
    found = win_rate(credits)
    half = found.standard_error * float(stats.t.ppf((1 + CONFIDENCE) / 2, max(found.num_total - 1, 1)))
    bounds = (max(found.win_rate - half, 0.0), min(found.win_rate + half, 100.0))
    return make_row(
        part, level, judge, "win_rate", subject, other, found.win_rate,
        bounds=bounds if not math.isnan(half) else (math.nan, math.nan), standard_error=found.standard_error,
        n=found.num_total,
    )  # fmt: skip


def source_rows(level: str, judge: str, credits: Credits, sources: Sequence[str], resamples: int) -> list[Row]:
    """Win rates of each generator in all and in each source, r^2 of each two sources and of each with the rest.

    Args:
        level: sandbox or recorded.
        judge: Who judged.
        credits: Of each generator.
        sources: Of each instruction, [B]; with one source alone there is nothing to compare.
        resamples: For the intervals of r^2.
    """
    which = np.array(sources)
    names = list(dict.fromkeys(sources)) if len(set(sources)) > 1 else []
    rows = []
    for generator, seeds in credits.items():
        mean = over_seeds(seeds)
        rows.append(rate_row("sources", level, judge, generator, "all", mean))
        rows += [rate_row("sources", level, judge, generator, name, mean[which == name]) for name in names]
    for place, name in enumerate(names):
        own = {key: [row[which == name] for row in seeds] for key, seeds in credits.items()}
        rest = {key: [row[which != name] for row in seeds] for key, seeds in credits.items()}
        rows += agreement_rows("sources", level, judge, (name, "the other sources"), own, rest, resamples=resamples)
        for second in names[place + 1 :]:
            two = {key: [row[which == second] for row in seeds] for key, seeds in credits.items()}
            rows += agreement_rows(
                "sources", level, judge, (name, second), own, two, resamples=resamples, figures=("r2",)
            )
    return rows


def agreement_rows(
    part: str,
    level: str,
    judge: str,
    names: tuple[str, str],
    one: Credits,
    two: Credits,
    *,
    figures: Sequence[str] = ("r2", "spearman"),
    same: bool = False,
    resamples: int,
    paper: float | None = None,
) -> list[Row]:
    """Rows of the agreement of two evaluations over the generators that both have; none for fewer than three.

    Args:
        part: Of the table.
        level: sandbox or recorded.
        judge: Who judged.
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
    drawn = [
        Bootstrap.of({name: credits[name] for name in both}, seed=0 if same else seed, num=resamples)
        for seed, credits in enumerate((one, two))
    ]
    x, y = (np.array([float(np.nanmean(over_seeds(credits[name]))) for name in both]) for credits in (one, two))
    columns = [np.stack([bootstrap.win_rates[name] for name in both], axis=1) for bootstrap in drawn]
    sizes = [len(credits[both[0]][0]) for credits in (one, two)]
    return correlation_rows(
        part, level, judge, names, (x, y), (columns[0], columns[1]), figures=figures, n=min(sizes), paper=paper
    )


def correlation_rows(
    part: str,
    level: str,
    judge: str,
    names: tuple[str, str],
    values: tuple[Array, Array],
    resampled: tuple[Array, Array],
    *,
    figures: Sequence[str],
    n: int | None,
    paper: float | None = None,
) -> list[Row]:
    """Rows of the agreement of two columns of win rates [M], whose resamples are [R, M]."""
    return [
        make_row(
            part, level, judge, figure, *names, correlation(figure, *values),
            bounds=bounds_of(figure, *values, resampled), n=n, models=len(values[0]),
            paper=paper if figure == "r2" else None,
        )
        for figure in figures
    ]  # fmt: skip


def bounds_of(figure: str, x: Array, y: Array, resampled: tuple[Array, Array]) -> Sequence[float]:
    """The 95 % interval of an agreement of x and y [M] from their resamples [R, M]; NaN where nothing is known."""
    if figure != "r2":
        return percentiles((spearman_rows if figure == "spearman" else kendall_rows)(*resampled))
    measured = float(pearson_rows(x[None], y[None])[0])
    ends = percentiles(pearson_rows(*resampled), (TAILS[0], 50, TAILS[1]))
    low, middle, high = (float(np.arctanh(np.clip(end, -NEARLY_1, NEARLY_1))) for end in ends)
    shift = float(np.arctanh(np.clip(measured, -NEARLY_1, NEARLY_1))) - middle
    near, far = sorted(np.tanh([low + shift, high + shift]).tolist(), key=abs)
    return 0.0 if low + shift < 0 < high + shift else near**2, far**2
