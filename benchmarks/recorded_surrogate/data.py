"""Recorded judgements as a table of models by instructions, and the folds that keep test and training apart.

A surrogate is tested only on models that it was never trained on. All models answer the same instructions and are
compared with the same reference, so one that saw an instruction in training knows how good the reference's answer is,
without reading anything of the left-out model. Hence two protocols: `disjoint` leaves out models and instructions, as a
reward model for new prompts would meet them, and counts; `models` leaves out models alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...data import RecordedDataset
from ...errors import DataError
from ...seeding import keyed_rng
from ..harness.evaluation import subset

NEAR: Final = 0.25
"""A model is near the reference if its win rate is within this of one half: where neither side is the rule, so that
always naming the usual winner is wrong in a quarter of the cases at least. Counted from the judgements alone."""
PROTOCOLS: Final = ("disjoint", "models")
POOLS: Final = ("half 0", "half 1", "near_reference")

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Judged:
    """M models' responses to N instructions, the reference's, and the judge's credits.

    Raises:
        DataError: Fewer than four models or instructions: they cannot be split in folds.
    """

    models: tuple[str, ...]
    instructions: tuple[str, ...]
    references: tuple[str, ...]
    outputs: tuple[tuple[str, ...], ...]
    """[M][N]."""
    credits: Array
    """[M, N] credit of the model in [0, 1], 0.5 for identical texts; NaN = no verdict."""

    def __post_init__(self) -> None:
        if min(self.credits.shape) < 4:
            raise DataError(
                f"expected judgements of 4 or more models on 4 or more instructions, got {self.credits.shape}: "
                "models and instructions are left out in folds."
            )

    @cached_property
    def decisive(self) -> Mask:
        """[M, N] where the judge preferred one of the two texts: what is trained on and tested."""
        return np.isin(self.credits, (0, 1))

    @cached_property
    def lengths(self) -> Array:
        """[M, N] characters of the responses."""
        return np.array([[len(text) for text in row] for row in self.outputs], dtype=np.float64)

    @cached_property
    def win_rates(self) -> Array:
        """[M] mean credit."""
        return np.asarray(np.nanmean(self.credits, axis=1))

    @cached_property
    def near(self) -> Mask:
        """[M] the models near the reference."""
        return np.asarray(np.abs(self.win_rates - 0.5) <= NEAR)

    def model_folds(self, count: int) -> Indices:
        """[M] fold of each model: dealt in turn in the order of their win rates, so that folds are alike."""
        return np.argsort(np.argsort(self.win_rates, kind="stable")) % count

    def instruction_folds(self, count: int) -> Indices:
        """[N] fold of each instruction, drawn at random but always the same."""
        return keyed_rng(0, "recorded_surrogate").permutation(len(self.instructions)) % count

    def members(self, pool: str) -> Mask:
        """[M] the models of a best-of-n pool: all of them were left out together."""
        return self.near if pool == "near_reference" else self.model_folds(2) == int(pool.removeprefix("half "))


def read_judged(dataset: RecordedDataset, num_instructions: int | None = None) -> Judged:
    """All judged models of a folder, on all its instructions or on an evenly spread part of them."""
    every, references = dataset.instructions("eval"), dataset.references("eval")
    rows = subset(len(every), num_instructions or len(every))
    return Judged(
        dataset.judged,
        tuple(str(every[row]) for row in rows),
        tuple(references[row] for row in rows),
        tuple(tuple(dataset.outputs(model)[row] for row in rows) for model in dataset.judged),
        np.array([dataset.judgements(model)[rows] for model in dataset.judged]),
    )


def parts(judged: Judged, protocol: str, folds: int, *, diagonal: bool = False) -> Iterator[tuple[Mask, Mask]]:
    """(train, test), both [M, N], of a protocol, or of a best-of-n pool (its models left out, instructions disjoint).

    Args:
        judged: The table.
        protocol: One of `PROTOCOLS` or `POOLS`.
        folds: Folds of models, and of instructions.
        diagonal: Of the disjoint folds only those with equal numbers: a fit a fold, 1 / folds of the pairs tested.
    """
    by_model = np.where(judged.members(protocol), 0, -1) if protocol in POOLS else judged.model_folds(folds)
    by_instruction = judged.instruction_folds(1 if protocol == "models" else folds)
    for model in range(int(by_model.max()) + 1):
        for instruction in range(int(by_instruction.max()) + 1):
            left_out, asked = (by_model == model)[:, None], (by_instruction == instruction)[None]
            if protocol == "models":  # every instruction is asked, in training too
                yield ~left_out & judged.decisive, left_out & asked
            elif not diagonal or instruction == model:
                yield ~left_out & ~asked & judged.decisive, left_out & asked
