"""How often the sandbox's reward models are right: accuracy against gold on fresh pairs, with intervals.

    python -m alpacafarm_env.benchmarks.reward_model_accuracy [--num 2000] [--quick] [--seeds N] [--out DIR]

The pairs are new: instructions that stand in no split, each answered twice by the shipped SFT policy at temperature 1.
A pair of equal gold has no right answer and is drawn again; the share of such pairs is reported. The surrogate was
trained on the labels of p_sim^ann (25 % flips), the clean reward model on gold's own. On the same pairs stands how
often the judges' labels are right, so that it can be seen what a reward model was given to learn from.

Calibration: a reward model says P(b preferred) = sigmoid(score(b) - score(a)), in the units it was trained in. Its
reliability is that probability beside the share of pairs on which the label of its own training judge agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import tyro

from ... import sandbox
from ...errors import CheckpointError
from ...folders import hash_folder, hash_model
from ...sandbox.dataset import ASSETS, Sandbox
from ..harness.estimates import frame_of
from ..harness.plots import write_png
from ..harness.report import SIMULATION, Figure, text_table, write_report
from ..harness.reward_models import against_gold, fresh_pairs, predicted, reliability
from ..harness.runner import Cell, run_cells
from ..harness.study import Row, Study, StudyOptions, run_command
from . import report as words

NAME = "reward_model_accuracy"
COLUMNS = (
    *("seed", "judge", "against", "subset", "accuracy", "low", "high", "n", "num_correct"),
    *("mean_gold_gap", "confidence", "num_equal"),
)
TRAINED_ON: Final = {"reward_model": "sim_ann", "reward_model_clean": "gold"}
"""Folder of a reward model -> the judge whose labels it was trained on."""
JUDGES: Final = ("gold", "sim_eval", "sim_ann", "sim_gpt4", "human")
NUM_QUICK: Final = 400


@dataclass(frozen=True)
class AccuracyOptions(StudyOptions):
    """Measures the reward models' and the judges' accuracy against gold on fresh pairs."""

    seeds: int = 1
    """Number of independent draws of fresh pairs; what is printed is over all of them together."""
    num: int = 2000
    """Pairs of each draw; with --quick 400 at most."""
    data: str | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num < 8:
            raise ValueError(f"--num: expected 8 pairs or more, as they are split into quartiles, got {self.num!r}")


def measure(assets: Path, num: int, seed: int) -> list[Row]:
    """All rows of one draw of fresh pairs: judges and reward models against gold, then the models' reliability."""
    pairs = fresh_pairs(Sandbox(assets / "data"), assets / "policy", seed, num)
    labels = {name: sandbox.judge(name, seed).compare(pairs.instructions, pairs.a, pairs.b) for name in JUDGES}
    chances = {name: predicted(assets / name, pairs) for name in TRAINED_ON}
    rows: list[Row] = []
    for name, chance in (chances | labels).items():
        rows += against_gold(name, chance, pairs.gap)
    for name, chance in chances.items():
        rows += reliability(name, chance, TRAINED_ON[name], labels[TRAINED_ON[name]])
    return [{"seed": seed, **row, "num_equal": pairs.num_equal} for row in rows]


def run(options: AccuracyOptions) -> int:
    """Draws, scores, prints and writes; the exit status says that all was done, not that an accuracy was reached."""
    assets = Path(options.data) if options.data else ASSETS
    num = min(options.num, NUM_QUICK) if options.quick else options.num
    if missing := [name for name in ("data", "policy", *TRAINED_ON) if not (assets / name).is_dir()]:
        raise CheckpointError(
            f"{assets}: expected the sandbox's assets, found no folder {', '.join(missing)}. Rebuild them with "
            "python -m alpacafarm_env.benchmarks.build_sandbox, or give their folder by --data."
        )
    sources = {name: partial(hash_model, assets / name) for name in ("policy", *TRAINED_ON)}
    sources["data"] = partial(hash_folder, assets / "data")
    with options.study(NAME, {"num": num}, sources=sources) as study:
        cells = [Cell.silent(f"seed {seed}", partial(measure, assets, num, seed)) for seed in range(options.seeds)]
        rows = run_cells(study, cells)
        if rows:
            write_results(study, rows)
            return study.finish()
        return study.exit_status


def write_results(study: Study, rows: Sequence[Row]) -> None:
    """Table, figures, report and manifest, and the summary on stdout."""
    frame = frame_of(rows)
    together, note = words.pooled(frame), words.label(frame)
    tables = {"accuracy": words.accuracy_table(together, note), "reliability": words.reliability_table(together, note)}
    found = words.findings(together)
    print("\n".join([*(f"{text_table(table)}\n" for table in tables.values()), note, SIMULATION, *found]))
    study.write_table(rows, COLUMNS)
    figures = [
        Figure(write_png(study.out / f"{name}.png", drawing), f"{title}. {note}")
        for name, (title, drawing) in words.draw(together, note).items()
    ]
    values: dict[str, Any] = {**tables, "figures": figures, "findings": found, "meanings": words.MEANINGS}
    title = "Accuracy of the sandbox's reward models"
    write_report(study.out / "report.html", title, template=f"{NAME}/report.html.j2", **values)
    study.note(level="sandbox", reference="gold", judges=words.MEANINGS, label=note, findings=found)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for 2 MB of weights breaks the study's own
    options = tyro.cli(AccuracyOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args)
    return run_command(partial(run, options))
