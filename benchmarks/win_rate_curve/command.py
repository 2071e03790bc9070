"""The win-rate curve as a command: it trains, evaluates, writes and prints what `plan` describes."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..experiment.own_judge import judge_name
from ..harness.page import publish
from ..harness.report import Provenance
from ..harness.runner import Cell, follow, run_cells
from ..harness.study import Row, Study, run_command, write_csv
from .page import page, samples, stored_curves, unscored
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
    gpus = 0 if options.policy == "sandbox" else 1
    cells = [Cell(plan.cell, partial(run_seed, plan), plan.units_done(plan.steps), gpus=gpus) for plan in plans]
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
    """Tables, the page and the manifest's facts; `plans` are the finished ones."""
    by_split = {split: [row for row in rows if row["split"] == split] for split in SPLITS}
    columns = COLUMNS if plans[0].judge is None else (*COLUMNS, "win_rate")
    study.write_table(by_split["eval"], columns)
    write_csv(study.out / "val.csv", by_split["val"], columns)
    steps = stored_curves(study.out)[2].steps
    write_csv(study.out / "samples.csv", samples(plans[0], steps[plans[0].seed]))
    where = provenance(plans)
    study.note(
        provenance=vars(where),
        unscored=unscored(plans, where.level),
        level=where.level,
        judges=where.judges(),
        reference=where.reference,
        chosen_steps={str(seed): step for seed, step in steps.items()},
    )
    publish(study, page(study.out))


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
