"""The win-rate curve as a command: it trains, evaluates, writes and prints what `plan` describes."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..experiment.own_judge import judge_name
from ..harness.report import Provenance, settings_table, text_table, write_report
from ..harness.runner import Cell, follow, run_cells
from ..harness.study import Row, Study, run_command, versions, write_csv
from . import report
from .plan import NAME, SPLITS, RunPlan, WinRateCurveOptions, make_plans
from .runs import check_inputs, run_seed
from .summary import COLUMNS


def run(options: WinRateCurveOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status.

    Processes that torchrun has started train each seed together, one after the other; only the main one writes.
    """
    options.refuse_taken(NAME)
    plans = make_plans(options)
    from ...agents.processes import Processes

    world = Processes()
    cells = [Cell(plan.cell, partial(run_seed, plan), plan.units_done(plan.steps)) for plan in plans]
    if not world.is_main:
        return follow(world, cells)
    check_inputs(plans[0])
    with options.study(NAME, plans[0].settings(), sources=plans[0].sources) as study:
        processes = min(options.processes, len(plans)) if world.count == 1 else 1
        shape = f"{options.steps} PPO steps a seed, seeds: {len(plans)}, at a time: {processes}"
        print(f"{NAME} into {study.out}: {shape}", file=sys.stderr)
        rows = run_cells(study, cells, processes=processes, world=world)
        if rows:
            write_results(study, [plan for plan in plans if plan.cell in study.done], rows)
        return study.finish() if rows else study.exit_status


def write_results(study: Study, plans: Sequence[RunPlan], rows: Sequence[Row]) -> None:
    """Tables, figures, report.html and manifest, and the summary on stdout; `plans` are the finished ones."""
    by_split = {split: [row for row in rows if row["split"] == split] for split in SPLITS}
    plan, columns = plans[0], COLUMNS if plans[0].judge is None else (*COLUMNS, "win_rate")
    study.write_table(by_split["eval"], columns)
    write_csv(study.out / "val.csv", by_split["val"], columns)
    where, steps = provenance(plans), report.stored_curves(study.out)[2].steps
    study.note(provenance=vars(where), unscored=report.unscored(plans, where.level))
    found = report.page(study.out)
    figures = found.write_figures(study.out).values()
    values: dict[str, Any] = {
        "page": found,
        "figures": figures,
        "samples": report.samples_table(plan, steps[plan.seed]),
        "where": where,
        "sample_seed": plan.seed,
    }
    names = {"dataset": where.dataset, "policy": where.policy, "reward_model": plan.reward_model}
    values["settings"] = settings_table({**names, **study.config, "seeds": list(steps), **versions()})
    study.note(level=where.level, judges=where.judges(), reference=where.reference, label=where.label())
    study.note(chosen_steps={str(seed): step for seed, step in steps.items()}, findings=found.findings)
    write_report(study.out / "report.html", "PPO and its win-rate curve", template=f"{NAME}/report.html.j2", **values)
    print(text_table(found.tables["summary"]), *found.findings, where.label(), where.judges(), sep="\n")
    count = len(figures)
    print(f"Written to {study.out}: report.html, table.csv, val.csv, manifest.json and {count} figures (PNG).")


def provenance(plans: Sequence[RunPlan]) -> Provenance:
    """Level, models and counts of the finished runs."""
    plan, dataset = plans[0], plans[0].job.data
    return Provenance(
        level=dataset.level,
        dataset=plan.data,
        policy=plan.policy,
        reward_model="surrogate" if plan.reward_model == "sandbox" else Path(plan.reward_model).name,
        num_val=plan.num_val,
        num_eval=plan.num_eval,
        num_seeds=len(plans),
        temperature=plan.temperature,
        judge="" if plan.judge is None else judge_name(plan.judge, dataset),
    )


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(WinRateCurveOptions.parse()), joins=True)
