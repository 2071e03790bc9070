"""The plan of a win-rate curve: what decides a seed's run, and what it is made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data import Dataset, load_dataset
from ...folders import hash_model
from ..harness.agent_options import with_options
from ..harness.own_judge import judge_content, judge_settings
from ..harness.sources import Sources, data_content

if TYPE_CHECKING:
    from ...agents import PPOConfig

SPLITS = ("val", "eval")


@dataclass(frozen=True)
class RunPlan:
    """All that decides one seed's run; picklable, so that it can be sent to a process."""

    seed: int
    folder: Path
    """The run's own folder: PPO's metrics and checkpoints, and evaluations/."""
    steps: int
    """PPO steps."""
    evaluate_every: int
    """Steps between evaluations; the first (0) and the last step are always evaluated."""
    num_val: int
    num_eval: int
    """How many instructions of val and eval are answered at each evaluation, always the same ones."""
    temperature: float
    """Sampling temperature of the evaluated responses."""
    dataset: str
    policy: str
    """Folder or hub name, or "sandbox"."""
    reward_model: str
    """Folder, or "sandbox"."""
    preset: str
    """The PPOConfig that is used, but for the number of steps: "sandbox" or "paper"."""
    max_prompt_tokens: int | None = None
    """Longest prompt trained on; None for all that fits."""
    judge: str | None = None
    """One's own, as `own_judge` reads it."""
    changed: tuple[tuple[str, float], ...] = ()
    """Fields of the preset that have other values: (name, value)."""
    allow_overlap: bool = False
    """Whether an instruction may stand in two splits."""

    template: str | None = None
    """Name of the prompt template of models that are not the sandbox's; None for what their folders say."""

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"seed {self.seed}"

    @property
    def proxy(self) -> str | dict[str, str]:
        """The training reward, as an oracle's specification."""
        named = {"template": self.template} if self.template else {}
        return "surrogate" if self.reward_model == "sandbox" else {"reward_model": self.reward_model, **named}

    @property
    def policy_template(self) -> str | None:
        """Name of the policy's template, None for what its folder says."""
        return None if self.policy == "sandbox" else self.template

    @property
    def data(self) -> Dataset:
        """The dataset."""
        return load_dataset(self.dataset, allow_overlap=self.allow_overlap)

    @property
    def model_folders(self) -> tuple[str, str]:
        """Where policy and reward model are."""
        if "sandbox" not in (self.policy, self.reward_model):
            return self.policy, self.reward_model
        from ...sandbox import POLICY, REWARD_MODEL

        shipped = ((self.policy, POLICY), (self.reward_model, REWARD_MODEL))
        policy, reward_model = (str(folder) if name == "sandbox" else name for name, folder in shipped)
        return policy, reward_model

    @property
    def sizes(self) -> dict[str, int]:
        """Split -> how many of its instructions are wanted."""
        return dict(zip(SPLITS, (self.num_val, self.num_eval), strict=True))

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """Steps after which the policy is evaluated, 0 (before training) first."""
        return tuple(sorted({*range(0, self.steps, self.evaluate_every), self.steps}))

    @property
    def units(self) -> int:
        """Units of work for the progress report, see `units_done`."""
        return self.units_done(self.steps)

    @property
    def max_response_tokens(self) -> int:
        """Longest response, in training and in evaluations: the preset's, else AlpacaFarm's 300."""
        return self.ppo_config().max_response_tokens or 300

    def ppo_config(self) -> PPOConfig:
        """The preset with this plan's steps, and checkpoints at evaluated steps only."""
        from ...agents import PPOConfig

        preset = {"sandbox": PPOConfig.sandbox, "paper": PPOConfig.paper}[self.preset]()
        return with_options(replace(preset, total_steps=self.steps, save_every=self.evaluate_every), self.changed)

    def settings(self) -> dict[str, Any]:
        """What decides the rows of every seed beside `sources`, JSON-able: a folder of other values is refused."""
        left_out = {"seed", "folder", "changed", "allow_overlap"}
        left_out |= {"dataset", "policy", "reward_model"}  # see `sources`
        plan = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        ppo = {name: value for name, value in asdict(self.ppo_config()).items() if name != "micro_batch_tokens"}
        return {**plan, "judge": judge_settings(self.judge), "ppo": ppo}

    @property
    def sources(self) -> Sources:
        """Data and models, by the options that name them; where they lie does not matter."""
        policy, reward_model = self.model_folders
        return {
            "--dataset": partial(data_content, self.dataset, allow_overlap=self.allow_overlap),
            "--policy": partial(hash_model, policy),
            "--reward-model": partial(hash_model, reward_model),
            **({} if self.judge is None else {"--judge": partial(judge_content, self.judge)}),
        }

    def units_done(self, step: int) -> int:
        """Units done once `step` steps and their evaluations are.

        An evaluation counts one a response. A step counts two, for it samples and then learns: measured, 2.7 in the
        sandbox and 1.3 with a policy of 1 M parameters and a reward model for a judge.
        """
        evaluations = sum(evaluated <= step for evaluated in self.evaluated_steps)
        return 2 * step * self.ppo_config().rollout_batch_size + evaluations * self.evaluation_units

    @property
    def evaluation_units(self) -> int:
        """Those of one evaluation."""
        return self.num_val + self.num_eval

    def evaluation_file(self, step: int) -> Path:
        """Where the evaluation after a step is kept."""
        return self.folder / "evaluations" / f"step-{step:05}.json"
