"""The two golds, each learned from all recorded verdicts but those on the answered instructions.

Gold A: boosted trees on measures made by hand. Gold B: a linear model on the policy's own hidden states. Both give the
log-odds that a response is preferred to the recorded reference. No proxy sees a feature of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.study import Row
from ..surrogates.features import measured
from ..surrogates.models import Kind, Score, accuracy, fit
from .plan import Array, Plan, World, read_array, world_of, write_array
from .sampling import pooled_states, recorded_file

GoldName = Literal["a", "b"]
GOLDS: Final[tuple[GoldName, ...]] = ("a", "b")
RIDGES: Final = (1.0, 10.0, 100.0, 1000.0)
"""Tried for gold B on held-out instructions; trees have none."""


@dataclass(frozen=True, eq=False)
class Gold:
    """A gold with its scores of recorded texts."""

    plan: Plan
    name: GoldName
    score: Score
    references: Array
    """[N, K] features of the references."""
    recorded: Array
    """[M, N] scores of the recorded models' texts; NaN where gold has no features of one."""
    accuracy: float
    """Share of the verdicts on a fifth of its instructions, held out for this alone, that it predicts."""
    ridge: float
    num: int
    """Verdicts that it was learned from."""

    def of(self, numbers: Sequence[int], texts: Sequence[str]) -> Array:
        """Scores [B] of responses to instructions, by their numbers."""
        world = world_of(self.plan)
        return self.from_features(numbers, features(self.plan, world, self.name, numbers, texts))

    def from_features(self, numbers: Sequence[int], found: Array) -> Array:
        """The same, of features [B, K]; NaN where there are none."""
        return scored(self.score, found - self.references[list(numbers)])


def scored(score: Score, differences: Array) -> Array:
    """Scores of differences of features; NaN where a row has a NaN."""
    known = ~np.isnan(differences).any(axis=1)
    values = np.full(len(differences), np.nan)
    if known.any():
        values[known] = score(differences[known])
    return values


def features(plan: Plan, world: World, name: GoldName, numbers: Sequence[int], texts: Sequence[str]) -> Array:
    """A gold's features [B, K] of responses of the policy."""
    instructions = [world.instructions[number] for number in numbers]
    return measured(instructions, texts) if name == "a" else pooled_states(plan, instructions, texts, plan.sizes.tokens)


def recorded_features(plan: Plan, world: World, name: GoldName) -> tuple[Array, Array]:
    """A gold's features of the references [N, K] and of the recorded models' texts [M, N, K]."""
    judged = world.judged
    if name == "a":
        asked = world.instructions
        return measured(asked, judged.references), np.stack([measured(asked, texts) for texts in judged.outputs])
    used = set(state_models(plan, len(judged.models)))
    references = read_array(recorded_file(plan, None))
    missing = np.full_like(references, np.nan)
    each = [read_array(recorded_file(plan, m)) if m in used else missing for m in range(len(judged.models))]
    return references, np.stack(each)


def state_models(plan: Plan, num: int) -> list[int]:
    """The recorded models whose texts the policy reads, evenly spread."""
    wanted = num if plan.state_models is None else min(plan.state_models, num)
    return [place * num // wanted for place in range(wanted)]


@cache
def gold_of(plan: Plan, name: GoldName) -> Gold:
    """Learns a gold; some seconds a process, always the same."""
    world = world_of(plan)
    references, texts = recorded_features(plan, world, name)
    differences = texts - references
    learned = np.zeros(len(world.instructions), dtype=bool)
    learned[world.others] = True
    usable = world.judged.decisive & learned & ~np.isnan(differences).any(axis=2)
    tested = usable & np.isin(np.arange(len(learned)), world.others[::5])
    kind: Kind = "trees" if name == "a" else "linear"

    def learn(rows: NDArray[np.bool_], ridge: float) -> Score:
        return fit(kind, differences[rows], world.judged.credits[rows], ridge=ridge)

    right = {
        ridge: accuracy(learn(usable & ~tested, ridge), differences[tested], world.judged.credits[tested])
        for ridge in (RIDGES if name == "b" else RIDGES[:1])
    }
    ridge = max(right, key=lambda each: right[each])
    score = learn(usable, ridge)
    recorded = scored(score, differences.reshape(-1, differences.shape[2])).reshape(differences.shape[:2])
    return Gold(plan, name, score, references, recorded, right[ridge], ridge, int(usable.sum()))


def scores_file(plan: Plan, name: GoldName) -> Path:
    """Where a gold's scores of all samples are."""
    return plan.out / "golds" / f"{name}-{plan.upto}.npy"


def score_samples(plan: Plan, key: str, name: GoldName, on_progress: ProgressFn) -> list[Row]:
    """Scores all samples by a gold and stores that, [P, most] with NaN where there is no sample; a row about gold."""
    quiet()
    on_progress(ProgressUpdate(key, 0))
    world, gold = world_of(plan), gold_of(plan, name)
    (most, _), (fewest, num) = plan.tiers[-1], plan.tiers[0]
    values, lengths = np.full((num, most), np.nan), np.full((num, fewest), np.nan)
    for place in range(num):
        texts, number = plan.texts(place), world.answered[place]
        if name == "a":
            found = features(plan, world, name, [number] * len(texts), texts)
        else:
            blocks = range(len(texts) // plan.sizes.block)
            found = np.concatenate([read_array(plan.states_file(block, place)) for block in blocks])
        values[place, : len(texts)] = gold.from_features([number] * len(texts), found)
        lengths[place] = [len(text) for text in texts[:fewest]]
        on_progress(ProgressUpdate(key, (place + 1) / num))
    write_array(scores_file(plan, name), values)
    first = values[:, :fewest]
    row = {
        "verdicts": gold.num,
        "ridge": gold.ridge if name == "b" else None,
        "accuracy": 100 * gold.accuracy,
        "mean": float(np.nanmean(first)),
        "sd_within": float(np.sqrt(np.nanvar(first, axis=1, ddof=1).mean())),
        "sd_between": float(np.nanmean(first, axis=1).std(ddof=1)),
        "length_within": correlation_within(first, lengths),
    }
    return [{"table": "golds", "gold": name, **row}]


def read_scores(plan: Plan, name: GoldName) -> Array:
    """What `score_samples` has stored."""
    return read_array(scores_file(plan, name))


def correlation_within(one: Array, two: Array) -> float:
    """Correlation of two measures [P, n] of samples after each instruction's mean is taken away."""
    known = ~np.isnan(one + two)
    parts = [(np.where(known, each, np.nan) - np.nanmean(each, axis=1, keepdims=True))[known] for each in (one, two)]
    return float(np.corrcoef(*parts)[0, 1])
