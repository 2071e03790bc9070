"""How judges judge, next to the paper's: agreement, bias, variance, and likings for place, length and lists.

    python -m alpacafarm_env.benchmarks.annotators [--quick] [--seeds N] [--data FOLDER] [--out DIR]
    python -m alpacafarm_env.benchmarks.annotators --labels labels.json
    python -m alpacafarm_env.benchmarks.annotators --judge '{"pool": "alpaca_farm", "base_url": URL}' [--pairs N]
    python -m alpacafarm_env.benchmarks.annotators --served '{"model": NAME, "base_url": URL}' --data FOLDER [--pairs N]

Judges are of four levels: the sandbox's on its preference pairs; recorded ones, GPT-4 and Claude, with --data or
ALPACAFARM_DATA; live, a judge of one's own such as a pool of LLM annotators, with --judge; people, who labelled pairs
of their own, with --labels. --served asks a model by each of the pools' prompts, and writes served.csv alone.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Final

import pydantic

from ... import sandbox
from ...annotators.analysis import LENGTH_GAP, PUBLISHED_LENGTH_GAP
from ...cli.options import Count
from ...data.load import DATA_VARIABLE, recorded_dataset
from ...errors import DataError
from ...folders import hash_folder
from ...llm.requests import content_key
from ...sandbox.dataset import ASSETS, Sandbox
from ..experiment.own_judge import judge_content, judge_settings, make_own_comparer
from ..harness.page import Drawn, Page, publish, read_manifest, read_table
from ..harness.report import sentences
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest
from ..harness.study import StudyOptions, run_command
from . import report, served
from .judges import MEANINGS, NUM_OPINIONS, SMALL, Question, judge_rows, live_rows, load_contests, load_pairs, spread
from .recorded import people_rows, recorded_rows

NAME: Final = "annotators"
NUM_QUICK_PAIRS: Final = 1_000
NUM_QUICK_INSTRUCTIONS: Final = 200


@dataclass(frozen=True)
class AnnotatorsOptions(StudyOptions):
    """Measures judges, simulated, recorded or live, and puts each figure next to the paper's."""

    name: ClassVar[str] = NAME

    seeds: Count = 3
    """Number of disjoint sets of four opinions on each of the sandbox's pairs."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""
    labels: Path | None = None
    """A file of people's labels, as annotate-human writes it."""
    sandbox: Path | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""
    judge: str | None = None
    """A judge to measure on the sandbox's pairs: module:Name, or a JSON object with the keywords of a judge, as
    '{"pool": "alpaca_farm", "base_url": "http://localhost:8000/v1", "models": "models.yaml"}'."""
    pairs: Annotated[int, pydantic.Field(ge=2)] = 200
    """Number of the sandbox's pairs that it is asked about, four times each; of recorded pairs with --served."""
    served: str | None = None
    """Instead of all else, a served model, asked by each prompt of the pools about recorded pairs of --data: a JSON
    object with the keywords of a pool, as '{"model": NAME, "base_url": URL, "max_concurrency": 4}'."""
    prompts: tuple[str, ...] = ()
    """The prompts that --served asks by; default: all of the pools alpaca_farm and greedy."""
    max_characters: Count = 1_500
    """Of a recorded pair with its instruction, for --served: a small model reads slowly."""


def cells(options: AnnotatorsOptions, question: Question) -> list[Cell]:
    """A cell for each of the sandbox's judges, one for the recorded ones, and one each for people and --judge."""
    work = {f"{judge}, seeds={question.num_seeds}": partial(judge_rows, judge, question) for judge in MEANINGS}
    if folder := options.data or os.environ.get(DATA_VARIABLE):
        dataset = recorded_dataset(folder)
        work[f"recorded {judgements_digest(dataset)[:16]}"] = partial(recorded_rows, dataset)
    if options.labels:
        people_rows(options.labels)  # what is wrong with the file shows now, and not after the other judges' minutes
        digest = hashlib.sha256(options.labels.read_bytes()).hexdigest()
        work[f"people {digest[:16]}"] = partial(people_rows, options.labels)
    made = [Cell.silent(key, rows) for key, rows in work.items()]
    if options.judge is None:
        return made
    make_own_comparer(options.judge, sandbox.SANDBOX)
    digest = content_key([judge_settings(options.judge), judge_content(options.judge)])
    key, some = f"live {digest[:16]}, pairs={options.pairs}", spread(question.pairs, options.pairs)
    rows = partial(live_rows, options.judge, Question(some, question.contests, num_seeds=1), key)
    # First: what is wrong with its server shows at once, not after the sandbox's minutes.
    return [Cell(key, rows, weight=NUM_OPINIONS), *made]


def run(options: AnnotatorsOptions) -> int:
    """Asks, compares, prints and writes; the exit status says that all was done, not that all is within tolerance."""
    if options.served is not None:
        if not (folder := options.data or os.environ.get(DATA_VARIABLE)):
            raise DataError("--served: expected --data, a folder of recorded judgements, got none.")
        which = (options.pairs, options.max_characters, options.prompts)
        return served.run(options.served, folder, *which, out=options.folder(NAME))
    data = Sandbox(options.sandbox / "data" if options.sandbox else ASSETS / "data")
    pairs, contests = load_pairs(data), load_contests(data, NUM_QUICK_INSTRUCTIONS if options.quick else None)
    question = Question(spread(pairs, NUM_QUICK_PAIRS) if options.quick else pairs, contests, options.seeds)
    config = {
        "num_opinions": NUM_OPINIONS,
        "num_pairs": len(question.pairs),
        "num_contests": len(contests),
        "length_gap": [LENGTH_GAP, PUBLISHED_LENGTH_GAP],
        "wilson_below": SMALL,
    }
    work = cells(options, question)
    live = options.judge and {"judge": judge_settings(options.judge), "num_pairs": min(len(pairs), options.pairs)}
    with options.study(NAME, config, sources={"the sandbox's data": partial(hash_folder, data.folder)}) as study:
        rows = run_cells(study, work)
        if not rows:
            return study.exit_status
        study.write_table(sorted(rows, key=lambda row: row["level"] == "live"))
        study.note(judges=MEANINGS, live=live)
        publish(study, page(study.out))
        return study.finish()


def page(folder: Path) -> Page:
    """The study's page, of its stored files."""
    rows = read_table(folder / "table.csv")
    note = report.note(rows, read_manifest(folder))
    caption = f"Above: published values, and those measured. Below: judges that were asked several times. {note}"
    tables, findings = report.tables(rows), report.findings(rows)
    if (by_prompt := folder / served.FILE).is_file():
        tables[served.LEVEL], findings = (
            served.table(asked := read_table(by_prompt)),
            [*findings, served.finding(asked)],
        )
    who = {judge: meaning for judge, meaning in MEANINGS.items() if (rows.judge == judge).any()}
    return Page(
        "How judges judge",
        tables,
        findings,
        {"annotators": Drawn(report.draw(rows, note), caption)},
        report.headline(rows),
        method=sentences(f"{NAME}/method.txt.j2", meanings=who),
        simulated="sandbox" in rows.level.unique(),
    )


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(AnnotatorsOptions.parse(args)))


if __name__ == "__main__":
    sys.exit(main())
