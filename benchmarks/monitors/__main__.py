"""The study of monitors: what tells that gold has fallen, without gold?

    python -m alpacafarm_env.benchmarks.monitors [--runs results/gold_axis results/noise]

It reads the runs of finished studies, trains nothing, and needs scikit-learn. Each run's signals are judged by
detectors that were fitted on the runs of other methods, or with other labels, beside single signals, a threshold on the
KL and a fixed step. detector.json is fitted on all runs; with `--real` it also judges the runs of a real policy.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from ...cli.options import Count
from ...errors import DataError
from ...monitors import SIGNALS
from ..harness.page import publish
from ..harness.runner import Cell, run_cells
from ..harness.study import Row, Study, StudyOptions, run_command, write_csv
from ..surrogates.features import scikit_learn
from .analysis import detector_of, detector_rows, group_rows, watched_of
from .page import page
from .real import COLUMNS, Runs, find_real, real_rows
from .runs import find_runs, outcomes_of, signal_rows

NAME = "monitors"


@dataclass(frozen=True)
class MonitorOptions(StudyOptions):
    """Options of the study of monitors."""

    name: ClassVar[str] = NAME
    repeats: ClassVar[bool] = False
    no_data: ClassVar[str] = "it reads the runs of other studies."

    runs: Annotated[tuple[Path, ...], Field(min_length=1)] = (Path("results/gold_axis"),)
    """Folders of finished studies whose runs are watched."""
    real: Path | None = None
    """Folder of `real_policy`, whose runs are watched by the detector of all the others."""
    seeds: Count = 1
    """Nothing is drawn but resamples."""
    processes: Count = 2
    """Runs that are read at a time."""


def run(options: MonitorOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status."""
    options.refuse_taken(NAME)
    scikit_learn()
    found = find_runs(options.runs)
    real = find_real(options.real) if options.real else {}
    outcomes = outcomes_of(found)
    if not any(past.any() for *_, past in outcomes.values()):
        raise DataError(f"--runs: expected some runs after whose peak gold falls, got none among {len(found)}.")
    names = [each.name for each, _ in found]
    cells = [Cell(each.name, partial(signal_rows, each, outcomes[each.name][0]), 5) for each, _ in found]
    with options.study(NAME, {"runs": names, "signals": list(SIGNALS)}) as study:
        print(f"{NAME} into {study.out}: {len(cells)} runs", file=sys.stderr)
        rows = run_cells(study, cells, processes=options.processes)
        if study.failed:
            return study.exit_status
        told = {(each.study, each.method, each.labels, each.seed): outcomes[each.name] for each, _ in found}
        write_results(study, [with_outcome(row, told) for row in rows], real)
        return study.finish()


def with_outcome(row: Row, told: Mapping[Any, Any]) -> Row:
    """A row of signals with what became of gold, beside it."""
    places, gold, past = told[row["study"], row["method"], row["labels"], row["run_seed"]]
    number = places.index(row["place"])
    return {**row, "gold": float(gold[number]), "past": bool(past[number])}


def write_results(study: Study, rows: list[Row], real: Runs) -> None:
    """The tables, the detector of all runs, and the page."""
    study.write_table([{name: _short(value) for name, value in row.items()} for row in rows])
    runs = watched_of(pd.read_csv(study.out / "table.csv"))
    write_csv(study.out / "detectors.csv", detector_rows(runs))
    write_csv(study.out / "groups.csv", group_rows(runs))
    fitted = detector_of(runs)
    fitted.save(study.out / "detector.json")
    write_csv(study.out / "real.csv", real_rows(real, fitted), COLUMNS)
    study.note(level="sandbox")
    publish(study, page(study.out))


def _short(value: Any) -> Any:
    """Five digits, and an empty cell for NaN."""
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.5g}")
    return value


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(MonitorOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
