"""The surrogates and the baselines: who learns what from the recorded verdicts.

Each learned one sees the same training pairs, from many models, most of which nearly always win. A model that wins a
share p of its training pairs is weighted by 4 p (1 - p): of one that always wins there is nothing to be learned but
that. The length-and-list baseline is there with and without these weights, and the stronger one is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...errors import UnknownNameError, did_you_mean
from .data import Array, Indices, Judged, Mask, parts
from .features import Features

Predict = Callable[[Indices], Array]
"""Rows of the features -> log-odds, or any score that is above 0 for "the model is preferred"."""
Fit = Callable[[Features, Indices, Array, Array], Predict]
"""(features, training rows, labels 0 or 1, weights) -> predictor."""


@dataclass(frozen=True)
class Surrogate:
    """One way to predict the judge's verdict."""

    name: str
    title: str
    fit: Fit
    baseline: bool = False
    weighted: bool = True
    """Whether the training models are weighted by what their verdicts can tell."""
    diagonal: bool = False
    """Too slow for all folds: tested on one in each row and column of them."""


def score(judged: Judged, features: Features, surrogate: Surrogate, protocol: str, folds: int) -> Array:
    """[M, N] the surrogate's score of every pair that the protocol tests, NaN elsewhere; never of a pair it saw."""
    scores = np.full(judged.credits.shape, np.nan)
    for part in parts(judged, protocol, folds, diagonal=surrogate.diagonal):
        rows = np.flatnonzero(part.train)
        weights = informativeness(judged, part.train) if surrogate.weighted else np.ones(len(rows))
        predict = surrogate.fit(features, rows, judged.credits.ravel()[rows], weights)
        scores[part.test] = predict(np.flatnonzero(part.test))
    return scores


def informativeness(judged: Judged, train: Mask) -> Array:
    """[number of training pairs] 4 p (1 - p) of the pair's model, p its share of wins in training."""
    counts = train.sum(axis=1)
    wins = np.where(train, judged.credits, 0).sum(axis=1) / np.maximum(1, counts)
    return np.repeat(4 * wins * (1 - wins), counts)


def find_surrogate(name: str) -> Surrogate:
    """The surrogate of that name.

    Raises:
        UnknownNameError: There is none.
    """
    found = {surrogate.name: surrogate for surrogate in SURROGATES}
    if name not in found:
        error: UnknownNameError = did_you_mean("surrogate", name, tuple(found))
        raise error
    return found[name]


def _majority(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
    side = 1.0 if labels.mean() >= 0.5 else -1.0
    return lambda test: np.full(len(test), side)


def _longer(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
    lengths = features.lengths
    # Of equal lengths the reference: a rule must say something.
    return lambda test: np.where(lengths[test, 0] > lengths[test, 1], 1.0, -1.0)


def _logistic(columns: Callable[[Features], Array], strength: float) -> Fit:
    def fit(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        table = columns(features)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
        model.fit(table[rows], labels, logisticregression__sample_weight=weights)
        return lambda test: np.asarray(model.decision_function(table[test]))

    return fit


def _trees(columns: Callable[[Features], Array]) -> Fit:
    def fit(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
        from sklearn.ensemble import HistGradientBoostingClassifier

        table = columns(features)
        model = HistGradientBoostingClassifier(
            max_iter=150,
            learning_rate=0.05,
            max_leaf_nodes=12,
            min_samples_leaf=60,
            l2_regularization=1.0,
            early_stopping=False,
            random_state=0,
        )
        model.fit(table[rows], labels, sample_weight=weights)
        return lambda test: np.asarray(model.decision_function(table[test]))

    return fit


def _ngrams(columns: Callable[[Features], Any]) -> Fit:
    def fit(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
        from sklearn.linear_model import SGDClassifier

        table = columns(features)
        model = SGDClassifier(loss="log_loss", alpha=1e-5, max_iter=5, tol=None, random_state=0)
        model.fit(table[rows], labels, sample_weight=weights)
        return lambda test: np.asarray(model.decision_function(table[test]))

    return fit


def _network(encoder: str) -> Fit:
    def fit(features: Features, rows: Indices, labels: Array, weights: Array) -> Predict:
        from .networks import train

        with one_thread():
            return train(encoder, features, rows, labels, weights)

    return fit


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread within: sums in one order, and no fight over the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _length_and_list(features: Features) -> Array:
    return features.length_and_list


BASELINE: Final = "length_list_weighted"
CHOSEN: Final = "trees"
"""The surrogate that best-of-n is drawn with."""
SURROGATES: Final = (
    Surrogate("majority", "always the side that wins most often in training", _majority, True, False),
    Surrogate("longer", "the longer response wins", _longer, True, False),
    Surrogate(
        "length_list", "logistic: length ratio, length difference, list", _logistic(_length_and_list, 1.0), True, False
    ),
    Surrogate(BASELINE, "logistic: the same, training models weighted", _logistic(_length_and_list, 1.0), True),
    Surrogate("length_trees", "boosted trees on lengths and lists alone", _trees(lambda f: f.length_and_list_raw)),
    Surrogate("words", "logistic: hashed word 1- and 2-grams, length, list", _ngrams(lambda f: f.words), diagonal=True),
    Surrogate(
        "characters",
        "logistic: hashed character 3- to 5-grams, length, list",
        _ngrams(lambda f: f.characters),
        diagonal=True,
    ),
    Surrogate("linear", "logistic: all measures of both texts", _logistic(lambda f: f.dense, 0.1)),
    Surrogate(CHOSEN, "boosted trees: all measures of both texts", _trees(lambda f: f.dense)),
    Surrogate("bag", "small pairwise network over hashed words (torch)", _network("bag"), diagonal=True),
    Surrogate("transformer", "tiny transformer reward model (torch)", _network("transformer"), diagonal=True),
)
QUICK: Final = tuple(s.name for s in SURROGATES if s.name not in ("characters", "transformer"))
