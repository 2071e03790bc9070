"""The evaluation protocol's own validation: is win rate on the 805 instructions a good measuring instrument?

    python -m alpacafarm_env.benchmarks.protocol [--quick] [--seeds N] [--data FOLDER] [--ranking FOLDER] [--out DIR]

Sandbox: win rates of several generators on each of the five sources of the evaluation set; how win rates on the
evaluation set agree (r^2, Spearman) with those on instructions of simulated live users, which no split has; how many
instructions tell two generators apart. --ranking takes the stored answers and policies of a finished `method_ranking`
in as further generators. Recorded, where --data or ALPACAFARM_DATA is given: win rates of real models by source, how
GPT-4's and Claude's leaderboards agree, how many instructions tell two real models apart.

A seed is another answer of each generator and another opinion of each judge; both are averaged over the seeds before
an interval is taken over the instructions.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), on its evaluation data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import tyro

from ...data.load import DATA_VARIABLE, recorded_dataset
from ...folders import Content, hash_folder, hash_model
from ...sandbox import SANDBOX
from ...sandbox.dataset import Sandbox
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest, sandbox_sources
from ..harness.study import Row, StudyOptions, run_command
from . import answers as protocol_answers
from . import recorded as protocol_recorded
from . import report as protocol_report
from . import sandbox as protocol_sandbox
from .answers import Answering
from .live import Question, questions
from .statistics import COLUMNS

NAME: Final = "protocol"
NUM_EVAL: Final = (805, 201)
"""Evaluation instructions of a full and of a quick study."""
NUM_LIVE: Final = (400, 100)
"""Live, and as many fresh, instructions."""
REPEATS: Final = (20, 5)
"""Shuffles of the paired tests."""
RESAMPLES: Final = (2_000, 200)


@dataclass(frozen=True)
class ProtocolOptions(StudyOptions):
    """Measures the evaluation protocol: sources, agreement with live users, power, judges' leaderboards."""

    seeds: int = 3
    """Number of answers of each generator, each judged with another opinion."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""
    ranking: Path | None = None
    """The folder of a finished method_ranking, whose methods join the sandbox's generators."""

    def pick(self, sizes: tuple[int, int]) -> int:
        """The full study's size or the quick one's."""
        return sizes[1 if self.quick else 0]


class Asked:
    """The sets of instructions, drawn when first asked for."""

    def __init__(self, num_eval: int, num_others: int) -> None:
        self._sizes = (num_eval, num_others)

    @cached_property
    def questions(self) -> dict[str, Question]:
        """Set -> its instructions and references."""
        if not isinstance(SANDBOX, Sandbox):
            raise TypeError(f"expected the sandbox, got {type(SANDBOX).__name__}")
        return questions(SANDBOX, *self._sizes)

    def of(self, cell: Answering) -> list[Row]:
        """Lets a cell answer them."""
        return cell.run(self.questions)


def answerings(options: ProtocolOptions, out: Path) -> list[Answering]:
    """Who answers what.

    Raises:
        DataError: --ranking is no finished ranking.
    """
    seeds = range(options.seeds)
    found = protocol_answers.own(out, seeds)
    if options.ranking is not None:
        found += protocol_answers.ranked(options.ranking, out, seeds)
    return found


def run(options: ProtocolOptions) -> int:
    """Answers, judges, compares, prints and writes."""
    out = options.folder(NAME)
    sizes = {"repeats": options.pick(REPEATS), "resamples": options.pick(RESAMPLES)}
    asked = Asked(options.pick(NUM_EVAL), options.pick(NUM_LIVE))
    cells = answerings(options, out)
    folder = options.data or os.environ.get(DATA_VARIABLE)
    dataset = recorded_dataset(folder) if folder else None
    config = {
        "num_eval": options.pick(NUM_EVAL),
        "num_live": options.pick(NUM_LIVE),
        **sizes,
    }
    sources = dict(sandbox_sources())
    if options.ranking is not None:
        sources["--ranking"] = partial(ranking_content, options.ranking)
    with options.study(NAME, config, sources=sources) as study:
        run_cells(study, [Cell.silent(cell.cell, partial(asked.of, cell)) for cell in cells], last=False)
        done = [cell for cell in cells if cell.cell in study.done]
        parts = []
        if done:
            names = hashlib.sha256(json.dumps([cell.cell for cell in done]).encode()).hexdigest()[:16]
            parts.append(Cell.silent(f"sandbox {names}", partial(sandbox_rows, done, asked, **sizes)))
        if dataset is not None:
            digest = recorded_digest(dataset.path, judgements_digest(dataset))
            parts.append(Cell.silent(f"recorded {digest[:16]}", partial(protocol_recorded.rows_of, dataset, **sizes)))
        rows = run_cells(study, parts)
        if not rows:
            return study.exit_status
        study.write_table(rows, COLUMNS)
        findings = protocol_report.write(study.out, rows, quick=options.quick, seeds=options.seeds, config=study.config)
        study.note(findings=findings, quick=options.quick, levels=list(dict.fromkeys(row["level"] for row in rows)))
        return study.finish()


def sandbox_rows(done: Sequence[Answering], asked: Asked, **sizes: int) -> list[Row]:
    """The sandbox's rows, from the stored answers."""
    return protocol_sandbox.rows_of(protocol_answers.collect(done), asked.questions, **sizes)


def recorded_digest(folder: Path, judged: str) -> str:
    """Hash of all files of the folder that are read: those that `judged` covers, and the published leaderboards."""
    found = hashlib.sha256(judged.encode())
    for file in sorted((folder / "extras").glob("leaderboard_*")):
        found.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def ranking_content(folder: Path) -> Content:
    """The content of a ranking's stored answers and saved policies, whatever its place."""
    policies = {policy.parent.name: hash_model(policy) for policy in sorted(folder.glob("runs/*/policy"))}
    answers = {"evaluations": hash_folder(folder / "evaluations")}
    return {f"{name}/{file}": found for name, files in (answers | policies).items() for file, found in files.items()}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(ProtocolOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))
