"""The runs: labels of a seed by a judge with a fault, a reward model of them, and every method on either.

All of a seed see the same pairs, prompts and draws, and all labellings agree with gold on the same share of the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, cast

from ... import agents
from ..experiment.faults import CLEAN, FLIP, DialPlan
from ..experiment.fresh import Sizes, run_setting
from ..experiment.fresh_runs import SettingRun, run_method
from ..experiment.reward_models import RewardModelRun
from ..experiment.treated import Sizes as RunSizes
from ..harness.labels import Setting
from ..harness.runner import ProgressFn
from ..harness.study import Row

LABELLINGS: Final = {CLEAN: "clean labels", FLIP: "25 % flips", "length_bias": "a taste for length"}
METHODS: Final = {
    "best_of_n": "best-of-n",
    "ppo": "PPO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "online_dpo": "online DPO",
    "dpo": "DPO",
    "kto": "KTO",
    "quark": "Quark",
    "expert_iteration": "expert iteration",
}
"""In the order of the page."""
OFFLINE: Final = ("dpo", "kto")
"""Learn from the labels alone: no sample is drawn for them."""
EACH: Final = agents.ExpertIterationConfig.sandbox().num_samples
"""Samples of an instruction in expert iteration."""


@dataclass(frozen=True)
class TrainingSizes(RunSizes):
    """Every method that samples draws as many responses in all."""

    num_eval: int = 201
    steps: tuple[int, ...] = (0, 2, 4, 6, 8, 10, 13, 16, 20)
    """Half as many as over-optimization has. By flipped labels gold peaks before, by clean ones not always."""

    def changed(self, method: str) -> tuple[tuple[str, Any], ...]:
        """Expert iteration draws n for each instruction, others one or a group."""
        if method != "expert_iteration":
            return super().changed(method)
        return tuple({**dict(super().changed(method)), "num_instructions": self.instructions_of_a_round}.items())

    @property
    def instructions_of_a_round(self) -> int:
        """Of expert iteration, which draws a round's samples as often as there are rounds."""
        return max(1, self.steps[-1] * self.rollouts // (self.rounds * EACH))

    def samples(self, method: str, places: Sequence[int]) -> list[int]:
        """Responses drawn for training up to each place of a method."""
        each = dict.fromkeys(OFFLINE, 0) | {"expert_iteration": EACH * self.instructions_of_a_round}
        return [place * each.get(method, self.rollouts) for place in places]


@dataclass(frozen=True)
class AxisSizes(Sizes):
    """How large the study is; the defaults are the full study's."""

    labels: tuple[int, ...] = (2000,)
    flips: tuple[float, ...] = ()
    num_prompts: int = 201  # as many as in `training`: methods are compared by instruction
    num_samples_of_faults: int = 1024
    training: TrainingSizes = field(default_factory=TrainingSizes)

    @classmethod
    def quick(cls) -> AxisSizes:
        """Those of --quick."""
        small = replace(RunSizes.quick(), rollouts=64)
        training = TrainingSizes(**{**vars(small), "num_eval": 50})
        return cls(labels=(500,), num_prompts=50, num_samples=64, num_val=50, training=training)


@dataclass(frozen=True)
class AxisPlan(DialPlan):
    """A seed's labels by one of `LABELLINGS`."""

    sizes: AxisSizes
    pairs_name: ClassVar[str] = "pairs"
    pairs_each: ClassVar[int] = 1
    agreed: ClassVar[float] = 0.75

    @property
    def setting(self) -> Setting:
        """All labels."""
        return Setting(max(self.sizes.labels), 0.0)

    def reward_model(self, setting: Setting) -> RewardModelRun:
        """Of as many epochs as reward models of other studies."""
        return replace(super().reward_model(setting), epochs=None)

    def run(self, method: str) -> MethodRun:
        """A method on these labels."""
        run = {"agent": method, "seed": self.seed, "out": self.out, "sizes": self.sizes.training}
        return MethodRun(plan=self, setting=self.setting, kind=self.kind, **cast(Any, run))

    def best_of_n(self, on_progress: ProgressFn) -> list[Row]:
        """Trains the reward model and chooses by it; a row for each judge of what is chosen."""
        rows = run_setting(self, self.setting, on_progress)
        return [{**row, "method": "best_of_n", "samples": list(row["n"])} for row in rows]


@dataclass(frozen=True, kw_only=True)
class MethodRun(SettingRun):
    """A method on a seed's labels."""

    sizes: TrainingSizes

    def rows(self, on_progress: ProgressFn) -> list[Row]:
        """Trains and evaluates; a row for each judge."""
        told = {"method": self.agent, "samples": self.sizes.samples(self.agent, self.places)}
        return [{**row, **told} for row in run_method(self, on_progress)]
