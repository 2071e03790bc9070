"""Reward models on features, learned from pairs whose labels may be flipped: linear ones and boosted trees.

Both model the log-odds that one text is preferred to another as an odd function g of the difference d of their
features, g(-d) = -g(d), as Bradley and Terry's model is one of scores. A single text's score is g of its difference to
a text that is fixed for its instruction (the reference), or to the mean of the training texts where there is none.
"""

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ...seeding import keyed_rng
from .features import Array, scikit_learn

Kind = Literal["linear", "trees"]
Score = Callable[[Array], Array]
"""Differences of features [B, K] -> log-odds [B] that the first of both texts is preferred."""
RIDGE: Final = 1.0
"""Weight of half the squared coefficients of a linear model, whose features have unit spread."""
TREES: Final = {"max_iter": 80, "learning_rate": 0.1, "max_leaf_nodes": 8, "l2_regularization": 1.0}
FEWEST_IN_A_LEAF: Final = 20


def flipped(labels: Array, rate: float, *stream: str | int) -> Array:
    """Labels [N] in {0, 1}, each flipped with probability `rate` in [0, 1].

    One uniform number a place decides, by the key `stream`: what is flipped at one rate is at every higher one, and the
    first labels are flipped alike however many follow.
    """
    uniform = keyed_rng(0, "label flips", *stream).random(len(labels))
    return np.where(uniform < rate, 1 - labels, labels)


def fit(kind: Kind, differences: Array, labels: Array, *, ridge: float = RIDGE) -> Score:
    """Learns which text of a pair is preferred; takes milliseconds ("linear") to a second ("trees"), and draws nothing.

    Args:
        kind: "linear" is Bradley and Terry's model with a ridge; "trees" are scikit-learn's boosted histogram trees,
            learned from each pair in both orders and made odd.
        differences: Features of the first text less those of the second, [N, K].
        labels: 1 where the first is preferred, 0 where the second is, [N].
        ridge: See `RIDGE`.

    Raises:
        DataError: "trees" without scikit-learn.
    """
    return _linear(differences, labels, ridge) if kind == "linear" else _trees(differences, labels)


def accuracy(score: Score, differences: Array, labels: Array) -> float:
    """Share of pairs whose preferred text has the higher score; a score of 0 counts half."""
    return float(np.mean(0.5 + 0.5 * np.sign(score(differences)) * np.sign(labels - 0.5)))


def _linear(differences: Array, labels: Array, ridge: float) -> Score:
    """Newton's method, from 0: convex, and at its optimum after a few steps."""
    scale = np.sqrt(np.mean(differences**2, axis=0))
    used = differences / np.where(scale > 1e-9, scale, np.inf)
    weights: Array = np.zeros(used.shape[1])
    for _ in range(25):
        chance = 1 / (1 + np.exp(-np.clip(used @ weights, -30, 30)))
        slope = used.T @ (labels - chance) - ridge * weights
        curvature = (used * (chance * (1 - chance))[:, None]).T @ used + ridge * np.eye(len(weights))
        step = np.linalg.solve(curvature, slope)
        weights = weights + step
        if np.abs(step).max(initial=0) < 1e-6:
            break
    weights = weights / np.where(scale > 1e-9, scale, np.inf)
    return lambda rows: np.asarray(rows @ weights)


def _trees(differences: Array, labels: Array) -> Score:
    scikit_learn()
    from sklearn.ensemble import HistGradientBoostingClassifier

    fewest = max(1, min(FEWEST_IN_A_LEAF, len(labels) // 10))
    model = HistGradientBoostingClassifier(**TREES, min_samples_leaf=fewest, early_stopping=False, random_state=0)
    model.fit(np.concatenate([differences, -differences]), np.concatenate([labels, 1 - labels]))

    def score(rows: Array) -> Array:
        both: NDArray[np.float64] = model.decision_function(np.concatenate([rows, -rows]))
        return np.asarray((both[: len(rows)] - both[len(rows) :]) / 2)

    return score
