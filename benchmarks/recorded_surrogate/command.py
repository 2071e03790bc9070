"""Reward models learned from real verdicts: do they know more than that longer is better, and what is their best worth?

    python -m alpacafarm_env.benchmarks.recorded_surrogate --data FOLDER [--quick] [--out DIR]

Learns surrogates of a recorded judge from its verdicts on published models' responses against one reference, and tests
them on models they never saw. table.csv has accuracy and AUC of each beside the baselines (the usual winner, the longer
response, a logistic model of length and list); models.csv the same of each model. best_of_n.csv: of n left-out models'
responses to an instruction the surrogate's favourite is taken; how often did the real judge prefer it to the reference?

Needs scikit-learn: pip install "alpacafarm-env[recorded]".
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, ClassVar, Final

import numpy as np
import tyro

from ...data.load import recorded_dataset
from ...errors import DataError, did_you_mean
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.report import Table, settings_table, text_table, write_report
from ..harness.runner import Cell, run_cells
from ..harness.study import Row, Study, StudyOptions, run_command, versions, write_csv
from . import results
from .data import POOLS, PROTOCOLS, Features, Judged, read_judged
from .models import QUICK, SURROGATES, score
from .results import BEST_OF_N_COLUMNS, CHOOSERS, NEAR_REFERENCE

NAME: Final = "recorded_surrogate"
NUM_QUICK_INSTRUCTIONS: Final = 160
FOLDS: Final = (5, 2)
"""Of a full and of a quick study."""
BOTH_PROTOCOLS: Final = ("majority", "longer", "length_list", "length_list_weighted", "linear", "trees")
"""Also tested with instructions shared between training and test, to show how much that helps."""


@dataclass(frozen=True)
class SurrogateOptions(StudyOptions):
    """Learns reward models from recorded judgements and tests them on models that they never saw."""

    repeats: ClassVar[bool] = False
    seeds: int = 1
    """1 alone: the folds and the fits are always the same."""
    data: str | None = None
    """The folder with responses and judgements. Default: the environment variable ALPACAFARM_DATA."""
    surrogates: tuple[str, ...] = ()
    """Which to try beside the baselines. Default: all; with --quick without the slowest two."""


def plans(options: SurrogateOptions, judged: Judged) -> list[tuple[str, str]]:
    """(protocol or pool, surrogate) of every cell.

    Raises:
        UnknownNameError: A surrogate's name is none.
    """
    asked = options.surrogates or (QUICK if options.quick else tuple(SURROGATES))
    if unknown := [name for name in asked if name not in SURROGATES]:
        raise did_you_mean("surrogate", unknown[0], tuple(SURROGATES))
    names = [name for name, each in SURROGATES.items() if each.baseline or name in (*asked, *CHOOSERS)]
    # Where nearly all models are near the reference, none would be left to learn from.
    pools = [pool for pool in POOLS if 2 <= judged.members(pool).sum() <= len(judged.models) - 2]
    return [
        *((PROTOCOLS[0], name) for name in names),
        *((PROTOCOLS[1], name) for name in names if name in BOTH_PROTOCOLS),
        *((pool, name) for pool in pools for name in CHOOSERS),
    ]


def run(options: SurrogateOptions) -> int:
    """Fits, tests, draws, prints and writes; returns the exit status."""
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(f'{NAME}: needs the package scikit-learn. Install it: pip install "alpacafarm-env[recorded]"')
    dataset = recorded_dataset(options.data)
    judged = read_judged(dataset, NUM_QUICK_INSTRUCTIONS if options.quick else None)
    folds = FOLDS[options.quick]
    config = {"data_sha256": dataset.sha256, "num_instructions": len(judged.instructions), "folds": folds}
    with options.study(NAME, config) as study:
        wanted, features = plans(options, judged), Features(judged)
        cells = [Cell.silent(" ".join(key), partial(fit, judged, features, *key, folds)) for key in wanted]
        fits = {row["cell"]: row for row in run_cells(study, cells)}
        scores = {key: np.array(fits[" ".join(key)]["scores"]) for key in wanted if " ".join(key) in fits}
        if not any(protocol in PROTOCOLS for protocol, _ in scores):
            return study.exit_status
        write_results(study, judged, scores, dataset.judge, {cell: row["cpu_seconds"] for cell, row in fits.items()})
        return study.finish()


def fit(judged: Judged, features: Features, protocol: str, name: str, folds: int) -> list[Row]:
    """The scores of all pairs that the protocol tests, and what they cost."""
    start = process_time()
    found = score(judged, features, SURROGATES[name], protocol, folds)
    return [{"cell": f"{protocol} {name}", "cpu_seconds": process_time() - start, "scores": found.tolist()}]


def write_results(study: Study, judged: Judged, scores: results.Scores, judge: str, costs: Mapping[str, float]) -> None:
    """Writes table.csv, models.csv, best_of_n.csv, the figures and the report; prints the tables and what they say."""
    tested = {key: found for key, found in scores.items() if key[0] in PROTOCOLS}
    study.write_table(results.accuracy_rows(judged, tested))
    write_csv(study.out / "models.csv", results.model_rows(judged, tested))
    write_csv(study.out / "best_of_n.csv", results.best_of_n_rows(judged, scores), BEST_OF_N_COLUMNS)
    num_models, num_instructions = judged.credits.shape
    counts = {"verdicts": judged.decisive.sum(), "models": num_models, "instructions": num_instructions}
    near = {judged.models[m]: 100 * judged.win_rates[m] for m in np.flatnonzero(judged.near)}
    study.note(level="recorded", judge=judge, counts=counts, near_reference=near, cpu_seconds=costs)
    found = page(study.out)
    print(*(f"{table.caption}\n{text_table(table)}\n" for table in found.tables.values()), *found.findings, sep="\n")
    seconds = [(cell, f"{seconds:.1f}") for cell, seconds in costs.items()]
    values: dict[str, Any] = {"page": found, "figures": found.write_figures(study.out).values()}
    values["costs"] = Table(("cell", "CPU seconds"), seconds)
    values["settings"] = settings_table({**study.config, **versions()})
    title = "Reward models learned from recorded verdicts"
    write_report(study.out / "report.html", title, template=f"{NAME}/report.html.j2", **values)
    study.note(findings=found.findings)


def page(folder: Path) -> Page:
    """What the study's stored files say."""
    quality, curves = (read_table(folder / f"{name}.csv") for name in ("table", "best_of_n"))
    facts, figures = read_manifest(folder)["facts"], {}
    note = f"Level: recorded; judge {facts['judge']}, n = {facts['counts']['verdicts']} verdicts in all."
    if (quality.group == NEAR_REFERENCE).any():
        caption = f"Accuracy on the left-out near-reference models, 95 % over models. {note}"
        figures["accuracy"] = Drawn(results.draw_accuracy(quality, note), caption)
    if len(curves):
        caption = f"Above the judge's verdicts, below the chooser's own score; bands: 95 % over instructions. {note}"
        figures["best_of_n"] = Drawn(results.draw_best_of_n(curves, note), caption)
    tables = {**results.accuracy_tables(quality, note), "best_of_n": results.best_of_n_table(curves, note)}
    return Page(tables, results.findings(facts, quality, curves), figures, results.headline(quality))


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = tyro.cli(
        SurrogateOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args, description=__doc__
    )
    return run_command(partial(run, options))
