"""How judges judge, beside the paper's: agreement, bias, variance, and likings for place, length and lists.

    python -m alpacafarm_env.benchmarks.annotators [--quick] [--seeds N] [--data FOLDER] [--out DIR]
    python -m alpacafarm_env.benchmarks.annotators --base-url URL [--pool NAME] [--models SPEC] [--budget-usd X]

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
as independent; `seed_min` and `seed_max` are the least and greatest value of one seed. A live judge is asked for one
seed's opinions, since each is paid for.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9; definitions as in the authors'
released analysis. The sandbox is a simulation beside the paper's numbers, no reproduction of them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import tyro

from ..sandbox.dataset import ASSETS, Sandbox
from . import annotator_recorded, annotator_report, annotator_two_judges, plots, report
from .annotator_live import LivePool
from .annotator_sandbox import MEANINGS, Question, judge_rows, load_contests, load_pairs
from .annotator_targets import COLUMNS
from .annotator_votes import LENGTH_GAP, PUBLISHED_LENGTH_GAP
from .evaluation import subset
from .leaderboard import DATA_VARIABLE
from .study import Row, Study, StudyOptions, run_command
from .win_rate_report import SIMULATION, text_table

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
    """The address of a live judge, up to "/v1"; none: no live judge. Its key is read from $OPENAI_API_KEY."""
    pool: str = "alpaca_farm"
    """The live pool: a name (alpaca_farm, eval, ann, greedy, weighted) or a YAML file."""
    models: str = "openai"
    """Which model plays which role: openai, sandbox, "model=NAME" for one model in all roles, or a YAML file."""
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

    def live(self) -> LivePool | None:
        """Who is asked live, None for nobody."""
        if self.base_url is None:
            return None
        return LivePool(self.base_url, self.pool, self.models, self.ledger, self.budget_usd)


Cells = dict[str, Callable[[], Sequence[Row]]]


def cells(options: AnnotatorsOptions, question: Question) -> Cells:
    """What is to be measured: a cell for each of the sandbox's judges, for the recorded ones, for the live one.

    Raises:
        DataError: The folder of recorded judgements is none, or faulty.
    """
    found: Cells = {f"{judge}, seeds={question.num_seeds}": partial(judge_rows, judge, question) for judge in MEANINGS}
    if folder := options.data or os.environ.get(DATA_VARIABLE):
        dataset = annotator_two_judges.load(folder)
        found[f"recorded {annotator_two_judges.digest(dataset)[:16]}"] = lambda: [
            *annotator_recorded.cross_rows(dataset.path),
            *annotator_two_judges.judge_rows(dataset),
        ]
    if live := options.live():
        asked = replace(question, pairs=question.pairs.take(subset(len(question.pairs), options.pairs)), num_seeds=1)
        found[f"live {live.digest()}, pairs={len(asked.pairs)}"] = partial(live.rows, asked)
    return found


def run(options: AnnotatorsOptions) -> int:
    """Asks, compares, prints and writes; the exit status says that all was done, not that all is within tolerance."""
    data = Sandbox(options.sandbox / "data" if options.sandbox else ASSETS / "data")
    pairs = load_pairs(data, NUM_QUICK_PAIRS if options.quick else None)
    contests = load_contests(data, NUM_QUICK_INSTRUCTIONS if options.quick else None)
    question = Question(pairs, contests, num_seeds=options.seeds)
    config = {
        "num_opinions": question.num_opinions,
        "num_pairs": len(pairs),
        "num_contests": len(contests),
        "pairs_sha256": hashlib.sha256((data.folder / "pairs.jsonl.gz").read_bytes()).hexdigest(),
        "length_gap": [LENGTH_GAP, PUBLISHED_LENGTH_GAP],
    }
    work = cells(options, question)
    study = Study(options.folder(NAME), NAME, config, seeds=range(options.seeds))
    rows = study.run(work, unit="judge")
    if not rows:
        return study.exit_status
    write(study, rows, options, question)
    return study.finish()


def write(study: Study, rows: Sequence[Row], options: AnnotatorsOptions, question: Question) -> None:
    """Prints the tables and what they say, and writes table.csv, the figure and the report."""
    levels = list(dict.fromkeys(row["level"] for row in rows))
    note = (
        f"Level sandbox: a simulation, {len(question.pairs)} preference pairs, {question.num_opinions} opinions on "
        f"each in each of {question.num_seeds} seeds. Level recorded: stored verdicts of real judges. Level live: a "
        "judge behind an API, on pairs of the sandbox."
    )
    said = annotator_report.verdicts(rows)
    tables = {
        level: annotator_report.figure_table(
            [row for row in rows if row["level"] == level and not annotator_report.is_member(row)], f"Level: {level}."
        )
        for level in levels
    }
    alone = annotator_report.member_table([row for row in rows if annotator_report.is_member(row)], "Level: sandbox.")
    shown = [text_table(table) + "\n" for table in tables.values()]
    print("\n".join([*shown[:1], "Each of the pool's 13 alone (sandbox):", text_table(alone) + "\n", *shown[1:], note]))
    print("\n".join([SIMULATION, *said]))
    study.write_table(rows, COLUMNS)
    png = plots.write_png(study.out / "annotators.png", annotator_report.draw(rows, note))
    figure = report.Figure(png, f"Left: paper and sandbox. Right: the sandbox's judges. {note}")
    sections = [report.Section("What the numbers say", [SIMULATION, *said], None, [figure])]
    sections += [report.Section(f"Level: {level}", [], table) for level, table in tables.items()]
    sections += [
        report.Section("Each of the pool's 13 alone", [], alone),
        report.Section("What is measured", [*(__doc__ or "").split("\n\n")[2:], *annotator_report.meanings(rows)]),
    ]
    report.write_report(study.out / "report.html", "How judges judge", sections)
    live = options.live()
    asked = {"host": live.host, "pool": live.pool, "models": live.models} if live else None
    study.note(levels=levels, judges=MEANINGS, label=note, findings=said, quick=options.quick, live=asked)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(AnnotatorsOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
