"""The win-rate curve as a command: it trains, evaluates, writes and prints what `plan` describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...data import load_dataset
from ...errors import DataError
from ...folders import check_model
from ..harness.own_judge import judge_name
from ..harness.report import Provenance, settings_table, text_table, write_report
from ..harness.runner import Cell, follow, run_cells
from ..harness.study import Row, Study, run_command, versions, write_csv
from . import report as words
from .inputs import check_inputs
from .plan import NAME, SPLITS, RunPlan, WinRateCurveOptions
from .runs import run_seed
from .samples import samples_table, unscored
from .summary import COLUMNS, choose, compare, curves_of


def run(options: WinRateCurveOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status.

    Processes that torchrun has started train each seed together, one after the other; the main one alone writes.
    """
    options.refuse_taken(NAME)
    plans = make_plans(options)
    from ...agents.processes import Processes

    world = Processes()
    cells = [Cell(plan.cell, partial(run_seed, plan), plan.units) for plan in plans]
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


def make_plans(options: WinRateCurveOptions) -> list[RunPlan]:
    """One plan a seed, with the numbers of instructions that there really are.

    Raises:
        DataError: Own data without an own policy and reward model, whose vocabulary and world would not fit it.
        CheckpointError: A model's name is a path to nothing.
    """
    models = {"policy": options.policy, "reward_model": options.reward_model}
    if options.data not in (None, "sandbox") and not all(models.values()):
        raise DataError(
            f"--dataset {options.data}: expected --policy and --reward-model beside it, got policy {options.policy!r} "
            f"and reward model {options.reward_model!r}; the sandbox's small models know only the sandbox's world"
        )
    for model in models.values():
        if model not in (None, "sandbox"):
            check_model(model)
    names = {"data": options.data or "sandbox", **{name: model or "sandbox" for name, model in models.items()}}
    dataset = load_dataset(names["data"], allow_overlap=options.allow_overlap)
    sizes = {
        f"num_{split}": min(getattr(options, f"num_{split}"), len(dataset.instructions(split))) for split in SPLITS
    }
    preset = options.preset or ("paper" if options.own_policy else "sandbox")
    settled = {**vars(options), **names, **sizes, "preset": preset}
    return [RunPlan(**settled, seed=seed) for seed in range(options.seeds)]


def write_results(study: Study, plans: Sequence[RunPlan], rows: Sequence[Row]) -> None:
    """Tables, figures, report.html and manifest, and the summary on stdout; `plans` are the finished ones."""
    by_split = {split: [row for row in rows if row["split"] == split] for split in SPLITS}
    columns = COLUMNS if plans[0].judge is None else (*COLUMNS, "win_rate")
    study.write_table(by_split["eval"], columns)
    write_csv(study.out / "val.csv", by_split["val"], columns)
    curves, val = (curves_of(by_split[split]) for split in ("eval", "val"))
    choice, where = choose(val), provenance(plans)
    comparisons = compare(curves, choice)
    missing = unscored(plans, plans[0].dataset.level)
    values: dict[str, Any] = {
        "findings": words.findings(comparisons, curves, choice, where, missing),
        "summary": words.summary_table(comparisons),
        "figures": words.write_figures(study.out, curves, val, choice, where),
        "samples": samples_table(plans[0], choice.steps[plans[0].seed]),
        "runs": words.run_table(curves, val, choice),
    }
    names = {"dataset": where.dataset, "policy": where.policy, "reward_model": plans[0].reward_model}
    settings = settings_table({**names, **study.config, "seeds": list(choice.steps), **versions()})
    study.note(level=where.level, judges=where.judges(), reference=where.reference, label=where.label())
    study.note(chosen_steps={str(seed): step for seed, step in choice.steps.items()}, findings=values["findings"])
    values |= {"settings": settings, "where": where, "sample_seed": plans[0].seed}
    write_report(study.out / "report.html", "PPO and its win-rate curve", template=f"{NAME}/report.html.j2", **values)
    print(text_table(values["summary"]), *values["findings"], where.label(), where.judges(), sep="\n")
    count = len(values["figures"])
    print(f"Written to {study.out}: report.html, table.csv, val.csv, manifest.json and {count} figures (PNG).")


def provenance(plans: Sequence[RunPlan]) -> Provenance:
    """Level, models and counts of the finished runs."""
    plan, dataset = plans[0], plans[0].dataset
    return Provenance(
        level=dataset.level,
        dataset=str(plan.data),
        policy=str(plan.policy),
        reward_model="surrogate" if plan.reward_model == "sandbox" else Path(str(plan.reward_model)).name,
        num_val=plan.num_val,
        num_eval=plan.num_eval,
        num_seeds=len(plans),
        temperature=plan.temperature,
        judge="" if plan.judge is None else judge_name(plan.judge, dataset),
    )


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(WinRateCurveOptions.parse()), joins=True)
