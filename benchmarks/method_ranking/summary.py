"""What the ranking of methods says: means over seeds, differences to SFT, the two rankings and how well they agree.

Pure functions of the rows of table.csv and of the per-instruction credits behind them; nothing here trains, draws or
writes. A method's simulated number is that of the model trained on simulated feedback and judged by p_sim^eval, its
human number that of the model trained on human feedback and judged by human raters, as in the paper's Table 2.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4 and Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ...statistics import PERCENT, POSITIVE, UNBOUNDED
from ..harness.estimates import Agreement, Array, Bootstrap, Estimate, agreement, frame_of, mean_known
from ..harness.report import Verdict
from ..harness.study import Row
from ..methods.methods import Method
from ..methods.runs import COLUMNS, FEEDBACKS

KEYS, MEASURES = list(COLUMNS[:3]), list(COLUMNS[3:])
JUDGED_BY = {"simulated": "win_rate_simulated", "human": "win_rate_human"}
"""Column of the paper's table -> our measure, of the models trained on that feedback."""
BASELINE = "sft"
"""The method that the others start from and are compared with."""
Credits = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""(method, feedback, seed) -> {"win_rate_simulated": [B], "win_rate_human": [B]}: credits in [0, 1], NaN = no
verdict."""


@dataclass(frozen=True)
class Summary:
    """All that is told of a study."""

    methods: tuple[Method, ...]
    """All that were meant to run, in the order of the tables."""
    values: pd.DataFrame
    """Rows (method, feedback), all there are; columns (measure, seed); NaN where a cell is missing."""
    asked: tuple[str, ...]
    """The kinds of feedback that were meant to run."""
    feedbacks: tuple[str, ...]
    """Of those asked for the ones that a method did learn from: the columns that are told of."""
    num_seeds: int
    """Seeds that were meant to run."""
    agreement: Agreement | None = None
    """Between the simulated and the human ranking; None for fewer than three methods that have both."""
    with_paper: Mapping[str, Agreement | None] = field(default_factory=dict)
    """Column -> agreement of our ranking with the published one, over the methods that have both."""
    in_paper: Agreement | None = None
    """Of the paper's two columns with each other, over the methods here that have both; no interval."""
    compared: Sequence[Verdict] = ()
    """Whether two methods are in the paper's order: see `_comparisons`."""

    @property
    def seeds(self) -> list[int]:
        """Seeds that are there."""
        return [int(seed) for seed in self.values["length"].columns]

    @property
    def has_baseline(self) -> bool:
        """Whether SFT has a row to compare with."""
        return any(BASELINE in self.column(feedback) for feedback in FEEDBACKS)

    def at(self, measure: str, method: str, feedback: str) -> Array:
        """[S]: the seeds of one method and feedback."""
        found: Array = self.values[measure].loc[(method, feedback)].to_numpy(dtype=np.float64)
        return found

    def mean(self, measure: str, method: str, feedback: str) -> Estimate:
        """Mean of a measure over the seeds."""
        bounds = PERCENT if measure in JUDGED_BY.values() else UNBOUNDED
        return Estimate.of(self.at(measure, method, feedback), bounds)

    def win_rate(self, method: str, feedback: str) -> Estimate:
        """In a column of the paper's table."""
        return self.mean(JUDGED_BY[feedback], method, feedback)

    def difference(self, measure: str, method: str, feedback: str, other: str = BASELINE) -> Estimate:
        """Mean over the seeds that both have of method - other, the same seed of both."""
        return Estimate.of(self.at(measure, method, feedback) - self.at(measure, other, feedback))

    def lead(self, method: str, feedback: str, other: str = BASELINE) -> Estimate:
        """The difference in win rate in a column of the paper's table, in points."""
        return self.difference(JUDGED_BY[feedback], method, feedback, other)

    def length_ratio(self, method: str, feedback: str) -> Estimate:
        """Mean over the seeds of (length of a response / length of SFT's, the same seed of both)."""
        sft = self.at("length", BASELINE, feedback)
        return Estimate.of(self.at("length", method, feedback) / np.where(sft > 0, sft, np.nan), POSITIVE)

    def column(self, feedback: str) -> dict[str, float]:
        """Method -> mean win rate in a column of the paper's table, of those that have one, the highest first."""
        names = self.values.index.unique("method")
        means = {name: self.win_rate(name, feedback).mean for name in names}
        return dict(sorted(((name, mean) for name, mean in means.items() if mean == mean), key=lambda item: -item[1]))

    def in_order(self, feedback: str | None = None) -> list[Method]:
        """The best win rate of a column (None: the first) first; methods without one last, in their own order."""
        order = list(self.column(feedback or self.feedbacks[0]))
        place = {name: number for number, name in enumerate(order)}
        return sorted(self.methods, key=lambda method: place.get(method.name, len(order)))

    def with_both(self) -> dict[str, tuple[Estimate, Estimate]]:
        """Title -> simulated and human win rate, of the methods that have both."""
        simulated, human = (self.column(feedback) for feedback in FEEDBACKS)
        return {
            method.title: (self.win_rate(method.name, FEEDBACKS[0]), self.win_rate(method.name, FEEDBACKS[1]))
            for method in self.methods
            if method.name in simulated and method.name in human
        }


def summarize(
    rows: Sequence[Row],
    credits: Credits,
    methods: Sequence[Method],
    *,
    feedbacks: Sequence[str] = FEEDBACKS,
    num_seeds: int | None = None,
    seed: int = 0,
) -> Summary:
    """Everything from the rows of table.csv and the credits behind them.

    Args:
        rows: Dicts of `COLUMNS`; cells may be missing.
        credits: For every row that is there its credits, [B] the same instructions in all.
        methods: All that were meant to run, in the order of the tables.
        feedbacks: The kinds of feedback that were meant to run, of `FEEDBACKS`. A column of another kind, or of one
            whose every trained cell failed, holds none but methods that need no feedback: its rows are left out.
        num_seeds: How many seeds were meant to run, 0 .. num_seeds - 1; None: those of the rows.
        seed: Keys the bootstrap's draws.

    Raises:
        ValueError: Rows or credits are faulty, or do not belong together; feedbacks or num_seeds are not those of a
            study with these rows.
    """
    if not feedbacks or not set(feedbacks) <= set(FEEDBACKS):
        raise ValueError(f"feedbacks: expected one or more of {FEEDBACKS}, got {tuple(feedbacks)}")
    frame = check_rows(frame_of(rows), [method.name for method in methods])
    check_credits(frame, credits)
    seeds = sorted(frame.seed.unique().tolist())
    if num_seeds is not None and not set(seeds) <= set(range(num_seeds)):
        raise ValueError(f"num_seeds: expected rows of seeds 0 to {num_seeds - 1}, got seeds {tuple(seeds)}")
    needy = [method.name for method in methods if method.needs != "nothing"]
    learned = set(frame.feedback[frame.method.isin(needy)])
    asked = tuple(feedback for feedback in FEEDBACKS if feedback in feedbacks)
    shown = tuple(feedback for feedback in asked if feedback in learned) or asked
    cells = pd.MultiIndex.from_product([[method.name for method in methods], FEEDBACKS], names=KEYS[:2])
    table = frame[frame.feedback.isin(shown)].set_index(KEYS)[MEASURES].astype(float)
    values = pd.DataFrame(table.unstack("seed")).reindex(cells)
    found = Summary(tuple(methods), values, asked, shown, len(seeds) if num_seeds is None else num_seeds)
    columns = {feedback: found.column(feedback) for feedback in FEEDBACKS}
    published = {
        feedback: {method.name: value for method in methods if (value := method.paper[place]) is not None}
        for place, feedback in enumerate(FEEDBACKS)
    }
    draws = {feedback: _resampled(found, credits, feedback, seed) for feedback in FEEDBACKS}
    theirs = [{name: published[kind][name] for name in published[kind] if name in columns[kind]} for kind in FEEDBACKS]
    simulated, human = FEEDBACKS
    return replace(
        found,
        agreement=agreement(columns[simulated], columns[human], draws[simulated], draws[human]),
        with_paper={kind: agreement(columns[kind], published[kind], draws[kind]) for kind in FEEDBACKS},
        in_paper=agreement(theirs[0], theirs[1]),
        compared=[verdict for kind in FEEDBACKS for verdict in _comparisons(found, published[kind], kind)],
    )


def check_rows(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The frame, if each row is of another cell, and of one that was meant to run.

    Raises:
        ValueError: It is not, or there are no rows.
    """
    if frame.empty:
        raise ValueError("expected at least one row to summarize, got none")
    right = frame.method.isin(names) & frame.feedback.isin(FEEDBACKS) & ~frame.duplicated(KEYS)
    if not right.all():
        key = next(frame.loc[~right, KEYS].itertuples(index=False, name=None))
        raise ValueError(
            f"row {key}: expected one row a cell, a method of {tuple(names)} and a feedback of {FEEDBACKS}"
        )
    return frame


def check_credits(frame: pd.DataFrame, credits: Credits) -> None:
    """Refuses credits that are not those of the rows.

    Raises:
        ValueError: A row has none, their numbers of instructions differ, or their mean is not the row's win rate.
    """
    sizes = set()
    for key, row in zip(frame[KEYS].itertuples(index=False, name=None), frame.to_dict("records"), strict=True):
        if key not in credits:
            raise ValueError(f"row {key}: expected its credits, got those of {len(credits)} other cells")
        for measure in JUDGED_BY.values():
            values = np.asarray(credits[key][measure], dtype=np.float64)
            sizes.add(values.shape)
            mean, told = 100 * float(mean_known(values)), float(row[measure])
            # Loose enough for credits that were stored in single precision.
            if math.isnan(told) != math.isnan(mean) or abs(told - mean) > 0.01:
                raise ValueError(f"row {key}: expected credits of mean {measure} = {told}, got {mean}")
    if len(sizes) != 1 or len(next(iter(sizes))) != 1:
        raise ValueError(f"expected the credits of all cells on the same instructions [B], got shapes {sorted(sizes)}")


def _resampled(summary: Summary, credits: Credits, feedback: str, seed: int) -> Bootstrap:
    """The win rates of a column, resampled."""
    measure, found = JUDGED_BY[feedback], {}
    for name in summary.column(feedback):
        known = zip(summary.seeds, summary.at(measure, name, feedback), strict=True)
        cells = [credits[name, feedback, number] for number, value in known if value == value]
        found[name] = [np.asarray(cell[measure], dtype=np.float64) for cell in cells]
    return Bootstrap.of(found, seed=seed)


def _comparisons(summary: Summary, published: Mapping[str, float], feedback: str) -> list[Verdict]:
    """Whether two methods are in the paper's order, the clear differences first, then by the difference here.

    Pairs are those whose published win rates differ and that have a common seed. `numbers`: feedback; `higher` and
    `lower`, names of methods in the paper's order; `paper`, the difference there in points, above 0; `here`, the same
    difference paired by seed.
    """
    found = []
    for pair in combinations([name for name in summary.column(feedback) if name in published], 2):
        higher, lower = sorted(pair, key=lambda name: -published[name])
        paper, here = published[higher] - published[lower], summary.lead(higher, feedback, lower)
        if paper and here.num:
            numbers = {"feedback": feedback, "higher": higher, "lower": lower, "paper": paper, "here": here}
            found.append(Verdict("pair_in_order", not here.mean < 0, numbers))
    return sorted(found, key=lambda verdict: (not verdict.numbers["here"].clear, verdict.numbers["here"].mean))
