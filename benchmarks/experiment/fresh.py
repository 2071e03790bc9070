"""The cells: fresh pairs and samples of a seed, and a reward model of each setting with what it chooses among them.

Every seed has its own pairs, on instructions that stand in no split. Smaller settings of a seed learn from the first of
them, and the pairs that get a coin by one share of flips are among those that get one by a larger share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
from scipy.special import expit

from ... import agents, sandbox
from ...instructions import Instruction, Preference
from ...oracles import RewardModel, make_judge
from ...oracles.base import PreferenceOracle, judge
from ...sandbox.dataset import Sandbox, label, read_rows, write_rows
from ..harness.labels import Setting
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import pack
from ..harness.study import Row
from .reward_models import SCALE_SAMPLES, RewardModelRun, fresh_pairs, hits, train
from .samples import JUDGED, SampleRun
from .treated import Sizes as RunSizes

OWN: Final = "own"
GOLDS: Final = dict(zip(JUDGED, (OWN, "sim_eval", "human"), strict=True))
"""What a choice is worth -> its name in the tables: "own" is the true reward; the others are win rates in points."""
UNITS: Final = {"gold": 1.0, "win_rate_simulated": 100.0, "win_rate_human": 100.0}
KIND: Final = "reward model"


@dataclass(frozen=True)
class Sizes:
    """How large the study is; the defaults are the full study's."""

    labels: tuple[int, ...] = (500, 1000, 2000, 4000, 8000)
    """Pairs that are labelled, each a whole share of the largest: all reward models make about as many updates."""
    flips: tuple[float, ...] = (0.0, 0.1, 0.25, 0.35, 0.4)
    num_prompts: int = 400
    num_samples: int = 1024
    num_samples_of_faults: int = 256
    """The largest n by judges with a fault: four times as many samples take twice as long."""
    num_val: int = 500
    training: RunSizes = field(default_factory=lambda: RunSizes(num_eval=400))
    """Of PPO and DPO; how many labels and val instructions there are is said here."""
    seeds_trained: int = 5
    """For how many of the seeds PPO and DPO train at most: a run takes as long as four reward models."""

    @classmethod
    def quick(cls) -> Sizes:
        """Those of --quick."""
        return cls(
            labels=(100, 400),
            flips=(0.0, 0.25, 0.35),
            num_prompts=20,
            num_samples=64,
            num_val=50,
            training=replace(RunSizes.quick(), rollouts=64),
        )

    @property
    def settings(self) -> list[Setting]:
        """Every number of labels with every share of flips."""
        return [Setting(labels, flip) for labels in self.labels for flip in self.flips]


@dataclass(frozen=True)
class Plan:
    """All that decides the rows of a seed's cells; picklable."""

    out: Path
    seed: int
    sizes: Sizes
    pairs_name: ClassVar[str] = "pairs"
    pairs_each: ClassVar[int] = 1
    """Pairs of each instruction."""

    @property
    def largest_n(self) -> int:
        """Of how many samples the best is chosen at most."""
        return self.sizes.num_samples

    @property
    def samples(self) -> SampleRun:
        """The seed's samples, from which all its reward models choose."""
        units = 1 + self.sizes.num_prompts * self.sizes.num_samples // 3000
        return SampleRun(self.seed, self.out, self.sizes.num_prompts, self.sizes.num_samples, units)

    @property
    def pairs_cell(self) -> str:
        """Name in the study of what draws the seed's pairs."""
        return f"{self.pairs_name}, seed {self.seed}"

    @property
    def pairs_file(self) -> Path:
        """Where they are."""
        return self.out / self.pairs_name / f"seed-{self.seed}.jsonl.gz"

    def annotator(self, setting: Setting) -> PreferenceOracle:
        """The pool of this seed, which flips no label by itself, with its noise."""
        return make_judge({"judge": "eval", "flip": setting.flip, "seed": self.seed}, dataset=sandbox.SANDBOX)

    def labelled(self, setting: Setting) -> tuple[Preference, ...]:
        """The pairs of a setting with their labels, less the ties."""
        instructions, texts = self.pairs(setting.labels)
        return label(instructions, texts, self.annotator(setting))

    def pairs(self, num: int) -> tuple[list[Instruction], list[tuple[str, str]]]:
        """The first of the seed's pairs."""
        rows = read_rows(self.pairs_file)[:num]
        instructions = [Instruction(row["instruction"], row["input"], split="fresh") for row in rows]
        return instructions, [(row["output_1"], row["output_2"]) for row in rows]

    def facts(self, setting: Setting) -> Row:
        """Columns that tell a setting's rows from others."""
        return {"kind": KIND, **vars(setting)}

    def named(self, setting: Setting) -> str:
        """Its name, which all seeds share."""
        return f"{setting.labels} labels with {100 * setting.flip:g} % flips"

    def cell(self, setting: Setting) -> str:
        """Its name in the study."""
        return f"{self.named(setting)}, seed {self.seed}"

    def reward_model(self, setting: Setting) -> RewardModelRun:
        """The run that trains a setting's reward model; all of a seed have the same start of the head."""
        return RewardModelRun(
            cell=self.cell(setting),
            seed=self.seed,
            out=self.out,
            pairs=partial(self.labelled, setting),
            epochs=max(self.sizes.labels) // setting.labels,
            num_val=self.sizes.num_val,
            num_samples=SCALE_SAMPLES,
            units=self.units,
        )

    @property
    def units(self) -> int:
        """Seconds of a reward model's cell on one core, roughly."""
        return 2 + 65 * max(self.sizes.labels) // 20_000


def draw_pairs(plan: Plan, on_progress: ProgressFn) -> list[Row]:
    """Draws the seed's pairs and stores them; one row about them."""
    quiet()
    on_progress(ProgressUpdate(plan.pairs_cell, 0))
    world, num = cast(Sandbox, sandbox.SANDBOX), max(plan.sizes.labels)
    pairs = fresh_pairs(world, sandbox.POLICY, plan.seed, num, each=plan.pairs_each)
    texts = zip(cast(Sequence[Instruction], pairs.instructions), pairs.a, pairs.b, strict=True)
    rows: list[dict[str, Any]] = [
        {"instruction": asked.instruction, "input": asked.input, "output_1": a, "output_2": b} for asked, a, b in texts
    ]
    write_rows(plan.pairs_file, rows)
    return [{"seed": plan.seed, "num_pairs": len(rows), "num_equal": pairs.num_equal}]


def run_setting(plan: Plan, setting: Setting, on_progress: ProgressFn) -> list[Row]:
    """Trains a setting's reward model and chooses the best of n by it; a row for each of `GOLDS`, packed [P, n]."""
    quiet()
    model = plan.reward_model(setting)
    train(model, on_progress)
    drawn = plan.samples.read()
    index, prompts = drawn.index[:, : plan.largest_n], drawn.prompts
    used = np.unique(index)
    asked, texts = [prompts[number] for number in used], drawn.responses.text[used].tolist()
    scores = np.full(len(drawn.responses), np.nan)
    scores[used] = judge(RewardModel(model.target), asked, texts).scores
    ns = [2**power for power in range(plan.largest_n.bit_length())]
    proxies, gold = (values[index] for values in (scores, drawn.responses.gold.to_numpy()))
    # Pairs of samples: the first with the second, the third with the fourth, and so on, where gold tells them apart.
    gaps = [values[:, 1::2] - values[:, : values.shape[1] // 2 * 2 : 2] for values in (proxies, gold)]
    right = hits(expit(gaps[0]), (gaps[1] > 0).astype(np.float64))[gaps[1] != 0]
    gained = np.asarray(agents.best_of_k(proxies, proxies, ns)).mean(axis=1)
    row = {**plan.facts(setting), "seed": plan.seed, "n": ns, "kl": [agents.best_of_n_kl(n) for n in ns]}
    row |= {"proxy": (gained - gained[0]).tolist(), "accuracy": float(right.mean())}
    return [
        {"judge": name, **row, "gold": pack(UNITS[column] * agents.best_of_k(proxies, worth[index], ns).T)}
        for column, name in GOLDS.items()
        for worth in [drawn.responses[column].to_numpy()]
    ]
