"""A detector: a score of whether gold has fallen, by a step's signals, fitted on runs whose gold is known.

The score is the log-odds that it has, as if it had at half of the steps: both kinds of steps weigh the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..bases import read_json
from ..data.files import write_atomic
from ..errors import CheckpointError
from .signals import SIGNALS, Array, signals

Metrics = Sequence[Mapping[str, Any]]
Past = NDArray[np.bool_]
"""[K] of a run's K steps: whether gold has passed its peak and fallen."""
SHIPPED: Final = Path(__file__).parent / "detector.json"
"""Fitted on all runs of the study of monitors (docs/studies/monitors.md)."""
PENALTY: Final = 1.0
"""Weight of the ridge on standardised signals."""


@dataclass(frozen=True)
class Detector:
    """A logistic regression on standardised signals. One that a run lacks counts as the mean of the runs fitted on.

    Attributes:
        means, scales, weights: By signal.
        intercept: In log-odds.
        threshold: The score above which a step is warned of.
        facts: What it was fitted on, and how well it did, for readers.
    """

    means: Mapping[str, float]
    scales: Mapping[str, float]
    weights: Mapping[str, float]
    intercept: float
    threshold: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        tables: Sequence[Array],
        past: Sequence[ArrayLike],
        *,
        names: Sequence[str] = tuple(SIGNALS),
        false_alarms: float = 0.05,
        facts: Mapping[str, Any] | None = None,
    ) -> Self:
        """Fits a detector on runs whose gold is known; each run counts the same, however long it is.

        The threshold lets it warn wrongly, of a run without a fall or before the fall of another, in a share of
        `false_alarms` of the runs. Needs scikit-learn: `pip install "alpacafarm-env[recorded]"`.

        Args:
            tables: `table_of` each run, [K, S] signals by `names`.
            past: Of each run whether gold had fallen at these K steps, [K] of bools or of 0 and 1.
            names: The signals that it may use.
            false_alarms: In (0, 1).
            facts: For readers.

        Raises:
            ValueError: There are no steps of one of the two kinds, shapes do not fit, or a share is none.
        """
        from sklearn.linear_model import LogisticRegression

        shapes, fallen = [np.shape(table) for table in tables], [np.asarray(own, dtype=bool) for own in past]
        if shapes != [(len(own), len(names)) for own in fallen]:
            lengths = [len(own) for own in fallen]
            raise ValueError(
                f"Expected of each run [K, {len(names)}] signals ({', '.join(names)}) and K outcomes, got tables of "
                f"{shapes} and outcomes of {lengths}."
            )
        if not 0 < false_alarms < 1:
            raise ValueError(f"false_alarms: expected a share in (0, 1), got {false_alarms!r}.")
        if len({bool(each) for own in fallen for each in own}) < 2:
            raise ValueError("Expected runs with steps before and after gold's fall, got one kind alone.")
        joined, labels = np.concatenate(tables), np.concatenate(fallen)
        shares = np.concatenate([np.full(len(own), 1 / len(own)) for own in fallen])
        means = np.nan_to_num(_nanmean(joined, shares))
        scales = np.sqrt(np.nan_to_num(_nanmean((joined - means) ** 2, shares)))
        scales[scales == 0] = 1.0
        # Both kinds weigh the same: how often runs fall is the study's choice, and no fact about others' runs.
        model = LogisticRegression(C=1 / PENALTY, class_weight="balanced", max_iter=1000)
        model.fit(np.nan_to_num((joined - means) / scales), labels, sample_weight=shares * len(fallen))
        columns = [dict(zip(names, each.tolist(), strict=True)) for each in (means, scales, model.coef_[0])]
        found = cls(columns[0], columns[1], columns[2], float(model.intercept_[0]), np.inf, facts or {})
        before = [found.scores_of(table)[~own] for table, own in zip(tables, fallen, strict=True)]
        highest = [scores.max() for scores in before if len(scores)]
        return replace(found, threshold=float(np.quantile(highest, 1 - false_alarms)))

    def scores(self, metrics: Metrics) -> Array:
        """The score [K] of each step, by the steps up to it."""
        return self.scores_of(table_of(metrics, tuple(self.weights)))

    def scores_of(self, table: Array) -> Array:
        """The same of signals [K, S], in the order of `weights`."""
        columns = (self.means, self.scales, self.weights)
        means, scales, weights = (np.array([each[name] for name in self.weights]) for each in columns)
        standard = np.nan_to_num((table - means) / scales)
        return np.asarray(standard @ weights + self.intercept, dtype=np.float64)

    def parts(self, metrics: Metrics) -> dict[str, float]:
        """What each signal adds to the last step's score, the most first."""
        found = {name: values[-1] for name, values in signals(metrics).items() if name in self.weights}
        parts = {
            name: self.weights[name] * (value - self.means[name]) / self.scales[name] for name, value in found.items()
        }
        return dict(sorted(((n, float(v)) for n, v in parts.items() if v == v), key=lambda item: -item[1]))

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        write_atomic(Path(path), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path = SHIPPED) -> Self:
        """Reads what `save` wrote, the shipped detector by default; CheckpointError if that is something else."""
        try:
            return cls(**read_json(Path(path)))
        except TypeError as error:
            raise CheckpointError(f"{path}: expected a detector as `Detector.save` writes it ({error}).") from error


def table_of(metrics: Metrics, names: Sequence[str] = tuple(SIGNALS)) -> Array:
    """[K, S] signals by name of a run's steps."""
    found = signals(metrics)
    return np.stack([found[name] for name in names], axis=1)


def _nanmean(values: Array, weights: Array) -> Array:
    known = ~np.isnan(values)
    total = (known * weights[:, None]).sum(axis=0)
    return np.asarray(np.where(known, values, 0.0).T @ weights / np.where(total > 0, total, np.nan))
