"""A run's metrics from its folder, with what the responses that it kept tell in addition."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import DataError, warn_caller
from ..instructions import Instruction
from ..oracles.base import RewardOracle, judge
from ..oracles.ensemble import DISAGREEMENT
from ..statistics import mean_known
from .signals import agreement, repetition

METRICS: Final = "metrics.jsonl"
WARNINGS: Final = "warnings.jsonl"
"""What a monitor has warned of, a line each."""
ROLLOUTS: Final = "rollouts.jsonl.gz"
"""Some responses of each step of a run, a line each."""


def append_rollouts(folder: Path, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Appends a step's responses to the `ROLLOUTS` of a run: gzip members behind each other are one file."""
    if rollouts:
        cleaned = ({"step": step, **without_nan(row), "info": without_nan(row["info"])} for row in rollouts)
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in cleaned)
        with (folder / ROLLOUTS).open("ab") as file:
            file.write(gzip.compress(lines.encode(), mtime=0))


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with None for NaN, which JSON does not have."""
    return {name: None if value != value else value for name, value in values.items()}


def lines_of(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects with a step of a file of JSON Lines, plain or gzip; None for what is damaged.

    A run that was killed may leave half a line.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from map(_parse, file)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_run(folder: str | Path, seconds: Mapping[str, RewardOracle] | None = None) -> list[dict[str, Any]]:
    """The metrics of each step of the run in a folder, or in a metrics.jsonl; with what its kept responses tell.

    That is info/repetition, and of each of `seconds`, which are asked about them, info/<name>_agreement; of one that
    is an ensemble, info/disagreement. A run that has kept none has only its metrics.

    Raises:
        DataError: There is no such file, or it holds no step; or one of `seconds` is no oracle.
    """
    path = Path(folder)
    path = path if path.suffix == ".jsonl" else path / METRICS
    if not path.is_file():
        raise DataError(f"{path}: expected a run's {METRICS}, there is none.")
    lines = list(lines_of(path))
    rows = [row for row in lines if row is not None]
    if not rows:
        raise DataError(f"{path}: expected a line a step, found none.")
    if damaged := len(lines) - len(rows):
        warn_caller(f"{path}: {damaged} damaged lines are left out.")
    if wrong := [(name, oracle) for name, oracle in (seconds or {}).items() if not hasattr(oracle, "score")]:
        raise DataError(f"seconds: expected oracles by name, such as make_oracle('surrogate'), got {wrong[0]!r}.")
    told = told_by_rollouts(path.with_name(ROLLOUTS), seconds or {})
    return [{**told.get(int(row["step"]), {}), **row} for row in rows]


def told_by_rollouts(path: Path, seconds: Mapping[str, RewardOracle]) -> dict[int, dict[str, float]]:
    """Step -> what its kept responses tell; {} without such a file."""
    rows = (row for row in lines_of(path) if row is not None) if path.is_file() else ()
    told = {}
    for step, group in groupby(rows, key=itemgetter("step")):
        kept = list(group)
        texts, asked = [row["response"] for row in kept], [Instruction(row["instruction"]) for row in kept]
        own = {"info/repetition": float(np.mean([repetition(text) for text in texts]))}
        proxy = np.array([row["score"] for row in kept], dtype=np.float64)
        for name, oracle in seconds.items():
            second = judge(oracle, asked, texts)
            own[f"info/{name}_agreement"] = agreement(proxy, second.scores)
            if DISAGREEMENT in second.details:
                own[f"info/{DISAGREEMENT}"] = float(mean_known(second.details[DISAGREEMENT]))
        told[step] = own
    return told
