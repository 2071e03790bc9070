"""The evaluation protocol's own validation: is win rate on the 805 instructions a good measuring instrument?

    python -m alpacafarm_env.benchmarks.protocol [--quick] [--seeds N] [--data FOLDER] [--out DIR]

Sandbox: win rates of several generators by source of the evaluation set; how win rates on the evaluation set agree
(r^2, Spearman) with those on held-out users' instructions; how many instructions tell two generators apart. Recorded,
with --data or ALPACAFARM_DATA: win rates of real models by source, agreement of GPT-4's and Claude's leaderboards, how
many instructions tell two models apart.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), on its evaluation data.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, Final

from ...cli.options import Count
from ...data.load import DATA_VARIABLE, recorded_dataset
from ..harness.page import Drawn, Page, publish, read_manifest, read_table
from ..harness.report import sentences
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest, sandbox_sources
from ..harness.study import StudyOptions, run_command
from . import answers, levels, report

NAME: Final = "protocol"
NUM_EVAL: Final = (805, 201)
"""Evaluation instructions of a full and of a quick study."""
NUM_LIVE: Final = (400, 100)
"""Held-out users' instructions, and fresh ones."""
REPEATS: Final = (20, 5)
"""Shuffles of the paired tests."""
RESAMPLES: Final = (2_000, 200)
PRINTED: Final = ("agreement", "sources", "pairs")


@dataclass(frozen=True)
class ProtocolOptions(StudyOptions):
    """Measures the evaluation protocol: sources, agreement with held-out users, power, judges' leaderboards."""

    name: ClassVar[str] = NAME

    seeds: Count = 3
    """Number of answers of each generator, each judged with another opinion."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""


def run(options: ProtocolOptions) -> int:
    """Answers, judges, compares, prints and writes; returns the exit status."""
    quick, folder = options.quick, options.data or os.environ.get(DATA_VARIABLE)
    sets = cache(partial(answers.questions, NUM_EVAL[quick], NUM_LIVE[quick]))  # drawn when first needed
    cells = answers.cells(sets, range(options.seeds))
    dataset = recorded_dataset(folder) if folder else None
    sizes = {"repeats": REPEATS[quick], "resamples": RESAMPLES[quick]}
    config = {"num_eval": NUM_EVAL[quick], "num_live": NUM_LIVE[quick], **sizes}
    with options.study(NAME, config, sources=sandbox_sources()) as study:
        answered = run_cells(study, cells)
        parts = []
        if answered:
            done = json.dumps([cell.key for cell in cells if cell.key in study.done])
            names = hashlib.sha256(done.encode()).hexdigest()[:16]
            parts.append(Cell.silent(f"sandbox {names}", lambda: levels.sandbox_rows(answered, sets(), **sizes)))
        if dataset is not None:
            key = f"recorded {judgements_digest(dataset)[:16]}"
            parts.append(Cell.silent(key, partial(levels.recorded_rows, dataset, **sizes)))
        rows = run_cells(study, parts)
        if not rows:
            return study.exit_status
        study.write_table(rows)
        publish(study, page(study.out))
        return study.finish()


def page(folder: Path) -> Page:
    """The study's page, of its stored files."""
    rows = read_table(folder / "table.csv")
    note = report.note(rows, len(read_manifest(folder)["seeds"]))
    drawings = report.drawings(rows).items()
    figures = {name: Drawn(drawing, f"{title}. {note}") for name, (title, drawing) in drawings}
    return Page(
        "The evaluation protocol, validated",
        report.tables(rows),
        report.findings(rows),
        figures,
        report.headline(rows),
        method=sentences(f"{NAME}/method.txt.j2"),
        simulated="sandbox" in rows.level.unique(),
        printed=PRINTED,
    )


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(ProtocolOptions.parse(args)))


if __name__ == "__main__":
    sys.exit(main())
