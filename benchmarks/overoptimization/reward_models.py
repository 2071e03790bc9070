"""Trains the reward models of the over-optimization study and measures how right and how calibrated they are."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import sandbox
from ...agents import LanguageModel, RewardModelingConfig
from ...errors import DataError
from ...instructions import Preference
from ...sandbox.dataset import Sandbox, label
from ...seeding import keyed_rng
from ..harness.reward_models import LAST_FILE, fit, fresh_pairs, hits, predicted, reliability
from ..harness.study import Row
from .plans import Plan
from .samples import ShareFn
from .sft import NUM_SAMPLES


def run_reward_model(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Trains the reward model unless it is there, and measures it on fresh pairs; one row.

    0 is the mean score of the SFT policy's answers, 1 their standard deviation within an instruction, for each reward
    model: PPO and the choice among n samples are moved by differences within an instruction only, so one KL penalty
    pulls equally hard against any of them (the mean or minimum of three moves a little less: 0.9 to 1).
    """
    on_share(0)
    preferences = labelled(plan)
    if not (plan.model / LAST_FILE).is_file():
        fit(
            trunk_of(plan),
            preferences,
            plan.model,
            val=sandbox.SANDBOX.instructions("val")[: plan.sizes.num_val],
            config=replace(RewardModelingConfig.sandbox(), keep_checkpoints=1),
            seed=training_seed(plan),
            out=plan.folder,
            sft=sandbox.POLICY,
            num_samples=NUM_SAMPLES,
            on_progress=lambda share: on_share(0.8 * share),
        )
    row = measure(plan, len(preferences))
    return [row], f"{row['accuracy_gold']:.1%} against gold, {row['accuracy_judge']:.1%} against its judge"


def training_seed(plan: Plan) -> int:
    """Of the head's start and the order of the pairs: the same for all labels of a seed."""
    return plan.seed if plan.member == 0 else int(keyed_rng(plan.seed, "member", plan.member).integers(2**31))


def labelled(plan: Plan) -> tuple[Preference, ...]:
    """The pairs of SFT samples as the plan's judge labels them, less the ties; the seed is the annotators' too."""
    data, num = sandbox.SANDBOX, plan.labels.num_labels
    assert isinstance(data, Sandbox)
    pairs = data.pairs()[:num]
    return label(data.instructions("preference")[:num], pairs, plan.labels.annotator(plan.seed))


def trunk_of(plan: Plan) -> Path:
    """Folder of the language model that the reward model starts from; one with fewer layers is made on the way.

    Raises:
        DataError: It has fewer layers than are to be kept.
    """
    trunk, layers = Path(plan.labels.trunk or sandbox.POLICY), plan.labels.layers
    if layers is None:
        return trunk
    language_model = LanguageModel.from_pretrained(trunk)
    model: Any = language_model.model
    if layers > len(model.model.layers):
        raise DataError(f"layers: expected at most the {len(model.model.layers)} of {trunk}, got {layers}.")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    language_model.save(plan.folder / "trunk")
    return plan.folder / "trunk"


def measure(plan: Plan, num_trained: int) -> Row:
    """The reward model on fresh pairs: those of a seed are the same for all labels and members.

    Accuracies are shares of the pairs: against gold, and against the labels of its own judge, noise included;
    `calibration_error` is the mean distance between P(b preferred) and those labels, by bins of confidence.
    """
    data = sandbox.SANDBOX
    assert isinstance(data, Sandbox)
    pairs = fresh_pairs(data, sandbox.POLICY, plan.seed, plan.sizes.num_fresh)
    chance = predicted(plan.model, pairs)
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
