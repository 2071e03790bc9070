"""The surrogates and the baselines: who learns what from the recorded verdicts.

All learn from the same pairs of many models, most of which nearly always win. A model that wins a share p of its
training pairs is weighted by 4 p (1 - p): one that always wins teaches nothing else. The length-and-list baseline
exists with and without these weights, and comparisons are with the stronger one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from ..harness.runner import quiet
from .data import Array, Features, Indices, Judged, Mask, parts

Predict = Callable[[Indices], Array]
"""Rows of the features -> log-odds, or any score that is above 0 for "the model is preferred"."""
Fit = Callable[[Features, Indices, Array, Array], Predict]
"""(features, training rows, labels 0 or 1, weights) -> predictor."""


@dataclass(frozen=True)
class Surrogate:
    """One way to predict the judge's verdict."""

    title: str
    fit: Fit
    baseline: bool = False
    weighted: bool = True
    diagonal: bool = False
    """Too slow for all folds: tested on one in each row and column of them."""


def score(judged: Judged, features: Features, surrogate: Surrogate, protocol: str, folds: int) -> Array:
    """[M, N] the surrogate's score of every pair that the protocol tests, NaN elsewhere; never of a pair it saw."""
    scores = np.full(judged.credits.shape, np.nan)
    for train, test in parts(judged, protocol, folds, diagonal=surrogate.diagonal):
        rows = np.flatnonzero(train)
        weights = informativeness(judged, train) if surrogate.weighted else np.ones(len(rows))
        scores[test] = surrogate.fit(features, rows, judged.credits.ravel()[rows], weights)(np.flatnonzero(test))
    return scores


def informativeness(judged: Judged, train: Mask) -> Array:
    """[number of training pairs] 4 p (1 - p) of the pair's model, p its share of wins in training."""
    counts = train.sum(axis=1)
    wins = np.where(train, judged.credits, 0).sum(axis=1) / np.maximum(1, counts)
    return np.repeat(4 * wins * (1 - wins), counts)


def _majority(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
    side = 1.0 if labels.mean() >= 0.5 else -1.0
    return lambda test: np.full(len(test), side)


def _longer(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
    return lambda test: np.where(features.length_and_list[test, 1] > 0, 1.0, -1.0)  # for equal lengths the reference


def _classifier(steps: Callable[[], Sequence[Any]], columns: str) -> Fit:
    """A pipeline of scikit-learn on one of the tables of the features."""

    def fit(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
        from sklearn.pipeline import make_pipeline

        table, model = getattr(features, columns), make_pipeline(*steps())
        model.fit(table[rows], labels, **{f"{model.steps[-1][0]}__sample_weight": weights})
        return lambda test: np.asarray(model.decision_function(table[test]))

    return fit


def _logistic(strength: float) -> Sequence[Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    return StandardScaler(), LogisticRegression(C=strength, max_iter=1000)


def _trees() -> Sequence[Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    size = {"max_iter": 150, "learning_rate": 0.05, "max_leaf_nodes": 12, "min_samples_leaf": 60}
    return (HistGradientBoostingClassifier(**size, l2_regularization=1.0, early_stopping=False, random_state=0),)


def _sparse() -> Sequence[Any]:
    from sklearn.linear_model import SGDClassifier

    return (SGDClassifier(loss="log_loss", alpha=1e-5, max_iter=5, tol=None, random_state=0),)


def _network(encoder: str, *data: Any) -> Predict:
    from .networks import train

    quiet()  # sums in one order, and no fight over the cores
    return train(encoder, *data)


BASELINE: Final = "length_list_weighted"
CHOSEN: Final = "trees"
"""The surrogate that best-of-n is drawn with."""
_LENGTH_LIST: Final = _classifier(partial(_logistic, 1.0), "length_and_list")
_WORDS, _CHARACTERS = _classifier(_sparse, "words"), _classifier(_sparse, "characters")
_BAG, _TRANSFORMER = partial(_network, "bag"), partial(_network, "transformer")
SURROGATES: Final = {
    "majority": Surrogate("always the usual winner", _majority, True, False),
    "longer": Surrogate("the longer response", _longer, True, False),
    "length_list": Surrogate("logistic on length and list", _LENGTH_LIST, True, False),
    BASELINE: Surrogate("weighted logistic on length and list", _LENGTH_LIST, True),
    "length_trees": Surrogate("boosted trees on length and list", _classifier(_trees, "length_and_list_raw")),
    "words": Surrogate("logistic on word n-grams, length and list", _WORDS, diagonal=True),
    "characters": Surrogate("logistic on character n-grams, length and list", _CHARACTERS, diagonal=True),
    "linear": Surrogate("logistic on all measures of both texts", _classifier(partial(_logistic, 0.1), "dense")),
    CHOSEN: Surrogate("boosted trees on all measures of both texts", _classifier(_trees, "dense")),
    "bag": Surrogate("pairwise network on hashed words", _BAG, diagonal=True),
    "transformer": Surrogate("tiny transformer", _TRANSFORMER, diagonal=True),
}
QUICK: Final = tuple(name for name in SURROGATES if name not in ("characters", "transformer"))
BASELINES: Final = tuple(name for name, surrogate in SURROGATES.items() if surrogate.baseline)
