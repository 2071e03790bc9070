"""The study of noise on recorded text: reward models on flipped verdicts, and what their favourite of n is worth.

    python -m alpacafarm_env.benchmarks.recorded_noise --data FOLDER [--quick] [--seeds N] [--processes N]

Reward models on measures of texts, linear ones and boosted trees, learn from k of a judge's recorded verdicts of which
a share is flipped. Each half of the models, and each third of the instructions, is held out once: there the best of n
held-out models' responses by the reward model is taken, for every n, and the judge's own verdict is its gold. Needs
`pip install "alpacafarm-env[recorded]"`.

Predicted before the first run, from a pilot by linear models on other features: at k = 1,000 the drop grows with the
flips, by .23 points of win rate for ten points of flips; it grows less the more labels there are; peaks, but not drops,
follow N(1 - 2e)^2; trees at k = 1,000 fall at 45 % alone.

Sources: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), Fig. 13; Gao, Schulman and Hilton 2022 (arXiv 2210.10760).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...cli.options import Count
from ...data.load import recorded_dataset
from ...errors import DataError
from ..harness.labels import Setting
from ..harness.page import publish
from ..harness.runner import Cell, run_cells
from ..harness.sources import judgements_digest
from ..harness.study import Study, StudyOptions, run_command, write_csv
from ..surrogates.features import scikit_learn
from ..surrogates.scarcity import claims, corrected, curve_rows, setting_rows, tables_of
from .page import page
from .runs import KINDS, PREDICTORS, RIDGE, Prepared, accuracy_rows, prepare, run_repeat

NAME = "recorded_noise"
LABELS = (250, 500, 1000, 2000, 4000, 8000)
FLIPS = (0.0, 0.175, 0.25, 0.35, 0.45)
QUICK_LABELS, QUICK_FLIPS, QUICK_INSTRUCTIONS = (250, 1000), (0.0, 0.25, 0.35, 0.45), 200
OTHER = "preferences_claude"
"""The second judge's file in `extras`."""


@dataclass(frozen=True)
class RecordedNoiseOptions(StudyOptions):
    """Options of the study of noise on recorded text. With --quick there are 2 seeds, 200 instructions, 2 sizes."""

    name: ClassVar[str] = NAME
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2}

    seeds: Count = 20
    """Number of repeats: of which verdicts are drawn, and which of them are flipped."""
    data: str | None = None
    """The folder with responses and judgements. Default: the environment variable ALPACAFARM_DATA."""
    labels: Annotated[tuple[Annotated[int, Field(ge=20)], ...], Field()] = ()
    """How many verdicts reward models learn from. Default: 250 to 8000, doubling, as far as there are enough."""
    processes: Count = 2
    """Cells at a time, each in a process with one thread."""

    @property
    def flips(self) -> tuple[float, ...]:
        """Shares of the labels that are flipped."""
        return QUICK_FLIPS if self.quick else FLIPS


def chosen_labels(options: RecordedNoiseOptions, data: Prepared) -> tuple[int, ...]:
    """The sizes that the data has enough verdicts for.

    Raises:
        DataError: It has too few for those that were asked for, or for any.
    """
    least = min(len(part.pairs) for part in data.parts)
    wanted = options.labels or (QUICK_LABELS if options.quick else LABELS)
    enough = tuple(sorted({size for size in wanted if size <= least}))
    if not enough or (options.labels and len(enough) < len({*wanted})):
        text = f"expected sizes of at most {least}, the verdicts that are left for training"
        raise DataError(f"--labels: {text}, got {', '.join(map(str, wanted))}. Give smaller ones, or more judgements.")
    return enough


def run(options: RecordedNoiseOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status."""
    options.refuse_taken(NAME)
    dataset = recorded_dataset(options.data)
    scikit_learn()
    number = QUICK_INSTRUCTIONS if options.quick else None
    config = {"data_sha256": judgements_digest(dataset), "flips": options.flips, "labels": options.labels or "default"}
    with options.study(NAME, config) as study:
        file = study.out / "features.npz"
        if not file.exists():
            print(f"{NAME} into {study.out}: measuring the texts of {len(dataset.judged)} models", file=sys.stderr)
            prepare(dataset, OTHER, number, file)
        data = Prepared.read(file)
        settings = [Setting(size, flip) for size in chosen_labels(options, data) for flip in options.flips]
        repeats = [
            Cell(f"{kind} repeat {seed}", partial(run_repeat, file, kind, settings, seed), 1 + 5 * (kind == "trees"))
            for seed in range(options.seeds)
            for kind in KINDS
        ]
        known = [Cell.silent(f"accuracy: {name}", partial(accuracy_rows, file, name)) for name in PREDICTORS]
        rows = run_cells(study, [*repeats, *known], processes=options.processes)
        if study.failed:
            return study.exit_status
        study.note(level="recorded", judge=dataset.judge, reference=dataset.reference, ridge=RIDGE, **data.counts)
        write_results(study, rows)
        return study.finish()


def write_results(study: Study, rows: list[dict[str, Any]]) -> None:
    """The tables and the page."""
    tables = tables_of([row for row in rows if "kind" in row])
    study.write_table(setting_rows(tables))
    write_csv(study.out / "curves.csv", curve_rows(tables))
    write_csv(study.out / "claims.csv", corrected(claims(tables)))
    order = [*PREDICTORS]
    accuracy = sorted((row for row in rows if "predictor" in row), key=lambda row: order.index(row["predictor"]))
    write_csv(study.out / "accuracy.csv", accuracy)
    publish(study, page(study.out))


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(RecordedNoiseOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
