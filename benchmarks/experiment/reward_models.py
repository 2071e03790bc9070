"""The sandbox's reward models: trained, calibrated and measured on fresh preference pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from ... import sandbox
from ...errors import DataError
from ...instructions import Instruction, Preference
from ...oracles import RewardModel
from ...oracles.base import PreferenceOracle, judge
from ...sandbox import dataset as texts
from ...sandbox import tasks
from ...seeding import keyed_rng
from ...statistics import wilson
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import ElapsedTime, file_name
from ..harness.study import Row

if TYPE_CHECKING:
    from ...agents import LanguageModel, RewardModelingConfig

Array = NDArray[np.float64]

MAX_RESPONSE_TOKENS: Final = 64
SCALE_SAMPLES: Final = 4
"""SFT's answers to each instruction of val, where a unit of reward is their deviation within an instruction."""
LAST_FILE: Final = "tokenizer_config.json"
"""The last file of a saved model's folder: files are put in place by name, so with this one all are there."""
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


def fresh_pairs(data: texts.Sandbox, policy: Path, seed: int, num: int, *, each: int = 1) -> FreshPairs:
    """Samples a policy at temperature 1 on fresh instructions until there are `num` pairs of unequal gold.

    `each` is how many pairs are drawn of an instruction.
    """
    from ...agents import LanguageModel
    from ...agents.loop import keyed_generator

    model = LanguageModel.from_pretrained(policy, max_response_tokens=MAX_RESPONSE_TOKENS)
    generator, stream = keyed_generator(seed, "fresh pairs"), fresh_instructions(data, seed)
    gold = sandbox.gold_oracle()
    pairs: list[tuple[str, str, str, float]] = []
    num_equal = 0
    while len(pairs) < num:
        missing = num - len(pairs)
        # Some more than are missing: some have equal gold.
        batch = tuple(islice(stream, (missing + missing // 4) // each + 8))
        samples = model.generate(batch, generator=generator, num_samples=2 * each).texts
        asked = [instruction for instruction in batch for _ in range(each)]
        gaps = gold.score(asked, samples[1::2]) - gold.score(asked, samples[::2])
        for pair in zip(asked, samples[::2], samples[1::2], gaps.tolist(), strict=True):
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
    kept: Path | None = None,
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
        kept: File that keeps these answers: the same for all models of a study, they are sampled once.
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
    if kept is not None and kept.is_file():
        answers = tuple(row["answer"] for row in texts.read_rows(kept))
    else:
        answering = LanguageModel.from_pretrained(sft or policy, max_response_tokens=MAX_RESPONSE_TOKENS)
        answers = sample(answering, val, "calibration", num_samples)
        if kept is not None:
            texts.write_rows(kept, [{"answer": answer} for answer in answers])
    answered = [instruction for instruction in val for _ in range(num_samples)]
    mean, std = agent.calibrate(answered, answers, num_samples=num_samples)
    world = Processes()
    if world.is_main:
        agent.save(target)
    world.wait()
    return {**metrics, "sft/mean": mean, "sft/std": std}


@dataclass(frozen=True, kw_only=True)
class RewardModelRun:
    """A reward model of the sandbox that a study trains on labels: a cell, picklable."""

    cell: str
    """Its name in the study."""
    seed: int
    out: Path
    """The study's folder."""
    pairs: Callable[[], tuple[Preference, ...]]
    """The labelled pairs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Columns that tell it from the study's others."""
    training_seed: int | None = None
    """Seed of the head's start and the order of the pairs; None: the seed."""
    layers: int | None = None
    """How many of its layers are kept; None: all."""
    epochs: int | None = None
    """Passes over the pairs; None: the sandbox's."""
    num_val: int | None = None
    """Instructions of val whose answers set the scale; None: all."""
    num_samples: int = 1
    """Answers to each: see `fit`."""
    judge: Callable[[], PreferenceOracle] | None = None
    """Whose verdicts on fresh pairs it is measured against, and gold's."""
    num_fresh: int = 0
    """Fresh pairs that it is measured on, the same for all of a seed."""
    units: int = 70
    """Its weight in the progress report: seconds on one core, roughly."""

    @property
    def folder(self) -> Path:
        """Where it is trained."""
        return self.out / "runs" / file_name(self.cell)

    @property
    def target(self) -> Path:
        """Where it is when it is trained."""
        return self.out / "reward_models" / file_name(self.cell)


def train(run: RewardModelRun, on_progress: ProgressFn) -> list[Row]:
    """Trains a reward model unless it is there, and measures it; one row."""
    from ...agents import RewardModelingConfig
    from ...agents.processes import Processes

    quiet()
    run.folder.mkdir(parents=True, exist_ok=True)
    spent, main, pairs = ElapsedTime(run.folder), Processes().is_main, run.pairs()

    def progress(share: float, text: str = "") -> None:
        if main:
            spent.keep()
            on_progress(ProgressUpdate(run.cell, share * run.units, text))

    progress(0)
    if not (run.target / LAST_FILE).is_file():
        config = RewardModelingConfig.sandbox()
        fit(
            shortened(run),
            pairs,
            run.target,
            val=sandbox.SANDBOX.instructions("val")[: run.num_val],
            config=replace(config, keep_checkpoints=1, epochs=run.epochs or config.epochs),
            seed=run.seed if run.training_seed is None else run.training_seed,
            out=run.folder,
            sft=sandbox.POLICY,
            num_samples=run.num_samples,
            kept=run.out / f"calibration-{run.num_val or 0}-{run.num_samples}.jsonl.gz",
            on_progress=lambda share: progress(0.8 * share),
        )
    row = {**run.facts, "seed": run.seed, "num_trained": len(pairs)}
    if run.judge is not None:
        row |= measure(run.target, run.judge(), run.seed, run.num_fresh)
    shown = "".join(f", {name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
    progress(1, f"{run.cell}: {spent.seconds:.0f} s{shown}")
    return [{**row, "seconds": round(spent.seconds, 2)}]


def measure(folder: Path, judged_by: PreferenceOracle, seed: int, num: int) -> Row:
    """A reward model on fresh pairs.

    Accuracies are shares of the pairs: against gold, and against the labels of its own judge, noise included;
    `calibration_error` is the mean distance between P(b preferred) and those labels, by bins of confidence. `scale` is
    what one unit of its score is in logits of that probability.
    """
    pairs = fresh_pairs(cast(texts.Sandbox, sandbox.SANDBOX), sandbox.POLICY, seed, num)
    chance, verdicts = predicted(folder, pairs), judged_by.compare(pairs.instructions, pairs.a, pairs.b)
    bins = reliability("reward_model", chance, judged_by.name, verdicts)
    error = sum(row["n"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / sum(row["n"] for row in bins)
    return {
        "num_pairs": len(pairs.a),
        "accuracy_gold": float(hits(chance, (pairs.gap > 0).astype(np.float64)).mean()),
        "accuracy_judge": float(hits(chance, verdicts).mean()),
        "calibration_error": float(error),
        "scale": scale_of(folder),
    }


@cache
def sft_policy() -> LanguageModel:
    """The sandbox's policy, read once."""
    from ...agents import LanguageModel

    return LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)


def shortened(run: RewardModelRun) -> Path:
    """Folder of the language model that the run starts from; one with fewer layers is made on the way."""
    from ...agents import LanguageModel

    if run.layers is None:
        return sandbox.POLICY
    language_model = LanguageModel.from_pretrained(sandbox.POLICY)
    model: Any = language_model.model
    if run.layers > len(model.model.layers):
        raise DataError(
            f"layers: expected at most the {len(model.model.layers)} of {sandbox.POLICY}, got {run.layers}."
        )
    model.model.layers = model.model.layers[: run.layers]
    model.config.num_hidden_layers = run.layers
    language_model.save(run.folder / "trunk")
    return run.folder / "trunk"


def hits(chance: Array, label: Array) -> Array:
    """1 where P(b preferred) [n] is on the label's side [n] of 0.5, 0.5 where either is a tie, 0 elsewhere."""
    return np.asarray((1 + np.sign(chance - 0.5) * np.sign(label - 0.5)) / 2)


def predicted(folder: Path, pairs: FreshPairs) -> Array:
    """P(b preferred) by a reward model, [n]."""
    oracle = RewardModel(folder, device="cpu")
    a, b = (judge(oracle, pairs.instructions, responses).scores for responses in (pairs.a, pairs.b))
    # Scores come in standard deviations of SFT's; the probabilities a model was trained to give are in its own units.
    return np.asarray(expit((b - a) * scale_of(folder)))


def scale_of(folder: Path) -> float:
    """The unit of a reward model's scores in its own units, logits."""
    return float(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("alpacafarm_reward_std", 1.0))


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
