"""Numbers of the ranking of methods: means over seeds, differences to SFT, the two rankings and how well they agree."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ...statistics import PERCENT, POSITIVE, UNBOUNDED
from ..experiment.engine import COLUMNS
from ..harness.estimates import Agreement, Array, Bootstrap, Coefficient, Estimate, agreement, sampled_methods
from ..methods.job import FEEDBACKS
from ..methods.methods import Method

JUDGED_BY = {"simulated": "win_rate_simulated", "human": "win_rate_human"}
"""Column of the paper's Table 2 -> our measure, of the models trained on that feedback."""
BASELINE = "sft"
"""The method that the others start from and are compared with."""
ANCHORS = ("gpt4", "chatgpt", "davinci001", "base")
"""Stand-ins whose habits are set so that they come near the published win rates, and the policy before SFT: they spread
a ranking over its whole range whatever the methods do."""
BOTH = "both"
"""Name of the agreement of the two columns."""
Credits = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""(method, feedback, seed) -> {"win_rate_simulated": [B], "win_rate_human": [B]}: credits in [0, 1] for the same
instructions in all cells, NaN = no verdict."""


class Summary:
    """All that is reported of a study: the rows of table.csv and the verdicts behind them, where cells may be missing.

    `methods`, in the order of the tables, `feedbacks` and `num_seeds` are those that were meant to run. Without the
    verdicts, `stored` are the `agreements` of the summary that had them.

    Attributes:
        feedbacks: The kinds of feedback that a method did learn from: the columns that are shown.
        values: Rows (method, feedback), columns (measure, seed); NaN where a cell is missing.
        agreement: Between the simulated and the human ranking; None for fewer than three methods that have both.
        with_paper: Column -> agreement of our ranking with the published one.
        in_paper: Between the paper's two columns, over the methods here.
        sampled: Spearman of rankings, with an interval for methods like these, and the number of methods.
        pairs: Methods whose published win rates differ: `higher` and `lower` there, `paper`, the difference there in
            points, and `here`, the same paired by seed. Clear differences first, then by the difference here.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        credits: Credits | None,
        methods: Sequence[Method],
        *,
        feedbacks: Sequence[str] = FEEDBACKS,
        num_seeds: int,
        stored: Mapping[str, Any] | None = None,
    ) -> None:
        learned = set(frame.feedback[frame.method.isin([each.name for each in methods if each.needs != "nothing"])])
        self.methods, self.num_seeds = tuple(methods), num_seeds
        self.titles = {method.name: method.title for method in methods}
        self.asked = tuple(feedback for feedback in FEEDBACKS if feedback in feedbacks)
        self.feedbacks = tuple(feedback for feedback in self.asked if feedback in learned) or self.asked
        shown = frame[frame.feedback.isin(self.feedbacks)].astype(dict.fromkeys(COLUMNS[3:], float))
        cells = pd.MultiIndex.from_product([[method.name for method in methods], FEEDBACKS])
        self.values = shown.pivot(index=["method", "feedback"], columns="seed", values=list(COLUMNS[3:])).reindex(cells)
        self.seeds = [int(seed) for seed in self.values["length"].columns]

        columns = {feedback: self.column(feedback) for feedback in FEEDBACKS}
        paper = {
            feedback: {method.name: value for method in methods if (value := method.paper[place]) is not None}
            for place, feedback in enumerate(FEEDBACKS)
        }
        known = [{name: paper[kind][name] for name in paper[kind] if name in columns[kind]} for kind in FEEDBACKS]
        self.in_paper = agreement(known[0], known[1])
        self.agreement: Agreement | None
        self.with_paper: dict[str, Agreement | None]
        if credits is None:
            self.agreement, *others = (Agreement.read((stored or {}).get(name)) for name in (BOTH, *FEEDBACKS))
            self.with_paper = dict(zip(FEEDBACKS, others, strict=True))
        else:
            draws = {feedback: self._resampled(credits, feedback) for feedback in FEEDBACKS}
            self.agreement = agreement(columns["simulated"], columns["human"], *draws.values())
            self.with_paper = {kind: agreement(columns[kind], paper[kind], draws[kind]) for kind in FEEDBACKS}
        inner = [{name: rate for name, rate in columns[kind].items() if name not in ANCHORS} for kind in FEEDBACKS]
        found = {
            "simulated and human, here": self.agreement,
            "simulated and human, here, without stand-ins and base model": agreement(inner[0], inner[1]),
            **{
                f"{kind}, here and in the paper, without them": agreement(own, paper[kind])
                for kind, own in zip(FEEDBACKS, inner, strict=True)
            },
        }
        self.sampled: dict[str, tuple[Coefficient, int]] = {
            words: (sampled_methods(each.spearman.value, len(each.methods)), len(each.methods))
            for words, each in found.items()
            if each
        }
        self.pairs = [pair for kind in FEEDBACKS for pair in self._pairs(paper[kind], kind)]

    @property
    def has_baseline(self) -> bool:
        """Whether SFT has a row to compare with."""
        return any(BASELINE in self.column(feedback) for feedback in FEEDBACKS)

    @property
    def agreements(self) -> dict[str, Any]:
        """The numbers that the verdicts are needed for, JSON-able."""
        found = {BOTH: self.agreement, **self.with_paper}
        return {name: each and asdict(each) for name, each in found.items()}

    def at(self, measure: str, method: str, feedback: str) -> Array:
        """[S]: the seeds of one method and feedback."""
        return np.asarray(self.values[measure].loc[(method, feedback)], dtype=np.float64)

    def mean(self, measure: str, method: str, feedback: str) -> Estimate:
        """Mean of a measure over the seeds."""
        bounds = PERCENT if measure in JUDGED_BY.values() else UNBOUNDED
        return Estimate.of(self.at(measure, method, feedback), bounds)

    def win_rate(self, method: str, feedback: str) -> Estimate:
        """In a column of the paper's table."""
        return self.mean(JUDGED_BY[feedback], method, feedback)

    def difference(self, measure: str, method: str, feedback: str, other: str = BASELINE) -> Estimate:
        """Method - other, paired by seed, over the seeds that both have."""
        return Estimate.of(self.at(measure, method, feedback) - self.at(measure, other, feedback))

    def lead(self, method: str, feedback: str, other: str = BASELINE) -> Estimate:
        """The difference in win rate in a column of the paper's table, in points."""
        return self.difference(JUDGED_BY[feedback], method, feedback, other)

    def length_ratio(self, method: str, feedback: str) -> Estimate:
        """Mean over the seeds of length of a response / length of SFT's, the same seed of both."""
        sft = self.at("length", BASELINE, feedback)
        return Estimate.of(self.at("length", method, feedback) / np.where(sft > 0, sft, np.nan), POSITIVE)

    def column(self, feedback: str) -> dict[str, float]:
        """Method -> mean win rate in a column of the paper's table, of those that have one, the highest first."""
        means = {method.name: self.win_rate(method.name, feedback).mean for method in self.methods}
        return dict(sorted(((name, mean) for name, mean in means.items() if mean == mean), key=lambda item: -item[1]))

    def in_order(self, feedback: str | None = None) -> list[Method]:
        """By win rate in a column (None: the first), the best first; methods without one last, in their own order."""
        order = list(self.column(feedback or self.feedbacks[0]))
        place = {name: number for number, name in enumerate(order)}
        return sorted(self.methods, key=lambda method: place.get(method.name, len(order)))

    def with_both(self) -> dict[str, tuple[Estimate, Estimate]]:
        """Title -> simulated and human win rate, of the methods that have both."""
        rates = {each.title: [self.win_rate(each.name, feedback) for feedback in FEEDBACKS] for each in self.methods}
        return {title: (one, two) for title, (one, two) in rates.items() if one.num and two.num}

    def _resampled(self, credits: Credits, feedback: str) -> Bootstrap:
        """The win rates of a column, resampled."""
        measure, found = JUDGED_BY[feedback], {}
        for name in self.column(feedback):
            known = zip(self.seeds, self.at(measure, name, feedback), strict=True)
            cells = [credits[name, feedback, seed] for seed, value in known if value == value]
            found[name] = [np.asarray(cell[measure], dtype=np.float64) for cell in cells]
        return Bootstrap.of(found, seed=0)

    def _pairs(self, paper: Mapping[str, float], feedback: str) -> list[dict[str, Any]]:
        found = []
        for pair in combinations([name for name in self.column(feedback) if name in paper], 2):
            higher, lower = sorted(pair, key=lambda name: -paper[name])
            difference, here = paper[higher] - paper[lower], self.lead(higher, feedback, lower)
            if difference and here.num:
                names = {"feedback": feedback, "higher": higher, "lower": lower}
                found.append({**names, "paper": difference, "here": here, "reversed": here.mean < 0})
        return sorted(found, key=lambda pair: (not pair["here"].clear, pair["here"].mean))
