"""The study of noise with known gold: does a flipped label do more than teach less?

    python -m alpacafarm_env.benchmarks.noise [--quick] [--seeds N] [--processes N]

Reward models learn from N labels of the sandbox's pool, of which a share e is flipped: fresh pairs for each seed, the
number of updates held equal. By each of them the best of n samples is chosen, to n = 1,024 on 400 instructions, and the
true reward says what that is worth. If flips are scarcity and nothing else, settings of equal N(1 - 2e)^2 do alike.
Some of these settings are also taken by PPO, by DPO, and with each label read once (`matched`). Beside them stand
judges by the true reward with one fault each, as strong as leaves equal agreement with it (`dials`). What was predicted
is `analysis.PREDICTED`, and stands on the page beside what came out.

Sources: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4.3; Gao, Schulman and Hilton 2022 (arXiv
2210.10760).
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import tyro

from ...cli.options import Count
from ..experiment.faults import CLEAN, KINDS, DialPlan
from ..experiment.fresh import Plan, Sizes, draw_pairs, run_setting
from ..experiment.fresh_runs import SettingRun, run_method
from ..harness.labels import Setting
from ..harness.page import publish
from ..harness.runner import Cell, run_cells
from ..harness.sources import sandbox_sources
from ..harness.study import Row, Study, StudyOptions, run_command, write_csv
from ..surrogates.scarcity import setting_rows, tables_of
from .analysis import all_claims, band_rows, gao_rows
from .dials import dial_rows
from .matched import METHODS, OncePlan, matched, read_once
from .page import page

NAME = "noise"


@dataclass(frozen=True)
class NoiseOptions(StudyOptions):
    """Options of the study of noise. With --quick there are 2 seeds and small sizes."""

    name: ClassVar[str] = NAME
    no_data: ClassVar[str] = "only the sandbox knows the true reward."
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2}

    seeds: Count = 10
    """Number of repeats, each with pairs, labels, samples and reward models of its own."""
    processes: Count = 2
    """Cells at a time, each in a process with one torch thread."""
    sizes: Annotated[Sizes | None, tyro.conf.Suppress] = None
    """Other sizes, for tests."""


def run(options: NoiseOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status."""
    options.refuse_taken(NAME)
    sizes = options.sizes or (Sizes.quick() if options.quick else Sizes())
    plans = [Plan(options.folder(NAME), seed, sizes) for seed in range(options.seeds)]
    faulty = {kind: [DialPlan(plan.out, plan.seed, sizes, kind) for plan in plans] for kind in KINDS}
    few = min(options.seeds, sizes.seeds_trained)
    trained = [
        run_of(plan, setting, method, method) for method in METHODS for plan in plans[:few] for setting in matched(plan)
    ]
    by_ppo = [run_of(plan, plan.settings[-1], "ppo", kind) for kind in KINDS for plan in faulty[kind][:few]]
    # Each part needs those before it.
    parts = {
        "pairs": [Cell(plan.pairs_cell, partial(draw_pairs, plan), plan.units) for plan in (*plans, *faulty[CLEAN])],
        "samples": [Cell(plan.samples.cell, plan.samples.draw, plan.samples.units) for plan in plans],
        "reward models": [
            Cell(plan.cell(setting), partial(run_setting, plan, setting), plan.units)
            for plan in plans
            for setting in sizes.settings
        ],
        "dials": [
            Cell(plan.cell(setting), partial(run_setting, plan, setting), plan.units)
            for kind in KINDS
            for plan in faulty[kind]
            for setting in plan.settings
        ],
        "methods": [Cell(run.cell, partial(run_method, run), run.units) for run in trained],
        "dials by PPO": [Cell(run.cell, partial(run_method, run), run.units) for run in by_ppo],
        "labels read once": [
            Cell(plan.cell(setting), partial(run_setting, plan, setting), plan.units)
            for plan in (OncePlan(plan.out, plan.seed, sizes) for plan in plans)
            for setting in plan.settings
        ],
    }
    with options.study(NAME, {"sizes": asdict(sizes)}, sources=sandbox_sources()) as study:
        study.plan([cell.key for cells in parts.values() for cell in cells])
        rows: dict[str, list[Row]] = {}
        for part, cells in parts.items():
            print(f"{NAME} into {study.out}: {part} ({len(cells)} cells)", file=sys.stderr)
            rows[part] = run_cells(study, cells, processes=options.processes)
            if study.failed:
                return study.exit_status
        grid = rows["reward models"]
        by_others = [*rows["methods"], *read_once(grid, rows["labels read once"])]
        write_results(study, grid, rows["dials"], by_others, rows["dials by PPO"])
        return study.finish()


def run_of(plan: Plan, setting: Setting, method: str, kind: str) -> SettingRun:
    """A method on a plan's setting."""
    sizes = plan.sizes.training
    return SettingRun(plan=plan, setting=setting, kind=kind, agent=method, seed=plan.seed, out=plan.out, sizes=sizes)


def write_results(study: Study, *parts: list[Row]) -> None:
    """The tables and the page, of the rows of reward models, dials, matched settings, and dials by PPO."""
    curves, faulty, methods, by_ppo = (tables_of(rows, unit=1.0) for rows in parts)
    study.write_table(setting_rows(curves))
    write_csv(study.out / "curves.csv", band_rows(curves))
    write_csv(study.out / "claims.csv", all_claims(curves, faulty, methods, by_ppo))
    write_csv(study.out / "methods.csv", setting_rows(methods))
    dialed = dial_rows("best_of_n", faulty, parts[1]) + dial_rows("ppo", by_ppo, parts[3])
    write_csv(study.out / "dials.csv", dialed)
    write_csv(study.out / "fits.csv", gao_rows(curves))
    study.note(level="sandbox")
    publish(study, page(study.out))


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(NoiseOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
