"""The main job: PPO in AlpacaFarm, and its win-rate curve.

    python -m alpacafarm_env.benchmarks.win_rate_curve [--quick] [--seeds N] [--out DIR]
    python -m alpacafarm_env.benchmarks.win_rate_curve [--quick] --dataset RECORDED_FOLDER --policy MODEL

Trains PPO on AlpacaFarm-PPO-v0 with several seeds. Every few steps the policy answers val and eval instructions, and
the answers are scored: proxy (the reward model trained on), gold (the sandbox's true reward), win rate against the
reference by p_sim^eval and by human raters, KL from SFT, length, share finished. As in the paper, the reported step is
chosen on val by the simulated win rate and measured on eval; the whole curve is shown.

Of a folder of recorded judgements (pip install "alpacafarm-env[recorded]") the instructions are divided: a reward model
is learned of a real judge's verdicts on some, PPO trains on others, and on the rest a learned gold, fitted on all other
verdicts, gives the win rate against the recorded reference. --reward-model and --judge put others in their place.
With a model of 135 M parameters --quick took 8 minutes on two cores.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4 and figure 4.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ... import agents
from ...cli.options import Count, Positive
from ...data import Dataset
from ...data.load import training_dataset
from ...data.recorded import RecordedParts
from ...errors import DataError
from ...folders import check_model, hash_model
from ..experiment.engine import Experiment, Sampling
from ..experiment.engine import run as run_experiment
from ..experiment.own_judge import (
    LEARNED_GOLD,
    judge_content,
    judge_name,
    judge_settings,
    make_own_judge,
    refuse_trained_on,
    settled_judge,
)
from ..harness.page import publish
from ..harness.report import Provenance
from ..harness.runner import Cell, follow, run_cells
from ..harness.sources import Sources, data_content
from ..harness.study import Row, Study, StudyOptions, run_command, write_csv
from ..methods.job import ModelOptions
from ..methods.methods import REWARD_MODELING
from ..methods.presets import choose_preset
from .page import COLUMNS, choose, curves_of, page, samples, unscored

NAME = "win_rate_curve"
SPLITS = ("val", "eval")
REWARD_LEARNING_RATE = 1e-4
"""Of a reward model of recorded verdicts: adapters take more than AlpacaFarm's 3e-6 for all weights."""
DECIDING = ("steps", "evaluate_every", "temperature", "preset", "max_prompt_tokens", "template")
"""Options that decide the rows of every seed."""


@dataclass(frozen=True)
class WinRateCurveOptions(ModelOptions, StudyOptions):
    """Options of the win-rate curve. With --quick the defaults of seeds, steps and sizes are smaller."""

    name: ClassVar[str] = NAME
    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2, "steps": 10, "num_val": 200, "num_eval": 402}
    recorded_defaults: ClassVar[Mapping[str, Any]] = {
        "seeds": 3, "processes": 1, "steps": 20, "num_val": 80, "num_eval": 200, "max_response_tokens": 96,
        "rollout_batch_size": 64, "minibatch_size": 32, "learning_rate": 1e-4, "micro_batch_tokens": 1024,
    }  # fmt: skip
    """Those of a recorded folder: real models take seconds where the sandbox's take milliseconds."""
    quick_recorded_defaults: ClassVar[Mapping[str, Any]] = {
        "seeds": 1, "steps": 4, "evaluate_every": 2, "num_val": 16, "num_eval": 40, "max_prompt_tokens": 96,
        "max_response_tokens": 48, "rollout_batch_size": 24, "minibatch_size": 12, "learning_rate": 3e-4,
        "reward_pairs": 128, "reward_tokens": 192,
    }  # fmt: skip

    seeds: Count = 4
    """Number of independent runs: seeds 0 .. N-1."""
    max_prompt_tokens: Count | None = None
    """Longest prompt to train on, in tokens; longer ones are counted and left out, and still answered where the policy
    can. Default: AlpacaFarm's 192."""
    steps: Count = 30
    """PPO steps of each run, with every --preset."""
    evaluate_every: Count = 5
    """Steps between evaluations."""
    num_val: Count = 400
    """Instructions of val answered at each evaluation; they choose the step."""
    num_eval: Count = 805
    """Instructions of eval answered at each evaluation; they are what is reported."""
    temperature: Positive = 0.7
    """Sampling temperature of evaluated responses (the paper's)."""
    processes: Count = 2
    """Runs at a time, each in a process with one torch thread; a single one, on a recorded folder, has all cores."""
    reward_pairs: Count = 2000
    """Recorded verdicts that a reward model is learned of, where --dataset is a recorded folder and --reward-model is
    not given."""
    reward_tokens: Count = 512
    """Longest text that it reads, in tokens of prompt and response; longer ones lose their middle."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template and self.policy == self.reward_model == "sandbox":
            raise ValueError("--template: expected --policy or --reward-model with it; the sandbox's have theirs")

    @property
    def learns_reward(self) -> bool:
        """Whether the reward model is learned of recorded verdicts: it would be the sandbox's otherwise."""
        return self.reward_model == "sandbox" and self.policy != "sandbox" and isinstance(self.dataset, RecordedParts)

    @property
    def dataset(self) -> Dataset:
        """The data, a recorded folder divided."""
        return training_dataset(self.data, allow_overlap=self.allow_overlap)

    def other_defaults(self) -> Mapping[str, Any]:
        """Also those of a recorded folder."""
        quick = super().other_defaults()
        if not Path(self.data).expanduser().is_dir() or not isinstance(self.dataset, RecordedParts):
            return quick
        return {**quick, **self.recorded_defaults, **(self.quick_recorded_defaults if quick else {})}


def make_plans(options: WinRateCurveOptions) -> list[Experiment]:
    """One experiment a seed, with the numbers of instructions that there really are.

    Raises:
        DataError, CheckpointError: Own data without own models, or a model's name is a path to nothing.
    """
    learned = "" if options.learns_reward else options.reward_model
    models = [model for model in (options.policy, learned) if model]
    if options.data != "sandbox" and "sandbox" in models:
        raise DataError(
            f"--dataset {options.data}: expected --policy and --reward-model with it, got policy {options.policy!r} "
            f"and reward model {options.reward_model!r}; the sandbox's small models know only the sandbox's world"
        )
    for model in models:
        if model != "sandbox":
            check_model(model)
    options = options.settled()
    same: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("template", "allow_overlap", "max_prompt_tokens", "max_response_tokens")
    }
    judge = options.judge or ("recorded" if isinstance(options.dataset, RecordedParts) else None)
    plan = Experiment(
        cell="seed 0",
        agent="ppo",
        out=options.folder(NAME),
        seed=0,
        dataset=options.data,
        sft=options.policy,
        reward=learned or str(reward_plan(options).saved),
        judge=settled_judge(judge, options.dataset),
        preset=options.preset or choose_preset(options.policy)[0],
        changed=(*options.changed, ("save_every", options.evaluate_every)),  # checkpoints where it is evaluated
        places=tuple(sorted({*range(0, options.steps, options.evaluate_every), options.steps})),
        sampling=Sampling(options.temperature),
        alone=options.processes == 1 and isinstance(options.dataset, RecordedParts),
        measures_reward=True,
        **same,
    )
    sizes = {split: len(plan.data.instructions(split)) for split in SPLITS}
    splits = tuple((split, min(getattr(options, f"num_{split}"), size)) for split, size in sizes.items())
    return [replace(plan, cell=f"seed {seed}", seed=seed, splits=splits) for seed in range(options.seeds)]


def reward_plan(options: WinRateCurveOptions) -> Experiment:
    """The cell that learns a reward model of recorded verdicts: by LoRA where the policy trains so."""
    shared = ("micro_batch_tokens", "precision", "gradient_checkpointing", "sharding")
    own = {"learning_rate": REWARD_LEARNING_RATE, "max_length": options.reward_tokens, "save_every": 5}
    return Experiment(
        cell="reward model",
        agent=REWARD_MODELING,
        out=options.folder(NAME),
        seed=0,
        dataset=options.data,
        sft=options.policy,
        preset=options.preset or choose_preset(options.policy)[0],
        template=options.template,
        changed=(*((name, value) for name, value in options.changed if name in shared), *own.items()),
        max_pairs=options.reward_pairs,
        save="adapter",
        splits=(),
        alone=True,
    )


def settings(options: WinRateCurveOptions, plan: Experiment) -> dict[str, Any]:
    """All that decides the rows of every seed besides `sources`, JSON-able."""
    from ...agents.settings import FREE_TO_CHANGE

    free = FREE_TO_CHANGE - {"save_every", "keep_checkpoints"}  # which are the study's
    ppo = {name: value for name, value in asdict(plan.config(agents.PPOConfig)).items() if name not in free}
    options_given = {**vars(options), "preset": plan.preset}
    sizes = {f"num_{split}": number for split, number in plan.splits}
    names = (*DECIDING, *(("reward_pairs", "reward_tokens") if options.learns_reward else ()))
    return {name: options_given[name] for name in names} | sizes | {"judge": judge_settings(plan.judge), "ppo": ppo}


def sources(plan: Experiment, *, learned: bool = False) -> Sources:
    """Data and models, by the options that name them; a reward model that is learned follows from the others."""
    reward = {} if learned else {"--reward-model": partial(hash_model, plan.reward_model)}
    return {
        "--dataset": partial(data_content, plan.dataset, allow_overlap=plan.allow_overlap),
        "--policy": partial(hash_model, plan.policy_folder),
        **reward,
        **({} if plan.judge is None else {"--judge": partial(judge_content, plan.judge)}),
    }


def run(options: WinRateCurveOptions) -> int:
    """Runs the study, writes its folder, prints the summary and returns the exit status.

    Processes that torchrun has started train each seed together, one after the other; only the main one writes.
    """
    options.refuse_taken(NAME)
    plans = make_plans(options)
    from ...agents.processes import Processes

    world, plan = Processes(), plans[0]
    gpus = 0 if options.policy == "sandbox" else 1
    cells = [Cell(each.cell, partial(run_experiment, each), each.units, gpus=gpus) for each in plans]
    learned = [reward_plan(options)] if options.learns_reward else []
    first = [Cell(each.cell, partial(run_experiment, each), each.units, gpus=gpus) for each in learned]
    if not world.is_main:
        return (follow(world, first) if first else 0) or follow(world, cells)
    if plan.judge is not None:
        make_own_judge(plan.judge, plan.data)
        if not learned:
            refuse_trained_on(plan.judge, hash_model(plan.reward_model))
    with options.study(NAME, settings(options, plan), sources=sources(plan, learned=bool(learned))) as study:
        processes = min(options.processes, len(plans)) if world.count == 1 else 1
        shape = f"{options.steps} PPO steps a seed, seeds: {len(plans)}, at a time: {processes}"
        print(f"{NAME} into {study.out}: {shape}", file=sys.stderr)
        if first:
            print(f"First a reward model of recorded verdicts, into {learned[0].saved}:", file=sys.stderr)
        trained = run_cells(study, first, world=world) if first else []
        if len(trained) < len(first):
            return study.exit_status
        rows = run_cells(study, cells, processes=processes, world=world)
        if rows:
            write_results(study, [plan for plan in plans if plan.cell in study.done], rows, trained)
        return study.finish() if rows else study.exit_status


def write_results(study: Study, plans: Sequence[Experiment], rows: Sequence[Row], trained: Sequence[Row] = ()) -> None:
    """Tables, the page and the manifest's facts; `plans` are the finished ones, `trained` a learned reward's row."""
    by_split = {split: [row for row in rows if row["split"] == split] for split in SPLITS}
    columns = COLUMNS if plans[0].judge is None else (*COLUMNS, "win_rate")
    study.write_table(by_split["eval"], columns)
    write_csv(study.out / "val.csv", by_split["val"], columns)
    steps = choose(curves_of(by_split["val"])).steps
    shown: Any = samples(plans[0], steps[plans[0].seed]).to_dict("records")
    write_csv(study.out / "samples.csv", shown)
    where = provenance(plans)
    if trained:
        text = "of {num_train} recorded verdicts, by LoRA on the policy; right on {accuracy:.0%} of {num_test} left out"
        where = replace(where, reward_model=text.format_map(trained[0]))
    study.note(
        provenance=vars(where),
        unscored=unscored(plans, where.level),
        level=where.level,
        judges=where.judges(),
        reference=where.reference,
        chosen_steps={str(seed): step for seed, step in steps.items()},
    )
    publish(study, page(study.out))


def provenance(plans: Sequence[Experiment]) -> Provenance:
    """Level, models and counts of the finished runs."""
    plan, dataset = plans[0], plans[0].data
    return Provenance(
        level="recorded (learned gold)" if plan.judge == LEARNED_GOLD else dataset.level,
        dataset=plan.dataset,
        policy=plan.sft,
        reward_model="surrogate" if plan.reward == "sandbox" else Path(plan.reward_model).name,
        num_val=dict(plan.splits)["val"],
        num_eval=dict(plan.splits)["eval"],
        num_seeds=len(plans),
        temperature=plan.sampling.temperature if plan.sampling else 1.0,
        judge="" if plan.judge is None else judge_name(plan.judge, dataset),
    )


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(WinRateCurveOptions.parse()), joins=True)


if __name__ == "__main__":
    sys.exit(main())
