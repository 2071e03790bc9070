"""Trains the reward models of the over-optimization study and measures how right and how calibrated they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import sandbox
from ...agents import LanguageModel, RewardModelingConfig
from ...errors import DataError
from ...instructions import Preference
from ...sandbox.dataset import Sandbox, label
from ..harness.accuracy import hits, predicted, reliability
from ..harness.fresh_pairs import fresh_pairs
from ..harness.reward_models import fit
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import check_settings, file_name
from ..harness.study import Row
from .plans import RewardModelPlan
from .sft import NUM_SAMPLES


def run_reward_model(plan: RewardModelPlan, on_progress: ProgressFn) -> list[Row]:
    """Trains the reward model unless it is there, and measures it on fresh pairs; one row.

    The row's accuracies are shares of the pairs: against gold, and against the labels of its own judge, noise included;
    `calibration_error` is the mean distance between P(b preferred) and those labels, by bins of confidence.
    """
    quiet()
    on_progress(ProgressUpdate(plan.cell, 0))
    folder = plan.out / "runs" / file_name(plan.cell)
    folder.mkdir(parents=True, exist_ok=True)
    check_settings(folder, {**asdict(plan.sizes), **asdict(plan.labels), "seed": plan.seed, "member": plan.member})
    preferences = labelled(plan)
    if not plan.done:
        train(
            plan,
            preferences,
            folder,
            lambda share: on_progress(ProgressUpdate(plan.cell, int(0.8 * share * plan.units))),
        )
    row = measure(plan, len(preferences))
    shares = f"{row['accuracy_gold']:.1%} against gold, {row['accuracy_judge']:.1%} against its judge"
    on_progress(ProgressUpdate(plan.cell, plan.units, f"{plan.cell}: {shares}"))
    return [row]


def labelled(plan: RewardModelPlan) -> tuple[Preference, ...]:
    """The pairs of SFT samples as the plan's judge labels them, less the ties; the seed is the annotators' too."""
    data, num = sandbox.SANDBOX, plan.labels.num_labels
    assert isinstance(data, Sandbox)
    pairs = data.pairs()[:num]
    return label(data.instructions("preference")[:num], pairs, plan.labels.annotator(plan.seed))


def train(
    plan: RewardModelPlan, preferences: Sequence[Preference], folder: Path, on_progress: Callable[[float], None]
) -> None:
    """Trains and saves into the plan's folder.

    0 is the mean score of the SFT policy's answers, 1 their standard deviation within an instruction, for each reward
    model: PPO and the choice among n samples are moved by differences within an instruction only, so one KL penalty
    pulls equally hard against any of them (the mean or minimum of three moves a little less: 0.9 to 1).
    """
    trunk = Path(plan.labels.trunk or sandbox.POLICY)
    if plan.labels.layers is not None:
        trunk = shallow(trunk, plan.labels.layers, folder / "trunk")
    fit(
        trunk,
        preferences,
        plan.folder,
        val=sandbox.SANDBOX.instructions("val")[: plan.sizes.num_val],
        config=replace(RewardModelingConfig.sandbox(), keep_checkpoints=1),
        seed=plan.training_seed,
        out=folder,
        sft=sandbox.POLICY,
        num_samples=NUM_SAMPLES,
        on_progress=on_progress,
    )


def shallow(trunk: Path, layers: int, folder: Path) -> Path:
    """Saves a language model with only its first layers, as the start of a smaller reward model; returns `folder`.

    Raises:
        DataError: It has fewer layers.
    """
    language_model = LanguageModel.from_pretrained(trunk)
    model: Any = language_model.model
    if layers > len(model.model.layers):
        raise DataError(f"layers: expected at most the {len(model.model.layers)} of {trunk}, got {layers}.")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    language_model.save(folder)
    return folder


def measure(plan: RewardModelPlan, num_trained: int) -> Row:
    """The reward model on fresh pairs: those of a seed are the same for all labels and members."""
    data = sandbox.SANDBOX
    assert isinstance(data, Sandbox)
    pairs = fresh_pairs(data, sandbox.POLICY, plan.seed, plan.sizes.num_fresh)
    chance = predicted(plan.folder, pairs)
    said = plan.labels.annotator(plan.seed).compare(pairs.instructions, pairs.a, pairs.b)
    bins = reliability("reward_model", chance, plan.labels.name, said)
    error = sum(row["n"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / sum(row["n"] for row in bins)
    return {
        **asdict(plan.labels),
        "member": plan.member,
        "seed": plan.seed,
        "num_trained": num_trained,
        "num_pairs": len(pairs.a),
        "accuracy_gold": float(hits(chance, (pairs.gap > 0).astype(np.float64)).mean()),
        "accuracy_judge": float(hits(chance, said).mean()),
        "calibration_error": float(error),
    }
