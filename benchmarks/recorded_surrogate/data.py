"""Recorded judgements as a table of models by instructions, and the folds that keep test and training apart.

A surrogate is tested only on models that it was never trained on. All models answer the same instructions and are
compared with the same reference, so a surrogate that saw an instruction in training knows how good the reference's
answer to it is, without reading anything of the left-out model. Two protocols, therefore:

* `disjoint`: neither the models nor the instructions of the test pairs are in training. This is what a reward model
  for new prompts would meet, and it is the one that counts.
* `models`: only the models are left out.

Best-of-n chooses among models that were all left out together: half of the models, then the other half; and those near
the reference, by a surrogate that learned from none of them. Instructions are disjoint there. A highest point is found
on the instructions it is reported on, so it flatters a little, and so does the fall from it.

The band of near-reference models, the features and the trees' few settings were fixed after a look at these very data
(of the variants tried, the two whose standard errors were taken lay 3.7 and 4.5 of them above the baseline): read a
lead that is hardly two standard errors as none. Models of one family, such as three sizes of one chat model, may be
apart in test and training.
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

    @classmethod
    def of(cls, dataset: RecordedDataset, num_instructions: int | None = None) -> Judged:
        """All judged models of a folder, on all its instructions or on an evenly spread part of them."""
        every = [str(instruction) for instruction in dataset.instructions("eval")]
        rows = list(subset(len(every), num_instructions or len(every)))
        references = dataset.references("eval")
        return cls(
            dataset.judged,
            tuple(every[row] for row in rows),
            tuple(references[row] for row in rows),
            tuple(tuple(dataset.outputs(model)[row] for row in rows) for model in dataset.judged),
            np.array([dataset.judgements(model)[rows] for model in dataset.judged]),
        )

    @cached_property
    def decisive(self) -> Mask:
        """[M, N] where the judge preferred one of the two texts: what is trained on and tested."""
        return np.asarray((self.credits == 0) | (self.credits == 1))

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
        order = np.argsort(self.win_rates, kind="stable")
        folds = np.empty(len(order), dtype=np.int64)
        folds[order] = np.arange(len(order)) % count
        return folds

    def instruction_folds(self, count: int) -> Indices:
        """[N] fold of each instruction, drawn at random but always the same."""
        return keyed_rng(0, "recorded_surrogate").permutation(len(self.instructions)) % count

    def members(self, pool: str) -> Mask:
        """[M] the models of a best-of-n pool."""
        return self.near if pool == "near_reference" else self.model_folds(2) == int(pool.removeprefix("half "))


@dataclass(frozen=True)
class Part:
    """One division of the table: fit on `train`, predict `test`; both [M, N]."""

    train: Mask
    test: Mask


def parts(judged: Judged, protocol: str, folds: int, *, diagonal: bool = False) -> Iterator[Part]:
    """The divisions of a protocol, or of a best-of-n pool (the pool's models left out, instructions disjoint).

    Args:
        judged: The table.
        protocol: One of `PROTOCOLS` or `POOLS`.
        folds: Folds of models, and of instructions.
        diagonal: Of the disjoint folds only those with equal numbers: a fit a fold, 1 / folds of the pairs tested.
    """
    size = (len(judged.models), len(judged.instructions))
    by_model = np.where(judged.members(protocol), 0, -1) if protocol in POOLS else judged.model_folds(folds)
    by_instruction = judged.instruction_folds(folds)
    for model in range(int(by_model.max()) + 1):
        left_out = (by_model == model)[:, None]
        if protocol == "models":
            yield Part(~left_out & judged.decisive, np.broadcast_to(left_out, size))
            continue
        for instruction in range(folds):
            if not diagonal or instruction == model:
                asked = (by_instruction == instruction)[None]
                yield Part(~left_out & ~asked & judged.decisive, left_out & asked)
