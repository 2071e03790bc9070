"""How judges judge, beside the paper's: agreement, bias, variance, and likings for place, length and lists.

    python -m alpacafarm_env.benchmarks.annotators [--quick] [--seeds N] [--data FOLDER] [--out DIR]
    python -m alpacafarm_env.benchmarks.annotators --base-url URL [--pool NAME] [--model NAME | --models SPEC] ...

The same figures for judges of three levels, which every number names. Sandbox: human raters, the pool of 13 annotators
with and without noise, each of the 13 alone, the greedy one, on the shipped preference pairs with unequal responses.
Recorded, where --data or ALPACAFARM_DATA is given: GPT-4's and Claude's stored verdicts on real responses. Live, where
--base-url is given: a pool of LLM annotators behind an API, on some of the sandbox's pairs.

* agreement: share of pairs on which one opinion equals the human majority. For humans, of one opinion with the majority
  of the others; for a judge, of each of its opinions with the majority of all human ones. An even vote counts half.
* bias: share of pairs on which the majority of a judge's opinions is not that of the humans; 0 for humans.
* variance: share of pairs on which one opinion differs from the majority of the same judge's others. disagreement: on
  which two of its opinions differ.
* prefers_first, prefers_longer, prefers_lists: share of pairs won by the response shown first (where an order is
  known), by the longer one (where lengths differ by more than 8 characters, 30 for real models), by the one with a list
  (where exactly one has one).
* cost_per_1000: US dollars for 1,000 verdicts; nothing where nothing is paid. Answers kept from before are not counted.
* spearman: rank correlation of the judge's and the humans' win rates of four writers of the sandbox and the reference.
  Five points are few: how methods rank by simulated and by human feedback is what `method_ranking` measures.

A seed is a set of four opinions on each pair that no other seed has: seed s asks the judge seeds 4s .. 4s + 3. Opinions
on a pair are averaged, over the seeds too, before the 95 % interval is taken over the pairs, so that they do not pose
as independent (Student's; for a share of under 30 pairs, or of 0 or 1, Wilson's); `seed_min` and `seed_max` are the
least and greatest value of one seed. A live judge is asked for one seed's opinions, since each is paid for.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9; definitions as in the authors'
released analysis. The sandbox is a simulation beside the paper's numbers, no reproduction of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Final

import tyro

from ...data import RecordedDataset
from ...data.load import DATA_VARIABLE, recorded_dataset
from ...errors import DataError
from ...folders import hash_folder
from ...llm.endpoint import OPENAI_KEY
from ...sandbox.dataset import ASSETS, Sandbox
from ..harness import plots, report
from ..harness.evaluation import subset
from ..harness.report import text_table
from ..harness.report_text import SIMULATION
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest
from ..harness.study import Row, Study, StudyOptions, run_command
from . import figure as annotator_figure
from . import recorded as annotator_recorded
from . import report as annotator_report
from . import two_judges as annotator_two_judges
from .live import LEVEL, LivePool
from .sandbox import MEANINGS, Question, judge_rows, load_contests, load_pairs
from .targets import COLUMNS, SMALL
from .votes import LENGTH_GAP, PUBLISHED_LENGTH_GAP

NAME: Final = "annotators"
NUM_QUICK_PAIRS: Final = 1_000
NUM_QUICK_INSTRUCTIONS: Final = 200


@dataclass(frozen=True)
class AnnotatorsOptions(StudyOptions):
    """Measures judges, simulated, recorded or live, and puts each figure beside the paper's."""

    seeds: int = 3
    """Number of disjoint sets of four opinions on each of the sandbox's pairs."""
    data: str | None = None
    """A folder of recorded judgements. Default: the environment variable ALPACAFARM_DATA, or none."""
    sandbox: Path | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""
    base_url: str | None = None
    """The address of a live judge, up to "/v1"; none: no live judge."""
    pool: str = "alpaca_farm"
    """The live pool: a name (alpaca_farm, eval, ann, greedy, weighted) or a YAML file."""
    models: str | None = None
    """Which model plays which role: openai, sandbox (for judge-server), or a YAML file. Default: openai."""
    model: str | None = None
    """One model for all roles, instead of --models."""
    api_key_env: str = OPENAI_KEY
    """The environment variable that holds the API key."""
    max_concurrency: int = 64
    """Requests in flight at once; fewer when the server asks for it."""
    allow_insecure: bool = False
    """Take an http:// address of another machine, where anybody on the way can read the key and the texts."""
    pairs: int = 200
    """Number of the sandbox's pairs that a live judge is asked about, four times each."""
    budget_usd: float | None = None
    """What the ledger may have spent in all, in US dollars. Default: no limit."""
    ledger: Path | None = None
    """The file of answers and spending. Default: the user's own."""

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
            given = [f"--{name.replace('_', '-')}" for name in _LIVE if getattr(self, name) != _DEFAULTS[name]]
            if given:
                raise DataError(f"{', '.join(given)}: expected with --base-url, the address of the judge; got none.")
            return None
        return LivePool(**{name: getattr(self, name) for name in _LIVE})


_LIVE: Final = tuple(field.name for field in fields(LivePool))
_DEFAULTS: Final = {field.name: field.default for field in fields(AnnotatorsOptions)}


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
        failure = f"Live: FAILED: {' '.join(study.failed[key].split())}" if key in study.failed else ""
        if not rows:
            return study.exit_status
        note = partial(annotator_report.note, question=question, num_live=len(asked.pairs))
        write(study, rows, note, failure)
        names = {role: model.model for role, model in live.played.items()} if live else {}
        facts = {"host": live.host, "pool": live.pool, "models": names} if live else None
        study.note(judges=MEANINGS, quick=options.quick, live=facts)
        return study.finish()


def write(study: Study, rows: Sequence[Row], note: Callable[[Sequence[str]], str], failure: str = "") -> None:
    """Prints the tables and what they say, and writes table.csv, the figure and the report.

    Args:
        study: Where to.
        rows: The table.
        note: What some levels are.
        failure: Why there are no live rows; it is said last.
    """
    levels = list(dict.fromkeys(row["level"] for row in rows))
    said = [SIMULATION, *annotator_report.verdicts(rows), *([failure] if failure else [])]
    sections: list[report.Section] = []
    for level in levels:
        main_rows = [row for row in annotator_report.whole(rows) if row["level"] == level]
        sections.append(report.Section(f"Level: {level}", [], annotator_report.figure_table(main_rows, "")))
        if alone := annotator_report.members(rows, level):
            heading = f"Level: {level}, each annotator of the pool by itself"
            heading += " (of how many pairs)" if level == LEVEL else ""
            sections.append(report.Section(heading, [], annotator_report.member_table(alone)))
    for section in sections:
        print(f"{section.heading}\n{text_table(section.table)}\n" if section.table else "")
    print("\n".join([note(levels), *said]))
    study.write_table(rows, COLUMNS)
    below = note(annotator_figure.drawn_levels(rows))
    png = plots.write_png(study.out / "annotators.png", annotator_figure.draw(rows, below))
    caption = f"Left: published values, and those measured. Right: judges that were asked several times. {below}"
    summary = report.Section("What the numbers say", said, None, [report.Figure(png, caption)])
    about = [*(__doc__ or "").split("\n\n")[2:], *annotator_report.meanings(rows)]
    page = [summary, *sections, report.Section("What is measured", about)]
    report.write_report(study.out / "report.html", "How judges judge", page)
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
