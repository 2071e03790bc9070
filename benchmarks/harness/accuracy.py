"""How often a reward model agrees with a label, and how far its probabilities can be trusted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from ...oracles import RewardModel
from ...oracles.base import judge
from ...statistics import wilson
from .fresh_pairs import FreshPairs
from .study import Row

Array = NDArray[np.float64]

CONFIDENCES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Edges of the bins of confidence."""


def hits(chance: Array, label: Array) -> Array:
    """1 where P(b preferred) [n] is on the label's side [n] of 0.5, 0.5 where either is a tie, 0 elsewhere."""
    return np.asarray((1 + np.sign(chance - 0.5) * np.sign(label - 0.5)) / 2)


def predicted(folder: Path, pairs: FreshPairs) -> Array:
    """P(b preferred) by a reward model, [n]."""
    oracle = RewardModel(folder, device="cpu")
    a, b = (judge(oracle, pairs.instructions, texts).scores for texts in (pairs.a, pairs.b))
    # Scores come in standard deviations of SFT's; the probabilities a model was trained to give are in its own units.
    std = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("alpacafarm_reward_std", 1.0)
    return np.asarray(expit((b - a) * float(std)))


def against_gold(name: str, chance: Array, gap: Array) -> list[Row]:
    """Accuracy of P(b preferred) [n] against the sign of the gold gap [n]: of all pairs, and by quartile of |gap|."""
    correct, size = hits(chance, (gap > 0).astype(np.float64)), np.abs(gap)
    quartile = np.digitize(size, np.quantile(size, (0.25, 0.5, 0.75)))
    groups = {"all": quartile >= 0} | {f"gap quartile {k + 1}": quartile == k for k in range(4)}
    return [
        _row(name, "gold", subset, correct[rows], mean_gold_gap=float(size[rows].mean()))
        for subset, rows in groups.items()
        if rows.any()
    ]


def reliability(name: str, chance: Array, label_judge: str, label: Array) -> list[Row]:
    """Agreement with a judge's labels [n] by the confidence max(p, 1 - p) of P(b preferred) [n]."""
    correct, confidence = hits(chance, label), np.maximum(chance, 1 - chance)
    place = np.digitize(confidence, CONFIDENCES[1:-1])
    bins = {f"confidence {low} to {high}": place == k for k, (low, high) in enumerate(pairwise(CONFIDENCES))}
    return [
        _row(name, label_judge, subset, correct[rows], confidence=float(confidence[rows].mean()))
        for subset, rows in bins.items()
        if rows.any()
    ]


def _row(name: str, against: str, subset: str, correct: Array, **means: float) -> Row:
    facts = {"judge": name, "against": against, "subset": subset, "mean_gold_gap": None, "confidence": None}
    return {**facts, **means, **share_row(float(correct.sum()), len(correct))}


def share_row(num_correct: float, num: int) -> Row:
    """A share with its Wilson interval and counts, as columns."""
    low, high = wilson(num_correct, num)
    return {"accuracy": num_correct / num, "low": low, "high": high, "n": num, "num_correct": num_correct}
