"""One seed of the study: the policy learns to rate, then the same rounds from there by each judge."""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ... import sandbox
from ...agents.language_model import LanguageModel
from ...agents.loop import keyed_generator
from ...agents.self_rewarding import SelfRewardingConfig, self_rewarding
from ...agents.sft import SFT, FineTuningConfig
from ...instructions import Demonstration, Instruction
from ...oracles.base import RewardOracle
from ...oracles.policy_rating import PolicyRating, rating_demonstrations
from ...oracles.ratings import rated
from ...oracles.registry import make_oracle
from ...sandbox.dataset import Sandbox, demonstration
from ...seeding import keyed_rng
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.study import Row

Scores = NDArray[np.float64]
JUDGES: Final = {
    "self": "the policy itself, as it is in that round",
    "frozen": "M1, the policy that has learned to rate, as it was before the first round",
    "raters": "the simulated human raters, whose ratings the policy learned to rate from",
}
"""Who rates the samples of the rounds."""
RATERS: Final = {"rating": "human"}
NUM_FIXED: Final = 500
"""Pairs of the split `preference`, its last, that no policy learns to rate from; judges are asked about them too."""
COLUMNS: Final = (
    *("seed", "policy", "judge", "round", "gold", "length", "finished", "agreement", "agreement_fixed"),
    *("num_pairs", "num_unrated", "num_val"),
)


@dataclass(frozen=True)
class Plan:
    """What a seed does."""

    seed: int
    num_rounds: int = 3
    num_instructions: int = 300
    """Of a round."""
    num_ratings: int = 6_000
    num_demonstrations: int = 1_500
    num_val: int = 500

    @property
    def cell(self) -> str:
        """Its name in the study."""
        return f"seed {self.seed}"

    @property
    def units(self) -> int:
        """Of work: the SFT and each round of each judge."""
        return 1 + len(JUDGES) * self.num_rounds

    @property
    def sft(self) -> FineTuningConfig:
        """Settings of learning to rate."""
        return replace(FineTuningConfig.sandbox(), epochs=2, learning_rate=1e-3)

    @property
    def rounds(self) -> SelfRewardingConfig:
        """Settings of the rounds."""
        return replace(
            SelfRewardingConfig.sandbox(), num_rounds=self.num_rounds, num_instructions=self.num_instructions
        )


class World:
    """The sandbox as a seed sees it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.data = plan, cast(Sandbox, sandbox.SANDBOX)
        self.gold, self.raters = (make_oracle(x, dataset=self.data, seed=plan.seed) for x in ("gold", RATERS))
        asked = self.data.instructions("preference")
        self.rows = [(x, y) for x, pair in zip(asked, self.data.pairs(), strict=True) for y in pair]

    def lessons(self) -> list[Demonstration]:
        """Demonstrations of answers and of ratings, each drawn by the seed."""
        rows = [self.rows[row] for row in self._drawn("ratings", len(self.rows) - 2 * NUM_FIXED)]
        ratings, _ = rated(self.raters, *map(list, zip(*rows, strict=True)))
        asked = self.data.instructions("sft")
        drawn = [asked[row] for row in self._drawn("demonstrations", len(asked))]
        return [*(Demonstration(x, demonstration(x)) for x in drawn), *rating_demonstrations(ratings)]

    def _drawn(self, what: str, most: int) -> list[int]:
        order = keyed_rng(self.plan.seed, "self-rewarding study", what).permutation(most)
        return [int(row) for row in order[: getattr(self.plan, f"num_{what}")]]

    @cached_property
    def _fixed(self) -> tuple[list[Instruction], list[str], Scores]:
        """Instructions, responses and their gold, [NUM_FIXED, 2]; a pair's two rows are neighbours."""
        asked, texts = map(list, zip(*self.rows[-2 * NUM_FIXED :], strict=True))
        return asked, texts, self.gold.score(asked, texts).reshape(-1, 2)

    def agreement_fixed(self, judge: RewardOracle) -> float:
        """On the pairs that are the same for all judges and rounds."""
        asked, texts, gold = self._fixed
        return agreement(judge.score(asked, texts).reshape(-1, 2), gold)

    def evaluate(self, policy: LanguageModel) -> Row:
        """Gold, length and share that ended by themselves, of one response to each instruction of val."""
        asked = self.data.instructions("val")[: self.plan.num_val]
        # The same draws for all policies of a seed, so that differences are due to the policies.
        draws = torch.rand(
            len(asked), policy.max_response_tokens, generator=keyed_generator(self.plan.seed, "evaluation", "val")
        )
        found = policy.generate(asked, generator=draws, temperature=0.7)
        return {
            "gold": float(self.gold.score(asked, found.texts).mean()),
            "length": float(np.mean([len(text) for text in found.texts])),
            "finished": float(found.finished.float().mean()),
            "num_val": len(asked),
        }


def run_seed(plan: Plan, on_progress: ProgressFn) -> list[Row]:
    """The rows of a seed: the SFT policy, M1 which has learned to rate, and for each judge the policies after it."""
    quiet()
    world, done = World(plan), 0

    def tell(row: dict[str, Any]) -> Row:
        state = f"seed {plan.seed}, {row['policy']} {row['judge']}: gold {row['gold']:.2f}"
        on_progress(ProgressUpdate(plan.cell, done, state, state))
        return {**dict.fromkeys(COLUMNS), "seed": plan.seed, **row}

    on_progress(ProgressUpdate(plan.cell, 0))
    policy = LanguageModel.from_pretrained(sandbox.POLICY)
    rows = [tell({"policy": "SFT", "judge": "", "round": None, **world.evaluate(policy)})]
    for _ in SFT(policy, world.lessons(), config=plan.sft, seed=plan.seed).updates():
        pass
    done = 1
    rows.append(tell({"policy": "M1", "judge": "", "round": 0, **world.evaluate(policy)}))
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder))
        for judge in JUDGES:
            for row in rounds_by(judge, world, Path(folder)):
                done += 1
                rows.append(tell({"policy": f"M{row['round'] + 1}", "judge": judge, **row}))
    return rows


def rounds_by(judge: str, world: World, start: Path) -> Iterator[Row]:
    """Rounds rated by one judge, from the policy in a folder.

    Yields:
        A row for each, after its DPO. Agreements are those of the judge in the round; `agreement` is on its samples.
    """
    plan, policy = world.plan, LanguageModel.from_pretrained(start)
    makers: dict[str, Callable[[], RewardOracle]] = {
        "self": lambda: PolicyRating(policy),
        "frozen": lambda: PolicyRating(start),
        "raters": lambda: world.raters,
    }
    oracle = makers[judge]()
    fixed = world.agreement_fixed(oracle)
    asked = world.data.instructions("unlabeled")
    for found in self_rewarding(policy, asked, oracle, config=plan.rounds, seed=plan.seed):
        samples = found.samples
        flat = [(x, y) for x, texts in zip(samples.instructions, samples.responses, strict=True) for y in texts]
        gold = world.gold.score(*map(list, zip(*flat, strict=True))).reshape(samples.rewards.shape)
        yield {
            "round": found.number,
            **world.evaluate(policy),
            "agreement": agreement(samples.rewards, gold),
            "agreement_fixed": fixed,
            "num_pairs": len(found.preferences),
            "num_unrated": int(np.isnan(samples.rewards).sum()),
        }
        if judge == "self":  # of the judge in the next round; the others stay as they are
            fixed = world.agreement_fixed(oracle)


def agreement(scores: Scores, gold: Scores) -> float:
    """Share of the pairs within the rows of [N, k], of different gold, that the scores order as gold does; ties half.

    Pairs without both scores are left out; NaN if none is left.
    """
    first, second = np.triu_indices(scores.shape[1], 1)
    gaps, truth = (table[:, first] - table[:, second] for table in (scores, gold))
    known = ~np.isnan(gaps) & (truth != 0)
    if not known.any():
        return math.nan
    return float(np.mean((np.sign(gaps * truth)[known] + 1) / 2))
