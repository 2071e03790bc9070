"""Training against proxies and on their labels: a LoRA reward model, PPO, GRPO, RLOO, and DPO.

Proxies are linear, of own pairs of the instructions at odd places, labelled by gold A; policies are judged on those at
even places. Prompts to sample for are the instructions that are answered nowhere in the study.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, Final

import numpy as np

from ... import agents
from ...data import Dataset
from ...data.dataset import RowDataset
from ...instructions import Preference
from ...oracles import RewardModel
from ...oracles.base import NoDeepCopy, RewardOracle
from ..experiment.engine import Experiment, Sampling, read_evaluation
from ..experiment.engine import run as run_experiment
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import file_name
from ..harness.study import Row
from ..methods.job import lora_settings
from ..surrogates.models import Score, flipped
from .curves import TESTED, Half, draw_pairs, learn, make_half, ns_of, tier_rows
from .golds import GOLDS, gold_of, read_scores
from .plan import Array, Plan, world_of

JUDGED_HALF: Final = 0
PASSES: Final = 1
RATE: Final = 1e-4
"""Learning rate of adapters, ten times AlpacaFarm's of all weights."""
KL_COEF: Final = 0.02
"""What a nat costs PPO, in standard deviations of the proxy within an instruction."""
LORA: Final = 8
GROUP: Final = 8
"""Responses to an instruction by GRPO and RLOO."""
GROUP_STEPS: Final = 30
"""Most steps of theirs."""


@cache
def own_half(plan: Plan) -> Half:
    """The crossing that everything here learns from and is judged by."""
    return make_half(plan, "a", "own", JUDGED_HALF)


class Proxy(NoDeepCopy):
    """A linear reward model of `trained` labels as an oracle, in standard deviations within an instruction."""

    def __init__(self, plan: Plan, flip: float, seed: int) -> None:
        self.name = f"proxy of {100 * flip:g} % flips"
        self._half = own_half(plan)
        self._score: Score = learn(plan, self._half, "linear", plan.sizes.trained, flip, "own", seed, JUDGED_HALF)
        within = [self._score(row - self._half.center).var(ddof=1) for row in self._half.learned]
        self._deviation = float(np.sqrt(np.mean(within))) or 1.0

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> Array:
        """Scores [B]; the instruction decides nothing."""
        return np.asarray(self._score(self._half.words(list(responses)) - self._half.center) / self._deviation)


def labelled(plan: Plan, flip: float, seed: int) -> tuple[Preference, ...]:
    """The pairs that a proxy of this seed learns from, with their flipped labels."""
    half, world, num = own_half(plan), world_of(plan), plan.sizes.trained
    stream = ("own", seed, JUDGED_HALF)
    pairs = draw_pairs(half.golds, max(plan.sizes.labels), *stream)
    labels = flipped(pairs.labels[:num], flip, *stream)
    others = [place for place in range(plan.tiers[0][1]) if place % 2 != JUDGED_HALF]
    texts = {place: plan.texts(place, plan.sizes.block) for place in others}
    return tuple(
        Preference(world.at(others[row]), (texts[others[row]][one], texts[others[row]][two]), 1 if label else 2)
        for row, one, two, label in zip(pairs.rows, pairs.first, pairs.second, labels, strict=False)
    )


@dataclass(frozen=True, kw_only=True)
class PolicyRun(Experiment):
    """A method by labels of which a share is flipped."""

    plan: Plan
    flip: float
    cell: str = field(init=False)
    required: tuple[str, ...] = ("kl_exact", "proxy")
    sampling: Sampling | None = field(default_factory=lambda: Sampling(1.0, "kl_exact"))
    measures_reward: bool = True

    NOT_DECIDING: ClassVar[frozenset[str]] = Experiment.NOT_DECIDING | {"plan"}

    def __post_init__(self) -> None:
        sizes = self.plan.sizes
        updates = -(-sizes.trained // 16)
        steps = tuple(step for step in sizes.steps if self.agent == "ppo" or step <= GROUP_STEPS)
        online: dict[str, Any] = {"total_steps": steps[-1], "rollout_batch_size": sizes.rollouts, "kl_coef": KL_COEF}
        online["minibatch_size"] = max(1, sizes.rollouts // 2)
        kept: dict[str, Any] = {"learning_rate": RATE, "schedule": "constant", "save_every": 5, "keep_checkpoints": 1}
        kept["precision"] = self.plan.precision
        group = {**online, "num_generations": min(GROUP, sizes.rollouts)}
        fields = {"ppo": {**online, "value": "adapter"}, "dpo": {"batch_size": 16, "epochs": PASSES}}
        own: dict[str, Any] = fields.get(self.agent, group)
        settled: dict[str, Any] = {
            "cell": f"{self.agent}, {100 * self.flip:g} % flips, seed {self.seed}",
            "places": tuple(sorted({0, updates // 2, updates})) if self.agent == "dpo" else steps,
            "splits": (("eval", self.plan.sizes.halved),),
            "changed": tuple((own | kept).items()),
            "max_response_tokens": sizes.tokens,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        super().__post_init__()

    @cached_property
    def data(self) -> Dataset:
        """Prompts to train on, and instructions to answer."""
        world, plan = world_of(self.plan), self.plan
        judged = [world.answered[place] for place in range(plan.tiers[0][1]) if place % 2 == JUDGED_HALF]
        numbers = {"unlabeled": world.others, "eval": judged}
        rows: dict[str, Any] = {split: (split, []) for split in numbers}
        for split, some in numbers.items():
            asked = [world.instructions[number] for number in some]
            rows[split][1].extend({"instruction": each.instruction, "input": each.input} for each in asked)
        return RowDataset("real policy", rows, allow_overlap=True)

    @property
    def value_start(self) -> None:
        """PPO's value starts from the policy."""
        return

    def policy(self, **limits: int) -> agents.LanguageModel:
        """The policy, which is also kept as the reference."""
        policy = super().policy(**limits)
        policy.add_reference()
        return policy

    def oracle(self, policy: agents.LanguageModel | None = None) -> RewardOracle:
        """The proxy."""
        return Proxy(self.plan, self.flip, self.seed)

    def preferences(self) -> tuple[Preference, ...]:
        """The proxy's own labels."""
        return labelled(self.plan, self.flip, self.seed)


def runs_of(plan: Plan, agent: str, seeds: int) -> list[PolicyRun]:
    """A run for clean and noisy labels and each seed."""
    same: dict[str, Any] = {"preset": "small_cpu", "dataset": plan.data or "", "sft": plan.policy, "lora": LORA}
    return [
        PolicyRun(agent=agent, plan=plan, flip=flip, seed=seed, out=plan.out, **same)
        for seed in range(seeds)
        for flip in plan.sizes.flips[1::-1]
    ]


def train_policy(run: PolicyRun, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; a row a place, with both golds of the answers there and their errors over instructions."""
    measured = run_experiment(run, on_progress)
    golds = {name: gold_of(run.plan, name) for name in GOLDS}
    world, rows = world_of(run.plan), list[Row]()
    numbers = {str(world.instructions[number]): number for number in world.answered}
    started: dict[str, Array] = {}
    for place, row in zip(run.places, measured, strict=True):
        answers = read_evaluation(run, place)["splits"]["eval"]
        kept = {
            "step": place,
            "kl": row["kl_exact"],
            "proxy": row["proxy"] - measured[0]["proxy"],
            "length": row["length"],
        }
        for name, gold in golds.items():
            values = gold.of([numbers[text] for text in answers["instructions"]], answers["responses"])
            gained = values - started.setdefault(name, values)
            error = float(gained.std(ddof=1) / np.sqrt(len(gained)))
            kept |= {f"gold_{name}": float(gained.mean()), f"gold_{name}_error": error}
        rows.append({"table": "runs", "method": run.agent, "flip": run.flip, "seed": run.seed, **kept})
    return rows


def lora_cell(plan: Plan, key: str, flip: float, on_progress: ProgressFn) -> list[Row]:
    """A reward model by LoRA on the labels of a proxy, and best-of-n by it on the judged half, to the second tier."""
    from peft import LoraConfig

    quiet()
    on_progress(ProgressUpdate(key, 0))
    target, half = plan.out / "reward_models" / file_name(key), own_half(plan)
    options: dict[str, Any] = {"batch_size": 16, "learning_rate": RATE, "save_every": 10, "keep_checkpoints": 1}
    config = agents.RewardModelingConfig(**options, precision=plan.precision)
    if not (target / "tokenizer_config.json").is_file():
        adapters = LoraConfig(**lora_settings(LORA), task_type="SEQ_CLS")
        pairs = labelled(plan, flip, 0)
        given: dict[str, Any] = {"config": config, "out": plan.out / "runs" / file_name(key), "lora": adapters}
        agent = agents.RewardModeling(plan.policy, pairs, seed=0, **given)
        for metrics in agent.updates():
            on_progress(ProgressUpdate(key, 20 * metrics["step"] / agent.num_steps))
        agent.save(target)
    oracle, world = RewardModel(target), world_of(plan)
    samples, num = plan.tiers[min(1, len(plan.tiers) - 1)]
    places = [place for place in half.places if place < num]
    scores = []
    for done, place in enumerate(places, start=1):
        texts = plan.texts(place)[:samples]
        scores.append(oracle.score([world.at(place)] * len(texts), texts))
        on_progress(ProgressUpdate(key, 20 + 20 * done / len(places)))
    golds, proxies = read_scores(plan, "a")[places, :samples], np.stack(scores)
    gained, liked = (agents.best_of_k(proxies, each, ns_of(samples)).T[None, None] for each in (golds, proxies))
    tested = draw_pairs(golds, TESTED, "tested")
    gap = proxies[tested.rows, tested.first] - proxies[tested.rows, tested.second]
    right = np.mean(0.5 + 0.5 * np.sign(gap) * np.sign(tested.labels - 0.5))
    who = {"gold": "a", "source": "own", "kind": "lora", "labels": plan.sizes.trained, "samples": samples}
    return tier_rows(who, [flip], gained, liked, np.array([[right]]))
