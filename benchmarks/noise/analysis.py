"""What is said of the curves beyond `surrogates.scarcity`: what flips add to the information, Gao's form, predictions.

Gold is gained as d (alpha - beta d), d = sqrt(KL): Gao, Schulman and Hilton 2022 (arXiv 2210.10760). Least squares is
linear in the curve, so every repeat and instruction has an alpha and a beta of its own, and their errors are over both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from ...seeding import keyed_rng
from ..experiment.faults import CLEAN, FLIP
from ..experiment.fresh import KIND, OWN
from ..harness.labels import Setting
from ..harness.page import records
from ..harness.study import Row
from ..surrogates.curves import TwoWay, slope
from ..surrogates.curves import gao as gao_fit
from ..surrogates.features import Array
from ..surrogates.predictions import Outcome, Prediction, outcomes_of
from ..surrogates.scarcity import (
    UP_TO,
    Curve,
    Key,
    claim_row,
    claims,
    corrected,
    curve_rows,
    estimate_cells,
)
from .dials import dial_claims
from .matched import ONCE, method_claims

RESAMPLES: Final = 1000
MEASURES: Final = ("drop", "peak")


def all_claims(
    curves: Mapping[Key, Curve],
    dialed: Mapping[Key, Curve],
    trained: Mapping[Key, Curve],
    dialed_by_ppo: Mapping[Key, Curve],
) -> list[Row]:
    """The page's family of claims: those of `scarcity`, of `dials`, of `matched`, and these.

    rest: what ten points of flips change in a measure of gold where N(1 - 2e)^2 is held fixed, over all settings. What
        the information does is taken as quadratic in its logarithm: of a straight line the curvature would be flips'.
    alpha, beta: what ten points of flips change in Gao's parameters of gold, at each number of labels.
    """
    own = {key: curve for key, curve in curves.items() if key[0] == OWN}
    rows = claims(curves)
    settings = [Setting(*key[2:]) for key in own]
    doublings = np.array([math.log2(each.effective) for each in settings])
    flipped = np.array([10 * each.flip for each in settings])
    design = np.stack([flipped, np.ones_like(doublings), doublings, doublings**2], axis=1)
    for measure in MEASURES:
        tables = np.stack([curve.measures[measure] for curve in own.values()])
        rest = np.tensordot(np.linalg.pinv(design)[0], tables, axes=1)
        rows.append(claim_row(f"rest {measure}", OWN, KIND, 0, rest))
    for labels in sorted({each.labels for each in settings}):
        chosen = {each.flip: curve for each, curve in zip(settings, own.values(), strict=True) if each.labels == labels}
        flips = [flip for flip in chosen if flip <= UP_TO]
        for name, place in (("alpha", 0), ("beta", 1)):
            tables = np.stack([gao(chosen[flip])[place] for flip in flips])
            rows.append(claim_row(f"slope of {name}", OWN, KIND, labels, slope(tables, flips) / 10))
    rows += dial_claims(dialed, dialed_by_ppo) + method_claims(trained)
    return corrected(rows)


def gao(curve: Curve) -> tuple[Array, Array]:
    """Alpha and beta [R, I] of each repeat and instruction, of the places behind the start."""
    return gao_fit(np.sqrt(curve.kl[1:]), curve.gold[..., 1:] - curve.gold[..., :1])


def gao_rows(curves: Mapping[Key, Curve]) -> list[Row]:
    """A row a setting: alpha and beta of gold with their intervals."""
    rows = []
    for (judge, _, labels, flip), curve in curves.items():
        if judge == OWN:
            alpha, beta = (
                estimate_cells(name, TwoWay.of(x)) for name, x in zip(("alpha", "beta"), gao(curve), strict=True)
            )
            rows.append({"labels": labels, "flip": flip, "effective": Setting(labels, flip).effective, **alpha, **beta})
    return rows


def band_rows(curves: Mapping[Key, Curve]) -> list[Row]:
    """The rows of `scarcity.curve_rows` with the ends of the simultaneous bands."""
    ends = [pair for curve in curves.values() for pair in zip(*bands(curve), strict=True)]
    return [
        {**row, "band_low": low, "band_high": high} for row, (low, high) in zip(curve_rows(curves), ends, strict=True)
    ]


def bands(curve: Curve, seed: int = 0) -> tuple[Array, Array]:
    """Ends [n] of a simultaneous 95 % band of the gold gained: with that chance it holds the whole curve.

    Repeats and instructions are drawn anew together, with replacement; the band is as many standard errors wide
    everywhere as the largest deviation along a curve is in 95 % of the draws.
    """
    gain = curve.gold - curve.gold[..., :1]
    mean, errors = gain.mean(axis=(0, 1)), [TwoWay.of(table).standard_error for table in np.moveaxis(gain, -1, 0)]
    error = np.array(errors)
    if np.isnan(error).any():
        return np.full(len(mean), np.nan), np.full(len(mean), np.nan)
    rng, (repeats, instructions) = keyed_rng(seed, "noise", "bands"), gain.shape[:2]
    one = rng.multinomial(repeats, np.full(repeats, 1 / repeats), RESAMPLES) / repeats
    two = rng.multinomial(instructions, np.full(instructions, 1 / instructions), RESAMPLES) / instructions
    drawn = np.einsum("br,rin,bi->bn", one, gain, two, optimize=True)
    known = error > 0
    spread = drawn.std(axis=0, ddof=1)[known]
    largest = np.abs((drawn - mean)[:, known] / spread).max(axis=1) if known.any() else np.zeros(1)
    width = np.quantile(largest, 0.95) * error
    return mean - width, mean + width


PREDICTED: Final = (
    Prediction("doubled peak", (0, KIND), "above", "Gold gained at the peak grows with N(1 − 2e)²."),
    Prediction("doubled drop", (0, KIND), "below", "The fall after the peak shrinks with N(1 − 2e)²."),
    Prediction("slope of the drop", (2000, KIND), "above", "2,000 labels: flips deepen the fall."),
    Prediction("slope of alpha", (2000, KIND), "below", "2,000 labels: flips lower α."),
    Prediction("slope of beta", (2000, KIND), "within", "2,000 labels: flips leave β as it is.", 0.02),
    *(
        Prediction(
            f"matched {what}", (n, KIND), "within", f"{4 * n:,} labels with 25 % flips {how} {n:,} clean ones.", by
        )
        for what, how, by in (("peak", "gain as much as", 0.1), ("drop", "fall as far as", 0.15))
        for n in (500, 1000, 2000)
    ),
    Prediction("rest peak", (0, KIND), "within", "Given N(1 − 2e)², flips change nothing in the gain.", 0.05),
    Prediction("rest drop", (0, KIND), "within", "Given N(1 − 2e)², flips change nothing in the fall.", 0.05),
    Prediction("matched peak", (500, "ppo"), "within", "PPO: 2,000 with 25 % flips gain as much as 500 clean.", 0.15),
    Prediction("matched peak", (1000, "ppo"), "within", "PPO: so do 4,000 and 1,000.", 0.15),
    Prediction("matched peak", (2000, "ppo"), "within", "PPO: so do 8,000 and 2,000.", 0.15),
    Prediction("matched drop", (2000, "ppo"), "within", "PPO: 8,000 with 25 % flips fall as far as 2,000 clean.", 0.25),
    Prediction(
        "matched peak", (2000, "dpo"), "within", "DPO: 8,000 with 25 % flips gain as much as 2,000 clean.", 0.15
    ),
    Prediction("matched peak", (500, ONCE), "within", "Added, read once: 2,000 flipped gain as much as 500.", 0.1),
    Prediction("matched peak", (1000, ONCE), "within", "Added, read once: so do 4,000 and 1,000.", 0.1),
    Prediction("matched peak", (2000, ONCE), "above", "Added, read once: 8,000 make more updates, and gain more."),
    Prediction("lift", (0, FLIP), "above", "More labels lift what is gained by flipped ones."),
    Prediction("lift", (0, CLEAN), "within", "No fault: 2,000 labels know nearly all that 8,000 do.", 0.1),
    Prediction("lift", (0, "length_bias"), "within", "More labels do not lift what a taste for length leaves.", 0.1),
    Prediction("cost peak", (8000, "length_bias"), "above", "8,000 labels: length costs more than flips."),
    Prediction("cost end", (8000, "length_bias"), "above", "8,000 labels: so it does at the largest n."),
    Prediction("cost peak", (2000, "temperature"), "below", "2,000 labels: noise of close pairs costs less."),
    Prediction("cost peak", (2000, "position_bias"), "below", "2,000 labels: so does a taste for the first."),
    Prediction("cost peak", (8000, "annotator_noise"), "above", "8,000 labels: annotators' tastes cost more."),
    Prediction("cost peak", (8000, "instruction_noise"), "above", "8,000 labels: instructions' tastes cost more."),
    Prediction("PPO's cost peak", (8000, "length_bias"), "above", "PPO, 8,000 labels: length costs more."),
    Prediction("PPO's cost end", (8000, "length_bias"), "above", "PPO: so it does at the last step."),
    Prediction("PPO's cost end", (8000, "annotator_noise"), "above", "PPO: annotators' tastes cost more then."),
    Prediction("PPO's cost peak", (8000, "temperature"), "below", "PPO: noise of close pairs costs less."),
)
"""Committed before any cell of the full study was run; those of flips from a pilot with five seeds that shared their
pairs and did not hold the number of updates equal. Those of labels read once were added when the grid was known and
seeds 0 to 2 had been tried at 500 and 2,000 labels, before their cells. In gold's unit; of slopes and the rest for ten
points of flips."""


def outcomes(claimed: pd.DataFrame) -> list[Outcome]:
    """What came of the predictions, by the claims about gold."""
    rows = {(row["claim"], row["labels"], row["kind"]): row for row in records(claimed[claimed.judge == OWN])}
    return outcomes_of(PREDICTED, rows)
