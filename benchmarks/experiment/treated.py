"""Runs of a method against a treatment's reward, past the peak of gold.

All treatments of a seed see the same prompts, the same samples and the same draws (common random numbers). Settings are
the sandbox's presets; what differs takes each method far enough from SFT to see what becomes of gold:
docs/studies/overoptimization_tried.md.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Final

from gymnasium.vector import VectorEnv

from ... import agents
from ...errors import DataError
from ...folders import hash_model
from ...instructions import Preference
from ...oracles.base import RewardOracle
from ...plugins import source_mark
from ...seeding import keyed_rng
from ..harness.stored import cell_file
from ..harness.study import Row
from .engine import Experiment, Sampling
from .reward_models import LAST_FILE, SCALE_SAMPLES, RewardModelRun
from .samples import SampleRun
from .treatments import Labels, Treatment, find_treatment

TEMPERATURE: Final = 1.0
"""Temperature of all responses that are measured: that of PPO's training, at which its KL is penalised."""
SAMPLING: Final = Sampling(TEMPERATURE, "kl_exact")
DPO_STEPS: Final = 6
"""Steps of DPO, an update each, for one of PPO, which has four."""


@dataclass(frozen=True)
class Sizes:
    """How large the study's cells are; the defaults are the full study's."""

    num_labels: int = 10_000
    """Most labels a reward model learns from, whatever its treatment wants."""
    num_val: int = 500
    """Instructions of val whose answers set a reward model's scale."""
    num_fresh: int = 2000
    """Fresh pairs that a reward model's accuracy is measured on."""
    num_prompts: int = 100
    """Instructions of eval that best-of-n answers."""
    num_samples: int = 1024
    """Largest n of best-of-n."""
    num_eval: int = 201
    """Instructions of eval that a policy answers at each evaluation."""
    steps: tuple[int, ...] = (0, 2, 4, 6, 8, 10, 15, 20, 25, 30, 35, 40)
    """PPO and Quark steps at which the policy is evaluated, often while gold rises and falls fastest; the last one is
    past the peak of gold. Expert iteration and DPO train in proportion."""
    rollouts: int = 256
    """Responses of a PPO or Quark step; instructions of a round of expert iteration."""
    kl_coef: float = 0.05
    """PPO's KL penalty, for rewards whose standard deviation within an instruction is 1 at SFT. With less even a reward
    without added noise is fooled in the end: docs/studies/overoptimization_tried.md."""

    @classmethod
    def quick(cls) -> Sizes:
        """Those of --quick."""
        return cls(num_labels=2000, num_fresh=1000, num_prompts=20, num_samples=64, steps=(0, 3, 6))

    @property
    def rounds(self) -> int:
        """Rounds of expert iteration: many, where the paper has one, which goes no farther than its best-of-n."""
        return max(1, self.steps[-1] // 6)

    def places(self, method: str) -> tuple[int, ...]:
        """Where a method is evaluated, ascending: after steps from 0, rounds of expert iteration, at n of best-of-n."""
        if method == "best_of_n":
            return tuple(sorted({*(2**i for i in range(self.num_samples.bit_length())), self.num_samples}))
        if method == "expert_iteration":
            return tuple(range(self.rounds + 1))
        return tuple(step * (DPO_STEPS if method in ("dpo", "kto") else 1) for step in self.steps)

    def changed(self, method: str) -> tuple[tuple[str, Any], ...]:
        """Settings that differ from the sandbox's presets."""
        kept = {"save_every": 10, "keep_checkpoints": 1}
        online = {
            "total_steps": self.steps[-1],
            "rollout_batch_size": self.rollouts,
            "minibatch_size": min(agents.PPOConfig.sandbox().minibatch_size, self.rollouts),
            "schedule": "constant",  # a rate that falls to 0 stops the policy where it is: near the peak
            **kept,
        }
        # Quark stays near SFT at its own rate.
        rate = agents.ExpertIterationConfig.sandbox().sft.learning_rate
        # Epochs are more than the steps take, whatever the number of pairs: `places` says where it ends.
        labels = {"epochs": DPO_STEPS * self.steps[-1], "warmup_steps": 8, "schedule": "constant"}
        offline = {**labels, **kept, "save_every": 20}
        fields: dict[str, dict[str, Any]] = {
            "ppo": {**online, "kl_coef": self.kl_coef},
            "quark": {**online, "learning_rate": rate},
            "expert_iteration": {"num_rounds": self.rounds, "num_instructions": self.rollouts, **kept},
            "dpo": offline,
            "kto": offline,
            "best_of_n": {},
        }
        return tuple(fields.get(method, online).items())


@dataclass(frozen=True, kw_only=True)
class TreatmentRun(Experiment):
    """A method on a treatment and seed."""

    treatment: str
    """Its name, or module:attribute of one's own."""
    sizes: Sizes
    cell: str = field(init=False)
    splits: tuple[tuple[str, int], ...] = field(init=False)
    measures_reward: bool = True
    required: tuple[str, ...] = ("kl_exact", "proxy", "gold")
    sampling: Sampling | None = SAMPLING

    NOT_DECIDING: ClassVar[frozenset[str]] = Experiment.NOT_DECIDING | {"treatment"}

    def __post_init__(self) -> None:
        # A treatment that has changed, or whose source was edited, is another one.
        content = json.dumps([self.treated.settings(), source_mark(self.treatment)])
        sizes = self.sizes if self.treated.kl_coef is None else replace(self.sizes, kl_coef=self.treated.kl_coef)
        mark = hashlib.sha256(content.encode()).hexdigest()[:8]
        settled = {
            "cell": f"{self.treated.name} ({mark}), {self.agent}, seed {self.seed}",
            "splits": (("eval", self.sizes.num_prompts if self.agent == "best_of_n" else self.sizes.num_eval),),
            "places": self.sizes.places(self.agent),
            "changed": sizes.changed(self.agent),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def source(self) -> str:
        """The treatment, which may be of one's own."""
        return self.treatment

    @property
    def treated(self) -> Treatment:
        """The treatment that `treatment` names."""
        return find_treatment(self.treatment)

    @property
    def facts(self) -> Row:
        """Columns that tell the study's rows apart."""
        return {"treatment": self.treated.name, "method": self.agent, "seed": self.seed}

    @property
    def labels(self) -> Labels:
        """The labels that the treatment's reward models learn from; no more than the sizes allow."""
        return self.treated.labels(self.sizes.num_labels)

    @property
    def samples(self) -> SampleRun:
        """A seed's samples, from which best-of-n chooses, for all treatments."""
        return SampleRun(self.seed, self.out, self.sizes.num_prompts, self.sizes.num_samples, self.units)

    @property
    def members(self) -> list[RewardModelRun]:
        """The treatment's reward models, to be trained first.

        0 is the mean score of the SFT policy's answers, 1 their standard deviation within an instruction: PPO and the
        choice among n samples are moved by differences within an instruction only, so one KL penalty pulls equally hard
        against any reward model (the mean or minimum of three moves a little less: 0.9 to 1).
        """
        return [
            reward_model(self.labels, member, self.seed, self.out, self.sizes) for member in range(self.treated.members)
        ]

    @cached_property
    def models(self) -> tuple[Path, ...]:
        """Folders of the trained members; DataError where one is missing."""
        if missing := [model for model in self.members if not (model.target / LAST_FILE).is_file()]:
            cells = ", ".join(str(cell_file(model.out, model.cell)) for model in missing)
            names = "; ".join(model.cell for model in missing)
            raise DataError(
                f"{self.cell}: expected its reward models, found none for: {names}. To train them anew remove {cells} "
                "(what there is of it) and call again."
            )
        return tuple(model.target for model in self.members)

    @property
    def value_start(self) -> Path | None:
        """PPO's value model starts from the first reward model; without one from the SFT policy."""
        return next(iter(self.models), None)

    def policy(self, **limits: int) -> agents.LanguageModel:
        """The SFT policy, which is also kept as the reference."""
        policy = super().policy(**limits)
        policy.add_reference()
        return policy

    def preferences(self) -> tuple[Preference, ...]:
        """The labelled pairs that the treatment's reward models learn from; DPO learns from them alone."""
        return self.labels.pairs(self.seed)

    def oracle(self, policy: agents.LanguageModel | None = None) -> RewardOracle:
        """The treatment's reward of responses to instructions of unlabeled."""
        return self.treated.proxy(self.models, "unlabeled")

    def env(self, num_envs: int, policy: agents.LanguageModel | None = None) -> VectorEnv[Any, Any, Any]:
        """AlpacaFarm-PPO-v0 with the treatment's reward."""
        return self.treated.env(self.models, num_envs)

    def proxy(self) -> RewardOracle:
        """The treatment's reward of responses to instructions of eval."""
        return self.treated.proxy(self.models)

    def settings(self) -> dict[str, Any]:
        """Also of the treatment and its reward models."""
        models = {folder.name: hash_model(folder) for folder in self.models}
        sizes = {"sizes": asdict(self.sizes)}
        return super().settings() | sizes | {"treated": self.treated.settings(), "reward_models": models}


def reward_model(labels: Labels, member: int, seed: int, out: Path, sizes: Sizes) -> RewardModelRun:
    """A member; all labels of a seed have the same start of the head and the same order of the pairs."""
    return RewardModelRun(
        cell=f"reward model, {labels.name}, member {member}, seed {seed}",
        seed=seed,
        out=out,
        pairs=partial(labels.pairs, seed),
        facts={**asdict(labels), "member": member},
        training_seed=seed if member == 0 else int(keyed_rng(seed, "member", member).integers(2**31)),
        layers=labels.layers,
        num_val=sizes.num_val,
        num_samples=SCALE_SAMPLES,
        judge=partial(labels.annotator, seed),
        num_fresh=sizes.num_fresh,
        units=1 + (65 * labels.num_labels + 40 * sizes.num_fresh) // 10_000,
    )
