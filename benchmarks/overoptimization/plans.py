"""Sizes and cells of the over-optimization study: what each cell is made from and where it keeps its files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ... import sandbox
from ...errors import CheckpointError, DataError
from ...folders import hash_model
from ...instructions import Instruction
from ...plugins import source_mark
from ..harness.evaluation import subset
from ..harness.stored import ANOTHER_OUT, SETTINGS, cell_file, differences, file_name, read_stored
from .treatments import Cell, Labels, Treatment, find_treatment

Method = Literal["ppo", "best_of_n"]
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
    without added noise is fooled in the end: docs/overoptimization_tried.md."""

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


NO_LABELS: Final = Labels("", 0.0, 0)


@dataclass(frozen=True)
class Plan:
    """One cell: a reward model, a seed's samples of the SFT policy, or PPO or best-of-n on a treatment and seed.

    Picklable, so that it can be sent to a process.
    """

    kind: Literal["reward_model", "samples", "ppo", "best_of_n"]
    seed: int
    out: Path
    """The study's folder."""
    sizes: Sizes
    labels: Labels = NO_LABELS
    """What a reward model learns from."""
    member: int = 0
    """Number of a reward model among those that share its labels and seed."""
    treatment: str = ""
    """Of PPO and best-of-n: name, or module:attribute."""
    mark: str = field(init=False)
    """Of a treatment of one's own, as it was loaded where the plan was made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mark", source_mark(self.treatment))

    @property
    def cell(self) -> str:
        """Name of the study's cell. A treatment of one's own that was edited is another one."""
        if self.kind == "reward_model":
            return f"reward model, {self.labels.name}, member {self.member}, seed {self.seed}"
        return ("" if self.kind == "samples" else f"{self.found.name}{self.mark}, ") + f"{self.kind}, seed {self.seed}"

    @property
    def units(self) -> int:
        """Its weight in the progress report: seconds on one core, roughly."""
        sizes, sampled = self.sizes, self.sizes.num_prompts * self.sizes.num_samples
        if self.kind == "reward_model":
            return 1 + (65 * self.labels.num_labels + 40 * sizes.num_fresh) // 10_000
        if self.kind == "samples":
            return 2 + sampled // 1800
        members = self.found.members
        if self.kind == "best_of_n":
            return 2 + max(1, members) * sampled // 3000
        scored = members * (1 + self.found.level_samples) if members > 1 else 1  # an ensemble scores SFT's answers too
        training = sizes.ppo_steps * sizes.rollouts * (12 + scored) // 1000
        return 2 + training + len(sizes.evaluated_steps) * sizes.num_eval * (3 + members) // 1000

    @property
    def found(self) -> Treatment:
        """The treatment itself."""
        return find_treatment(self.treatment)

    @property
    def folder(self) -> Path:
        """What the cell keeps on its way: settings, checkpoints, responses; of samples all of them."""
        samples = self.out / "samples" / f"seed-{self.seed}"
        return samples if self.kind == "samples" else self.out / "runs" / file_name(self.cell)

    @property
    def model(self) -> Path:
        """Where a reward model is when it is trained."""
        return self.out / "reward_models" / file_name(self.cell)

    def reward_models(self) -> list[Plan]:
        """The treatment's members, to be trained first; no more labels than the sizes allow."""
        labels = self.found.labels(self.sizes.num_labels)
        return [Plan("reward_model", self.seed, self.out, self.sizes, labels, i) for i in range(self.found.members)]

    def trained(self) -> Cell:
        """What the treatment makes its reward from.

        Raises:
            DataError: A member has not been trained.
        """
        from ..harness.reward_models import LAST_FILE

        members = self.reward_models()
        if missing := [plan for plan in members if not (plan.model / LAST_FILE).is_file()]:
            stored = ", ".join(str(cell_file(plan.out, plan.cell)) for plan in missing)
            raise DataError(
                f"{self.cell}: expected its reward models, found none for: {'; '.join(plan.cell for plan in missing)}. "
                f"To train them anew remove {stored} (what there is of it) and call again."
            )
        return Cell(self.seed, tuple(plan.model for plan in members))

    def settings(self) -> dict[str, Any]:
        """What decides the cell's rows, JSON-able: a folder that was made with other settings is refused."""
        if self.kind == "reward_model":
            return {**asdict(self.sizes), **asdict(self.labels), "seed": self.seed, "member": self.member}
        if self.kind == "samples":
            return {"seed": self.seed, **asdict(self.sizes)}
        members = {folder.name: hash_model(folder) for folder in self.trained().reward_models}
        return {"treatment": self.found.settings(), "sizes": asdict(self.sizes), "reward_models": members}

    def evaluation_file(self, number: int) -> Path:
        """Where responses and verdicts after a PPO step, or of best-of-`number`, are kept: removed with the run."""
        name = "step" if self.kind == "ppo" else "n"
        return self.folder / "evaluations" / f"{name}-{number:05}.json"


PARTS: Final = ("reward models", "samples", "PPO and best-of-n")
"""In the order in which they run, as each needs the cells of those before it."""


def make_plans(
    specs: Iterable[str], methods: Collection[Method], seeds: Sequence[int], out: Path, sizes: Sizes
) -> dict[str, list[Plan]]:
    """Each of `PARTS` -> its cells. Reward models of equal labels, member and seed are one, whoever uses them."""
    kinds: list[Method] = [kind for kind in ("ppo", "best_of_n") if kind in methods]
    runs = [Plan(kind, seed, out, sizes, treatment=spec) for spec in specs for kind in kinds for seed in seeds]
    models = {model.cell: model for run in runs for model in run.reward_models()}
    samples = [Plan("samples", seed, out, sizes) for seed in seeds if "best_of_n" in kinds]
    return dict(zip(PARTS, (list(models.values()), samples, runs), strict=True))


def refuse_changed(runs: Iterable[Plan]) -> None:
    """Keeps results of what a treatment once was from passing for those of what it is now.

    Raises:
        CheckpointError: A treatment of a stored cell has changed since.
    """
    changed = {}
    for run in runs:
        if (file := run.folder / SETTINGS).is_file():
            before = read_stored(file, "treatment", shape={"treatment": dict}, remedy=ANOTHER_OUT)["treatment"]
            now: Mapping[str, Any] = json.loads(json.dumps(run.found.settings()))
            if what := differences(before, now):
                changed[run.found.name] = f"{', '.join(what)}, in {run.out}"
    if changed:
        told = "; ".join(f"{name} ({what})" for name, what in changed.items())
        raise CheckpointError(
            f"There are results of treatments that have changed since: {told}. Choose another --out, or remove what "
            "begins with their names from its folders cells and runs."
        )
