"""The evaluation protocol's own validation: is win rate on the 805 instructions a good measuring instrument?

    python -m alpacafarm_env.benchmarks.protocol [--quick] [--seeds N] [--data FOLDER] [--ranking FOLDER] [--out DIR]

Sandbox: win rates of several generators by source of the evaluation set; how win rates on the evaluation set agree
(r^2, Spearman) with those on held-out users' instructions; how many instructions tell two generators apart. --ranking
adds the stored answers and policies of a finished `method_ranking`. Recorded, with --data or ALPACAFARM_DATA: win rates
of real models by source, agreement of GPT-4's and Claude's leaderboards, how many instructions tell two models apart.
roots.csv counts the root verbs of the instructions and the nouns they take.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), on its evaluation data.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import tyro

from ...data.load import DATA_VARIABLE, recorded_dataset
from ...folders import Content, hash_folder, hash_model
from ...sandbox import SANDBOX
from ..harness.estimates import frame_of
from ..harness.plots import write_png
from ..harness.report import SIMULATION, Figure, settings_table, text_table, write_report
from ..harness.runner import Cell, run_cells
from ..harness.sources import extras_digest, judgements_digest, sandbox_sources
from ..harness.study import Row, Study, StudyOptions, run_command, versions, write_csv
from . import answers, levels, report, roots
from .held_out import EVAL, questions

NAME: Final = "protocol"
NUM_EVAL: Final = (805, 201)
"""Evaluation instructions of a full and of a quick study."""
NUM_LIVE: Final = (400, 100)
"""Held-out users' instructions, and fresh ones."""
REPEATS: Final = (20, 5)
"""Shuffles of the paired tests."""
RESAMPLES: Final = (2_000, 200)
FIGURES: Final = ("sources_sandbox", "sources_recorded", "live", "judges", "pairs", "roots_sandbox", "roots_recorded")


@dataclass(frozen=True)
class ProtocolOptions(StudyOptions):
    """Measures the evaluation protocol: sources, agreement with held-out users, power, judges' leaderboards."""

    seeds: int = 3
    """Number of answers of each generator, each judged with another opinion."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""
    ranking: Path | None = None
    """The folder of a finished method_ranking, whose methods join the sandbox's generators."""


def run(options: ProtocolOptions) -> int:
    """Answers, judges, compares, prints and writes; returns the exit status."""
    quick, ranking, folder = options.quick, options.ranking, options.data or os.environ.get(DATA_VARIABLE)
    asked = cache(partial(questions, NUM_EVAL[quick], NUM_LIVE[quick]))  # drawn when first needed
    cells = answers.cells(asked, range(options.seeds), ranking)
    dataset = recorded_dataset(folder) if folder else None
    sizes = {"repeats": REPEATS[quick], "resamples": RESAMPLES[quick]}
    sources = dict(sandbox_sources()) | ({"--ranking": partial(ranking_content, ranking)} if ranking else {})
    config = {"num_eval": NUM_EVAL[quick], "num_live": NUM_LIVE[quick], **sizes}
    with options.study(NAME, config, sources=sources) as study:
        answered = run_cells(study, cells, last=False)
        parts = []
        if answered:
            done = json.dumps([cell.key for cell in cells if cell.key in study.done])
            names = hashlib.sha256(done.encode()).hexdigest()[:16]
            parts.append(Cell.silent(f"sandbox {names}", lambda: levels.sandbox_rows(answered, asked(), **sizes)))
        if dataset is not None:
            digest = extras_digest(dataset.path, judgements_digest(dataset), ("leaderboard_",))
            parts.append(Cell.silent(f"recorded {digest[:16]}", partial(levels.recorded_rows, dataset, **sizes)))
        rows = run_cells(study, parts)
        if not rows:
            return study.exit_status
        counted = [row for split in ("sft", EVAL) for row in roots.count("sandbox", split, SANDBOX.instructions(split))]
        if dataset is not None:
            counted += roots.count("recorded", EVAL, dataset.instructions(EVAL))
        write_csv(study.out / "roots.csv", counted)
        write_results(study, rows, counted, quick=quick)
        return study.finish()


def write_results(study: Study, rows: Sequence[Row], counted: Sequence[Row], *, quick: bool) -> None:
    """Table, figures, report and manifest, and the summary on stdout; removes figures without rows.

    `counted` are the rows of `roots.count`.
    """
    study.write_table(rows)
    frame, num_seeds = frame_of(rows), len(study.seeds)
    found, levels = report.findings(frame), frame.level.unique().tolist()
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)} in the sandbox."
    note = f"Level: {', '.join(report.LEVELS[level] for level in levels)}. {seeds}"
    mode = ["A quick run: a smaller study of the same shape, for a look at it."] if quick else []
    tables = {
        "Agreement of two evaluations over generators": report.agreement_table(frame, "live", "judges"),
        "Agreement between sources": report.agreement_table(frame, "sources"),
        "Telling models apart": report.agreement_table(frame, "pairs"),
    }
    print("\n\n".join(f"{title}\n{text_table(table)}" for title, table in tables.items() if table.rows))
    print("\n".join(["", *mode, *found, note]))
    tables["Win rates by source"] = report.rate_table(frame, "sources")
    tables["Win rates on held-out instructions"] = report.rate_table(frame, "live")
    tables["What the held-out users ask"] = report.mixture_table(frame)
    drawings, figures = report.drawings(frame, note) | roots.drawings(counted), []
    for name in FIGURES:
        file = study.out / f"{name}.png"
        if name in drawings:
            title, drawing = drawings[name]
            figures.append((title, Figure(write_png(file, drawing), f"{title}. {note}")))
        else:
            file.unlink(missing_ok=True)
    values: dict[str, Any] = {"said": [*mode, SIMULATION, *found, note], "tables": tables, "figures": figures}
    values["settings"] = settings_table({**study.config, "seeds": num_seeds, **versions()})
    title = "The evaluation protocol, validated"
    write_report(study.out / "report.html", title, template=f"{NAME}/report.html.j2", **values)
    study.note(findings=found, quick=quick, levels=levels)


def ranking_content(folder: Path) -> Content:
    """The content of a ranking's stored answers and saved policies, whatever its place."""
    policies = {policy.parent.name: hash_model(policy) for policy in sorted(folder.glob("runs/*/policy"))}
    content = {"evaluations": hash_folder(folder / "evaluations"), **policies}
    return {f"{name}/{file}": found for name, files in content.items() for file, found in files.items()}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(ProtocolOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))
