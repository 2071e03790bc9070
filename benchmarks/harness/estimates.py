"""A mean over seeds with what is known of its error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...statistics import UNBOUNDED, Interval, interval

Array = NDArray[np.float64]

CLEAR = 2.0
"""A difference is called clear when it is more than this many standard errors."""


@dataclass(frozen=True)
class Estimate:
    """A mean over the seeds that have a value, with its standard error and 95 % t-interval."""

    interval: Interval
    standard_error: float
    """Standard deviation (ddof 1) over sqrt(n); NaN for fewer than two seeds."""

    @classmethod
    def of(cls, values: Array, bounds: tuple[float, float] = UNBOUNDED) -> Estimate:
        """Of values [S], one a seed, NaN where a seed failed; `bounds` are those of `statistics.interval`."""
        known = values[np.isfinite(values)]
        if not len(known):
            return cls(Interval(math.nan, math.nan, math.nan, 0), math.nan)
        error = math.nan
        if len(known) > 1:
            # Equal values have no spread; their computed mean may be off by a rounding, and would give them one.
            error = float(known.std(ddof=1) / math.sqrt(len(known))) if np.ptp(known) > 0 else 0.0
        return cls(interval(known, bounds=bounds), error)

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return self.interval.mean

    @property
    def num(self) -> int:
        """Seeds that have a value."""
        return self.interval.num

    @property
    def ratio(self) -> float:
        """The mean in standard errors, with its sign; NaN where there is no error to divide by."""
        return self.mean / self.standard_error if self.standard_error > 0 else math.nan

    @property
    def clear(self) -> bool:
        """Whether the mean is more than two standard errors from 0; never for fewer than two seeds."""
        return abs(self.mean) > CLEAR * self.standard_error


def mean_known(values: Array) -> Array:
    """Mean over the first axis without NaN; NaN where nothing is known."""
    known = ~np.isnan(values)
    num = known.sum(axis=0)
    return np.asarray(np.where(num, np.nansum(values, axis=0) / np.maximum(num, 1), np.nan), dtype=np.float64)
