"""Every method of the paper and later ones, trained, decoded and ranked by simulated and by human feedback.

    python -m alpacafarm_env.benchmarks.method_ranking [--quick] [--seeds N] [--methods NAME ...]

All methods start from the same SFT policy and learn from the same 10k pairs of its samples: once as p_sim^ann labels
them (25 % flips), once as human raters do. Each answers the eval instructions at temperature 0.7 (best-of-n: 1.0); the
answers are compared with the reference's by p_sim^eval and by human raters. The table stands next to the paper's, with
the rank correlation of the two columns.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4 and Table 2.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from ... import agents, sandbox
from ...cli.options import Count
from ...sandbox.dataset import SIZES
from ..experiment.engine import COLUMNS, Experiment, cell_of, read_evaluation
from ..experiment.engine import run as run_experiment
from ..experiment.reward_models import RewardModelRun
from ..experiment.reward_models import train as train_reward_model
from ..harness.estimates import frame_of
from ..harness.page import publish
from ..harness.report import Provenance
from ..harness.runner import Cell, run_cells
from ..harness.sources import sandbox_sources
from ..harness.study import Row, Study, StudyOptions, named_once, run_command
from ..methods.job import FEEDBACK_OF, FEEDBACKS, Feedback, Job, Labellers
from ..methods.methods import BY_NAME, RANKED, REWARD_MODELING, Method, find_method
from .page import BASELINE, JUDGED_BY, Summary, agreements_of, page

NAME = "method_ranking"


@dataclass(frozen=True)
class MethodRankingOptions(StudyOptions):
    """Options of the ranking."""

    name: ClassVar[str] = NAME
    no_data: ClassVar[str] = (
        "the ranking needs the sandbox's judges and demonstrations. On your own data train one method at a time: "
        "python -m alpacafarm_env.benchmarks.train"
    )
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 1, "num_eval": 201}

    seeds: Count = 3
    """Number of independent runs of each method: seeds 0 .. N-1, of training and of the annotators' labels."""
    methods: tuple[str, ...] = ()
    """Which methods, by name or as module:attribute of a Method of your own; SFT joins them. Default: all."""
    feedback: Annotated[tuple[Labellers, ...], Field(min_length=1)] = ("ann", "human")
    """Whose labels to train on: the noisy pool of annotators', the human raters', or each in turn."""
    num_eval: Annotated[int, Field(ge=1, le=SIZES["eval"])] = 805
    """Instructions of eval that every method answers."""
    processes: Count = 2
    """Cells at a time, each in a process with one torch thread."""

    @property
    def feedbacks(self) -> tuple[Feedback, ...]:
        """The feedback as tables call it."""
        return tuple(FEEDBACK_OF[each] for each in dict.fromkeys(self.feedback))

    @property
    def specs(self) -> dict[str, str]:
        """Name of each chosen method, SFT among them -> how it was given."""
        given = [*(self.methods or [method.name for method in RANKED]), BASELINE]
        return named_once("--methods", given, find_method, BY_NAME | {REWARD_MODELING: None})  # which gives no answers

    @property
    def chosen(self) -> tuple[Method, ...]:
        """The methods of `specs`."""
        return tuple(find_method(spec) for spec in self.specs.values())


def run(options: MethodRankingOptions) -> int:
    """Runs the study, writes its folder, prints the table and returns the exit status."""
    options.refuse_taken(NAME)
    config = {"quick": options.quick, "num_eval": options.num_eval, "presets": presets()}
    with options.study(NAME, config, sources=sandbox_sources()) as study:
        reward_plans, plans = make_plans(options)
        at_a_time = options.processes
        shape = f"{len(options.specs)} methods, seeds: {options.seeds}, {len(plans)} cells, at a time: {at_a_time}"
        print(f"{NAME} into {study.out}: {shape}", file=sys.stderr)
        if reward_plans:
            print(f"1 of 2: reward models ({len(reward_plans)})", file=sys.stderr)
            cells = [Cell(each.cell, partial(train_reward_model, each), each.units) for each in reward_plans]
            study.note(reward_models=run_cells(study, cells, processes=at_a_time))
            print("2 of 2: methods", file=sys.stderr)
        cells = [Cell(plan.cell, partial(run_experiment, plan), plan.units) for plan in plans]
        rows = run_cells(study, cells, processes=at_a_time)
        if rows:
            store_results(study, options, [plan for plan in plans if plan.cell in study.done], rows)
            publish(study, page(study.out))
        return study.finish() if rows else study.exit_status


def presets() -> dict[str, dict[str, Any]]:
    """The settings of every agent, so that a folder of results that came from others is refused."""
    others = ("APIPolicyConfig", "PolicyConfig")
    configs = [name for name in agents.__all__ if name.endswith("Config") and name not in others]
    return {name: asdict(getattr(agents, name).sandbox()) for name in configs}


def reward_model(options: MethodRankingOptions, seed: int, feedback: Feedback) -> RewardModelRun | None:
    """That of a seed's labels; None: a quick study takes the shipped one, of simulated labels."""
    if options.quick and feedback == "simulated":
        return None
    out, cell = options.folder(NAME), f"reward model, {feedback}, seed {seed}"
    job = Job(seed=seed, folder=out, feedback=feedback, quick=options.quick)
    return RewardModelRun(cell=cell, seed=seed, out=out, pairs=job.preferences, facts={"feedback": feedback})


def make_plans(options: MethodRankingOptions) -> tuple[list[RewardModelRun], list[Experiment]]:
    """The reward models that the methods need; and the cells, one per seed of a method that needs no feedback."""
    out, cells = options.folder(NAME), list(product(range(options.seeds), options.feedbacks))
    rewards, plans = {(seed, feedback): reward_model(options, seed, feedback) for seed, feedback in cells}, []
    for spec, method in zip(options.specs.values(), options.chosen, strict=True):
        for seed, feedback in cells:
            if method.needs == "nothing" and feedback != options.feedbacks[0]:
                continue
            made = rewards[seed, feedback]
            plan = Experiment(
                cell=cell_of(spec, feedback, seed),
                agent=spec,
                out=out,
                seed=seed,
                feedback=feedback,
                quick=options.quick,
                reward=str(made.target if made else sandbox.REWARD_MODEL) if method.needs == "reward" else None,
                splits=(("eval", options.num_eval),),
                save="merged",
            )
            plans.append(plan)
    needed = any(method.needs == "reward" for method in options.chosen)
    return [each for each in rewards.values() if each and needed], plans


def feedbacks_of(plan: Experiment) -> tuple[str, ...]:
    """The feedbacks for which a cell has a row."""
    return FEEDBACKS if plan.method.needs == "nothing" else (plan.feedback,)


def store_results(study: Study, options: MethodRankingOptions, plans: Sequence[Experiment], rows: list[Row]) -> None:
    """table.csv, and in the manifest what the page needs besides; `plans` are the finished ones."""
    order = {method.name: place for place, method in enumerate(options.chosen)}
    columns = {plan.method.name: feedbacks_of(plan) for plan in plans if plan.method.needs == "nothing"}
    rows = [
        {**row, "feedback": feedback} for row in rows for feedback in columns.get(row["method"], (row["feedback"],))
    ]
    rows.sort(key=lambda row: (order[row["method"]], row["feedback"] != "simulated", row["seed"]))
    study.write_table(rows, COLUMNS)
    credits: dict[str, dict[str, list[Any]]] = {feedback: {} for feedback in FEEDBACKS}
    for plan in plans:
        verdicts = read_evaluation(plan)["splits"]["eval"]
        for feedback in feedbacks_of(plan):
            of_seed = np.array(verdicts[JUDGED_BY[feedback]], dtype=np.float64)
            credits[feedback].setdefault(plan.method.name, []).append(of_seed)
    where = Provenance(
        level="sandbox",
        dataset="sandbox",
        policy="sandbox",
        reward_model="of the same feedback and seed",
        num_val=0,
        num_eval=options.num_eval,
        num_seeds=options.seeds,
        temperature=0.7,
        temperature_note=", best-of-n 1" if any(name.startswith("best_of") for name in order) else "",
    )
    agreements = agreements_of(Summary(frame_of(rows), options.chosen, options.feedbacks), credits)
    stored: dict[str, Any] = {
        name: each and {figure: vars(value) for figure, value in each.items()} for name, each in agreements.items()
    }
    specs = list(options.specs.values())
    study.note(provenance=vars(where), methods=specs, feedback=options.feedbacks, agreements=stored)
    study.note(level=where.level, judges=where.judges(), reference=where.reference)


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(MethodRankingOptions.parse()))


if __name__ == "__main__":
    sys.exit(main())
