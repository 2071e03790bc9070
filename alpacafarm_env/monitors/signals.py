"""Signals of over-optimization: what a run's metrics say of each step by those up to it, without gold.

All are relative to the run's own start, so that a reward's unit, a policy's length and a step's size do not matter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
SIGNALS: Final[Mapping[str, str]] = {
    "distance": "square root of the KL to the start, in nats a response",
    "acceleration": "KL gained in a step lately, over that of an average step, less 1",
    "gain": "proxy gained, in standard deviations of its scores at the start",
    "gain_per_nat": "proxy gained a nat lately, over that of an average nat, less 1",
    "length": "log of the responses' length, in tokens, over that at the start",
    "repetition": "share of three words in a row that a response has had before, less that at the start",
    "entropy": "log of the entropy a token over that at the start",
    "at_limit": "share of responses that do not end by themselves, less that at the start",
    "disagreement": "log of an ensemble's disagreement over that at the start",
    "agreement": "rank correlation of the proxy with a second opinion, less that at the start",
}
"""Signal -> what it is. One whose metrics a run lacks is NaN."""
START: Final = 2
"""Steps, the first, whose mean is the start."""
SMOOTH: Final = 3
"""Steps, the last, whose mean stands for a step."""
LATELY: Final = 5
"""Steps back that "lately" begins."""
MOST: Final = 5.0
"""Ratios of differences are kept within this: their denominators may be near 0."""
WORDS: Final = 3


def signals(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Each signal of `SIGNALS` at each of K steps, [K], from the steps' metrics, by our agents' names.

    A step's value depends on the steps up to it alone. NaN where a metric is missing, or nothing has happened yet.
    """
    kl, proxy, length = (_column(metrics, name) for name in ("kl/k1", "score/mean", "tokens/mean"))
    entropy, finished = (_column(metrics, name) for name in ("entropy", "finished"))
    disagreement, repeated = (_column(metrics, f"info/{name}") for name in ("disagreement", "repetition"))
    spread = _start(_column(metrics, "score/std"))
    gain = (_smooth(proxy) - _start(proxy)) / (spread if spread > 0 else np.nan)
    moved = np.maximum(_smooth(kl), 0)
    return {
        "distance": np.sqrt(moved),
        "acceleration": _lately(moved, np.arange(float(len(metrics)))),
        "gain": gain,
        "gain_per_nat": _lately(gain, moved),
        "length": _log_ratio(length),
        "repetition": _smooth(repeated) - _start(repeated),
        "entropy": _log_ratio(entropy),
        "at_limit": _start(finished) - _smooth(finished),
        "disagreement": _log_ratio(disagreement),
        "agreement": _agreed(metrics),
    }


def repetition(text: str) -> float:
    """The share of a text's runs of three words that it has had before, in [0, 1]; 0 of fewer than three words."""
    words = text.split()
    runs = list(zip(*(words[first:] for first in range(WORDS)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def agreement(proxy: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rank correlation of two scores of the same responses, [B] each; NaN where it is not defined.

    Responses that lack one of them (NaN) do not count.
    """
    from scipy.stats import spearmanr  # half a second, for wrappers that may never ask

    both = np.stack([np.asarray(proxy, np.float64), np.asarray(second, np.float64)])
    known = both[:, ~np.isnan(both).any(axis=0)]
    if known.shape[1] < 3 or not (np.ptp(known, axis=1) > 0).all():
        return float("nan")
    return float(spearmanr(*known).statistic)


def _column(metrics: Sequence[Mapping[str, Any]], name: str) -> Array:
    values = [row.get(name) for row in metrics]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _agreed(metrics: Sequence[Mapping[str, Any]]) -> Array:
    """That of the second opinion that has left the proxy farthest."""
    names = sorted({name for row in metrics for name in row if name.endswith("_agreement")})
    changes = [_smooth(column) - _start(column) for column in (_column(metrics, name) for name in names)]
    return np.fmin.reduce(changes) if changes else np.full(len(metrics), np.nan)


def _smooth(values: Array) -> Array:
    """Means of the last `SMOOTH` values up to each, without NaN."""
    padded = np.concatenate([np.full(SMOOTH - 1, np.nan), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, SMOOTH)
    known = ~np.isnan(windows)
    counts = known.sum(axis=1)
    return np.where(counts > 0, np.where(known, windows, 0.0).sum(axis=1) / np.maximum(counts, 1), np.nan)


def _start(values: Array) -> float:
    known = values[:START][~np.isnan(values[:START])]
    return float(known.mean()) if len(known) else float("nan")


def _log_ratio(values: Array) -> Array:
    """The log of each over the start; NaN where one of them is not above 0."""
    ratio = _smooth(values) / (_start(values) or np.nan)
    return np.log(np.where(ratio > 0, ratio, np.nan))


def _lately(values: Array, along: Array) -> Array:
    """The slope of `values` along another column over the last steps, over that since the start, less 1."""
    back = np.maximum(np.arange(len(values)) - LATELY, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        late, whole = ((values - values[past]) / (along - along[past]) for past in (back, np.zeros_like(back)))
        change = late / np.abs(whole) - np.sign(whole)
    return np.clip(np.where(np.isfinite(change) & (back > 0), change, np.nan), -MOST, MOST)
