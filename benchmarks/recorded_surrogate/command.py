"""Reward models learned from real verdicts: do they know more than that longer is better, and what is their best worth?

    python -m alpacafarm_env.benchmarks.recorded_surrogate --data FOLDER [--quick] [--out DIR]

Learns surrogates of a recorded judge from its verdicts on published models' responses against one reference, and tests
them on models they never saw. table.csv has accuracy and AUC of each beside the baselines (the usual winner, the longer
response, a logistic model of length and list); models.csv the same of each model. best_of_n.csv: of n left-out models'
responses to an instruction the surrogate's favourite is taken; how often did the real judge prefer it to the reference?

Needs scikit-learn: pip install "alpacafarm-env[recorded]".
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import ClassVar, Final

import numpy as np
import tyro

from ...data.files import write_atomic
from ...data.load import DATA_VARIABLE, recorded_dataset
from ...errors import CheckpointError, DataError
from ..harness.runner import Cell, run_cells
from ..harness.study import Row, Study, StudyOptions, run_command
from . import report as recorded_surrogate_report
from .data import POOLS, PROTOCOLS, Array, Judged
from .features import Features
from .models import QUICK, SURROGATES, find_surrogate, score
from .summary import CHOOSERS, accuracy_rows, best_of_n_rows, model_rows

NAME: Final = "recorded_surrogate"
NUM_QUICK_INSTRUCTIONS: Final = 160
FOLDS: Final = 5
QUICK_FOLDS: Final = 2
BOTH_PROTOCOLS: Final = ("majority", "longer", "length_list", "length_list_weighted", "linear", "trees")
"""Also tested with instructions shared between training and test, to show what that is worth."""


@dataclass(frozen=True)
class SurrogateOptions(StudyOptions):
    """Learns reward models from recorded judgements and tests them on models that they never saw."""

    repeats: ClassVar[bool] = False
    seeds: int = 1
    """1 alone: the folds and the fits are always the same."""
    data: str | None = None
    """The folder with responses and judgements. Default: the environment variable ALPACAFARM_DATA."""
    surrogates: tuple[str, ...] = ()
    """Which to try beside the baselines. Default: all; with --quick without the slowest two."""


def plans(options: SurrogateOptions, judged: Judged) -> list[tuple[str, str]]:
    """(protocol or pool, surrogate) of every cell.

    Raises:
        UnknownNameError: A surrogate's name is none.
    """
    asked = options.surrogates or (QUICK if options.quick else tuple(s.name for s in SURROGATES))
    wanted = {find_surrogate(name).name for name in asked} | {s.name for s in SURROGATES if s.baseline} | set(CHOOSERS)
    names = [s.name for s in SURROGATES if s.name in wanted]
    found = [(PROTOCOLS[0], name) for name in names]
    found += [(PROTOCOLS[1], name) for name in names if name in BOTH_PROTOCOLS]
    # Where nearly all models are near the reference, none would be left to learn from.
    pools = [pool for pool in POOLS if 2 <= judged.members(pool).sum() <= len(judged.models) - 2]
    return found + [(pool, name) for pool in pools for name in CHOOSERS]


def run(options: SurrogateOptions) -> int:
    """Fits, tests, draws, prints and writes; returns the exit status."""
    folder = options.data or os.environ.get(DATA_VARIABLE)
    if not folder:
        raise DataError(f"--data: expected a folder of recorded judgements, got none; set it, or {DATA_VARIABLE}.")
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(f'{NAME}: needs the package scikit-learn. Install it: pip install "alpacafarm-env[recorded]"')
    dataset = recorded_dataset(folder)
    judged = Judged.of(dataset, NUM_QUICK_INSTRUCTIONS if options.quick else None)
    folds = QUICK_FOLDS if options.quick else FOLDS
    config = {"data_sha256": dataset.sha256, "num_instructions": len(judged.instructions), "folds": folds}
    with options.study(NAME, config) as study:
        features = Features(judged)
        wanted = plans(options, judged)
        cells = [
            Cell.silent(f"{protocol} {name}", partial(fit, study.out, judged, features, protocol, name, folds))
            for protocol, name in wanted
        ]
        costs = {row["cell"]: row["cpu_seconds"] for row in run_cells(study, cells)}
        scores = {key: read_scores(study.out, *key) for key in wanted if f"{key[0]} {key[1]}" in study.done}
        if not scores:
            return study.exit_status
        write(study, judged, scores, dataset.judge, costs)
        return study.finish()


def fit(out: Path, judged: Judged, features: Features, protocol: str, name: str, folds: int) -> list[Row]:
    """Scores all pairs that the protocol tests, stores them in scores/, and says what it cost."""
    start = process_time()
    found = score(judged, features, find_surrogate(name), protocol, folds)
    buffer = io.BytesIO()
    np.save(buffer, found, allow_pickle=False)
    path = scores_path(out, protocol, name)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, buffer.getvalue())
    return [{"cell": f"{protocol} {name}", "cpu_seconds": process_time() - start}]


def scores_path(out: Path, protocol: str, name: str) -> Path:
    """Where a cell's scores are stored."""
    return out / "scores" / f"{protocol.replace(' ', '_')}-{name}.npy"


def read_scores(out: Path, protocol: str, name: str) -> Array:
    """The stored scores [M, N].

    Raises:
        CheckpointError: They are gone or damaged.
    """
    path = scores_path(out, protocol, name)
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.float64)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{path}: expected the scores of a finished cell, got {error}. Remove {out / 'cells'} and call again."
        ) from error


def write(
    study: Study,
    judged: Judged,
    scores: Mapping[tuple[str, str], Array],
    judge: str,
    costs: Mapping[str, float],
) -> None:
    """Prints the tables and what they say; writes table.csv, models.csv, best_of_n.csv, the figures and the report."""
    tested = {key: found for key, found in scores.items() if key[0] in PROTOCOLS}
    results = recorded_surrogate_report.Results(
        judged,
        judge,
        accuracy_rows(judged, tested),
        model_rows(judged, tested),
        best_of_n_rows(judged, scores),
        costs,
    )
    recorded_surrogate_report.write(study, results)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(
        SurrogateOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args, description=__doc__
    )
    return run_command(partial(run, options))
