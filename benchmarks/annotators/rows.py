"""Judges' figures as rows of a table, next to the paper's values.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9 and its costs per 1,000 labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...annotators.analysis import COST, Array
from ...statistics import interval, mean_known, wilson
from ..harness.study import Row

SMALL: Final = 30
"""Below this many pairs a share's interval is Wilson's: a t-interval of a few equal verdicts has no width."""
SINGLE: Final = "single annotators"
"""Each of the pool's 13 asked alone; figures are means over the 13."""
SPENT: Final = "spent_usd"
"""US dollars paid for a study; only a live pool as a whole has it."""
FIGURES: Final = (
    *("agreement", "bias", "variance", "disagreement", "prefers_first", "prefers_longer", "prefers_lists", COST),
    *("spearman", "no_verdict", SPENT, "prefers_1"),
)
"""In the order of the tables; agreement_with_X and kappa_with_X of recorded judges come after them."""


@dataclass(frozen=True)
class Target:
    """The paper's value of a figure: a share in [0, 1], or US dollars for costs."""

    paper: float
    tolerance: float | None = None
    """None: shown for comparison only."""
    upper_bound: bool = False
    """The paper says "less than"."""

    def holds(self, value: float) -> bool | None:
        """Whether a value is within the tolerance; None without one."""
        if self.tolerance is None:
            return None
        return value - self.paper <= self.tolerance and (self.upper_bound or self.paper - value <= self.tolerance)


ALONE: Final = Target(0.20, 0.05, upper_bound=True)
"""The variance of every single annotator."""
TARGETS: Final[Mapping[str, Mapping[str, Target]]] = {
    "human": {
        "agreement": Target(0.66, 0.03),
        "variance": Target(0.35, 0.05),
        "prefers_longer": Target(0.62, 0.05),
        "prefers_lists": Target(0.69, 0.05),
        COST: Target(300.0),
    },
    "sim_eval": {
        "agreement": Target(0.65, 0.03),
        "variance": Target(0.26, 0.05),
        "prefers_longer": Target(0.64, 0.05),
        "prefers_lists": Target(0.63, 0.05),
        COST: Target(12.0),
    },
    "sim_ann": {"variance": Target(0.43, 0.05), COST: Target(6.0)},
    "sim_gpt4": {"agreement": Target(0.65, 0.03), "variance": Target(0.10, 0.05)},
    SINGLE: {"variance": ALONE},
}
"""Judge -> figure -> the paper's value."""


def rows_of(
    judge: str, by_seed: Sequence[Mapping[str, Array]], level: str, targets: Mapping[str, Target] | None = None
) -> list[Row]:
    """The rows of a judge, one for each figure that any pair has a value for.

    The value is the mean over the pairs of their means over the seeds, with a 95 % interval over the pairs: Student's,
    but Wilson's for a share of fewer than `SMALL` pairs, or of 0 or 1. Where a pair's value is a mean of several
    opinions, Wilson's is too wide rather than too narrow. `by_seed` has for each seed: figure -> [n].
    """
    rows = []
    for figure in by_seed[0]:
        seeds = np.array([values[figure] for values in by_seed])
        per_pair = mean_known(seeds)
        scored = per_pair[~np.isnan(per_pair)]
        if not len(scored):
            continue
        estimate = interval(scored)
        bounds: Sequence[float] = (estimate.low, estimate.high)
        if figure != COST:
            few = len(scored) < SMALL or min(estimate.mean, 1 - estimate.mean) <= 0
            bounds = wilson(scored.sum(), len(scored)) if few else np.clip(bounds, 0, 1).tolist()
        # A recorded judge has no seeds.
        means = [float(np.nanmean(row)) for row in seeds if level != "recorded" and not np.isnan(row).all()]
        target = (targets or {}).get(figure)
        rows.append(make_row(judge, figure, estimate.mean, bounds, estimate.num, level, means, target))
    return rows


def make_row(
    judge: str,
    figure: str,
    value: float,
    bounds: Sequence[float],
    num: int,
    level: str,
    seeds: Sequence[float] = (),
    target: Target | None = None,
) -> Row:
    """A row of the table from a value and its interval; NaN bounds become empty cells."""
    low, high = (None if np.isnan(bound) else float(bound) for bound in bounds)
    row: Row = {"judge": judge, "figure": figure, "value": value, "low": low, "high": high}
    row |= {"paper": target.paper, "tolerance": target.tolerance} if target else {"paper": None, "tolerance": None}
    row |= {"within": target.holds(value) if target else None, "n": num, "level": level, "seeds": len(seeds) or None}
    return row | {"seed_min": min(seeds, default=None), "seed_max": max(seeds, default=None)}
