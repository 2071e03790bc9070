"""Sizes and cells of the over-optimization study: what each cell is made from and where it keeps its files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from ... import sandbox
from ...errors import CheckpointError
from ...instructions import Instruction
from ...plugins import source_mark
from ..experiment.evaluation import subset
from ..harness.stored import ANOTHER_OUT, SETTINGS, cell_file, differences, file_name, read_stored
from .treatments import TREATMENTS, Labels, Treatment, find_treatment

Method = Literal["ppo", "quark", "expert_iteration", "dpo", "best_of_n"]


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
    ppo_steps: int = 40
    """PPO and Quark steps, past the peak of gold; expert iteration and DPO train in proportion."""
    often_until: int = 10
    """Up to this PPO step, while gold rises and falls fastest, the policy is evaluated every `often` steps..."""
    often: int = 2
    seldom: int = 5
    """... and every `seldom` after it."""
    rollouts: int = 256
    """Responses of a PPO or Quark step; instructions of a round of expert iteration."""
    kl_coef: float = 0.05
    """PPO's KL penalty, for rewards whose standard deviation within an instruction is 1 at SFT. With less even a reward
    without added noise is fooled in the end: docs/studies/overoptimization_tried.md."""

    @classmethod
    def quick(cls) -> Sizes:
        """Those of --quick."""
        short = {"ppo_steps": 6, "often_until": 0, "seldom": 3}
        return cls(num_labels=2000, num_fresh=1000, num_prompts=20, num_samples=64, **short)

    @property
    def evaluated_steps(self) -> list[int]:
        """PPO steps after which the policy is evaluated; 0 is before training."""
        last = min(self.often_until, self.ppo_steps)
        often, seldom = range(0, last + 1, self.often), range(last, self.ppo_steps + 1, self.seldom)
        return sorted({0, *often, *seldom, self.ppo_steps})

    @property
    def ns(self) -> list[int]:
        """1, 2, 4, ... and the largest n."""
        return sorted({*(2**i for i in range(self.num_samples.bit_length())), self.num_samples})

    def instructions(self, num: int) -> list[Instruction]:
        """So many instructions of eval, evenly spread, always the same ones."""
        everything = sandbox.SANDBOX.instructions("eval")
        return [everything[index] for index in subset(len(everything), num)]


NO_LABELS: Final = Labels("", 0.0, 0)


@dataclass(frozen=True)
class Plan:
    """One cell, picklable: a reward model, a seed's samples of the SFT policy, or a method on a treatment."""

    kind: Literal["reward_model", "samples"] | Method
    seed: int
    out: Path
    """The study's folder."""
    sizes: Sizes
    labels: Labels = NO_LABELS
    """Of a reward model."""
    member: int = 0
    """Number of a reward model among those that share its labels and seed."""
    spec: str = ""
    """The treatment of a method: its name, or module:attribute."""
    mark: str = field(init=False)
    """Of a treatment of one's own, as it was loaded where the plan was made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mark", source_mark(self.spec))

    @property
    def treatment(self) -> Treatment:
        """What `spec` names."""
        return find_treatment(self.spec)

    @property
    def cell(self) -> str:
        """Name of the study's cell. A treatment of one's own that was edited is another one."""
        if self.kind == "reward_model":
            return f"reward model, {self.labels.name}, member {self.member}, seed {self.seed}"
        treatment = f"{self.treatment.name}{self.mark}, " if self.spec else ""
        return f"{treatment}{self.kind}, seed {self.seed}"

    @property
    def units(self) -> int:
        """Its weight in the progress report: seconds on one core, roughly."""
        sizes, sampled = self.sizes, self.sizes.num_prompts * self.sizes.num_samples
        if self.kind == "reward_model":
            return 1 + (65 * self.labels.num_labels + 40 * sizes.num_fresh) // 10_000
        if self.kind == "samples":
            return 2 + sampled // 1800
        members = self.treatment.members
        if self.kind == "best_of_n":
            return 2 + max(1, members) * sampled // 3000
        scored = members * (1 + self.treatment.level_samples) if members > 1 else 1  # an ensemble scores SFT's too
        training = sizes.ppo_steps * sizes.rollouts * (12 + scored) // 1000
        training //= 1 if self.kind == "ppo" else 2
        return 2 + training + len(sizes.evaluated_steps) * sizes.num_eval * (3 + members) // 1000

    @property
    def folder(self) -> Path:
        """Settings, checkpoints and responses of the cell."""
        samples = self.out / "samples" / f"seed-{self.seed}"
        return samples if self.kind == "samples" else self.out / "runs" / file_name(self.cell)

    @property
    def model(self) -> Path:
        """Where a reward model is when it is trained."""
        return self.out / "reward_models" / file_name(self.cell)

    def evaluation_file(self, place: int) -> Path:
        """Responses and verdicts at a place along training, or of best-of-`place`; removed with the run."""
        return self.folder / "evaluations" / f"{'n' if self.kind == 'best_of_n' else 'step'}-{place:05}.json"

    def reward_models(self) -> list[Plan]:
        """The treatment's members, to be trained first; no more labels than the sizes allow."""
        labels = self.treatment.labels(self.sizes.num_labels)
        return [Plan("reward_model", self.seed, self.out, self.sizes, labels, i) for i in range(self.treatment.members)]


PARTS: Final = ("reward models", "samples", "methods")
"""In the order in which they run, as each needs the cells of those before it."""


def make_plans(
    specs: Iterable[str], methods: Collection[Method], seeds: Sequence[int], out: Path, sizes: Sizes
) -> dict[str, list[Plan]]:
    """Each of `PARTS` -> its cells. Reward models of equal labels, member and seed are one, whoever uses them.

    Runs of these seeds that an earlier call has stored are among them, so that calls for some methods and treatments
    add up to one table. Of a treatment without labels there is no run of DPO.
    """
    asked, kinds = list(specs), get_args(Method)
    known = dict.fromkeys((*asked, *(treatment.name for treatment in TREATMENTS)))
    every = [Plan(kind, seed, out, sizes, spec=spec) for spec in known for kind in kinds for seed in seeds]
    runs = [
        run
        for run in every
        if (run.spec in asked and run.kind in methods and (run.kind != "dpo" or run.treatment.members))
        or cell_file(out, run.cell).is_file()
    ]
    models = {model.cell: model for run in runs for model in run.reward_models()}
    chosen = dict.fromkeys(run.seed for run in runs if run.kind == "best_of_n")
    samples = [Plan("samples", seed, out, sizes) for seed in chosen]
    return dict(zip(PARTS, (list(models.values()), samples, runs), strict=True))


def refuse_changed(runs: Iterable[Plan]) -> None:
    """Keeps results of what a treatment once was from passing for those of what it is now (CheckpointError)."""
    changed = {}
    for run in runs:
        if (file := run.folder / SETTINGS).is_file():
            before = read_stored(file, "treatment", shape={"treatment": dict}, remedy=ANOTHER_OUT)["treatment"]
            if what := differences(before, run.treatment.settings()):
                changed[run.treatment.name] = f"{', '.join(what)}, in {run.out}"
    if changed:
        found = "; ".join(f"{name} ({what})" for name, what in changed.items())
        raise CheckpointError(
            f"There are results of treatments that have changed since: {found}. Choose another --out, or remove what "
            "begins with their names from its folders cells and runs."
        )
