"""How judges judge, beside the paper's: agreement, bias, variance, and likings for place, length and lists.

    python -m alpacafarm_env.benchmarks.annotators [--quick] [--seeds N] [--data FOLDER] [--out DIR]
    python -m alpacafarm_env.benchmarks.annotators --base-url URL [--pool NAME] [--model NAME | --models SPEC] ...

The same figures for judges of three levels, which every number names: the sandbox's on its preference pairs; recorded
ones, GPT-4 and Claude, where --data or ALPACAFARM_DATA is given; live ones, a pool of LLM annotators, where --base-url
is given. The report says what each figure is.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9; definitions as in the authors'
released analysis. The sandbox is a simulation beside the paper's numbers, no reproduction of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import tyro

from ...data import RecordedDataset
from ...data.load import DATA_VARIABLE, recorded_dataset
from ...errors import DataError
from ...folders import hash_folder
from ...llm.endpoint import OPENAI_KEY
from ...sandbox.dataset import ASSETS, Sandbox
from ..harness.estimates import frame_of
from ..harness.evaluation import subset
from ..harness.plots import write_png
from ..harness.report import SIMULATION, Figure, text_table, write_report
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest
from ..harness.study import Row, Study, StudyOptions, run_command
from . import figure as annotator_figure
from . import recorded as annotator_recorded
from . import report as words
from . import two_judges as annotator_two_judges
from .live import LEVEL, LivePool
from .sandbox import MEANINGS, Question, judge_rows, load_contests, load_pairs
from .targets import SMALL
from .votes import LENGTH_GAP, PUBLISHED_LENGTH_GAP

NAME: Final = "annotators"
NUM_QUICK_PAIRS: Final = 1_000
NUM_QUICK_INSTRUCTIONS: Final = 200


@dataclass(frozen=True)
class AnnotatorsOptions(LivePool, StudyOptions):
    """Measures judges, simulated, recorded or live, and puts each figure beside the paper's."""

    seeds: int = 3
    """Number of disjoint sets of four opinions on each of the sandbox's pairs."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""
    sandbox: Path | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""
    pairs: int = 200
    """Number of the sandbox's pairs that a live judge is asked about, four times each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs < 2:
            raise ValueError(f"--pairs: expected 2 or more, got {self.pairs!r}")
        if self.budget_usd is not None and not 0 < self.budget_usd < float("inf"):
            raise ValueError(f"--budget-usd: expected a number above 0, got {self.budget_usd!r}")
        if self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency: expected 1 or more, got {self.max_concurrency!r}")

    def live(self) -> LivePool | None:
        """Who is asked live, None for nobody.

        Raises:
            DataError: Options of a live judge without its address, or two that exclude each other.
        """
        if self.model is not None and self.models is not None:
            raise DataError("--model, one model for all roles: expected without --models, got both.")
        if self.base_url is None:
            options = [each for each in fields(LivePool) if getattr(self, each.name) != each.default]
            if given := [f"--{each.name.replace('_', '-')}" for each in options]:
                raise DataError(f"{', '.join(given)}: expected with --base-url, the address of the judge; got none.")
            return None
        return self


def cells(options: AnnotatorsOptions, question: Question) -> list[Cell]:
    """What is to be measured without a live judge: a cell for each of the sandbox's judges, one for the recorded ones.

    Raises:
        DataError: The folder of recorded judgements is none, or faulty.
    """
    num_seeds = question.num_seeds
    found = [Cell.silent(f"{judge}, seeds={num_seeds}", partial(judge_rows, judge, question)) for judge in MEANINGS]
    if folder := options.data or os.environ.get(DATA_VARIABLE):
        dataset = recorded_dataset(folder)
        key = f"recorded {judgements_digest(dataset)[:16]}"
        found.append(Cell.silent(key, partial(recorded_rows, dataset)))
    return found


def recorded_rows(dataset: RecordedDataset) -> list[Row]:
    """The recorded judges' rows."""
    return [*annotator_recorded.cross_rows(dataset.path), *annotator_two_judges.judge_rows(dataset)]


def run(options: AnnotatorsOptions) -> int:
    """Asks, compares, prints and writes; the exit status says that all was done, not that all is within tolerance."""
    live = options.live()
    if live:
        live.check()
    data = Sandbox(options.sandbox / "data" if options.sandbox else ASSETS / "data")
    pairs = load_pairs(data, NUM_QUICK_PAIRS if options.quick else None)
    contests = load_contests(data, NUM_QUICK_INSTRUCTIONS if options.quick else None)
    question = Question(pairs, contests, num_seeds=options.seeds)
    config = {
        "num_opinions": question.num_opinions,
        "num_pairs": len(pairs),
        "num_contests": len(contests),
        "length_gap": [LENGTH_GAP, PUBLISHED_LENGTH_GAP],
        "wilson_below": SMALL,
    }
    work = cells(options, question)
    sources = {"the sandbox's data": partial(hash_folder, data.folder)}
    with options.study(NAME, config, sources=sources) as study:
        asked = replace(question, pairs=pairs.take(subset(len(pairs), options.pairs)), num_seeds=1)
        # The live judge first: what is wrong with its server is known at once, not after the sandbox's minutes.
        key = f"live {live.digest()}, pairs={len(asked.pairs)}" if live else ""
        rows = run_cells(study, [*([Cell.silent(key, partial(live.rows, asked))] if live else []), *work])
        rows.sort(key=lambda row: row["level"] == LEVEL)
        failures = [
            f"{'Live' if cell == key else cell}: FAILED: {' '.join(why.split())}" for cell, why in study.failed.items()
        ]
        if not rows:
            return study.exit_status
        note = partial(words.note, question=question, num_live=len(asked.pairs))
        write_results(study, rows, note, failures)
        names = {role: model.model for role, model in live.played.items()} if live else {}
        facts = {"host": live.host, "pool": live.pool, "models": names} if live else None
        study.note(judges=MEANINGS, quick=options.quick, live=facts)
        return study.finish()


def write_results(
    study: Study, rows: Sequence[Row], note: Callable[[Iterable[str]], str], failures: Sequence[str] = ()
) -> None:
    """Table, figure, report and manifest, and the summary on stdout.

    Args:
        study: Where to.
        rows: The table.
        note: What some levels are.
        failures: What has no rows, and why; they are said last.
    """
    study.write_table(rows)
    frame = frame_of(rows)
    levels = frame.level.unique().tolist()
    said = [SIMULATION, *words.findings(frame), *failures]
    member, tables = words.is_member(frame), {}
    for level in levels:
        own = frame.level == level
        tables[f"Level: {level}"] = words.figure_table(frame[own & ~member])
        if (own & member).any():
            many = " (of how many pairs)" if level == LEVEL else ""
            heading = f"Level: {level}, each annotator of the pool by itself{many}"
            tables[heading] = words.member_table(frame[own & member])
    for heading, table in tables.items():
        print(f"{heading}\n{text_table(table)}\n")
    print("\n".join([note(levels), *said]))
    below = note(annotator_figure.drawn_levels(frame))
    png = write_png(study.out / "annotators.png", annotator_figure.draw(frame, below))
    caption = f"Left: published values, and those measured. Right: judges that were asked several times. {below}"
    who = {judge: meaning for judge, meaning in MEANINGS.items() if (frame.judge == judge).any()}
    values: dict[str, Any] = {"findings": said, "figure": Figure(png, caption), "tables": tables}
    template = f"{NAME}/report.html.j2"
    write_report(study.out / "report.html", "How judges judge", template=template, **values, meanings=who)
    study.note(levels=levels, label=note(levels), findings=said)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    given = sys.argv[1:] if args is None else args
    if any(text.split("=")[0].replace("_", "-") == "--api-key" for text in given):
        # Without this the key would be printed, as an option that is not known.
        print(f"error: --api-key: a key is never an argument; put it into ${OPENAI_KEY}.", file=sys.stderr)
        return 2
    options = tyro.cli(AnnotatorsOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))
