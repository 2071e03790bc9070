"""A step's report, as columns `{key: array [B]}` (one level of nesting allowed), and its two readings.

`row` reads one environment's info from them. `scatter` places them into the slots of a vector environment, in the form
that `gymnasium.vector.VectorEnv._add_info` would build from the rows, masks included, without visiting rows.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Column: TypeAlias = NDArray[Any]
Columns: TypeAlias = Mapping[str, Column | Mapping[str, Column]]

# What Gymnasium makes of Python's float, int and bool; everything else becomes an array of objects.
_DTYPES: dict[str, type] = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}


def column(values: ArrayLike) -> Column:
    """`values` as a new array of a type that infos have: float64, int64, bool or object (text or None)."""
    given = np.asarray(values)
    return np.array(given, dtype=_DTYPES.get(given.dtype.kind, object))


def row(columns: Columns, index: int = 0) -> dict[str, Any]:
    """Row `index` as a new dictionary of Python values."""
    return {
        key: row(values, index) if isinstance(values, Mapping) else values[index : index + 1].tolist()[0]
        for key, values in columns.items()
    }


def scatter(columns: Columns, slots: NDArray[np.int64], num_envs: int) -> dict[str, Any]:
    """The columns in ascending `slots` [B] of `num_envs`, each with its mask `_key` of the slots that have a value."""
    mask = np.zeros(num_envs, dtype=np.bool_)
    mask[slots] = True
    infos: dict[str, Any] = {}
    for key, values in columns.items():
        if isinstance(values, Mapping):
            infos[key] = scatter(values, slots, num_envs)
        else:
            infos[key] = values if len(slots) == num_envs else _place(values, slots, num_envs)
        infos[f"_{key}"] = mask.copy()
    return infos


def _place(values: Column, slots: NDArray[np.int64], num_envs: int) -> Column:
    placed = np.full(num_envs, None, dtype=object) if values.dtype == object else np.zeros(num_envs, values.dtype)
    placed[slots] = values
    return placed


def merge(infos: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`infos` of some slots and `more` of others: values and masks of shared keys are combined in place."""
    for key, mask in more.items():
        if not key.startswith("_"):
            continue
        name = key[1:]
        if name in infos:
            infos[name][mask] = more[name][mask]
            infos[key] |= mask
        else:
            infos[name], infos[key] = more[name], mask
    return infos
