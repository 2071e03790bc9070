"""Sizes and plans of the over-optimization study: what each cell is made from and where it keeps its files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from ... import sandbox
from ...errors import CheckpointError, DataError
from ...folders import hash_model
from ...instructions import Instruction
from ...plugins import source_mark
from ...seeding import keyed_rng
from ..harness.evaluation import subset
from ..harness.stored import ANOTHER_OUT, cell_file, differences, file_name, read_stored
from .treatments import Cell, Labels, Treatment, find_treatment

Kind = Literal["ppo", "best_of_n"]
TEMPERATURE: Final = 1.0
"""Of all responses that are measured: that of PPO's training, at which its KL is penalised."""


@dataclass(frozen=True)
class Sizes:
    """How large the study's cells are; the defaults are the full study's."""

    num_labels: int = 10_000
    """Most labels a reward model learns from, whatever its treatment wants."""
    num_val: int = 500
    """Instructions of val whose answers, 4 each, set a reward model's scale."""
    num_fresh: int = 2000
    """Fresh pairs that a reward model's accuracy is measured on."""
    num_prompts: int = 100
    """Instructions of eval that best-of-n answers."""
    num_samples: int = 1024
    """Largest n of best-of-n."""
    num_eval: int = 201
    """Instructions of eval that PPO's policy answers at each evaluation."""
    ppo_steps: int = 40
    """PPO steps, past the peak of gold."""
    often_until: int = 10
    """Last PPO step of the part in which gold rises and falls fastest..."""
    often: int = 2
    """... where this many steps are between evaluations..."""
    seldom: int = 5
    """... and this many after it."""
    rollouts: int = 256
    """Responses of a PPO step."""
    kl_coef: float = 0.05
    """PPO's KL penalty, for rewards whose standard deviation within an instruction is 1 at SFT. With less even a reward
    without added noise is fooled in the end: the report's appendix."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("often_until", "kl_coef") else 1
            if not value >= least:
                raise ValueError(f"Sizes.{name}: expected {least} or more, got {value!r}")

    @classmethod
    def quick(cls) -> Sizes:
        """Those of --quick."""
        short = {"ppo_steps": 6, "often_until": 0, "seldom": 3}
        return cls(num_labels=2000, num_fresh=1000, num_prompts=20, num_samples=64, **short)

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """PPO steps after which the policy is evaluated: 0 (before training) first, then often, then seldom."""
        last = min(self.often_until, self.ppo_steps)
        often, seldom = range(0, last + 1, self.often), range(last, self.ppo_steps + 1, self.seldom)
        return tuple(sorted({0, *often, *seldom, self.ppo_steps}))

    @property
    def ns(self) -> tuple[int, ...]:
        """1, 2, 4, ... and the largest n."""
        return tuple(sorted({*(2**i for i in range(self.num_samples.bit_length())), self.num_samples}))

    def instructions(self, num: int) -> list[Instruction]:
        """So many instructions of eval, evenly spread, always the same ones."""
        everything = sandbox.SANDBOX.instructions("eval")
        return [everything[index] for index in subset(len(everything), num)]


@dataclass(frozen=True)
class RewardModelPlan:
    """One reward model: labels, member, seed."""

    labels: Labels
    member: int
    seed: int
    out: Path
    """The study's folder."""
    sizes: Sizes

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"reward model, {self.labels.name}, member {self.member}, seed {self.seed}"

    @property
    def units(self) -> int:
        """Its weight in the progress report: seconds on one core, roughly."""
        return 1 + (65 * self.labels.num_labels + 40 * self.sizes.num_fresh) // 10_000

    @property
    def folder(self) -> Path:
        """Where the trained model is."""
        return self.out / "reward_models" / file_name(self.cell)

    @property
    def done(self) -> bool:
        """Whether the reward model is whole."""
        from ..harness.reward_models import LAST_FILE

        return (self.folder / LAST_FILE).is_file()

    @property
    def training_seed(self) -> int:
        """Of the head's start and the order of the pairs: the same for all labels of a seed."""
        return self.seed if self.member == 0 else int(keyed_rng(self.seed, "member", self.member).integers(2**31))


@dataclass(frozen=True)
class SamplesPlan:
    """The SFT policy's samples of one seed, for best-of-n on all treatments."""

    seed: int
    out: Path
    sizes: Sizes

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"samples, seed {self.seed}"

    @property
    def units(self) -> int:
        """Its weight in the progress report."""
        return 2 + self.sizes.num_prompts * self.sizes.num_samples // 1800

    @property
    def folder(self) -> Path:
        """Where they are kept."""
        return self.out / "samples" / f"seed-{self.seed}"


@dataclass(frozen=True)
class TreatmentPlan:
    """A method on one treatment and seed; picklable, so that it can be sent to a process."""

    treatment: str
    """Name, or module:attribute."""
    seed: int
    out: Path
    sizes: Sizes
    mark: str = field(init=False)
    """Of a treatment of one's own, as it was loaded where the plan was made."""
    method: ClassVar[Kind]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mark", source_mark(self.treatment))

    @property
    def units(self) -> int:
        """Its weight in the progress report: seconds on one core, roughly."""
        raise NotImplementedError

    @property
    def cell(self) -> str:
        """Name of the study's cell. A treatment of one's own that was edited is another one."""
        return f"{self.found.name}{self.mark}, {self.method}, seed {self.seed}"

    @property
    def found(self) -> Treatment:
        """The treatment itself."""
        return find_treatment(self.treatment)

    @property
    def as_run(self) -> Treatment:
        """The treatment with the number of labels that it really has."""
        return replace(self.found, num_labels=self.found.labels(self.sizes.num_labels).num_labels)

    @property
    def folder(self) -> Path:
        """The cell's own."""
        return self.out / "runs" / file_name(self.cell)

    def reward_models(self) -> list[RewardModelPlan]:
        """The members, to be trained first; no more labels than the sizes allow."""
        labels = self.found.labels(self.sizes.num_labels)
        return [RewardModelPlan(labels, i, self.seed, self.out, self.sizes) for i in range(self.found.members)]

    def trained(self) -> Cell:
        """What the treatment makes its reward from.

        Raises:
            DataError: A member has not been trained.
        """
        members = self.reward_models()
        if missing := [plan for plan in members if not plan.done]:
            stored = ", ".join(str(cell_file(plan.out, plan.cell)) for plan in missing)
            raise DataError(
                f"{self.cell}: expected its reward models, found none for: {'; '.join(plan.cell for plan in missing)}. "
                f"To train them anew remove {stored} (what there is of it) and call again."
            )
        return Cell(self.seed, tuple(plan.folder for plan in members))

    def settings(self) -> dict[str, Any]:
        """What decides the cell's rows, JSON-able: a folder that was made with other settings is refused."""
        members = {folder.name: hash_model(folder) for folder in self.trained().reward_models}
        return {"treatment": self.found.settings(), "sizes": asdict(self.sizes), "reward_models": members}

    def changed(self) -> str:
        """What of the treatment was another when the cell's folder was made, "flip was 0.2, is 0.25"; or ""."""
        file = self.folder / "settings.json"
        if not file.is_file():
            return ""
        before = read_stored(file, "treatment", shape={"treatment": dict}, remedy=ANOTHER_OUT)["treatment"]
        now = json.loads(json.dumps(self.found.settings()))
        return ", ".join(differences(before, now))

    def evaluation_file(self, number: int) -> Path:
        """Where responses and verdicts after a PPO step, or of best-of-`number`, are kept: removed with the run."""
        name = {"ppo": "step", "best_of_n": "n"}[self.method]
        return self.folder / "evaluations" / f"{name}-{number:05}.json"


@dataclass(frozen=True)
class PPOPlan(TreatmentPlan):
    """PPO on one treatment and seed."""

    method = "ppo"

    @property
    def units(self) -> int:
        """Its weight in the progress report."""
        sizes, members = self.sizes, self.found.members
        scored = members * (1 + self.found.level_samples) if members > 1 else 1  # an ensemble scores SFT's answers too
        training = sizes.ppo_steps * sizes.rollouts * (12 + scored) // 1000
        return 2 + training + len(self.sizes.evaluated_steps) * sizes.num_eval * (3 + members) // 1000


@dataclass(frozen=True)
class BestOfNPlan(TreatmentPlan):
    """Best-of-n on one treatment and seed, from the seed's samples."""

    method = "best_of_n"

    @property
    def units(self) -> int:
        """Its weight in the progress report."""
        return 2 + max(1, self.found.members) * self.sizes.num_prompts * self.sizes.num_samples // 3000


@dataclass(frozen=True)
class Plans:
    """All cells of a study."""

    reward_models: tuple[RewardModelPlan, ...]
    samples: tuple[SamplesPlan, ...]
    treatments: tuple[TreatmentPlan, ...]

    @classmethod
    def of(cls, specs: Iterable[str], methods: Collection[Kind], seeds: Sequence[int], out: Path, sizes: Sizes) -> Self:
        """A plan a cell. Reward models of equal labels, member and seed are one, whoever uses them."""
        kinds = [kind for kind in (PPOPlan, BestOfNPlan) if kind.method in methods]
        plans = tuple(kind(spec, seed, out, sizes) for spec in specs for kind in kinds for seed in seeds)
        models = {model.cell: model for plan in plans for model in plan.reward_models()}
        samples = [SamplesPlan(seed, out, sizes) for seed in seeds if BestOfNPlan in kinds]
        return cls(tuple(models.values()), tuple(samples), plans)

    def refuse_changed(self) -> None:
        """Keeps results of what a treatment once was from passing for those of what it is now.

        Raises:
            CheckpointError: A treatment of a stored cell has changed since.
        """
        changed = {plan.found.name: f"{what}, in {plan.out}" for plan in self.treatments if (what := plan.changed())}
        if changed:
            told = "; ".join(f"{name} ({what})" for name, what in changed.items())
            raise CheckpointError(
                f"There are results of treatments that have changed since: {told}. Choose another --out, or remove "
                "what begins with their names from its folders cells and runs."
            )
