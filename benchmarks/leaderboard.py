"""The recorded leaderboard: stored responses of real models replayed through the environment.

    python -m alpacafarm_env.benchmarks.leaderboard --data <folder> [--out DIR]

Every generator's responses are stepped through `AlpacaFarm-WinRate-v0` with the recorded judgements of that generator;
a judgement that could not be parsed is unscored and left out of n, as AlpacaEval does. Where the data folder holds the
published leaderboard too, the two are compared.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pandas as pd
import tyro
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray

from ..data import RecordedDataset
from ..data.load import recorded_dataset
from ..errors import DataError
from ..statistics import COUNTS, LENGTH_CONTROL, leaderboard_row
from ..statistics import LEADERBOARD_COLUMNS as COLUMNS
from ..tables import format_cell
from .harness.page import Drawn, Page, read_manifest, read_table
from .harness.plots import titled
from .harness.report import Section, Table, text_table, write_report
from .harness.runner import Cell, run_cells
from .harness.study import Row, Study, StudyOptions, run_command

NAME = "leaderboard"
ENV_ID = "AlpacaFarm-WinRate-v0"
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


@dataclass(frozen=True)
class Comparison:
    """A leaderboard against the published one.

    Attributes:
        num_models: In both.
        differences: Column -> max |difference| over these models, in the column's unit.
        num_length_controlled: Of them, those with a published length-controlled win rate.
        correlation: Pearson's, of the minimal length-controlled fit with that; NaN for fewer than three.
        mean_difference: Mean |difference| of the two, in points.
    """

    num_models: int
    differences: Mapping[str, float]
    num_length_controlled: int
    correlation: float
    mean_difference: float

    @property
    def reproduced(self) -> bool:
        """Win rate and standard error within `TOLERANCE`, all counts equal, for one model or more."""
        close = all(self.differences[column] <= TOLERANCE for column in ("win_rate", "standard_error"))
        return self.num_models > 0 and close and all(self.differences[column] == 0 for column in COUNTS)


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
    return [leaderboard_row(generator, replay(dataset, generator), outputs, references)]


def published_table(path: Path) -> pd.DataFrame:
    """A published leaderboard by generator; an empty cell is NaN. DataError if the file is no leaderboard."""
    try:
        return pd.read_csv(path, index_col=0, dtype=str)[list(COLUMNS[1:])].astype(float)
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{path}: expected the columns {', '.join(COLUMNS[1:])} with numbers, got {error!r}."
        ) from error


def compare(rows: Sequence[Row], published: pd.DataFrame) -> Comparison:
    """Compares the rows with the published ones of the same generators."""
    ours = pd.DataFrame(rows).set_index("generator")
    both = [name for name in ours.index if name in published.index]
    ours, theirs = ours.loc[both], published.loc[both]
    columns = ["win_rate", "standard_error", *COUNTS, "avg_length"]
    differences = (ours[columns] - theirs[columns]).abs().max(skipna=False)
    pairs = pd.concat([ours[COLUMNS[-1]], theirs[COLUMNS[-1]]], axis=1).dropna().to_numpy()
    return Comparison(
        num_models=len(both),
        differences={column: float(differences[column]) for column in columns},
        num_length_controlled=len(pairs),
        correlation=float(np.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else float("nan"),
        mean_difference=float(np.abs(pairs[:, 0] - pairs[:, 1]).mean()) if len(pairs) else float("nan"),
    )


def draw(table: pd.DataFrame, note: str) -> Drawing:
    """Win rates with 95 % intervals (1.96 standard errors), best on top, and the length-controlled fit as a mark."""
    figure = Drawing(figsize=(8.5, 1.8 + 0.24 * len(table)), dpi=150, layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(table))[::-1]
    caps, name = {"elinewidth": 1, "capsize": 2}, "win rate, 95 % interval"
    axis.barh(places, table.win_rate, xerr=1.96 * table.standard_error, color="#a6c8e0", error_kw=caps, label=name)
    name = "length-controlled (minimal fit)"
    axis.plot(table.length_controlled_winrate, places, "D", color="#d55e00", markersize=4, label=name)
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(places, [f"{row.generator}  (n = {row.n_total})" for row in table.itertuples()], fontsize=8)
    axis.set(xlim=(0, 100), ylim=(-0.8, len(table) - 0.2), xlabel="win rate against the reference, %")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    return titled(figure, note=note)


def _rank(row: Row) -> tuple[bool, float, str]:
    """Sorts by falling win rate; a generator without a verdict comes last."""
    return bool(np.isnan(row["win_rate"])), -row["win_rate"], row["generator"]


def describe(rows: pd.DataFrame, facts: Mapping[str, Any]) -> str:
    """Judge, reference, level and n."""
    num, size = len(rows), facts["num_instructions"]
    return (
        f"judge: {facts['judge']} | reference: {facts['reference']} | level: {facts['level']} | {num} generators, "
        f"n = {rows.n_total.min()} to {rows.n_total.max()} of {size} instructions, "
        f"{size * num - rows.n_total.sum()} unscored"
    )


def describe_comparison(comparison: Comparison, source: str) -> list[str]:
    """The comparison with the published leaderboard in sentences."""
    largest = ", ".join(f"{column} {value:.2g}" for column, value in comparison.differences.items())
    return [
        f"Published leaderboard {source}: {comparison.num_models} models compared. Max |difference|: {largest}.",
        f"Win rate and standard error within {TOLERANCE:g} and all counts equal: "
        f"{'yes' if comparison.reproduced else 'NO'}.",
        f"{LENGTH_CONTROL}; against the published one over {comparison.num_length_controlled} models: correlation "
        f"{comparison.correlation:.3f}, mean |difference| {comparison.mean_difference:.2f} points.",
    ]


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 when all was done and the published table, if there, came out."""
    options = tyro.cli(LeaderboardOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))


def run(options: LeaderboardOptions) -> int:
    """Computes, compares, prints and writes the leaderboard."""
    dataset = recorded_dataset(options.data)
    with options.study(NAME, {"data_sha256": dataset.sha256}) as study:
        generators = dataset.judged[:NUM_QUICK] if options.quick else dataset.judged
        cells = [Cell.silent(name, partial(replayed_rows, dataset, name)) for name in generators]
        rows = sorted(run_cells(study, cells), key=_rank)
        if not rows:
            return study.exit_status
        study.write_table(rows, COLUMNS)
        source = dataset.path / "extras" / f"leaderboard_{dataset.judge}.csv.gz"
        comparison = compare(rows, published_table(source)) if source.exists() else None
        study.note(
            judge=dataset.judge,
            reference=dataset.reference,
            level=dataset.level,
            num_instructions=len(dataset.instructions("eval")),
            num_generators=len(rows),
            unjudged=[name for name in dataset.generators if name not in dataset.judged],
            published=source.name,
            comparison=vars(comparison) if comparison is not None else None,
        )
        write_results(study)
        status = study.finish()
        return status if comparison is None or comparison.reproduced else 1


def write_results(study: Study) -> None:
    """Prints and writes table, figure and report."""
    found = page(study.out)
    table = found.tables["leaderboard"]
    print("\n".join([text_table(table), table.caption, *found.findings]))
    figures = [*found.write_figures(study.out).values()]
    section = Section("Leaderboard", [table.caption, *found.findings], table, figures)
    write_report(study.out / "report.html", "Recorded leaderboard", [section])


def page(folder: Path) -> Page:
    """What the study's stored files say."""
    rows, facts = read_table(folder / "table.csv"), read_manifest(folder)["facts"]
    note, lines, headline = describe(rows, facts), [LENGTH_CONTROL + "."], ""
    if facts["comparison"]:
        comparison = Comparison(**facts["comparison"])
        lines = describe_comparison(comparison, facts["published"])
        headline = (
            f"largest difference to the published win rates: {comparison.differences['win_rate']:.2g} points, "
            f"{comparison.num_models} models"
        )
    if facts["unjudged"]:
        lines.append(f"Responses without judgements, not in the table: {', '.join(facts['unjudged'])}.")
    table = Table(COLUMNS, [[format_cell(row[column]) for column in COLUMNS] for row in rows.to_dict("records")], note)
    figures = {"leaderboard": Drawn(draw(rows, note.replace(" | ", "; ")), f"Win rate with 95 % intervals; {note}")}
    return Page({"leaderboard": table}, lines, figures, headline)


if __name__ == "__main__":
    sys.exit(main())
