"""The cells: reward models of one kind and repeat, and their best-of-n curves on what they never saw."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from ...data import RecordedDataset
from ...data.files import write_atomic
from ...seeding import keyed_rng
from ..harness.labels import Setting
from ..harness.runner import ProgressFn, ProgressUpdate
from ..harness.stored import pack
from ..harness.study import Row
from ..surrogates.curves import best_of_n
from ..surrogates.features import MEASURES, Array, Scaling, measured, one_thread
from ..surrogates.judged import Judged, Mask, Places, read_judged, read_other
from ..surrogates.models import Kind, accuracy, fit, flipped

KINDS: Final[tuple[Kind, ...]] = ("linear", "trees")
RIDGE: Final = 100.0
"""Of linear models: in a trial with clean labels none of 1, 10 and 300 was more accurate."""
FOLDS: Final = 3
"""Thirds of the instructions."""
NUMBERS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 19)
"""The n whose gold is kept for each instruction."""
NEAR: Final = 0.25
"""A model is near the reference if its win rate is within this of one half."""
LENGTH: Final = [MEASURES.index(name) for name in ("log characters", "has a list")]
PREDICTORS: Final[dict[str, tuple[Kind, list[int]]]] = {
    "the longer response": ("linear", LENGTH[:1]),
    "linear on length and list": ("linear", LENGTH),
    "linear on all measures": ("linear", [*range(len(MEASURES))]),
    "trees on all measures": ("trees", [*range(len(MEASURES))]),
}
"""Who predicts the verdicts -> the kind of its model, and the measures that it sees."""


@dataclass(frozen=True)
class Part:
    """A half of the models and a third of the instructions that are held out, and what is trained on."""

    half: int
    fold: int
    pairs: Places
    """[P, 2] model and instruction of every decisive verdict on other models and other instructions."""
    asked: Mask
    """[N] the held-out instructions."""


@dataclass(frozen=True)
class Prepared:
    """What cells need of a folder: scaled measures of the responses less the reference's, and the credits."""

    differences: Array
    """[M, N, K]."""
    credits: Array
    halves: Places
    folds: Places
    other_differences: Array
    """Of the models that the second judge has judged, [M', N, K]; M' = 0 where there is none."""
    other_credits: Array
    trained_half: Places
    """[M'] half of these models, -1 for those that the first judge has never judged."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Of a file that `prepare` wrote."""
        with np.load(file) as stored:
            return cls(**{name: stored[name].astype(stored[name].dtype, copy=False) for name in stored.files})

    @cached_property
    def parts(self) -> list[Part]:
        """Every half with every third."""
        decisive = np.isin(self.credits, (0, 1))
        return [
            Part(half, fold, np.argwhere(decisive & (self.halves != half)[:, None] & (self.folds != fold)), asked)
            for half in (0, 1)
            for fold in range(FOLDS)
            if (asked := self.folds == fold).any()
        ]

    @property
    def counts(self) -> dict[str, int]:
        """Sizes, for the manifest."""
        decided, others = np.isin(self.credits, (0, 1)).sum(), (~np.isnan(self.other_credits)).sum()
        models, instructions = self.credits.shape
        sizes = {"models": models, "instructions": instructions, "verdicts": decided}
        sizes |= {"other_models": len(self.other_credits), "other_verdicts": others}
        return {f"num_{name}": int(value) for name, value in sizes.items()}

    def candidates(self, judge: str, half: int) -> tuple[Array, Array]:
        """Differences and credits of the models, never trained on, among which the best is chosen: [m, N, K], [m, N].

        `judge`: "own", whose verdicts are trained on, or "other".
        """
        if judge == "own":
            return self.differences[self.halves == half], self.credits[self.halves == half]
        held = (self.trained_half == half) | (self.trained_half == -1)
        return self.other_differences[held], self.other_credits[held]


def prepare(dataset: RecordedDataset, other: str, number: int | None, file: Path) -> None:
    """Measures all texts, 0.5 ms each, and writes what cells need."""
    judged, second = read_judged(dataset, number), read_other(dataset, other, number)
    own, reference = _measured(judged)
    scaling, halves = Scaling.of(own.reshape(-1, own.shape[-1])), judged.halves()
    content: dict[str, Any] = {"credits": judged.credits, "halves": halves, "folds": judged.folds(FOLDS)}
    content["differences"] = scaling(own) - scaling(reference)
    half_of, shape = dict(zip(judged.models, halves.tolist(), strict=True)), (0, *own.shape[1:])
    content |= {"other_differences": np.zeros(shape), "other_credits": np.zeros(shape[:2]), "trained_half": np.zeros(0)}
    if second is not None:
        content["other_differences"] = scaling(_measured(second)[0]) - scaling(reference)
        content["other_credits"] = second.credits
        content["trained_half"] = np.array([half_of.get(name, -1) for name in second.models])
    np.savez(buffer := io.BytesIO(), **content)
    write_atomic(file, buffer.getvalue())


def _measured(judged: Judged) -> tuple[Array, Array]:
    """Measures of the responses [M, N, K], and of the reference's [N, K]."""
    rows = np.stack([measured(judged.instructions, texts) for texts in (*judged.outputs, judged.references)])
    return rows[:-1], rows[-1]


def numbers_for(num: int) -> list[int]:
    """The n of curves among `num` candidates: those of `NUMBERS`, and the last one there is."""
    return sorted({*(n for n in NUMBERS if n <= num), min(num, NUMBERS[-1])})


def run_repeat(
    file: Path, kind: Kind, settings: Sequence[Setting], seed: int, on_progress: ProgressFn
) -> Sequence[Row]:
    """All settings of one kind and repeat: for each judge a row, whose `gold` is packed [N, n]."""
    data, rows = Prepared.read(file), list[Row]()
    cell, weight = f"{kind} repeat {seed}", 1 + 5 * (kind == "trees")
    for number, setting in enumerate(settings):
        on_progress(ProgressUpdate(cell, weight * number / len(settings)))
        with one_thread():
            found = curves(data, kind, setting, seed)
        rows += [{"kind": kind, "seed": seed, **vars(setting), **row} for row in found]
    return rows


def curves(data: Prepared, kind: Kind, setting: Setting, seed: int) -> list[dict[str, Any]]:
    """For each judge that there is the curves, mean over both halves; `seed` keys which pairs, and which flips."""
    judges = [name for name in ("own", "other") if len(data.candidates(name, 0)[1]) > 1]
    numbers = {name: numbers_for(min(len(data.candidates(name, half)[1]) for half in (0, 1))) for name in judges}
    found = {name: np.zeros((3, len(data.folds), len(numbers[name]))) for name in judges}
    right = []
    for part in data.parts:
        stream = (seed, part.half, part.fold)
        chosen = part.pairs[keyed_rng(0, "recorded noise", *stream).permutation(len(part.pairs))[: setting.labels]].T
        labels = flipped(data.credits[*chosen], setting.flip, *stream)
        score = fit(kind, data.differences[*chosen], labels, ridge=RIDGE)
        for name in judges:
            differences, credits = (each[:, part.asked] for each in data.candidates(name, part.half))
            proxy = score(differences.reshape(-1, differences.shape[-1])).reshape(credits.shape).T
            spread = float(np.sqrt(proxy.var(axis=1).mean())) or 1.0
            curve = best_of_n(proxy / spread, credits.T)
            kept = [n - 1 for n in numbers[name]]
            found[name][:, part.asked] += np.stack([curve.gold, curve.proxy, curve.kl])[..., kept] / 2
            if name == "own":
                known = np.isin(credits, (0, 1))
                right.append(accuracy(score, differences[known], credits[known]))
    return [
        {
            "judge": name,
            "accuracy": float(np.mean(right)),
            "n": numbers[name],
            "proxy": (proxy - proxy[:, :1]).mean(axis=0).tolist(),
            "kl": np.nanmean(kl, axis=0).tolist(),
            "gold": pack(gold),
        }
        for name, (gold, proxy, kl) in found.items()
    ]


def accuracy_rows(file: Path, predictor: str) -> list[Row]:
    """How often each held-out verdict is predicted, by model: trained on all verdicts on other models, instructions."""
    data, (kind, columns) = Prepared.read(file), PREDICTORS[predictor]
    right = np.full(data.credits.shape, np.nan)
    for part in data.parts:
        pairs, held = part.pairs.T, np.ix_(data.halves == part.half, part.asked)
        seen = data.differences[..., columns]
        shown, truth = seen[held].reshape(-1, len(columns)), data.credits[held]
        with one_thread():
            guess = (
                fit(kind, seen[*pairs], data.credits[*pairs], ridge=RIDGE)(shown) if len(columns) > 1 else shown[:, 0]
            )
        right[held] = np.where(
            np.isin(truth, (0, 1)), 0.5 + 0.5 * np.sign(guess).reshape(truth.shape) * (2 * truth - 1), np.nan
        )
    near = np.abs(np.nanmean(data.credits, axis=1) - 0.5) <= NEAR
    return [
        {"predictor": predictor, "model": place, "near": bool(near[place]), "accuracy": float(np.nanmean(row))}
        for place, row in enumerate(right)
    ]
