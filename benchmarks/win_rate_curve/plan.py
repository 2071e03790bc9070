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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro

from ... import agents, sandbox
from ...data import Dataset, load_dataset
from ...folders import hash_model
from ..harness.agent_options import with_options
from ..harness.own_judge import judge_content, judge_settings
from ..harness.sources import Sources, data_content
from ..harness.study import StudyOptions

NAME = "win_rate_curve"
SPLITS = ("val", "eval")
DECIDING = ("steps", "evaluate_every", "num_val", "num_eval", "temperature", "preset", "max_prompt_tokens", "template")
"""Options that decide the rows of every seed."""
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
        counts = ("steps", "evaluate_every", "num_val", "num_eval", "processes", "max_prompt_tokens", *CHANGES[:3])
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value!r}")
        for name in ("learning_rate", "temperature"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')}: expected a finite number above 0, got {value!r}")
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
    def parse(cls, args: Sequence[str] | None = None) -> Self:
        """Options from the command line; --quick changes what is not given."""
        given = list(sys.argv[1:] if args is None else args)
        default = cls(quick=True, seeds=2, steps=10, num_val=200, num_eval=402) if "--quick" in given else cls()
        prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
        return tyro.cli(cls, prog=prog, args=given, default=default, description=__doc__)


@dataclass(frozen=True)
class RunPlan(WinRateCurveOptions):
    """One seed's run: the options, all of them settled, and the seed; picklable, to be sent to a process."""

    seed: int = 0

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"seed {self.seed}"

    @property
    def run_folder(self) -> Path:
        """The run's own folder: PPO's metrics and checkpoints, and evaluations/."""
        return self.folder(NAME) / "runs" / f"seed-{self.seed}"

    def evaluation_file(self, step: int) -> Path:
        """Where the evaluation after a step is kept."""
        return self.run_folder / "evaluations" / f"step-{step:05}.json"

    @property
    def dataset(self) -> Dataset:
        """The data."""
        return load_dataset(self.data or "sandbox", allow_overlap=self.allow_overlap)

    @property
    def proxy(self) -> str | dict[str, str]:
        """The training reward, as an oracle's specification."""
        named = {"template": self.template} if self.template else {}
        return "surrogate" if self.reward_model == "sandbox" else {"reward_model": str(self.reward_model), **named}

    @property
    def policy_template(self) -> str | None:
        """Name of the policy's template, None for what its folder says."""
        return self.template if self.own_policy else None

    @property
    def model_folders(self) -> tuple[str, str]:
        """Where policy and reward model are."""
        shipped = ((self.policy, sandbox.POLICY), (self.reward_model, sandbox.REWARD_MODEL))
        policy, reward_model = (str(folder if name == "sandbox" else name) for name, folder in shipped)
        return policy, reward_model

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """Steps after which the policy is evaluated, 0 (before training) first."""
        return tuple(sorted({*range(0, self.steps, self.evaluate_every), self.steps}))

    @property
    def max_response_tokens(self) -> int:
        """Longest response, in training and in evaluations: the preset's, else AlpacaFarm's 300."""
        return self.ppo_config().max_response_tokens or 300

    def ppo_config(self) -> agents.PPOConfig:
        """The preset with this plan's steps, and checkpoints at evaluated steps only."""
        preset = agents.PPOConfig.paper() if self.preset == "paper" else agents.PPOConfig.sandbox()
        changed = tuple((name, value) for name in CHANGES if (value := getattr(self, name)) is not None)
        return with_options(replace(preset, total_steps=self.steps, save_every=self.evaluate_every), changed)

    def settings(self) -> dict[str, Any]:
        """What decides the rows of every seed beside `sources`, JSON-able: a folder of other values is refused."""
        options = {name: getattr(self, name) for name in DECIDING}
        ppo = {name: value for name, value in asdict(self.ppo_config()).items() if name != "micro_batch_tokens"}
        return {**options, "judge": judge_settings(self.judge), "ppo": ppo}

    @property
    def sources(self) -> Sources:
        """Data and models, by the options that name them; where they lie does not matter."""
        policy, reward_model = self.model_folders
        return {
            "--dataset": partial(data_content, self.data or "sandbox", allow_overlap=self.allow_overlap),
            "--policy": partial(hash_model, policy),
            "--reward-model": partial(hash_model, reward_model),
            **({} if self.judge is None else {"--judge": partial(judge_content, self.judge)}),
        }

    @property
    def units(self) -> int:
        """Units of work for the progress report, see `units_done`."""
        return self.units_done(self.steps)

    @property
    def evaluation_units(self) -> int:
        """Those of one evaluation."""
        return self.num_val + self.num_eval

    def units_done(self, step: int) -> int:
        """Units done once `step` steps and their evaluations are.

        An evaluation counts one a response. A step counts two, for it samples and then learns: measured, 2.7 in the
        sandbox and 1.3 with a policy of 1 M parameters and a reward model for a judge.
        """
        evaluations = sum(evaluated <= step for evaluated in self.evaluated_steps)
        return 2 * step * self.ppo_config().rollout_batch_size + evaluations * self.evaluation_units
