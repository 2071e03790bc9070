"""The main job: PPO in AlpacaFarm, and its win-rate curve.

    python -m alpacafarm_env.benchmarks.win_rate_curve [--quick] [--seeds N] [--out DIR]

Trains PPO on AlpacaFarm-PPO-v0 with several seeds. Every few steps the policy answers val and eval instructions, and
the answers are scored: proxy (the reward model trained on), gold (the sandbox's true reward), win rate against the
reference by p_sim^eval and by human raters, KL from SFT, length, share finished. As in the paper, the reported step is
chosen on val by the simulated win rate and measured on eval; the whole curve is shown.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4 and figure 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from ... import agents
from ...cli.options import parse
from ...errors import DataError
from ...folders import check_model, hash_model
from ..experiment.own_judge import judge_content, judge_settings
from ..harness.sources import Sources, data_content
from ..harness.study import StudyOptions
from ..methods.job import Job, ModelOptions, check_positive
from ..methods.presets import choose_preset

NAME = "win_rate_curve"
SPLITS = ("val", "eval")
DECIDING = ("steps", "evaluate_every", "num_val", "num_eval", "temperature", "preset", "max_prompt_tokens", "template")
"""Options that decide the rows of every seed."""


@dataclass(frozen=True)
class WinRateCurveOptions(ModelOptions, StudyOptions):
    """Options of the win-rate curve. With --quick the defaults of seeds, steps and sizes are smaller."""

    quick_defaults: ClassVar[Mapping[str, Any]] = {"seeds": 2, "steps": 10, "num_val": 200, "num_eval": 402}

    seeds: int = 4
    """Number of independent runs: seeds 0 .. N-1."""
    max_prompt_tokens: int | None = None
    """Longest prompt to train on, in tokens; longer ones are counted and left out, and still answered where the models
    can. Default: the positions of the models less the longest response."""
    steps: int = 30
    """PPO steps of each run, with every --preset."""
    evaluate_every: int = 5
    """Steps between evaluations."""
    num_val: int = 400
    """Instructions of val answered at each evaluation; they choose the step."""
    num_eval: int = 805
    """Instructions of eval answered at each evaluation; they are what is reported."""
    temperature: float = 0.7
    """Sampling temperature of evaluated responses (the paper's)."""
    processes: int = 2
    """Runs at a time, each in a process with one torch thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("rollout_batch_size", "minibatch_size", "micro_batch_tokens", "sampling_batch", "max_prompt_tokens")
        counts = ("steps", "evaluate_every", "num_val", "num_eval", "processes")
        check_positive(self, (*counts, *sizes, "learning_rate", "temperature"))
        if self.template and self.policy == self.reward_model == "sandbox":
            raise ValueError("--template: expected --policy or --reward-model with it; the sandbox's have theirs")

    @classmethod
    def parse(cls, args: Sequence[str] | None = None) -> Self:
        """Options from the command line; --quick changes what is not given."""
        prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
        return parse(cls, args, prog=prog, description=__doc__)


@dataclass(frozen=True)
class RunPlan(WinRateCurveOptions):
    """One seed's run: the settled options and the seed; picklable, to be sent to a process."""

    seed: int = 0

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"seed {self.seed}"

    def evaluation_file(self, step: int) -> Path:
        """Where the evaluation after a step is kept."""
        return self.job.folder / "evaluations" / f"step-{step:05}.json"

    @property
    def job(self) -> Job:
        """Data, policy and reward model; its folder has PPO's metrics and checkpoints, and evaluations/."""
        same = ("seed", "template", "max_prompt_tokens", "changed", "allow_overlap")
        settings: dict[str, Any] = {name: getattr(self, name) for name in same}
        settings |= {"dataset": self.data, "sft": self.policy, "reward": self.reward_model}
        preset, folder = self.preset or choose_preset(self.policy)[0], self.folder(NAME) / "runs" / f"seed-{self.seed}"
        return Job(folder=folder, preset=preset, **settings)

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """Steps after which the policy is evaluated, 0 (before training) first."""
        return tuple(sorted({*range(0, self.steps, self.evaluate_every), self.steps}))

    @property
    def max_response_tokens(self) -> int:
        """Longest response, in training and in evaluations: the preset's, else AlpacaFarm's 300."""
        return self.ppo_config().max_response_tokens or 300

    def ppo_config(self) -> agents.PPOConfig:
        """The preset with the given options, and checkpoints at evaluated steps only."""
        return replace(self.job.config(agents.PPOConfig), save_every=self.evaluate_every)

    def settings(self) -> dict[str, Any]:
        """What decides the rows of every seed besides `sources`, JSON-able."""
        from ...agents.settings import FREE_TO_CHANGE

        options = {name: getattr(self, name) for name in DECIDING}
        free = FREE_TO_CHANGE - {"save_every", "keep_checkpoints"}  # which are the study's
        ppo = {name: value for name, value in asdict(self.ppo_config()).items() if name not in free}
        return {**options, "judge": judge_settings(self.judge), "ppo": ppo}

    @property
    def sources(self) -> Sources:
        """Data and models, by the options that name them."""
        return {
            "--dataset": partial(data_content, self.data, allow_overlap=self.allow_overlap),
            "--policy": partial(hash_model, self.job.policy_folder),
            "--reward-model": partial(hash_model, self.job.reward_model),
            **({} if self.judge is None else {"--judge": partial(judge_content, self.judge)}),
        }

    def units_done(self, step: int) -> int:
        """Units of work, for the progress report, that are done after `step` steps and their evaluations.

        A response of an evaluation counts one. One of a step counts two, for it is also learned from: measured, 2.7 in
        the sandbox and 1.3 with a policy of 1 M parameters and a reward model as the judge.
        """
        evaluations = sum(evaluated <= step for evaluated in self.evaluated_steps)
        return 2 * step * self.ppo_config().rollout_batch_size + evaluations * (self.num_val + self.num_eval)


def make_plans(options: WinRateCurveOptions) -> list[RunPlan]:
    """One plan per seed, with the numbers of instructions that there really are.

    Raises:
        DataError, CheckpointError: Own data without own models, or a model's name is a path to nothing.
    """
    models = options.policy, options.reward_model
    if options.data != "sandbox" and "sandbox" in models:
        raise DataError(
            f"--dataset {options.data}: expected --policy and --reward-model with it, got policy {options.policy!r} "
            f"and reward model {options.reward_model!r}; the sandbox's small models know only the sandbox's world"
        )
    for model in models:
        if model != "sandbox":
            check_model(model)
    plan = RunPlan(**vars(options.settled()))
    sizes = {f"num_{split}": len(plan.job.data.instructions(split)) for split in SPLITS}
    known = {name: min(getattr(options, name), size) for name, size in sizes.items()}
    return [replace(plan, **known, seed=seed) for seed in range(options.seeds)]
