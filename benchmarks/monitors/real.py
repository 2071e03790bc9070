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
COLUMNS: Final = (
    *("method", "flip", "seed", "step", "warned"),
    *(f"{name}_{part}" for name in GOLDS for part in ("peak", "peak_step", "lost", "lost_error", "fallen")),
)


def real_rows(folder: Path, detector: Detector) -> list[Row]:
    """A row a run of the study of a real policy: its last step, the one that is warned of, and gold's peak and fall.

    Raises:
        DataError: The folder has no run that samples as it learns.
    """
    rows = []
    for path in sorted((folder / "cells").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        places = [row for row in content["rows"] if row.get("table") == "runs"]
        run = folder / "runs" / file_name(content["key"])
        if places and samples_as_it_learns(run):
            told = {name: places[-1][name] for name in ("method", "flip", "seed", "step")}
            told["warned"] = watch(run, detector)
            rows.append({**told, **{key: value for name in GOLDS for key, value in fall_of(name, places).items()}})
    if not rows:
        raise DataError(
            f"{folder}: expected a study of a real policy with runs that sample as they learn, found none."
        )
    return rows


def fall_of(name: str, places: Sequence[Row]) -> Row:
    """What one gold gains at its peak and loses from there to the end, and whether that is a fall.

    Errors are over instructions. Those of peak and end are taken as independent: so the fall's is too large.
    """
    gold, errors = (np.array([row[f"gold_{name}{end}"] for row in places]) for end in ("", "_error"))
    peak = int(gold.argmax())
    lost, error = float(gold[peak] - gold[-1]), float(np.hypot(errors[peak], errors[-1]))
    values = (float(gold[peak]), places[peak]["step"], lost, error, int(lost > ERRORS * error))
    parts = ("peak", "peak_step", "lost", "lost_error", "fallen")
    return {f"{name}_{part}": value for part, value in zip(parts, values, strict=True)}
