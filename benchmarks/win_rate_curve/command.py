"""The main job: PPO in AlpacaFarm, and its win-rate curve.

    python -m alpacafarm_env.benchmarks.win_rate_curve [--quick] [--seeds N] [--out DIR]

Trains PPO on AlpacaFarm-PPO-v0 with several seeds. Every few steps the policy answers val and eval instructions, and
the answers are scored: proxy (the reward model trained on), gold (the sandbox's true reward), win rate against the
reference by p_sim^eval and by human raters, KL from SFT, length, share finished. As in the paper, the step that is
reported is chosen on val by the simulated win rate and measured on eval; the whole curve is shown.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4 and figure 4.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

import tyro

from ...data import Dataset, load_dataset
from ...errors import DataError
from ...folders import check_model
from ..harness.own_judge import judge_name
from ..harness.provenance import Provenance
from ..harness.report import Section, settings_table, text_table, write_report
from ..harness.report_text import SIMULATION
from ..harness.runner import Cell, follow, run_cells
from ..harness.study import Row, Study, StudyOptions, run_command, versions, write_csv
from . import report as words
from .inputs import check_inputs
from .plan import SPLITS, RunPlan
from .runs import run_seed
from .samples import samples_table, unscored_sentences
from .summary import COLUMNS, Curves, choose, compare

NAME = "win_rate_curve"
CHANGES = ("rollout_batch_size", "minibatch_size", "micro_batch_tokens", "learning_rate")
"""Options that replace a field of the preset."""


@dataclass(frozen=True)
class WinRateCurveOptions(StudyOptions):
    """Options of the win-rate curve. With --quick the defaults of seeds, steps and sizes are smaller."""

    seeds: int = 4
    """Number of independent runs: seeds 0 .. N-1."""
    data: Annotated[str | None, tyro.conf.arg(name="dataset", aliases=["--data"])] = None
    """Your own data (folder or hub name) instead of the sandbox; --policy and --reward-model are then needed too."""
    policy: str | None = None
    """Your own SFT model (folder or hub name) to start from and to measure KL against. Default: the sandbox's."""
    reward_model: str | None = None
    """Your own reward model (sequence-classification folder) to train on. Default: the sandbox's surrogate."""
    template: Literal["alpaca"] | None = None
    """The prompt that your own --policy and --reward-model were trained on, in the place of what their folders say.
    Needed where they have neither a prompt_template.json nor a tokenizer with a chat_template."""
    preset: Literal["sandbox", "paper"] | None = None
    """PPO's settings, all but the number of steps, which is --steps with every preset. Default: paper with --policy,
    else sandbox. paper's responses of 300 tokens do not fit the sandbox's policy: it needs --policy."""
    max_prompt_tokens: int | None = None
    """Longest prompt to train on, in tokens; longer ones are left out, with their number, and answered all the same
    where the models can. Default: the positions of the models less the longest response."""
    steps: int = 30
    """PPO steps of each run."""
    evaluate_every: int = 5
    """Steps between evaluations."""
    num_val: int = 400
    """Instructions of val answered at each evaluation; they choose the step."""
    num_eval: int = 805
    """Instructions of eval answered at each evaluation; they are what is reported."""
    judge: str | None = None
    """Who gives a win rate against the references of the data: an oracle's name, or its keywords as JSON, such as
    '{"pool": "eval", "base_url": "http://localhost:8000/v1", "budget_usd": 5}', or '{"reward_model": "folder"}' of a
    reward model held out."""
    allow_overlap: bool = False
    """Take data in which an instruction stands in two splits, or twice in one."""
    rollout_batch_size: int | None = None
    """Responses sampled for each PPO step. Default: the preset's (sandbox 128, paper 512)."""
    minibatch_size: int | None = None
    """Responses of each of PPO's updates. Default: the preset's."""
    micro_batch_tokens: int | None = None
    """Tokens that go through a model at once, so what memory allows; no result depends on it. Default: the preset's."""
    learning_rate: float | None = None
    """PPO's. Default: the preset's."""
    temperature: float = 0.7
    """Sampling temperature of evaluated responses (the paper's)."""
    processes: int = 2
    """Runs at a time, each in a process with one torch thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "evaluate_every", "num_val", "num_eval", "processes", *CHANGES[:3]):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value!r}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate: expected a number above 0, got {self.learning_rate!r}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"--temperature: expected a finite number above 0, got {self.temperature!r}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"--max-prompt-tokens: expected 1 or more, got {self.max_prompt_tokens!r}")
        if self.template and not (self.own_policy or self.reward_model):
            raise ValueError("--template: expected --policy or --reward-model beside it; the sandbox's say their own")
        if self.preset == "paper" and not self.own_policy:
            raise ValueError(
                "--preset paper: expected --policy beside it, got none; its responses of up to 300 tokens do not fit "
                "the 256 positions of the sandbox's policy. Give your own --policy, or leave --preset out"
            )

    @property
    def own_policy(self) -> bool:
        """Whether PPO starts from the user's own model and not from the sandbox's."""
        return self.policy not in (None, "sandbox")

    @classmethod
    def small(cls) -> Self:
        """The defaults of --quick."""
        return cls(quick=True, seeds=2, steps=10, num_val=200, num_eval=402)

    @classmethod
    def parse(cls, args: Sequence[str] | None = None) -> Self:
        """Options from the command line; --quick changes what is not given."""
        given = list(sys.argv[1:] if args is None else args)
        default = cls.small() if "--quick" in given else cls()
        prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
        return tyro.cli(cls, prog=prog, args=given, default=default, description=__doc__)


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
    with options.study(NAME, plans[0].settings(), sources=plans[0].sources, row=("split", *COLUMNS)) as study:
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
    own = options.data is not None and options.data != "sandbox"
    if own and not (options.policy and options.reward_model):
        raise DataError(
            f"--dataset {options.data}: expected --policy and --reward-model beside it, got policy {options.policy!r} "
            f"and reward model {options.reward_model!r}; the sandbox's small models know only the sandbox's world"
        )
    for model in (options.policy, options.reward_model):
        if model not in (None, "sandbox"):
            check_model(model)
    folder, dataset = options.folder(NAME), load_dataset(options.data or "sandbox", allow_overlap=options.allow_overlap)
    num_val, num_eval = (
        min(wanted, len(dataset.instructions(split)))
        for split, wanted in zip(SPLITS, (options.num_val, options.num_eval), strict=True)
    )
    given = {name: getattr(options, name) for name in CHANGES}
    changed = tuple((name, value) for name, value in given.items() if value is not None)
    return [
        RunPlan(
            seed=seed,
            folder=folder / "runs" / f"seed-{seed}",
            steps=options.steps,
            evaluate_every=options.evaluate_every,
            num_val=num_val,
            num_eval=num_eval,
            temperature=options.temperature,
            dataset=options.data or "sandbox",
            policy=options.policy or "sandbox",
            reward_model=options.reward_model or "sandbox",
            preset=options.preset or ("paper" if options.own_policy else "sandbox"),
            max_prompt_tokens=options.max_prompt_tokens,
            judge=options.judge,
            changed=changed,
            allow_overlap=options.allow_overlap,
            template=options.template,
        )
        for seed in range(options.seeds)
    ]


def write_results(study: Study, plans: Sequence[RunPlan], rows: Sequence[Row]) -> None:
    """Tables, figures, report.html and manifest, and the summary on stdout; `plans` are the finished ones."""
    by_split = {split: [row for row in rows if row["split"] == split] for split in SPLITS}
    columns = COLUMNS if plans[0].judge is None else (*COLUMNS, "win_rate")
    study.write_table(by_split["eval"], columns)
    write_csv(study.out / "val.csv", by_split["val"], columns)
    curves, val = Curves.of(by_split["eval"]), Curves.of(by_split["val"])
    choice = choose(val)
    chosen = {seed: curves.steps[column] for seed, column in zip(curves.seeds, choice.columns, strict=True)}
    dataset = plans[0].data
    where = provenance(dataset, plans)
    sentences = words.findings(compare(curves, choice), curves, choice) + unscored_sentences(plans, dataset.level)
    sentences = ([SIMULATION] if where.sandbox else []) + sentences
    table = words.summary_table(compare(curves, choice), where)
    study.note(level=where.level, judges=where.judges(), reference=where.reference, label=where.label())
    study.note(chosen_steps={str(seed): step for seed, step in chosen.items()}, findings=sentences)
    dotted = "The whole course of training; dotted lines mark the steps chosen on val."
    samples = samples_table(plans[0], dataset, chosen[plans[0].seed], f"{where.label()} {where.judges()}")
    names = {"dataset": where.dataset, "policy": where.policy, "reward_model": plans[0].reward_model}
    settings = {**names, **study.config, "seeds": list(chosen), **versions()}
    figures = words.write_figures(study.out, curves, val, choice, where)
    sections = [
        Section("Result", sentences, table),
        Section("Curves", [dotted], figures=figures),
        Section("Responses before and after", table=samples),
        Section("Every seed", table=words.run_table(curves, val, choice)),
        Section("What the columns mean", words.meanings(where)),
        Section("Configuration and versions", table=settings_table(settings)),
    ]
    write_report(study.out / "report.html", "PPO and its win-rate curve", sections)
    print(text_table(table), *sentences, where.label(), where.judges(), sep="\n")
    print(f"Written to {study.out}: report.html, table.csv, val.csv, manifest.json and {len(figures)} figures (PNG).")


def provenance(dataset: Dataset, plans: Sequence[RunPlan]) -> Provenance:
    """Level, models and counts of the finished runs."""
    plan = plans[0]
    return Provenance(
        level=dataset.level,
        dataset=plan.dataset,
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
