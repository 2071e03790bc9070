"""Self-rewarding: a policy of the sandbox rates its own answers and learns from its ratings, and what gold says of it.

    python -m alpacafarm_env.benchmarks.self_rewarding [--quick] [--seeds N] [--rounds N]

The shipped policy learns to rate, by SFT on ratings of the simulated human raters among demonstrations (then it is M1).
From M1 the same rounds are made three times: rated by the policy itself as it is in each round, by M1 as it was, and by
the raters. A round samples 4 responses to each of 300 new instructions, and DPO prefers the best rated to the worst.

Source: Yuan et al. 2024, "Self-Rewarding Language Models" (arXiv 2401.10020).
"""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

from ..harness.estimates import Estimate
from ..harness.page import Drawn, Page, read_table
from ..harness.plots import Curve, Panel, draw
from ..harness.report import (
    SIMULATION,
    Section,
    Table,
    Verdict,
    interval_text,
    number,
    seeds_text,
    sentences,
    settings_table,
    signed,
    text_table,
    write_report,
)
from ..harness.runner import Cell, run_cells
from ..harness.sources import sandbox_sources
from ..harness.study import Study, StudyOptions, run_command, versions
from .runs import COLUMNS, JUDGES, NUM_FIXED, Plan, run_seed

NAME = "self_rewarding"
QUICK: dict[str, int] = {
    "num_instructions": 64,
    "num_ratings": 1_500,
    "num_demonstrations": 500,
    "num_val": 200,
}
"""What --quick changes: to see that everything works; the policy hardly learns to rate."""


@dataclass(frozen=True)
class SelfRewardingOptions(StudyOptions):
    """Options of the study."""

    seeds: int = 3
    """Number of independent runs: seeds 0 .. N-1, of training, samples and the raters' opinions."""
    rounds: int = 3
    """Rounds of sampling, rating and DPO."""
    processes: int = 2
    """Seeds at a time, each in a process with one torch thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rounds", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)!r}")
        if self.data not in (None, "sandbox"):
            raise ValueError(f"--data: expected none, as only the sandbox has a gold reward, got {self.data!r}")

    def plan(self, seed: int) -> Plan:
        """What a seed does."""
        return Plan(seed, num_rounds=self.rounds, **(QUICK if self.quick else {}))


def run(options: SelfRewardingOptions) -> int:
    """Runs the study, writes its folder, prints the table and returns the exit status."""
    options.refuse_taken(NAME)
    plans = [options.plan(seed) for seed in range(options.seeds)]
    config = {**asdict(plans[0]), "sft": asdict(plans[0].sft), "self_rewarding": asdict(plans[0].rounds)}
    del config["seed"]
    with options.study(NAME, config, sources=sandbox_sources()) as study:
        print(f"{NAME} into {study.out}: seeds: {options.seeds}, {options.rounds} rounds each", file=sys.stderr)
        cells = [Cell(plan.cell, partial(run_seed, plan), plan.units) for plan in plans]
        if rows := run_cells(study, cells, processes=options.processes):
            study.write_table(rows, COLUMNS)
            write_results(study)
            return study.finish()
        return study.exit_status


def write_results(study: Study) -> None:
    """A figure, report.html and manifest, and the table on stdout."""
    found = page(study.out)
    table, figures = found.tables["gold"], found.write_figures(study.out).values()
    quick = ["Quick run: to see that everything works."] if study.quick else []
    meanings = [f"{judge}: {meaning}." for judge, meaning in JUDGES.items()]
    sections = [
        Section("Gold by round and judge", [SIMULATION, *quick, *meanings, *found.findings], table, [*figures]),
        Section("Settings", table=settings_table({**study.config, **versions()})),
    ]
    write_report(study.out / "report.html", "Self-rewarding in the sandbox", sections)
    study.note(level="sandbox", judge=JUDGES, reference="gold", label=table.caption, findings=found.findings)
    print(text_table(table), table.caption, *quick, *meanings, SIMULATION, *found.findings, sep="\n")
    print(f"Written to {study.out}: report.html, table.csv, manifest.json and a figure (PNG).")


def page(folder: Path) -> Page:
    """What the study's stored files say."""
    frame = read_table(folder / "table.csv")
    note, verdicts = label(frame), claims(frame)
    legend = f"Thin: seeds; bold: their mean; shaded: its 95 % t-interval. {where(frame)}"
    title = "Gold and length of the policy's responses by round, for each judge"
    figures = {"gold": Drawn(draw(panels(frame), title, legend), f"{title}. {legend}")}
    gain = verdicts["raises_gold"].numbers["gain"]
    headline = (
        f"gold {_signed(gain)} after {frame['round'].max():.0f} rounds on its own ratings, {seeds_text([gain.num])}"
    )
    told = sentences(f"{NAME}/findings.txt.j2", verdicts=verdicts, rounds=int(frame["round"].max()))
    return Page({"gold": summary(frame, note)}, told, figures, headline)


def claims(frame: pd.DataFrame) -> dict[str, Verdict]:
    """What is claimed of the last round, paired by seed, by name."""
    last = frame["round"].max()

    def of(measure: str, judge: str, number: float) -> "pd.Series[Any]":
        own = frame[(frame.judge == judge) & (frame["round"] == number)]
        return own.set_index("seed")[measure].astype(float)

    def verdict(name: str, minuend: "pd.Series[Any]", subtrahend: "pd.Series[Any]") -> Verdict:
        gain = Estimate.of((minuend - subtrahend).to_numpy(dtype=np.float64))
        return Verdict(name, gain.mean > 0 if gain.clear else None, {"gain": gain})

    gold = {judge: of("gold", judge, last) for judge in JUDGES}
    fixed, own = (
        [100 * of(measure, "self", number) for number in (last, 1)] for measure in ("agreement_fixed", "agreement")
    )
    found = [
        verdict("raises_gold", gold["self"], of("gold", "", 0)),
        verdict("beats_the_raters", gold["self"], gold["raters"]),
        verdict("beats_the_frozen_judge", gold["self"], gold["frozen"]),
        verdict("judges_better", *fixed),
        verdict("judges_its_own_better", *own),
    ]
    return {each.id: each for each in found}


def where(frame: pd.DataFrame) -> str:
    """Level and n, in one line."""
    num = int(frame.num_val.iloc[0])
    return (
        f"Level: sandbox (simulation); seeds: {frame.seed.nunique()}; val, n = {num} responses each, temperature 0.7."
    )


def label(frame: pd.DataFrame) -> str:
    """Level, n and what the columns of the table are."""
    return (
        f"{where(frame)} In parentheses standard errors over seeds. Agreement: share of the pairs of different gold "
        "that the judge of the round ordered as gold does, among the samples that led to the policy, and on "
        f"{NUM_FIXED} pairs of the split preference that are always the same."
    )


def summary(frame: pd.DataFrame, caption: str) -> Table:
    """A row for each policy: mean over seeds, with the standard error."""
    header = ("policy", "judge", "gold", "over M1", "characters", "agreement, %", "on fixed pairs, %", "pairs")
    start = frame[frame.policy == "M1"].set_index("seed").gold
    rows = []
    for (policy, judge), own in frame.groupby(["policy", "judge"], sort=False):
        by_seed = own.set_index("seed")
        gain = by_seed.gold - start.loc[by_seed.index]
        cells = [
            _cell(by_seed.gold),
            "" if policy == "M1" else _cell(gain, sign=True),
            _cell(by_seed.length, "characters"),
            _cell(100 * by_seed.agreement, "%"),
            _cell(100 * by_seed.agreement_fixed, "%"),
            _cell(by_seed.num_pairs, "characters"),
        ]
        rows.append((str(policy), str(judge), *cells))
    return Table(header, rows, caption)


def _signed(found: Estimate) -> str:
    """For instance "+0.64 [0.51, 0.77]"."""
    return f"{'+' if found.mean > 0 else ''}{interval_text(found.interval, '')}"


def _cell(values: "pd.Series[Any]", unit: str = "", *, sign: bool = False) -> str:
    found = Estimate.of(values.to_numpy(dtype=np.float64))
    if not found.num:
        return ""
    mean = signed(found.mean, unit) if sign else number(found.mean, unit)
    return mean if np.isnan(found.standard_error) else f"{mean} ({number(found.standard_error, unit)})"


def panels(frame: pd.DataFrame) -> list[Panel]:
    """Gold and length by round, a curve for each judge, all from M1."""
    start = frame[frame.policy == "M1"]

    def curves(measure: str) -> list[Curve]:
        found = []
        for judge in JUDGES:
            own = pd.concat([start, frame[frame.judge == judge]])
            values = own.pivot(index="seed", columns="round", values=measure).to_numpy(dtype=np.float64)
            rounds = np.broadcast_to(np.arange(values.shape[1], dtype=np.float64), values.shape)
            found.append(Curve(judge, rounds, values))
        return found

    return [
        Panel("rounds", "gold on val", curves("gold"), whole_x=True),
        Panel("rounds", "characters of a response", curves("length"), whole_x=True),
    ]


def main() -> int:
    """Runs the command and returns its exit status."""
    options = partial(tyro.cli, SelfRewardingOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}")
    return run_command(lambda: run(options(description=__doc__)))
