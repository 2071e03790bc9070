"""Runs of a real policy under the sandbox's detector: what it would have warned of, and what became of both golds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ...errors import DataError
from ...monitors import Detector, watch
from ..harness.stored import file_name
from ..harness.study import Row
from .runs import ERRORS, samples_as_it_learns

GOLDS: Final = ("a", "b")
PARTS: Final = ("peak", "peak_step", "lost", "lost_error", "fallen")
FACTS: Final = ("method", "flip", "seed", "step")
COLUMNS: Final = (*FACTS, "warned", *(f"{name}_{part}" for name in GOLDS for part in PARTS))

Runs = dict[Path, list[Row]]
"""Folder of a run -> its rows of gold, a place each."""


def find_real(folder: Path) -> Runs:
    """The runs of a study of a real policy that sample as they learn.

    Raises:
        DataError: The folder has none.
    """
    found: Runs = {}
    for path in sorted((folder / "cells").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        places = [row for row in content["rows"] if row.get("table") == "runs"]
        run = folder / "runs" / file_name(content["key"])
        if places and samples_as_it_learns(run):
            found[run] = places
    if not found:
        raise DataError(f"--real: {folder}: expected a real policy's runs that sample as they learn, found none.")
    return found


def real_rows(runs: Runs, detector: Detector) -> list[Row]:
    """A row a run: its last step, the one that is warned of, and each gold's peak and fall."""
    rows = []
    for run, places in runs.items():
        row: Row = {name: places[-1][name] for name in FACTS} | {"warned": watch(run, detector)}
        for name in GOLDS:
            row |= fall_of(name, places)
        rows.append(row)
    return rows


def fall_of(name: str, places: Sequence[Row]) -> Row:
    """What one gold gains at its peak and loses from there to the end, and whether that is a fall.

    Errors are over instructions. Those of peak and end are taken as independent: so the fall's is too large.
    """
    gold, errors = (np.array([row[f"gold_{name}{end}"] for row in places]) for end in ("", "_error"))
    peak = int(gold.argmax())
    lost, error = float(gold[peak] - gold[-1]), float(np.hypot(errors[peak], errors[-1]))
    values = (float(gold[peak]), places[peak]["step"], lost, error, int(lost > ERRORS * error))
    return {f"{name}_{part}": value for part, value in zip(PARTS, values, strict=True)}
