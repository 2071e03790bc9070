"""The sandbox's annotators beside the paper's: agreement, variance, and likings for length and lists.

    python -m alpacafarm_env.benchmarks.calibration [--quick] [--seeds N] [--out DIR]

Several opinions are asked on each shipped preference pair with unequal responses: judge seeds 0 .. N-1. Definitions:

* agreement: share of pairs on which one opinion equals the human majority. For humans, of one opinion with the majority
  of the others; for a judge, of each of its opinions with the majority of all human ones. An even vote counts half.
* variance: share of pairs on which one opinion differs from the majority of the same judge's others.
* prefers_longer, prefers_lists: share of pairs won by the longer response (where lengths differ by more than
  `LENGTH_GAP` characters), by the response with a list (where exactly one has one).

Opinions on a pair are averaged before the 95 % interval is taken over the pairs, so that they do not pose as
independent. Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9; definitions as in the
authors' released analysis. It is a simulation beside the paper's numbers, no reproduction of them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import tyro
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from .. import sandbox
from ..errors import DataError
from ..oracles.base import PreferenceOracle, compare
from ..sandbox.dataset import ASSETS, Sandbox
from ..sandbox.judges import POOL, Annotators
from ..statistics import interval
from . import plots, report
from .evaluation import subset
from .study import Row, Study, StudyOptions, run_command
from .win_rate_report import SIMULATION, text_table

NAME = "calibration"
COLUMNS = ("judge", "figure", "value", "low", "high", "paper", "tolerance", "within", "n")
LENGTH_GAP: Final = 8
"""Characters; smaller differences in length say nothing. (The released code has 30, for longer responses.)"""
NUM_QUICK = 1_000
SINGLE: Final = "single annotators"
"""Each of the pool's 13 asked alone; figures are means over the 13."""

_LIST = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Target:
    """What the paper reports of a figure. All figures are shares in [0, 1]."""

    paper: float
    tolerance: float
    upper_bound: bool = False
    """The paper gives no value but "less than"."""

    def holds(self, value: float) -> bool:
        """Whether a value is within the tolerance."""
        return value - self.paper <= self.tolerance and (self.upper_bound or self.paper - value <= self.tolerance)

    def text(self) -> str:
        """As the paper says it."""
        return f"{'< ' if self.upper_bound else ''}{self.paper:.2f}"


TARGETS: Final = {
    ("human", "agreement"): Target(0.66, 0.03),
    ("sim_eval", "agreement"): Target(0.65, 0.03),
    ("sim_gpt4", "agreement"): Target(0.65, 0.03),
    ("human", "variance"): Target(0.35, 0.05),
    ("sim_eval", "variance"): Target(0.26, 0.05),
    ("sim_ann", "variance"): Target(0.43, 0.05),
    (SINGLE, "variance"): Target(0.20, 0.05, upper_bound=True),
    ("sim_gpt4", "variance"): Target(0.10, 0.05),
    ("human", "prefers_longer"): Target(0.62, 0.05),
    ("sim_eval", "prefers_longer"): Target(0.64, 0.05),
    ("human", "prefers_lists"): Target(0.69, 0.05),
    ("sim_eval", "prefers_lists"): Target(0.63, 0.05),
}
"""(judge, figure) -> the paper's value. Figures of a judge that are not here are measured too, beside nothing."""
MEANINGS: Final = {
    "human": "16 simulated human raters, one drawn for each pair and opinion",
    "sim_eval": "p_sim^eval: the pool of 13 simulated annotators, one drawn for each pair and opinion",
    "sim_ann": "p_sim^ann: the pool with 25 % of its labels flipped",
    SINGLE: "each of the 13 alone, mean of the 13",
    "sim_gpt4": "p_sim^GPT-4: one greedy simulated annotator",
}


@dataclass(frozen=True)
class CalibrationOptions(StudyOptions):
    """Compares the sandbox's simulated annotators with the paper's figures on annotators."""

    seeds: int = 4
    """Number of opinions on each pair, two or more: judge seeds 0 .. N-1 (the paper has four)."""
    data: str | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 2:
            raise ValueError(f"--seeds: expected 2 or more, to compare one opinion with others, got {self.seeds!r}")


@dataclass(frozen=True)
class Pairs:
    """Pairs of unequal responses to one instruction each, n of them, and how many opinions are asked on each."""

    instructions: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    num_opinions: int

    @classmethod
    def load(cls, data: Sandbox, num_opinions: int, num_pairs: int | None = None) -> Pairs:
        """The unequal ones of the stored preference pairs, all or `num_pairs` of them evenly spread."""
        both = zip(data.instructions("preference"), data.pairs(), strict=True)
        rows = [(instruction, a, b) for instruction, (a, b) in both if a != b]
        chosen = [rows[i] for i in subset(len(rows), num_pairs or len(rows))]
        instructions, a, b = zip(*chosen, strict=True)
        return cls(instructions, a, b, num_opinions)

    def __len__(self) -> int:
        return len(self.instructions)

    def ask(self, judge_of: Callable[[int], PreferenceOracle]) -> Array:
        """Votes [opinions, n]: 1 where b was preferred, 0 where a was; the judge of each seed is asked once.

        Raises:
            DataError: A judge had no verdict: the pairs are not of the sandbox's world.
        """
        judges = [judge_of(seed) for seed in range(self.num_opinions)]
        votes = np.array([compare(judge, self.instructions, self.a, self.b).scores for judge in judges])
        if not np.isin(votes, (0, 1)).all():
            row = int(np.flatnonzero(~np.isin(votes, (0, 1)).all(axis=0))[0])
            raise DataError(
                f"pair {row}: expected a verdict of {judges[0].name!r} for each pair, got none for "
                f"{self.instructions[row]!r}; only instructions of the sandbox can be judged."
            )
        return votes

    @cached_property
    def human_majority(self) -> Array:
        """[n] 1 for b, -1 for a, 0 for an even vote."""
        return majority(self.ask(partial(sandbox.judge, "human")))

    @cached_property
    def longer(self) -> Array:
        """[n] 1 where b is longer by more than `LENGTH_GAP`, -1 where a is, 0 elsewhere."""
        gap = np.array([len(b) - len(a) for a, b in zip(self.a, self.b, strict=True)])
        return np.sign(np.where(np.abs(gap) > LENGTH_GAP, gap, 0)).astype(np.float64)

    @cached_property
    def listed(self) -> Array:
        """[n] 1 where b alone has a list, -1 where a alone has one, 0 elsewhere."""
        return np.array([has_list(b) - has_list(a) for a, b in zip(self.a, self.b, strict=True)], dtype=np.float64)


def has_list(response: str) -> bool:
    """Whether a line starts with a bullet or a number."""
    return _LIST.search(response) is not None


def majority(votes: Array) -> Array:
    """What most of the votes [opinions, n] say, [n]: 1 for b, -1 for a, 0 for an even vote."""
    return np.asarray(np.sign(2 * votes.sum(axis=0) - len(votes)))


def agreement(votes: Array, side: Array) -> Array:
    """Share of the votes [opinions, n] on the side (1, -1; 0 = none, which counts half) [n] or [opinions, n]; [n]."""
    return np.asarray(np.where(side == 0, 0.5, (2 * votes - 1) == side).mean(axis=0))


def self_agreement(votes: Array) -> Array:
    """Share of the votes [opinions, n] that equal the majority of the others, [n]."""
    others = votes.sum(axis=0) - votes
    return agreement(votes, np.sign(2 * others - (len(votes) - 1)))


def figures(judge: str, votes: Array, pairs: Pairs) -> dict[str, Array]:
    """Figure -> its value for each pair that it is about; its mean is the figure."""
    to_itself = self_agreement(votes)
    return {
        "agreement": to_itself if judge == "human" else agreement(votes, pairs.human_majority),
        "variance": 1 - to_itself,
        "prefers_longer": agreement(votes, pairs.longer)[pairs.longer != 0],
        "prefers_lists": agreement(votes, pairs.listed)[pairs.listed != 0],
    }


def judge_rows(judge: str, pairs: Pairs) -> list[Row]:
    """The rows of one judge's figures."""
    if judge == SINGLE:
        members = [figures(judge, pairs.ask(partial(_alone, index)), pairs) for index in range(len(POOL))]
        values = {name: np.mean([member[name] for member in members], axis=0) for name in members[0]}
    else:
        values = figures(judge, pairs.ask(partial(sandbox.judge, judge)), pairs)
    return [_row(judge, name, per_pair) for name, per_pair in values.items()]


def _alone(index: int, seed: int) -> PreferenceOracle:
    return Annotators(POOL[index].name, [POOL[index]], seed=seed)


def _row(judge: str, figure: str, per_pair: Array) -> Row:
    found, target = interval(per_pair), TARGETS.get((judge, figure))
    return {
        "judge": judge,
        "figure": figure,
        "value": found.mean,
        "low": found.low,
        "high": found.high,
        "paper": target.paper if target else None,
        "tolerance": target.tolerance if target else None,
        "within": target.holds(found.mean) if target else None,
        "n": found.num,
    }


def make_table(rows: Sequence[Row], caption: str) -> report.Table:
    """The rows for people: figure by figure beside the paper's."""
    ordered = sorted(rows, key=lambda row: list(dict.fromkeys(r["figure"] for r in rows)).index(row["figure"]))
    header = ("figure", "judge", "paper", "sandbox", "95 % interval", "n", "tolerance", "within?")
    return report.Table(header, [_cells(row) for row in ordered], caption)


def _cells(row: Row) -> tuple[str, ...]:
    target = TARGETS.get((row["judge"], row["figure"]))
    beside = ("–", "–", "–")
    if target:
        sign = "+" if target.upper_bound else "±"
        beside = (target.text(), f"{sign}{target.tolerance:.2f}", "yes" if row["within"] else "NO")
    value, span = f"{row['value']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"
    return row["figure"], row["judge"], beside[0], value, span, str(row["n"]), beside[1], beside[2]


def verdict(rows: Sequence[Row]) -> str:
    """How many of the paper's figures are within their tolerance, and which are not."""
    told = [row for row in rows if row["within"] is not None]
    outside = [
        f"{row['judge']} {row['figure']} {row['value']:.3f} (paper {TARGETS[row['judge'], row['figure']].text()})"
        for row in told
        if not row["within"]
    ]
    words = f"{len(told) - len(outside)} of {len(told)} figures are within tolerance of the paper's"
    return f"{words}. Outside: {'; '.join(outside)}." if outside else f"{words}."


def draw(rows: Sequence[Row], note: str) -> Drawing:
    """Each figure that the paper has: its value with tolerance, and the sandbox's with interval."""
    told = [row for row in rows if row["paper"] is not None][::-1]
    figure = Drawing(figsize=(8.5, 2.0 + 0.32 * len(told)), dpi=150, layout="constrained")
    axis, places = figure.subplots(), np.arange(len(told))
    values: Any = np.array([[row[key] for key in ("paper", "tolerance", "value", "low", "high")] for row in told]).T
    paper, tolerance, value, low, high = values
    below = [row["paper"] if TARGETS[row["judge"], row["figure"]].upper_bound else row["tolerance"] for row in told]
    reach = (below, tolerance)
    axis.errorbar(paper, places, xerr=reach, fmt="none", ecolor="#cccccc", elinewidth=8, label="paper, tolerance")
    axis.plot(paper, places, "|", color="#555555", markersize=12, label="paper")
    span = np.array([value - low, high - value])
    axis.errorbar(value, places, xerr=span, fmt="o", color="#0072b2", markersize=5, label="sandbox, 95 % interval")
    axis.set_yticks(places, [f"{row['figure']}: {row['judge']}" for row in told], fontsize=8)
    axis.set(xlim=(0, 1), xlabel="share of pairs")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel(note, fontsize=7, color="#555555", x=0.01, ha="left")
    return figure


def run(options: CalibrationOptions) -> int:
    """Asks, compares, prints and writes; the exit status says that all was done, not that all is within tolerance."""
    data = Sandbox(Path(options.data) / "data" if options.data else ASSETS / "data")
    pairs = Pairs.load(data, options.seeds, NUM_QUICK if options.quick else None)
    digest = hashlib.sha256((data.folder / "pairs.jsonl.gz").read_bytes()).hexdigest()
    config = {"num_opinions": options.seeds, "num_pairs": len(pairs), "pairs_sha256": digest, "length_gap": LENGTH_GAP}
    study = Study(options.folder(NAME), NAME, config, seeds=range(options.seeds))
    rows = study.run({judge: partial(judge_rows, judge, pairs) for judge in MEANINGS}, unit="judge")
    if not rows:
        return study.exit_status
    note = f"Level: sandbox (simulation); {len(pairs)} preference pairs, {options.seeds} opinions on each."
    table, said = make_table(rows, note), verdict(rows)
    meanings = [f"{judge}: {meaning}." for judge, meaning in MEANINGS.items()]
    print("\n".join([text_table(table), note, SIMULATION, said]))
    study.write_table(rows, COLUMNS)
    png = plots.write_png(study.out / "calibration.png", draw(rows, note))
    sections = [
        report.Section("Annotators", [SIMULATION, said], table, [report.Figure(png, f"Paper and sandbox. {note}")]),
        report.Section("What is measured", [*(__doc__ or "").split("\n\n")[2:], *meanings]),
    ]
    report.write_report(study.out / "report.html", "Calibration of the sandbox's annotators", sections)
    study.note(level="sandbox", judges=MEANINGS, label=note, finding=said, quick=options.quick)
    return study.finish()


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(CalibrationOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
