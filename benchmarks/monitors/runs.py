"""Finished runs of other studies: their signals, and apart from these, what became of gold.

A detector is given signals alone. `signal_rows` reads a run's metrics and kept responses, which hold no gold;
`outcomes_of` reads the study's cells, which hold nothing else.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import sandbox
from ...errors import DataError
from ...monitors import SIGNALS, read_run, table_of
from ...monitors.runs import METRICS, lines_of
from ...oracles import Ensemble, RewardModel
from ...oracles.base import RewardOracle
from ..experiment.fresh import OWN
from ..harness.estimates import other_peaks
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import file_name, unpack
from ..harness.study import Row
from ..surrogates.features import Array

MEMBERS: Final = 3
"""Reward models of an ensemble: a run's own, and those of other seeds on labels of the same kind."""
ERRORS: Final = 2.0
"""Standard errors, over instructions, by which gold lies below its peak where it has fallen."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    study: str
    cell: str
    method: str
    labels: str
    """Kind of labelling."""
    seed: int
    folder: Path
    """Of its metrics."""

    @property
    def group(self) -> tuple[str, str, str]:
        """Runs that differ in the seed alone."""
        return self.study, self.method, self.labels

    @property
    def name(self) -> str:
        """Among all studies."""
        return f"{self.study}: {self.cell}"


def find_runs(folders: Sequence[Path]) -> list[tuple[Run, Row]]:
    """The runs of finished studies that sample as they learn, each with the row of its gold.

    Raises:
        DataError: A folder has none.
    """
    found = []
    for folder in folders:
        own = list(_runs_of(folder))
        if not own:
            raise DataError(
                f"{folder}: expected the folder of a study with runs that sample as they learn, found none."
            )
        found += own
    return found


def _runs_of(folder: Path) -> Iterator[tuple[Run, Row]]:
    for path in sorted((folder / "cells").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        place = folder / "runs" / file_name(content["key"])
        rows = [row for row in content["rows"] if row.get("judge") == OWN]
        if not rows or not samples_as_it_learns(place):
            continue
        row = rows[0]
        method = row.get("method", "ppo")  # the study of noise has no other that samples
        labels = row["kind"] if row["kind"] != method else "flips" if row["flip"] else "clean labels"
        yield Run(folder.name, content["key"], method, labels, row["seed"], place), row


def samples_as_it_learns(run: Path) -> bool:
    """Whether a run's folder has metrics of responses that it sampled; one that learns from labels has none."""
    first = next(lines_of(run / METRICS), None) if (run / METRICS).is_file() else None
    return first is not None and "score/mean" in first


def outcomes_of(runs: Sequence[tuple[Run, Row]]) -> dict[str, tuple[list[int], Array, np.ndarray[Any, Any]]]:
    """Run -> places, gold gained [K], and whether it has fallen there [K].

    The peak of a run is that of the other seeds' mean, so that the noise that chose it is not the noise of the fall.
    """
    groups: dict[Any, list[tuple[Run, Row]]] = defaultdict(list)
    for run, row in runs:
        groups[run.group].append((run, row))
    found = {}
    for group in groups.values():
        golds = [unpack(row["gold"], len(row["n"])) for _, row in group]
        peaks = other_peaks(np.stack([gold.mean(axis=0) for gold in golds])).tolist()
        for (run, row), gold, peak in zip(group, golds, peaks, strict=True):
            lost = gold[:, [peak]] - gold
            error = lost.std(axis=0, ddof=1) / np.sqrt(len(lost))
            past = (np.arange(gold.shape[1]) > peak) & (lost.mean(axis=0) > ERRORS * error)
            found[run.name] = (list(row["n"]), gold.mean(axis=0) - gold[:, 0].mean(), past)
    return found


def signal_rows(run: Run, places: Sequence[int], on_progress: ProgressFn) -> list[Row]:
    """The run's signals at each place but the first, with those of second opinions about its kept responses."""
    quiet()
    on_progress(ProgressUpdate(run.name, 0))
    seconds: dict[str, RewardOracle] = {"shipped": RewardModel(sandbox.REWARD_MODEL)}
    if (members := ensemble_of(run)) is not None:
        seconds["ensemble"] = members
    metrics = read_run(run.folder, seconds)
    if sealed := [name for row in metrics for name in row if "gold" in name or "win_rate" in name]:
        raise DataError(f"{run.folder}: expected metrics without gold, got {sealed[0]}.")
    by_step = {int(row["step"]): values for row, values in zip(metrics, table_of(metrics), strict=True)}
    facts = {"study": run.study, "method": run.method, "labels": run.labels, "run_seed": run.seed}
    samples = np.cumsum([row["tokens"] / row["tokens/mean"] for row in metrics])
    counts = {int(row["step"]): round(float(number)) for row, number in zip(metrics, samples, strict=True)}
    return [
        {**facts, "place": place, "samples": counts[place], **dict(zip(SIGNALS, by_step[place].tolist(), strict=True))}
        for place in places
        if place in by_step
    ]


def ensemble_of(run: Run) -> RewardOracle | None:
    """The run's reward model and those of the next seeds that there are; None of fewer than two."""
    study = run.folder.parent.parent
    settings = json.loads((run.folder / "settings.json").read_text(encoding="utf-8"))
    own = next(iter(settings.get("reward_models", {})), None)
    if own is None:
        return None
    pattern = re.sub(r"seed-\d+", "seed-{}", own)
    folders = [study / "reward_models" / pattern.format(run.seed + number) for number in range(10 * MEMBERS)]
    folders += [study / "reward_models" / pattern.format(number) for number in range(run.seed)]
    there = [folder for folder in folders if (folder / "model.safetensors").is_file()][:MEMBERS]
    return Ensemble([RewardModel(folder) for folder in there]) if len(there) > 1 else None
