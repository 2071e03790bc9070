"""What is computed across treatments, or beside gold: drops against noise, early warnings, the share of length.

Arrays are [S, K]: S seeds, K evaluations along optimization, the first the SFT policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...seeding import keyed_rng
from ..harness.agreement import RESAMPLES, Coefficient, percentiles, spearman_rows
from ..harness.estimates import Estimate
from .fits import rises

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trend:
    """Mean drop against the share of flipped labels."""

    spearman: Coefficient
    """Of the mean drops; the interval is of percentiles over resamples of the seeds, one draw for all treatments."""
    monotone_share: float
    """Share of the resamples in which the mean drops rise from each share of flips to the next."""
    slope: Estimate
    """Gold units for 10 points of flips, by least squares for each seed."""

    @property
    def monotone(self) -> bool:
        """Whether the mean drops rise from each share of flips to the next."""
        return bool(self.spearman.value > 1 - 1e-9)


def trend(flips: Sequence[float], drops: Array) -> Trend:
    """Of drops [T, S] at T shares of flips in [0, 1], seeds paired: column s is the same seed of all treatments.

    Raises:
        ValueError: Fewer than three shares, or shapes that do not belong together.
    """
    x = np.asarray(flips, dtype=np.float64)
    if len(x) < 3 or drops.ndim != 2 or len(drops) != len(x) or not drops.size:
        raise ValueError(f"expected drops [T, S] at T >= 3 shares of flips, got {drops.shape} at {tuple(flips)}")
    count = drops.shape[1]
    drawn = keyed_rng(0, "over-optimization", "drops").integers(0, count, (RESAMPLES, count))
    means = drops[:, drawn].mean(axis=2).T
    table = np.concatenate([drops.mean(axis=1)[None], means])
    rho = spearman_rows(np.broadcast_to(x, table.shape), table)
    # One seed has nothing to resample.
    low, high = percentiles(rho[1:]) if count > 1 else (math.nan, math.nan)
    centred = 10 * (x - x.mean())
    slopes = centred @ drops / (centred @ centred)
    share = float((rho[1:] > 1 - 1e-9).mean()) if count > 1 else math.nan
    return Trend(Coefficient(float(rho[0]), low, high), share, Estimate.of(slopes))


def warning_place(disagreement: Array) -> int | None:
    """The first evaluation at which an ensemble's disagreement [S, K] is clearly above its start (`rises`, by seed).

    None where it never is, and for one seed.
    """
    for place in range(1, disagreement.shape[1]):
        if rises(Estimate.of(disagreement[:, place] - disagreement[:, 0])):
            return place
    return None


def length_slope(gold: ArrayLike, length: ArrayLike, prompt: ArrayLike) -> float:
    """Gold units for one character more, among responses of the SFT policy to the same prompt.

    Least squares of gold on length within prompts (both less their prompt's mean), so that instructions that ask for
    much do not count as an effect of length. NaN where lengths do not differ.

    Args:
        gold: [B].
        length: [B] characters.
        prompt: [B] integers that say which prompt a response answers.
    """
    y, x = np.asarray(gold, dtype=np.float64), np.asarray(length, dtype=np.float64)
    groups = np.unique(np.asarray(prompt), return_inverse=True)[1]
    if not y.shape == x.shape == groups.shape or y.ndim != 1:
        raise ValueError(f"expected gold, length and prompt of one shape [B], got {y.shape}, {x.shape}, {groups.shape}")
    counts = np.bincount(groups)
    x, y = (each - (np.bincount(groups, each) / counts)[groups] for each in (x, y))
    return float(x @ y / (x @ x)) if x @ x > 0 else math.nan


def length_residual(gold: Array, length: Array, slope: float) -> Array:
    """Gold [S, K] less what its change of length since the start is worth: gold - slope (length - length at start).

    The slope is that of SFT's responses; far from their lengths it is an extrapolation.
    """
    return gold - slope * (length - length[:, :1])


def by_seed(rows: Sequence[Mapping[str, Any]], treatment: str, measure: str) -> Array:
    """[S] a measure of a treatment's reward models, one value a seed: the mean over an ensemble's members."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["treatment"] == treatment and row[measure] is not None:
            found.setdefault(int(row["seed"]), []).append(float(row[measure]))
    return np.array([np.mean(values) for values in found.values()], dtype=np.float64)
