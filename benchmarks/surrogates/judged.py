"""Recorded judgements as a table of models by instructions, with the texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...data import RecordedDataset
from ...errors import DataError
from ...seeding import keyed_rng
from ..experiment.evaluation import subset
from ..harness.sources import eval_rows, extra_files, judgements
from .features import Array

FEWEST: Final = 4
"""Models, and instructions, that can be held out in parts."""
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Judged:
    """M models' responses to N instructions, the reference's, and a judge's credits.

    Raises:
        DataError: Fewer than four models or instructions, which cannot be held out in parts.
    """

    models: tuple[str, ...]
    instructions: tuple[str, ...]
    references: tuple[str, ...]
    outputs: tuple[tuple[str, ...], ...]
    """[M][N]."""
    credits: Array
    """[M, N] credit of the model in [0, 1], 0.5 for identical texts; NaN = no verdict."""

    def __post_init__(self) -> None:
        if min(self.credits.shape) < FEWEST:
            raise DataError(
                f"expected judgements of {FEWEST} or more models on {FEWEST} or more instructions, got "
                f"{self.credits.shape}: models and instructions are held out in parts."
            )

    @cached_property
    def decisive(self) -> Mask:
        """[M, N] where the judge preferred one of the two texts: what is trained on."""
        return np.isin(self.credits, (0, 1))

    def halves(self) -> Places:
        """[M] half of each model, 0 or 1, dealt in turn by mean credit, so that both halves are alike."""
        rates = np.nanmean(self.credits, axis=1)
        return np.argsort(np.argsort(rates, kind="stable")) % 2

    def folds(self, num: int) -> Places:
        """[N] fold of each instruction, 0 .. num - 1, at random but always the same."""
        return keyed_rng(0, "folds of instructions").permutation(len(self.instructions)) % num


def read_judged(dataset: RecordedDataset, num_instructions: int | None = None) -> Judged:
    """All judged models of a folder, on all its instructions or on an evenly spread part of them."""
    return _judged(dataset, {name: dataset.judgements(name) for name in dataset.judged}, num_instructions)


def read_other(dataset: RecordedDataset, name: str, num_instructions: int | None = None) -> Judged | None:
    """As `read_judged`, of the models that another judge has judged; None where it has judged fewer than four of them.

    Args:
        dataset: The folder.
        name: Of a file in its subfolder `extras`, "preferences_claude" for instance.
        num_instructions: As for `read_judged`.

    Raises:
        DataError: The file is faulty.
    """
    if name not in (files := extra_files(dataset.path)):
        return None
    found = judgements(files[name]).pivot(index="generator", columns="index", values="preference").astype(float)
    found = found.reindex(columns=eval_rows(dataset)["index"])
    credits = {str(model): row.to_numpy() for model, row in found.iterrows() if model in dataset.generators}
    return _judged(dataset, credits, num_instructions) if len(credits) >= FEWEST else None


def _judged(dataset: RecordedDataset, credits: Mapping[str, Array], num_instructions: int | None) -> Judged:
    every, references = dataset.instructions("eval"), dataset.references("eval")
    rows = subset(len(every), num_instructions or len(every))
    return Judged(
        tuple(credits),
        tuple(str(every[row]) for row in rows),
        tuple(references[row] for row in rows),
        tuple(tuple(dataset.outputs(model)[row] for row in rows) for model in credits),
        np.array([row[rows] for row in credits.values()]),
    )
