"""Reward models of the sandbox: trained and calibrated, and their accuracy on fresh preference pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from ... import sandbox
from ...instructions import Instruction, Preference
from ...oracles import RewardModel
from ...oracles.base import judge
from ...sandbox import dataset as texts
from ...sandbox import tasks
from ...seeding import keyed_rng
from ...statistics import wilson
from ..harness.study import Row

if TYPE_CHECKING:
    from ...agents import LanguageModel, RewardModelingConfig

Array = NDArray[np.float64]

MAX_RESPONSE_TOKENS: Final = 64
LAST_FILE: Final = "tokenizer_config.json"
"""Of a saved model's folder: files are put in place in the order of their names, so with this one all are there."""
CONFIDENCES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Edges of the bins of confidence."""


@dataclass(frozen=True)
class FreshPairs:
    """n pairs of samples of unequal gold. Pairs of equal gold, which have no right answer, are only counted."""

    instructions: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    gap: Array
    """[n] gold of b minus gold of a; never 0."""
    num_equal: int


def fresh_instructions(data: texts.Sandbox, seed: int) -> Iterator[Instruction]:
    """Endlessly: instructions that stand in no split and were not given before, in the training splits' mix."""
    seen = {str(instruction) for split in data.splits for instruction in data.instructions(split)}
    share_with_input = np.mean([bool(instruction.input) for instruction in data.instructions("preference")])
    by_input = {kind: [t for t in tasks.TEMPLATES if t.with_input == kind] for kind in (False, True)}
    rng = keyed_rng(seed, "fresh instructions")
    while True:
        templates = by_input[bool(rng.random() < share_with_input)]
        template = templates[int(rng.integers(len(templates)))]
        row = Instruction(*tasks.draw(rng, template), split="fresh")
        while str(row) in seen:  # drawn again of the same template, so that the mix stays what it is in the splits
            row = Instruction(*tasks.draw(rng, template), split="fresh")
        seen.add(str(row))
        yield row


def fresh_pairs(data: texts.Sandbox, policy: Path, seed: int, num: int) -> FreshPairs:
    """Samples a policy twice at temperature 1 on fresh instructions until there are `num` pairs of unequal gold."""
    from ...agents import LanguageModel
    from ...agents.loop import keyed_generator

    model = LanguageModel.from_pretrained(policy, max_response_tokens=MAX_RESPONSE_TOKENS)
    generator, stream = keyed_generator(seed, "fresh pairs"), fresh_instructions(data, seed)
    gold = sandbox.gold_oracle()
    pairs: list[tuple[str, str, str, float]] = []
    num_equal = 0
    while len(pairs) < num:
        missing = num - len(pairs)
        batch = tuple(islice(stream, missing + missing // 4 + 8))  # some more than are missing: some have equal gold
        samples = model.generate(batch, generator=generator, num_samples=2).texts
        gaps = gold.score(batch, samples[1::2]) - gold.score(batch, samples[::2])
        for pair in zip(batch, samples[::2], samples[1::2], gaps.tolist(), strict=True):
            if len(pairs) == num:
                break
            if pair[-1] == 0:
                num_equal += 1
            else:
                pairs.append(pair)
    instructions, a, b, gap = zip(*pairs, strict=True)
    return FreshPairs(instructions, a, b, np.array(gap), num_equal)


def sample(
    model: LanguageModel, instructions: Sequence[Instruction], key: str, num_samples: int = 1
) -> tuple[str, ...]:
    """Responses at temperature 1, keyed by the sandbox's seed; those to one instruction follow each other."""
    from ...agents.loop import keyed_generator

    generator = keyed_generator(texts.SEED, "build", key)
    return model.generate(instructions, generator=generator, num_samples=num_samples).texts


def fit(
    policy: Path,
    preferences: Sequence[Preference],
    target: Path,
    *,
    val: Sequence[Instruction],
    config: RewardModelingConfig,
    seed: int,
    out: Path,
    sft: Path | None = None,
    num_samples: int = 1,
    on_progress: Callable[[float], None] = lambda share: None,
) -> dict[str, float]:
    """Trains a reward model from a policy's trunk, calibrates it so that 0 is an SFT response's mean score, saves it.

    Args:
        policy: Folder of the SFT policy.
        preferences: Settled pairs.
        target: Where the model goes.
        val: Instructions whose sampled answers set the scale.
        config: Settings of the training.
        seed: Of the training.
        out: Folder for metrics and checkpoints.
        sft: Folder of the policy whose answers set the scale, if it is another one.
        num_samples: Answers to each instruction. With 2 or more a unit of reward is their standard deviation within an
            instruction; with 1, that of all answers.
        on_progress: Called with the share of the steps that is done.

    Returns:
        The last step's metrics, and the mean and standard deviation of SFT responses' scores before the calibration.
    """
    from ...agents import LanguageModel, RewardModeling
    from ...agents.processes import Processes

    agent = RewardModeling(policy, preferences, config=config, seed=seed, out=out)
    metrics: dict[str, float] = {}
    for metrics in agent.updates():
        on_progress(metrics["step"] / agent.num_steps)
    answering = LanguageModel.from_pretrained(sft or policy, max_response_tokens=MAX_RESPONSE_TOKENS)
    answers = sample(answering, val, "calibration", num_samples)
    asked = [instruction for instruction in val for _ in range(num_samples)]
    mean, std = agent.calibrate(asked, answers, num_samples=num_samples)
    world = Processes()
    if world.is_main:
        agent.save(target)
    world.wait()
    return {**metrics, "sft/mean": mean, "sft/std": std}


def hits(chance: Array, label: Array) -> Array:
    """1 where P(b preferred) [n] is on the label's side [n] of 0.5, 0.5 where either is a tie, 0 elsewhere."""
    return np.asarray((1 + np.sign(chance - 0.5) * np.sign(label - 0.5)) / 2)


def predicted(folder: Path, pairs: FreshPairs) -> Array:
    """P(b preferred) by a reward model, [n]."""
    oracle = RewardModel(folder, device="cpu")
    a, b = (judge(oracle, pairs.instructions, responses).scores for responses in (pairs.a, pairs.b))
    # Scores come in standard deviations of SFT's; the probabilities a model was trained to give are in its own units.
    std = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("alpacafarm_reward_std", 1.0)
    return np.asarray(expit((b - a) * float(std)))


def against_gold(name: str, chance: Array, gap: Array) -> list[Row]:
    """Accuracy of P(b preferred) [n] against the sign of the gold gap [n]: of all pairs, and by quartile of |gap|."""
    correct, size = hits(chance, (gap > 0).astype(np.float64)), np.abs(gap)
    quartile = np.digitize(size, np.quantile(size, (0.25, 0.5, 0.75)))
    groups = {"all": quartile >= 0} | {f"gap quartile {k + 1}": quartile == k for k in range(4)}
    return _rows(name, "gold", correct, groups, "mean_gold_gap", size)


def reliability(name: str, chance: Array, label_judge: str, label: Array) -> list[Row]:
    """Agreement with a judge's labels [n] by the confidence max(p, 1 - p) of P(b preferred) [n]."""
    confidence = np.maximum(chance, 1 - chance)
    place = np.digitize(confidence, CONFIDENCES[1:-1])
    bins = {f"confidence {low} to {high}": place == k for k, (low, high) in enumerate(pairwise(CONFIDENCES))}
    return _rows(name, label_judge, hits(chance, label), bins, "confidence", confidence)


def _rows(
    name: str, against: str, correct: Array, groups: dict[str, NDArray[np.bool_]], measure: str, values: Array
) -> list[Row]:
    """A row for each group of pairs that is not empty, with the mean of the measure."""
    return [
        {"judge": name, "against": against, "subset": subset, "mean_gold_gap": None, "confidence": None}
        | {measure: float(values[rows].mean())}
        | share_row(float(correct[rows].sum()), int(rows.sum()))
        for subset, rows in groups.items()
        if rows.any()
    ]


def share_row(num_correct: float, num: int) -> Row:
    """A share with its Wilson interval and counts, as columns."""
    low, high = wilson(num_correct, num)
    return {"accuracy": num_correct / num, "low": low, "high": high, "n": num, "num_correct": num_correct}
