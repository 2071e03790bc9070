"""Reward models of the sandbox fitted to ratings from 1 to 7, to the pairs those make, and to choices between pairs.

    python -m alpacafarm_env.benchmarks.ratings [--raters human] [--num 10000] [--quick] [--seeds N] [--out DIR]

All learn from the same pairs of responses, those of the split `preference`, by the same annotators:

    ratings    each response with its rating, by least squares
    binarized  each pair with the response that was rated higher, by Bradley-Terry; equally rated pairs are left out
    choices    each pair with the response that an annotator prefers when shown both, by Bradley-Terry

A rating is one annotator's look at one response, a choice one annotator's look at two: `binarized` has two looks a
pair, as `ratings` has, and `choices` has one. Updates hold as many responses, and there are as many passes over them.
What is measured: accuracy against gold on pairs of fresh instructions, as `reward_model_accuracy` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pandas as pd
import tyro
from scipy.special import expit

from ... import sandbox
from ...folders import hash_folder, hash_model
from ...instructions import Preference
from ...oracles.ratings import rated
from ...sandbox.dataset import ASSETS, Sandbox, label
from ...statistics import PERCENT
from ..experiment.reward_models import against_gold, fresh_pairs
from ..harness.estimates import Estimate, pivot
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import draw_rows
from ..harness.report import SIMULATION, Table, Verdict, interval_text, seeds_text, sentences, text_table, write_report
from ..harness.runner import Cell, ProgressFn, ProgressUpdate, quiet, run_cells
from ..harness.study import Row, Study, StudyOptions, run_command

if TYPE_CHECKING:
    from ...agents import RewardModeling

NAME = "ratings"
COLUMNS = ("seed", "data", "num_trained", "accuracy", "low", "high", "n", "num_correct")
DATA: Final = ("ratings", "binarized", "choices")
NUM_QUICK: Final = 500
NUM_FRESH: Final = 2000


@dataclass(frozen=True)
class RatingsOptions(StudyOptions):
    """Compares reward models fitted to ratings with ones fitted to pairs."""

    raters: Literal["human", "sim_eval", "sim_gpt4"] = "human"
    """Who rates and chooses: the sandbox's 16 human raters, its pool of 13, or one greedy annotator."""
    num: int = 10_000
    """Pairs of responses to learn from, 10000 at most; with --quick 500."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 10 <= self.num <= len(Sandbox().instructions("preference")):
            raise ValueError(f"--num: expected 10 to 10000 pairs, got {self.num!r}")
        if self.data not in (None, "sandbox"):
            raise ValueError(f"--data: expected none, since only the sandbox has a gold reward, got {self.data!r}.")


def fitted_to(data: str, raters: str, num: int, seed: int) -> tuple[RewardModeling, int]:
    """The agent that fits a reward model to `num` pairs of responses as `data` has them, and its number of records."""
    from ...agents import RatingModeling, RewardModeling, RewardModelingConfig

    config = RewardModelingConfig.sandbox()
    asked, pairs = Sandbox().instructions("preference")[:num], Sandbox().pairs()[:num]
    if data == "choices":
        chosen = label(asked, pairs, sandbox.judge(raters, seed))
        return RewardModeling(sandbox.POLICY, chosen, config=config, seed=seed), len(chosen)
    twice = [ask for ask in asked for _ in range(2)]
    ratings, _ = rated(sandbox.raters(raters, seed), twice, [response for pair in pairs for response in pair])
    if data == "binarized":
        found = zip(asked, pairs, ratings[::2], ratings[1::2], strict=True)
        settled = [
            Preference(ask, pair, 1 + (b.rating > a.rating)) for ask, pair, a, b in found if a.rating != b.rating
        ]
        return RewardModeling(sandbox.POLICY, settled, config=config, seed=seed), len(settled)
    config = replace(config, batch_size=2 * config.batch_size)  # as many responses as of pairs
    return RatingModeling(sandbox.POLICY, ratings, config=config, seed=seed), len(ratings)


def measure(data: str, raters: str, num: int, seed: int, num_fresh: int, on_progress: ProgressFn) -> list[Row]:
    """The row of one reward model: its accuracy against gold on `num_fresh` fresh pairs."""
    agent, num_trained = fitted_to(data, raters, num, seed)
    for metrics in agent.updates():
        on_progress(ProgressUpdate(f"{data} {seed}", 100 * metrics["step"] / agent.num_steps))
    pairs = fresh_pairs(Sandbox(), sandbox.POLICY, seed, num_fresh)
    a, b = (agent.score(pairs.instructions, texts) for texts in (pairs.a, pairs.b))
    row = against_gold(data, expit(b - a), pairs.gap)[0]
    return [{"seed": seed, "data": data, "num_trained": num_trained, **{name: row[name] for name in COLUMNS[3:]}}]


def run(options: RatingsOptions) -> int:
    """Trains, measures, prints and writes; the exit status says that all was done, not who is better."""
    num, num_fresh = (min(options.num, NUM_QUICK), NUM_FRESH // 5) if options.quick else (options.num, NUM_FRESH)
    sources = {"policy": partial(hash_model, sandbox.POLICY), "data": partial(hash_folder, ASSETS / "data")}
    with options.study(NAME, {"raters": options.raters, "num": num}, sources=sources) as study:
        cells = [
            Cell(f"{data} {seed}", partial(measure, data, options.raters, num, seed, num_fresh), 100)
            for seed in range(options.seeds)
            for data in DATA
        ]
        if rows := run_cells(study, cells):
            study.write_table(rows, COLUMNS)
            write_results(study)
            return study.finish()
        return study.exit_status


def write_results(study: Study) -> None:
    """Figure and report, and the summary on stdout."""
    found = page(study.out)
    table, figures = found.tables["accuracy"], found.write_figures(study.out)
    print("\n".join([text_table(table), "", table.caption, SIMULATION, *found.findings]))
    title, template = "Reward models fitted to ratings and to pairs", f"{NAME}/report.html.j2"
    write_report(study.out / "report.html", title, template=template, page=found, figures=figures)
    study.note(level="sandbox", reference="gold", label=table.caption, findings=found.findings)


def page(folder: Path) -> Page:
    """What the study's stored files say."""
    rows, raters = read_table(folder / "table.csv"), read_manifest(folder)["config"]["raters"]
    accuracy = pivot(rows.assign(accuracy=100 * rows.accuracy), "seed", "data", "accuracy").reindex(columns=list(DATA))
    note = (
        f"Level: sandbox (simulation); raters: {raters}; seeds: {len(accuracy)}, each with {rows.n.max()} fresh pairs; "
        "95 % t-intervals over seeds."
    )
    lines = [
        (name, str(int(rows[rows.data == name].num_trained.mean())), *_cells(accuracy[name], accuracy.binarized, name))
        for name in DATA
    ]
    table = Table(("trained on", "records", "accuracy, %", "minus binarized, points"), lines, note)
    title = "Accuracy against gold of reward models by what they are fitted to"
    shown = {name: accuracy[name].to_numpy() for name in DATA}
    drawing = draw_rows(shown, "fresh pairs ordered as gold orders them (%)", title, note, PERCENT)
    figures = {"accuracy": Drawn(drawing, f"{title}: seeds, their mean and its interval. {note}")}
    measured = f"{seeds_text([len(accuracy)])} of {rows.n.max()} pairs"
    gain = f"ratings less their pairs: {lines[0][-1]} points of accuracy, {measured}"
    return Page({"accuracy": table}, findings(accuracy), figures, gain)


def _cells(own: pd.Series[Any], other: pd.Series[Any], name: str) -> tuple[str, str]:
    gain = "" if name == "binarized" else interval_text(Estimate.of((own - other).to_numpy()).interval, "%")
    return interval_text(Estimate.of(own.to_numpy(), bounds=PERCENT).interval, "%"), gain


def findings(accuracy: pd.DataFrame) -> list[str]:
    """What the accuracies in percent say, a row for each seed."""
    gain = Estimate.of((accuracy.ratings - accuracy.binarized).to_numpy())
    numbers = {"gain": gain.interval, "settled": gain.clear}
    beaten = Verdict("ratings_beat_their_pairs", gain.interval.low > 0, numbers)
    return sentences(f"{NAME}/findings.txt.j2", verdict=beaten)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    quiet()
    options = tyro.cli(RatingsOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))
