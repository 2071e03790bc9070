"""How judges judge, next to the paper's: agreement, bias, variance, and likings for place, length and lists.

    python -m alpacafarm_env.benchmarks.annotators [--quick] [--seeds N] [--data FOLDER] [--out DIR]
    python -m alpacafarm_env.benchmarks.annotators --labels labels.json
    python -m alpacafarm_env.benchmarks.annotators --base-url URL [--pool NAME] [--model NAME | --models SPEC] ...

Judges are of four levels: the sandbox's on its preference pairs; recorded ones, GPT-4 and Claude, with --data or
ALPACAFARM_DATA; live ones, a pool of LLM annotators, with --base-url; people, who labelled pairs of their own, with
--labels.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Final

from ...annotators.analysis import LENGTH_GAP, PUBLISHED_LENGTH_GAP, Pairs
from ...cli.options import parse
from ...data.load import DATA_VARIABLE, recorded_dataset
from ...errors import DataError
from ...folders import hash_folder
from ...llm.endpoint import OPENAI_KEY
from ...sandbox.dataset import ASSETS, Sandbox
from ..experiment.evaluation import subset
from ..harness.page import Drawn, Page, publish, read_manifest, read_table
from ..harness.report import sentences
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest
from ..harness.study import StudyOptions, run_command
from . import report
from .live import LEVEL, LivePool
from .recorded import labels_digest, people_rows, recorded_rows
from .rows import SMALL
from .sandbox import MEANINGS, Question, judge_rows, load_contests, load_pairs

NAME: Final = "annotators"
NUM_QUICK_PAIRS: Final = 1_000
NUM_QUICK_INSTRUCTIONS: Final = 200


@dataclass(frozen=True)
class AnnotatorsOptions(LivePool, StudyOptions):
    """Measures judges, simulated, recorded or live, and puts each figure next to the paper's."""

    seeds: int = 3
    """Number of disjoint sets of four opinions on each of the sandbox's pairs."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""
    labels: Path | None = None
    """A file of people's labels, as annotate-human writes it."""
    sandbox: Path | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""
    pairs: int = 200
    """Number of the sandbox's pairs that a live judge is asked about, four times each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs < 2:
            raise ValueError(f"--pairs: expected 2 or more, got {self.pairs!r}")

    def live(self) -> LivePool | None:
        """The live pool, checked; None for none.

        Raises:
            AlpacaFarmError: Options of a live judge without its address, or see `LivePool.check`.
        """
        if self.base_url is not None:
            self.check()
            return self
        options = [each for each in fields(LivePool) if getattr(self, each.name) != each.default]
        if given := [f"--{each.name.replace('_', '-')}" for each in options]:
            raise DataError(f"{', '.join(given)}: expected with --base-url, the address of the judge; got none.")
        return None


def cells(options: AnnotatorsOptions, question: Question) -> list[Cell]:
    """A cell for each of the sandbox's judges, one for the recorded ones, and one for people."""
    work = {f"{judge}, seeds={question.num_seeds}": partial(judge_rows, judge, question) for judge in MEANINGS}
    if folder := options.data or os.environ.get(DATA_VARIABLE):
        dataset = recorded_dataset(folder)
        work[f"recorded {judgements_digest(dataset)[:16]}"] = partial(recorded_rows, dataset)
    if options.labels:
        work[f"people {labels_digest(options.labels)[:16]}"] = partial(people_rows, options.labels)
    return [Cell.silent(key, rows) for key, rows in work.items()]


def live_cell(live: LivePool, num: int, question: Question) -> Cell:
    """The cell of the live pool: one seed's opinions on `num` of the pairs, evenly spread."""
    pairs = question.pairs
    rows = list(zip(pairs.instructions, pairs.a, pairs.b, strict=True))
    some = replace(question, pairs=Pairs.of([rows[i] for i in subset(len(rows), num)]), num_seeds=1)
    return Cell.silent(f"live {live.digest()}, pairs={num}", partial(live.rows, some))


def run(options: AnnotatorsOptions) -> int:
    """Asks, compares, prints and writes; the exit status says that all was done, not that all is within tolerance."""
    live = options.live()
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
    work, facts = cells(options, question), None
    if live:
        num = min(len(pairs), options.pairs)
        # First: what is wrong with its server shows at once, not after the sandbox's minutes.
        work.insert(0, live_cell(live, num, question))
        models = {role: model.model for role, model in live.played.items()}
        facts = {"host": live.host, "pool": live.pool, "models": models, "num_pairs": num}
    with options.study(NAME, config, sources={"the sandbox's data": partial(hash_folder, data.folder)}) as study:
        rows = run_cells(study, work)
        if not rows:
            return study.exit_status
        study.write_table(sorted(rows, key=lambda row: row["level"] == LEVEL))
        study.note(judges=MEANINGS, live=facts)
        publish(study, page(study.out))
        return study.finish()


def page(folder: Path) -> Page:
    """The study's page, of its stored files."""
    rows = read_table(folder / "table.csv")
    note = report.note(report.drawn_levels(rows), read_manifest(folder))
    caption = f"Above: published values, and those measured. Below: judges that were asked several times. {note}"
    figures = {"annotators": Drawn(report.draw(rows, note), caption)}
    who = {judge: meaning for judge, meaning in MEANINGS.items() if (rows.judge == judge).any()}
    return Page(
        "How judges judge",
        report.tables(rows),
        report.findings(rows),
        figures,
        report.headline(rows),
        method=sentences(f"{NAME}/method.txt.j2", meanings=who),
        simulated="sandbox" in rows.level.unique(),
    )


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    given = sys.argv[1:] if args is None else args
    if any(text.split("=")[0].replace("_", "-") == "--api-key" for text in given):
        # Without this the key would be printed, as an unknown option.
        print(f"error: --api-key: a key is never an argument; put it into ${OPENAI_KEY}.", file=sys.stderr)
        return 2
    prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
    return run_command(lambda: run(parse(AnnotatorsOptions, args, prog=prog)))
