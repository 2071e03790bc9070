"""The over-optimization study: what a noisy reward does to a policy that is optimized against it for too long.

    python -m alpacafarm_env.benchmarks.overoptimization [--quick] [--seeds N] [--treatments NAME ...] [--methods ...]

For each reward treatment (who labels the pairs, with how much noise, how many, one reward model or an ensemble) methods
are run past the peak of gold (PPO, and where asked Quark, expert iteration and DPO; best-of-n up to n = 1024),
everything else held fixed: the same prompts, samples and draws. Proxy, gold, win rates, KL and length are measured on
the way. A treatment of your own joins by --treatments module:attribute: a `Treatment`, an oracle, or a wrapper of
batched environments. Later calls in the same folder, for other methods or treatments or more seeds, add to its table.

Sources: Gao, Schulman and Hilton 2022 (arXiv 2210.10760); Coste et al. 2023 (arXiv 2310.02743); Dubois et al. 2023,
AlpacaFarm (arXiv 2305.14387), section 4.3.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import tyro

from ...cli.options import parse
from ...errors import UnknownNameError
from ...plugins import check_unchanged
from ..harness.runner import Cell, ProgressFn, run_cells
from ..harness.sources import sandbox_sources
from ..harness.study import Row, Study, StudyOptions, run_command, write_csv
from .curves import COLUMNS, position
from .plans import PARTS, Method, Plan, Sizes, make_plans, refuse_changed
from .treatments import TREATMENTS, Labels, find_treatment

NAME = "overoptimization"
QUICK = ("none", "ann", "uwo_3")  # treatments of --quick
KNOWN = [treatment.name for treatment in TREATMENTS]


@dataclass(frozen=True)
class OveroptimizationOptions(StudyOptions):
    """Options of the over-optimization study. With --quick there are 2 seeds, 3 treatments and small sizes."""

    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2}

    seeds: int = 5
    """Number of independent runs: seeds 0 .. N-1, of the labels, the reward models, the samples and the methods."""
    treatments: tuple[str, ...] = ()
    """Which reward treatments, by name or as module:attribute of your own. Default: all, with --quick none, ann and
    uwo_3."""
    methods: tuple[Method, ...] = ("ppo", "best_of_n")
    """What optimizes against them. DPO learns from the labels alone, whatever reward is made of them, and has no run in
    a treatment without labels."""
    kl_coef: float | None = None
    """PPO's KL penalty: how much reward, in standard deviations of SFT's answers to one instruction, a nat costs. The
    less, the farther PPO goes. Default: 0.05."""
    processes: int = 2
    """Cells at a time, each in a process with one torch thread."""
    sizes: Annotated[Sizes | None, tyro.conf.Suppress] = None
    """Other sizes, for tests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes < 1:
            raise ValueError(f"--processes: expected 1 or more, got {self.processes!r}")
        if self.kl_coef is not None and not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"--kl-coef: expected 0 or more, got {self.kl_coef!r}")
        if self.data not in (None, "sandbox"):
            raise ValueError(f"--data: expected none, since only the sandbox knows the true reward, got {self.data!r}.")
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise ValueError(f"--methods: expected one or more, each once, got {self.methods!r}")

    @property
    def chosen_sizes(self) -> Sizes:
        """The sizes of the cells."""
        sizes = self.sizes or (Sizes.quick() if self.quick else Sizes())
        return sizes if self.kl_coef is None else replace(sizes, kl_coef=self.kl_coef)

    @property
    def specs(self) -> dict[str, str]:
        """Name of each chosen treatment -> how it was asked for; UnknownNameError where two have one name."""
        specs: dict[str, str] = {}
        for spec in self.treatments or (QUICK if self.quick else KNOWN):
            name = find_treatment(spec).name
            if specs.setdefault(name, spec) != spec or (spec != name and name in KNOWN):
                taken = "the study itself" if name in KNOWN else specs[name]
                raise UnknownNameError(
                    f"--treatments {spec}: expected a name of its own, got {name!r}, which is taken by {taken}."
                )
        return specs

    @classmethod
    def parse(cls, args: Sequence[str] | None = None) -> Self:
        """Options from the command line; --quick changes what is not given."""
        prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
        return parse(cls, args, prog=prog, description=__doc__)


def run(options: OveroptimizationOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status."""
    options.refuse_taken(NAME)
    out, sizes, seeds = options.folder(NAME), options.chosen_sizes, range(options.seeds)
    plans = make_plans(options.specs.values(), options.methods, seeds, out, sizes)
    *_, runs = plans.values()
    if not runs:
        raise ValueError(f"--methods dpo: expected a treatment with labels, got {', '.join(options.specs)}.")
    refuse_changed(runs)
    with options.study(NAME, settings(sizes), sources=sandbox_sources()) as study:
        counts = f"{len(options.specs)} treatments, seeds: {options.seeds}, {len(runs)} runs"
        print(f"{NAME} into {out}: {counts}, at a time: {options.processes}", file=sys.stderr)
        rows = {}
        for number, (part, cells) in enumerate(plans.items(), start=1):
            if cells:
                print(f"{number} of {len(plans)}: {part} ({len(cells)})", file=sys.stderr)
            work = [Cell(plan.cell, partial(run_plan, plan), plan.units) for plan in cells]
            rows[part] = run_cells(study, work, processes=options.processes) if cells else []
        if not rows[part]:
            why = f"no run was finished, why is above. No report is written; one in {out} is of an earlier call."
            print(f"error: {why}", file=sys.stderr)
            return study.exit_status
        write_results(study, plans, rows)
        if study.failed:
            print(f"error: cells that failed: {'; '.join(study.failed)}. Why is above.", file=sys.stderr)
        return study.finish()


def write_results(study: Study, plans: Mapping[str, list[Plan]], rows: Mapping[str, list[Row]]) -> None:
    """The tables and the page: of each part of the study its cells, and the rows of the finished ones."""
    from ..harness.page import publish
    from .analyse import Results
    from .page import page_of

    models, _, curves = (rows[part] for part in PARTS)
    *_, runs = (plans[part] for part in PARTS)
    sizes, places = runs[0].sizes, {run.treatment.name: place for place, run in enumerate(runs)}
    curves = sorted(
        curves, key=lambda row: (places[row["treatment"]], row["method"], row["seed"], row[position(row["method"])])
    )
    study.write_table(curves, COLUMNS)
    used, file = reward_models_of(runs, models), study.out / "reward_models.csv"
    if used:
        write_csv(file, used)
    else:
        file.unlink(missing_ok=True)  # an earlier call's, of other treatments
    # With the number of labels that they really have.
    treatments = [replace(run.treatment, num_labels=run.treatment.labels(sizes.num_labels).num_labels) for run in runs]
    study.note(level="sandbox", treatments={each.name: each.settings() for each in treatments})
    publish(study, page_of(Results(curves, treatments), used, sizes))


def reward_models_of(runs: Sequence[Plan], models: Sequence[Row]) -> list[Row]:
    """A row a treatment, seed and member: reward models that several treatments share stand in each of them."""
    names = [*(field.name for field in fields(Labels)), "member", "seed"]
    by_model = {tuple(row[name] for name in names): row for row in models}
    wanted = dict.fromkeys(
        (run.treatment.name, (*vars(model.labels).values(), model.member, model.seed))
        for run in runs
        for model in run.reward_models()
    )
    return [{"treatment": name, **by_model[model]} for name, model in wanted if model in by_model]


def settings(sizes: Sizes) -> dict[str, Any]:
    """What decides the rows of every treatment: a folder of results that came from others is refused."""
    from ...agents import RewardModelingConfig
    from .policies import ppo_config

    configs = {"ppo": ppo_config(sizes), "reward_modeling": RewardModelingConfig.sandbox()}
    return {"sizes": asdict(sizes), **{name: asdict(config) for name, config in configs.items()}}


def run_plan(plan: Plan, on_progress: ProgressFn) -> list[Row]:
    """Runs a cell, unless its treatment was edited after the study began; --help does not wait for what it imports."""
    check_unchanged(plan.spec, plan.mark)
    from .run import run_cell

    return run_cell(plan, on_progress)


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(OveroptimizationOptions.parse()))
