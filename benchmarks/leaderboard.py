"""The recorded leaderboard: stored responses of real models replayed through the environment.

    python -m alpacafarm_env.benchmarks.leaderboard --data <folder> [--out DIR]

Every generator's responses are stepped through `AlpacaFarm-WinRate-v0` with the recorded judgements of that generator;
a judgement that could not be parsed is unscored and left out of n, as AlpacaEval does. Where the data folder holds the
published leaderboard too, the two are compared.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pandas as pd
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from ..cli.options import parse
from ..data import RecordedDataset
from ..data.load import recorded_dataset
from ..errors import DataError
from ..statistics import COUNTS, leaderboard_row, length_control_note
from ..statistics import LEADERBOARD_COLUMNS as COLUMNS
from ..terminal import format_cell
from .harness.page import Drawn, Page, publish, read_manifest, read_table
from .harness.plots import titled
from .harness.report import Table
from .harness.runner import Cell, run_cells
from .harness.sources import published_table
from .harness.study import Row, StudyOptions, run_command

NAME = "leaderboard"
ENV_ID = "AlpacaFarm-WinRate-v0"
COMPARED = ["win_rate", "standard_error", *COUNTS, "avg_length"]
CONTROLLED = "length_controlled_winrate"
TOLERANCE = 1e-9
"""Largest |difference| to the published win rate and standard error, in points, that counts as reproduced."""
NUM_QUICK = 5


@dataclass(frozen=True)
class LeaderboardOptions(StudyOptions):
    """Replays recorded judgements of published responses and compares the leaderboard with the published one."""

    repeats: ClassVar[bool] = False

    seeds: int = 1
    """1 alone: a replay draws nothing at random."""
    data: str | None = None
    """The folder with responses and judgements. Default: the environment variable ALPACAFARM_DATA."""


def replay(dataset: RecordedDataset, generator: str) -> NDArray[np.float64]:
    """Steps a generator's stored responses through the environment; the credits [eval instructions], NaN if unscored.

    The oracle replays this generator's judgements only: the judge was stochastic, and of a few texts that several
    generators share it preferred one and not the other.
    """
    instructions = dataset.instructions("eval")
    env = gym.make_vec(
        ENV_ID,
        num_envs=len(instructions),
        dataset=str(dataset.path),
        on_unscored="truncate",
        oracle={"name": "recorded", "generator": generator},
        autoreset_mode=AutoresetMode.DISABLED,
    )
    try:
        shown, _ = env.reset(options={"instruction_ids": [instruction.id for instruction in instructions]})
        if tuple(shown) != instructions:
            raise DataError(f"{generator}: expected the eval instructions in order, got others.")
        _, rewards, _, _, infos = env.step(dataset.outputs(generator))
        return np.where(infos["scored"], rewards, np.nan)
    finally:
        env.close()


def replayed_rows(dataset: RecordedDataset, generator: str) -> list[Row]:
    """One generator's row of the table."""
    outputs, references = dataset.outputs(generator), dataset.references("eval")
    return [leaderboard_row(generator, replay(dataset, generator), outputs, references, dataset.judge)]


def compare(table: pd.DataFrame, published: pd.DataFrame) -> dict[str, Any]:
    """Compares a leaderboard, a row each generator, with the published one of the same generators.

    Returns:
        num_models: Generators in both.
        differences: Column -> max |difference| over them, in the column's unit.
        num_length_controlled: Of them, those with a published length-controlled win rate.
        correlation: Pearson's, of ours with that; NaN for fewer than three.
        mean_difference, largest_difference: Mean and max |difference| of the two, in points.
    """
    ours, theirs = table.set_index("generator").align(published, join="inner")
    differences = (ours - theirs).abs()
    largest = differences[COMPARED].max(skipna=False)
    both = pd.concat([ours[CONTROLLED], theirs[CONTROLLED]], axis=1).dropna()
    return {
        "num_models": len(ours),
        "differences": {column: float(value) for column, value in largest.items()},
        "num_length_controlled": len(both),
        "correlation": float(np.corrcoef(both.to_numpy().T)[0, 1]) if len(both) > 2 else math.nan,
        "mean_difference": float(differences[CONTROLLED].mean()),
        "largest_difference": float(differences[CONTROLLED].max()),
    }


def reproduced(comparison: Mapping[str, Any]) -> bool:
    """Whether win rate and standard error are within `TOLERANCE` and all counts equal, for one model or more."""
    far = comparison["differences"]
    close = far["win_rate"] <= TOLERANCE and far["standard_error"] <= TOLERANCE
    return comparison["num_models"] > 0 and close and all(far[column] == 0 for column in COUNTS)


def draw(table: pd.DataFrame, note: str) -> Drawing:
    """Win rates with 95 % intervals (1.96 standard errors), best on top, and those at equal lengths as marks."""
    figure = Drawing(figsize=(8.5, 1.8 + 0.24 * len(table)), dpi=150, layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(table))[::-1]
    caps: dict[str, Any] = {"elinewidth": 1, "capsize": 2}
    name = "win rate, 95 % interval"
    axis.barh(places, table.win_rate, xerr=1.96 * table.standard_error, color="#a6c8e0", error_kw=caps, label=name)
    name, rates = "at equal lengths, 95 % interval", table[CONTROLLED]
    ends = [rates - table.lc_low, table.lc_high - rates]
    axis.errorbar(rates, places, xerr=ends, fmt="D", color="#d55e00", markersize=3, linewidth=0, **caps, label=name)
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(places, [f"{row.generator}  (n = {row.n_total})" for row in table.itertuples()], fontsize=8)
    axis.set(xlim=(0, 100), ylim=(-0.8, len(table) - 0.2), xlabel="win rate against the reference, %")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    return titled(figure, note=note)


def describe(rows: pd.DataFrame, facts: Mapping[str, Any]) -> str:
    """Judge, reference, level and n."""
    num, size = len(rows), facts["num_instructions"]
    return (
        f"judge: {facts['judge']} | reference: {facts['reference']} | level: {facts['level']} | {num} generators, "
        f"n = {rows.n_total.min()} to {rows.n_total.max()} of {size} instructions, "
        f"{size * num - rows.n_total.sum()} unscored"
    )


def describe_comparison(comparison: Mapping[str, Any], source: str, judge: str) -> list[str]:
    """The comparison with the published leaderboard in sentences."""
    largest = ", ".join(f"{column} {value:.2g}" for column, value in comparison["differences"].items())
    return [
        f"Published leaderboard {source}: {comparison['num_models']} models compared. Max |difference|: {largest}.",
        f"Win rate and standard error within {TOLERANCE:g} and all counts equal: "
        f"{'yes' if reproduced(comparison) else 'NO'}.",
        f"{length_control_note(judge)} Against the published one over {comparison['num_length_controlled']} models: "
        f"correlation {comparison['correlation']:.4f}, mean |difference| {comparison['mean_difference']:.2f} points, "
        f"largest {comparison['largest_difference']:.2f}.",
    ]


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 when all was done and the published table, if there, came out."""
    prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
    return run_command(lambda: run(parse(LeaderboardOptions, args, prog=prog)))


def run(options: LeaderboardOptions) -> int:
    """Computes, compares, prints and writes the leaderboard."""
    dataset = recorded_dataset(options.data)
    with options.study(NAME, {"data_sha256": dataset.sha256}) as study:
        generators = dataset.judged[:NUM_QUICK] if options.quick else dataset.judged
        rows = run_cells(study, [Cell.silent(name, partial(replayed_rows, dataset, name)) for name in generators])
        if not rows:
            return study.exit_status
        table = pd.DataFrame(rows).sort_values("generator").sort_values("win_rate", ascending=False, kind="stable")
        study.write_table([rows[place] for place in table.index], COLUMNS)
        source = dataset.path / "extras" / f"leaderboard_{dataset.judge}.csv.gz"
        comparison = compare(table, published_table(source, (*COMPARED, CONTROLLED))) if source.exists() else None
        study.note(
            judge=dataset.judge,
            reference=dataset.reference,
            level=dataset.level,
            num_instructions=len(dataset.instructions("eval")),
            unjudged=[name for name in dataset.generators if name not in dataset.judged],
            published=source.name,
            comparison=comparison,
        )
        publish(study, page(study.out))
        status = study.finish()
        return status if comparison is None or reproduced(comparison) else 1


def page(folder: Path) -> Page:
    """The study's page, of its stored files."""
    rows, facts = read_table(folder / "table.csv"), read_manifest(folder)["facts"]
    note, judge, headline, comparison = describe(rows, facts), facts["judge"], "", facts["comparison"]
    lines = [length_control_note(judge)]
    if comparison:
        lines = describe_comparison(comparison, facts["published"], judge)
        largest = comparison["differences"]["win_rate"]
        headline = f"largest difference to the published win rates: {largest:.2g} points, "
        headline += f"{comparison['num_models']} models"
    if facts["unjudged"]:
        lines.append(f"Responses without judgements, not in the table: {', '.join(facts['unjudged'])}.")
    table = Table(COLUMNS, rows[[*COLUMNS]].astype(object).map(format_cell).to_numpy().tolist(), note)
    figures = {"leaderboard": Drawn(draw(rows, note.replace(" | ", "; ")), f"Win rate with 95 % intervals; {note}")}
    return Page("Recorded leaderboard", {"leaderboard": table}, lines, figures, headline, simulated=False)


if __name__ == "__main__":
    sys.exit(main())
