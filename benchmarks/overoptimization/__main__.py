"""The over-optimization study: what a noisy reward does to a policy that is optimized against it for too long.

    python -m alpacafarm_env.benchmarks.overoptimization [--quick] [--seeds N] [--treatments NAME ...] [--methods ...]

For each reward treatment (who labels the pairs, with how much noise, how many, one reward model or an ensemble) methods
are run past the peak of gold (PPO, and where asked Quark, expert iteration and DPO; best-of-n up to n = 1024),
everything else held fixed: the same prompts, samples and draws. Proxy, gold, win rates, KL and length are measured on
the way. A `Treatment` of your own, of an oracle or a wrapper, joins by --treatments module:attribute. Later calls in
the same folder, for other methods or treatments or more seeds, add to its table.

Sources: Gao, Schulman and Hilton 2022 (arXiv 2210.10760); Coste et al. 2023 (arXiv 2310.02743); Dubois et al. 2023,
AlpacaFarm (arXiv 2305.14387), section 4.3.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

import tyro
from pydantic import Field

from ...cli.options import Count
from ..experiment.engine import run as run_experiment
from ..experiment.reward_models import train as train_reward_model
from ..experiment.treated import Sizes, TreatmentRun
from ..experiment.treatments import BY_NAME, find_treatment
from ..harness.page import publish
from ..harness.runner import Cell, Work, run_cells
from ..harness.sources import sandbox_sources
from ..harness.stored import cell_file
from ..harness.study import Row, Study, StudyOptions, named_once, run_command, write_csv
from .analysis import COLUMNS, position
from .page import page
from .runs import run_best_of_n

NAME = "overoptimization"
QUICK = ("none", "ann", "uwo_3")  # treatments of --quick
REWARD_MODELS = (
    *("treatment", "judge", "flip", "num_labels", "layers", "member", "seed", "num_trained", "num_pairs"),
    *("accuracy_gold", "accuracy_judge", "calibration_error", "scale"),
)
"""Columns of reward_models.csv."""
Method = Literal["ppo", "quark", "expert_iteration", "dpo", "best_of_n"]


@dataclass(frozen=True)
class OveroptimizationOptions(StudyOptions):
    """Options of the over-optimization study. With --quick there are 2 seeds, 3 treatments and small sizes."""

    name: ClassVar[str] = NAME
    no_data: ClassVar[str] = "only the sandbox knows the true reward."
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2}

    seeds: Count = 5
    """Number of independent runs: seeds 0 .. N-1, of the labels, the reward models, the samples and the methods."""
    treatments: tuple[str, ...] = ()
    """Which reward treatments, by name or as module:attribute of your own. Default: all, with --quick none, ann and
    uwo_3."""
    methods: Annotated[tuple[Method, ...], Field(min_length=1)] = ("ppo", "best_of_n")
    """Methods that optimize against them. DPO learns from the labels alone, whatever reward is made of them, and has no
    run in a treatment without labels."""
    processes: Count = 2
    """Cells at a time, each in a process with one torch thread."""
    sizes: Annotated[Sizes | None, tyro.conf.Suppress] = None
    """Other sizes, for tests."""

    @property
    def chosen_sizes(self) -> Sizes:
        """The sizes of the cells."""
        return self.sizes or (Sizes.quick() if self.quick else Sizes())

    @property
    def specs(self) -> dict[str, str]:
        """Name of each chosen treatment -> how it was given."""
        return named_once(
            "--treatments", self.treatments or (QUICK if self.quick else BY_NAME), find_treatment, BY_NAME
        )


def make_plans(options: OveroptimizationOptions) -> list[TreatmentRun]:
    """A run for each treatment, method and seed.

    Runs of these seeds that an earlier call has stored are among them, so that calls for some methods and treatments
    add up to one table. Of a treatment without labels there is no run of DPO, of one with a KL penalty of its own
    there is PPO alone.
    """
    specs, sizes, out = list(options.specs.values()), options.chosen_sizes, options.folder(NAME)
    every = [
        TreatmentRun(treatment=spec, agent=method, seed=seed, out=out, sizes=sizes)
        for spec in dict.fromkeys((*specs, *BY_NAME))
        for method in get_args(Method)
        for seed in range(options.seeds)
    ]
    return [
        run
        for run in every
        if (run.treatment in specs and run.agent in options.methods and applies(run))
        or cell_file(out, run.cell).is_file()
    ]


def applies(run: TreatmentRun) -> bool:
    """Whether the method can be told apart under the treatment, and run."""
    return run.agent == "ppo" or (run.treated.kl_coef is None and (run.agent != "dpo" or run.treated.members > 0))


def work_of(run: TreatmentRun) -> Work:
    """The work of a method's cell."""
    return partial(run_best_of_n, run) if run.agent == "best_of_n" else partial(run_experiment, run)


def run(options: OveroptimizationOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status."""
    options.refuse_taken(NAME)
    runs = make_plans(options)
    if not runs:
        wanted = "dpo needs labels, and a KL penalty of its own ppo"
        raise ValueError(f"--methods: {wanted}; nothing is left to run of {', '.join(options.specs)}.")
    # Each part needs the cells of those before it. Reward models of equal labels, member and seed are one.
    models = {model.cell: model for run in runs for model in run.members}
    samples = {run.samples.cell: run.samples for run in runs if run.agent == "best_of_n"}
    parts = {
        "reward models": [Cell(key, partial(train_reward_model, model), model.units) for key, model in models.items()],
        "samples": [Cell(key, each.draw, each.units) for key, each in samples.items()],
        "methods": [Cell(run.cell, work_of(run), run.units) for run in runs],
    }
    with options.study(NAME, settings(runs[0]), sources=sandbox_sources()) as study:
        counts = f"{len(options.specs)} treatments, seeds: {options.seeds}, {len(runs)} runs"
        print(f"{NAME} into {study.out}: {counts}, at a time: {options.processes}", file=sys.stderr)
        rows: dict[str, list[Row]] = {}
        for number, (part, cells) in enumerate(parts.items(), start=1):
            if cells:
                print(f"{number} of {len(parts)}: {part} ({len(cells)})", file=sys.stderr)
            rows[part] = run_cells(study, cells, processes=options.processes) if cells else []
        if not rows["methods"]:
            why = f"no run was finished, why is above. No page is written; one in {study.out} is of an earlier call."
            print(f"error: {why}", file=sys.stderr)
            return study.exit_status
        write_results(study, runs, rows["methods"])
        return study.finish()


def settings(plan: TreatmentRun) -> dict[str, Any]:
    """All that decides the rows of every treatment: a folder of results that came from others is refused."""
    from ...agents import PPOConfig, RewardModelingConfig

    ppo = replace(replace(plan, agent="ppo").config(PPOConfig), kl_coef=plan.sizes.kl_coef)
    configs = {"ppo": ppo, "reward_modeling": RewardModelingConfig.sandbox()}
    return {"sizes": asdict(plan.sizes), **{name: asdict(config) for name, config in configs.items()}}


def write_results(study: Study, runs: Sequence[TreatmentRun], rows: Sequence[Row]) -> None:
    """The tables and the page, of the rows of finished cells."""
    order = {run.treated.name: place for place, run in enumerate(runs)}
    curves = [table_row(row) for row in rows]
    curves.sort(key=lambda row: (order[row["treatment"]], row["method"], row["seed"], row[position(row["method"])]))
    study.write_table(curves, COLUMNS)
    done = set(study.done)
    models = {(run.treated.name, model.cell): model.cell for run in runs for model in run.members if model.cell in done}
    used = [{"treatment": name, **study.rows(cell)[0]} for (name, _), cell in models.items()]
    write_csv(study.out / "reward_models.csv", used, REWARD_MODELS)
    # With the number of labels that they really have.
    treatments = [(run.treated.title, replace(run.treated, num_labels=run.labels.num_labels)) for run in runs]
    study.note(level="sandbox", treatments={each.name: {"title": t, **each.settings()} for t, each in treatments})
    publish(study, page(study.out))


def table_row(row: Row) -> Row:
    """A row of table.csv: a place of best-of-n is its n; None where there is no number."""
    place = {"step": None, "n": row["step"]} if row["method"] == "best_of_n" else {"n": None}
    row = {**row, **place}
    return {name: None if row.get(name) != row.get(name) else row.get(name) for name in COLUMNS}


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(OveroptimizationOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
