"""What the ranking of methods says: means over seeds, differences to SFT, the two rankings and how well they agree.

Pure functions of the rows of table.csv and of the per-instruction credits behind them; nothing here trains, draws or
writes. A method's simulated number is that of the model trained on simulated feedback and judged by p_sim^eval, its
human number that of the model trained on human feedback and judged by human raters, as in the paper's Table 2.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), section 4 and Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...statistics import PERCENT, POSITIVE, UNBOUNDED
from ..harness.agreement import Agreement, Bootstrap, agreement
from ..harness.estimates import Estimate
from ..harness.study import Row, number_of
from ..methods.methods import Method
from ..methods.runs import COLUMNS, FEEDBACKS

MEASURES = COLUMNS[3:]
JUDGED_BY = {"simulated": "win_rate_simulated", "human": "win_rate_human"}
"""Column of the paper's table -> our measure, of the models trained on that feedback."""
BASELINE = "sft"
"""The method that the others start from and are compared with."""

Array = NDArray[np.float64]
Key = tuple[str, str, int]
Credits = Mapping[Key, Mapping[str, Any]]
"""(method, feedback, seed) -> {"win_rate_simulated": [B], "win_rate_human": [B]}: credits in [0, 1], NaN = no
verdict."""


@dataclass(frozen=True)
class Cells:
    """The rows as arrays. `values`: measure -> [M, 2, S], NaN where a cell is missing; 2 is `FEEDBACKS`."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    values: Mapping[str, Array]

    @classmethod
    def of(cls, rows: Sequence[Row], methods: Sequence[str]) -> Cells:
        """Arrays from rows of `COLUMNS` in any order; cells may be missing.

        Raises:
            ValueError: There are no rows, two for one cell, or one of an unknown method or feedback.
        """
        if not rows:
            raise ValueError("expected at least one row to summarize, got none")
        seeds = tuple(sorted({int(row["seed"]) for row in rows}))
        values = {name: np.full((len(methods), len(FEEDBACKS), len(seeds)), np.nan) for name in MEASURES}
        seen: set[Key] = set()
        for row in rows:
            key = (str(row["method"]), str(row["feedback"]), int(row["seed"]))
            if key[0] not in methods or key[1] not in FEEDBACKS or key in seen:
                raise ValueError(
                    f"row {key}: expected one row a cell, a method of {tuple(methods)} and a feedback of {FEEDBACKS}"
                )
            seen.add(key)
            place = (methods.index(key[0]), FEEDBACKS.index(key[1]), seeds.index(key[2]))
            for name in MEASURES:
                values[name][place] = number_of(row[name])
        return cls(tuple(methods), seeds, values)

    def at(self, measure: str, method: str, feedback: str) -> Array:
        """[S]: the seeds of one method and feedback."""
        found: Array = self.values[measure][self.methods.index(method), FEEDBACKS.index(feedback)]
        return found

    def column(self, feedback: str) -> dict[str, float]:
        """Method -> mean win rate in a column of the paper's table, of those that have one, the highest first."""
        means = {name: Estimate.of(self.at(JUDGED_BY[feedback], name, feedback)).mean for name in self.methods}
        known = {name: mean for name, mean in means.items() if not math.isnan(mean)}
        return dict(sorted(known.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Reversal:
    """Two methods in another order than in the paper."""

    feedback: str
    """Column of the table: simulated or human."""
    higher: str
    """The method that is higher in the paper."""
    lower: str
    paper: float
    """Published win rate of `higher` less that of `lower`, in points; above 0."""
    here: Estimate
    """The same difference here, paired by seed, in points; its mean is below 0."""


@dataclass(frozen=True)
class Summary:
    """All that is told of a study."""

    cells: Cells
    agreement: Agreement | None
    """Between the simulated and the human ranking; None for fewer than three methods that have both."""
    with_paper: Mapping[str, Agreement | None]
    """Column -> agreement of our ranking with the published one, over the methods that have both."""
    in_paper: Agreement | None
    """Of the paper's two columns with each other, over the methods here that have both; no interval."""
    reversals: tuple[Reversal, ...]
    compared: Mapping[str, int]
    """Column -> pairs of methods that were compared with the paper's order: see `_comparisons`."""
    asked: tuple[str, ...] = FEEDBACKS
    """The kinds of feedback that were meant to run."""
    feedbacks: tuple[str, ...] = FEEDBACKS
    """Of those asked for the ones that a method did learn from: the columns that are told of."""
    num_seeds: int = 0
    """Seeds that were meant to run."""

    @property
    def has_baseline(self) -> bool:
        """Whether SFT has a row to compare with."""
        return BASELINE in self.cells.methods and any(
            np.isfinite(self.cells.at(JUDGED_BY[feedback], BASELINE, feedback)).any() for feedback in FEEDBACKS
        )

    def mean(self, measure: str, method: str, feedback: str) -> Estimate:
        """Mean of a measure over the seeds."""
        bounds = PERCENT if measure in JUDGED_BY.values() else UNBOUNDED
        return Estimate.of(self.cells.at(measure, method, feedback), bounds)

    def difference(self, measure: str, method: str, feedback: str, other: str = BASELINE) -> Estimate:
        """Mean over the seeds that both have of method - other, the same seed of both."""
        return Estimate.of(self.cells.at(measure, method, feedback) - self.cells.at(measure, other, feedback))

    def length_ratio(self, method: str, feedback: str) -> Estimate:
        """Mean over the seeds of (length of a response / length of SFT's, the same seed of both)."""
        lengths, sft = self.cells.at("length", method, feedback), self.cells.at("length", BASELINE, feedback)
        return Estimate.of(lengths / np.where(sft > 0, sft, np.nan), POSITIVE)

    def ranking(self, feedback: str) -> tuple[str, ...]:
        """Names in a column of the paper's table, the highest win rate first."""
        return tuple(self.cells.column(feedback))


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
    asked = tuple(feedback for feedback in FEEDBACKS if feedback in feedbacks)
    learned = _learned_from(rows, methods)
    shown = tuple(feedback for feedback in asked if feedback in learned) or asked
    all_seeds = Cells.of(rows, [method.name for method in methods]).seeds
    check_credits(rows, credits)
    if num_seeds is not None and not set(all_seeds) <= set(range(num_seeds)):
        raise ValueError(f"num_seeds: expected rows of seeds 0 to {num_seeds - 1}, got seeds {all_seeds}")
    cells = Cells.of([row for row in rows if row["feedback"] in shown], [method.name for method in methods])
    columns = {feedback: cells.column(feedback) for feedback in FEEDBACKS}
    published = {
        feedback: {method.name: value for method in methods if (value := method.paper[place]) is not None}
        for place, feedback in enumerate(FEEDBACKS)
    }
    draws = {
        feedback: Bootstrap.of(
            {
                name: [
                    np.asarray(credits[name, feedback, number][JUDGED_BY[feedback]], dtype=np.float64)
                    for number, value in zip(cells.seeds, cells.at(JUDGED_BY[feedback], name, feedback), strict=True)
                    if not math.isnan(value)
                ]
                for name in columns[feedback]
            },
            seed=seed,
        )
        for feedback in FEEDBACKS
    }
    compared = {feedback: _comparisons(cells, published[feedback], feedback) for feedback in FEEDBACKS}
    simulated, human = FEEDBACKS
    return Summary(
        cells,
        agreement(columns[simulated], columns[human], draws[simulated], draws[human]),
        {feedback: agreement(columns[feedback], published[feedback], draws[feedback]) for feedback in FEEDBACKS},
        agreement(_within(published[simulated], columns[simulated]), _within(published[human], columns[human])),
        tuple(reversal for feedback in FEEDBACKS for reversal in _reversals(compared[feedback])),
        {feedback: len(pairs) for feedback, pairs in compared.items()},
        asked,
        shown,
        len(all_seeds) if num_seeds is None else num_seeds,
    )


def check_credits(rows: Sequence[Row], credits: Credits) -> None:
    """Refuses credits that are not those of the rows.

    Raises:
        ValueError: A row has none, their numbers of instructions differ, or their mean is not the row's win rate.
    """
    sizes = set()
    for row in rows:
        key = (str(row["method"]), str(row["feedback"]), int(row["seed"]))
        if key not in credits:
            raise ValueError(f"row {key}: expected its credits, got those of {len(credits)} other cells")
        for measure in JUDGED_BY.values():
            values = np.asarray(credits[key][measure], dtype=np.float64)
            sizes.add(values.shape)
            known = values[~np.isnan(values)]
            mean = 100 * float(known.mean()) if len(known) else math.nan
            told = number_of(row[measure])
            # Loose enough for credits that were stored in single precision.
            if math.isnan(told) != math.isnan(mean) or abs(told - mean) > 0.01:
                raise ValueError(f"row {key}: expected credits of mean {measure} = {told}, got {mean}")
    if len(sizes) != 1 or len(next(iter(sizes))) != 1:
        raise ValueError(f"expected the credits of all cells on the same instructions [B], got shapes {sorted(sizes)}")


def _comparisons(cells: Cells, published: Mapping[str, float], feedback: str) -> list[Reversal]:
    """All pairs that can be compared with the paper: published win rates that differ, and a seed that both have here.

    Each is told as if it were a reversal; it is one where `here` is below 0.
    """
    found = []
    for one, two in combinations([name for name in cells.column(feedback) if name in published], 2):
        if published[one] == published[two]:
            continue
        higher, lower = (one, two) if published[one] > published[two] else (two, one)
        measure = JUDGED_BY[feedback]
        here = Estimate.of(cells.at(measure, higher, feedback) - cells.at(measure, lower, feedback))
        if here.num:
            found.append(Reversal(feedback, higher, lower, published[higher] - published[lower], here))
    return found


def _reversals(compared: Sequence[Reversal]) -> list[Reversal]:
    """The pairs that are in the other order here; the clearest first."""
    found = [each for each in compared if each.here.mean < 0]
    return sorted(found, key=lambda reversal: (not reversal.here.clear, reversal.here.mean))


def _learned_from(rows: Sequence[Row], methods: Sequence[Method]) -> set[str]:
    """The kinds of feedback under which a method that needs feedback has a row."""
    needy = {method.name for method in methods if method.needs != "nothing"}
    return {str(row["feedback"]) for row in rows if row["method"] in needy}


def _within(values: Mapping[str, float], names: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name in names}
