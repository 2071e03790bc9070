"""Rows as pandas frames, with the checks that pandas leaves out: it skips NaN and combinations that are not there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd

from ...statistics import UNBOUNDED
from .estimates import Estimate
from .study import Row


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows of a table; None in a column of numbers is NaN."""
    return pd.DataFrame(rows).replace({None: np.nan}).infer_objects()


def pivot(frame: pd.DataFrame, index: str | Sequence[str], columns: str, values: str) -> pd.DataFrame:
    """One row for each value of `index`, one column for each of `columns`, in the order of the frame.

    Raises:
        ValueError: A combination of them is missing or stands there twice.
    """
    keys = [*([index] if isinstance(index, str) else index), columns]
    counts = frame.groupby(keys, sort=False).size().unstack()
    if len(frame) and (wrong := counts[counts.ne(1).any(axis=1)]).size:
        raise ValueError(f"expected one row for each {', '.join(keys)}, got these numbers of rows:\n{wrong}")
    found = frame.pivot(index=keys[:-1], columns=columns, values=values)
    return found.reindex(index=counts.index, columns=frame[columns].unique())


def estimates(
    frame: pd.DataFrame, by: Sequence[str], measure: str, bounds: tuple[float, float] = UNBOUNDED
) -> dict[tuple[Hashable, ...], Estimate]:
    """The mean of a measure with its interval over the rows (one a seed) of each group; see `Estimate.of`.

    NaN, a seed that failed, is left out and not counted in the estimate's `num`.
    """
    groups = frame.groupby(list(by), sort=False, dropna=False)[measure]
    return {key: Estimate.of(group.to_numpy(dtype=np.float64), bounds) for key, group in groups}
