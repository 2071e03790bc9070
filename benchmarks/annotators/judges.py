"""Judges that are asked about the sandbox's pairs, their figures as rows of a table, and the paper's values beside.

Level "sandbox": human raters, the pool with and without noise, its 13 alone, the greedy one. A seed is a disjoint set
of four opinions: seed s has those of the judge seeds 4s .. 4s + 3. Level "live": a judge of one's own, a pool of LLM
annotators for instance. Responses and human majority are the sandbox's, so its figures say how it behaves there, not
how it would agree with people.

Source: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 4, 7, 8 and 9 and its costs per 1,000 labels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np

from ... import sandbox
from ...annotators.analysis import COST, Array, Opinions, Pairs, ask, figures, majority
from ...errors import DataError
from ...oracles.base import PreferenceOracle
from ...sandbox import writers
from ...sandbox.dataset import Sandbox
from ...sandbox.judges import POOL, Annotators
from ...seeding import keyed_rng
from ...statistics import Interval, interval, mean_known, wilson
from ..experiment.evaluation import subset
from ..experiment.own_judge import make_own_comparer
from ..harness.estimates import correlation
from ..harness.runner import ProgressFn, ProgressUpdate
from ..harness.study import Row

NUM_OPINIONS: Final = 4
"""Of one seed on each pair."""
SMALL: Final = 30
"""Below this many pairs a share's interval is Wilson's: a t-interval of a few equal verdicts has no width."""
SINGLE: Final = "single annotators"
"""Each of the pool's 13 asked alone; figures are means over the 13."""
MEANINGS: Final = {
    "human": "16 simulated human raters, one drawn for each pair and opinion",
    "sim_eval": "p_sim^eval: the pool of 13 simulated annotators, one drawn for each pair and opinion",
    "sim_ann": "p_sim^ann: the pool with 25 % of its labels flipped",
    SINGLE: "each of the 13 alone, mean of the 13",
    "sim_gpt4": "p_sim^GPT-4: one greedy simulated annotator",
}
WRITERS: Final = {"crowd": writers.CROWD, **writers.API_MODELS}
"""Ranked by win rate, together with the reference's own 50 %."""
SPENT: Final = "spent_usd"
"""US dollars paid for a study; only a live judge as a whole has it."""
OF_MEMBERS: Final = ("agreement", "prefers_first", "prefers_longer", "prefers_lists", COST)
"""Figures of single annotators of a live pool, who seldom have two opinions on one pair to compare with each other."""
PAPERS_POOLS: Final = {"alpaca_farm": "sim_eval", "eval": "sim_eval", "ann+flip0.25": "sim_ann", "greedy": "sim_gpt4"}
"""Live pool -> the paper's judge of its structure."""

JudgeOf = Callable[[int], PreferenceOracle]


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


PAIRS: Final = {"agreement": 648, "variance": 648, "prefers_longer": 445, "prefers_lists": 53}
"""Figure -> pairs of the paper's cross-annotations that it rests on: all, those of unequal length, those with one list.
Counted in the stored annotations of GPT-4 on these pairs (level "recorded")."""
LARGEST: Final = {"agreement": 0.03, "variance": 0.05, "prefers_longer": 0.05, "prefers_lists": 0.05}
"""Figure -> the largest tolerance, where the paper's error is larger."""


def near(figure: str, paper: float, *, upper_bound: bool = False) -> Target:
    """The paper's share with half its 95 % interval as the tolerance, which the number of its pairs gives."""
    error = 1.96 * math.sqrt(paper * (1 - paper) / PAIRS[figure])
    return Target(paper, min(error, LARGEST[figure]), upper_bound=upper_bound)


ALONE: Final = near("variance", 0.20, upper_bound=True)
"""The variance of every single annotator."""
_SHARES: Final = {
    "human": {"agreement": 0.66, "variance": 0.35, "prefers_longer": 0.62, "prefers_lists": 0.69},
    "sim_eval": {"agreement": 0.65, "variance": 0.26, "prefers_longer": 0.64, "prefers_lists": 0.63},
    "sim_ann": {"variance": 0.43},
    "sim_gpt4": {"agreement": 0.65, "variance": 0.10},
}
_COSTS: Final = {"human": 300.0, "sim_eval": 12.0, "sim_ann": 6.0}
TARGETS: Final[Mapping[str, Mapping[str, Target]]] = {
    judge: {figure: near(figure, paper) for figure, paper in shares.items()}
    | ({COST: Target(_COSTS[judge])} if judge in _COSTS else {})
    for judge, shares in _SHARES.items()
} | {SINGLE: {"variance": ALONE}}
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
        if figure != COST:
            few = len(scored) < SMALL or min(estimate.mean, 1 - estimate.mean) <= 0
            ends = wilson(scored.sum(), len(scored)) if few else np.clip([estimate.low, estimate.high], 0, 1)
            estimate = replace(estimate, low=float(ends[0]), high=float(ends[1]))
        # A recorded judge has no seeds.
        means = [float(np.nanmean(row)) for row in seeds if level != "recorded" and not np.isnan(row).all()]
        rows.append(make_row(judge, figure, estimate, level, means, (targets or {}).get(figure)))
    return rows


def make_row(
    judge: str, figure: str, value: Interval, level: str, seeds: Sequence[float] = (), target: Target | None = None
) -> Row:
    """A row of the table from a value and its interval; NaN bounds become empty cells."""
    low, high = (None if math.isnan(bound) else bound for bound in (value.low, value.high))
    row: Row = {"judge": judge, "figure": figure, "value": value.mean, "low": low, "high": high}
    row |= {"paper": target and target.paper, "tolerance": target and target.tolerance}
    row |= {"within": target and target.holds(value.mean), "n": value.num, "level": level, "seeds": len(seeds) or None}
    return row | {"seed_min": min(seeds, default=None), "seed_max": max(seeds, default=None)}


@dataclass(frozen=True)
class Question:
    """The pairs and contests that every judge of a study is asked about."""

    pairs: Pairs
    contests: Pairs
    """For each writer in turn, its response (b) against the reference (a) to the same instructions."""
    num_seeds: int = 3

    def ask(self, judge_of: JudgeOf, seed: int, pairs: Pairs | None = None) -> Opinions:
        """A seed's opinions on the pairs, or on others."""
        return ask(pairs or self.pairs, judge_of, range(seed * NUM_OPINIONS, (seed + 1) * NUM_OPINIONS))

    # Asked once: every judge is compared with them.
    @cached_property
    def humans(self) -> list[Array]:
        """For each seed, the majority of the simulated raters' opinions [n], see `analysis.majority`.

        Raises:
            DataError: The pairs are not of the sandbox's world.
        """
        human = partial(sandbox.judge, "human")
        return [majority(self.ask(human, seed).votes) for seed in range(self.num_seeds)]

    @cached_property
    def human_rates(self) -> list[Array]:
        """`win_rates` by the human raters."""
        return self.win_rates(partial(sandbox.judge, "human"))

    def win_rates(self, judge_of: JudgeOf) -> list[Array]:
        """For each seed, the share of the contests that each of `WRITERS` wins, then the reference's own half."""
        credits = [mean_known(self.ask(judge_of, seed, self.contests).votes) for seed in range(self.num_seeds)]
        return [np.append(credit.reshape(len(WRITERS), -1).mean(axis=1), 0.5) for credit in credits]

    def figures(self, judge_of: JudgeOf, *, human: bool = False) -> list[dict[str, Array]]:
        """`analysis.figures` of a judge for each seed."""
        sides = enumerate(self.humans)
        return [figures(self.ask(judge_of, seed), self.pairs, None if human else side) for seed, side in sides]

    def correlations(self, judge_of: JudgeOf) -> list[float]:
        """Spearman's correlation of the judge's win rates with the humans' for each seed; NaN where all are equal."""
        rates = zip(self.win_rates(judge_of), self.human_rates, strict=True)
        return [correlation("spearman", own, human) for own, human in rates]


def spread(pairs: Pairs, num: int) -> Pairs:
    """`num` of the pairs, evenly spread."""
    rows = list(zip(pairs.instructions, pairs.a, pairs.b, strict=True))
    return Pairs.of([rows[i] for i in subset(len(rows), num)])


def load_pairs(data: Sandbox) -> Pairs:
    """The stored preference pairs with unequal responses."""
    both = zip(data.instructions("preference"), data.pairs(), strict=True)
    return Pairs.of([(instruction, a, b) for instruction, (a, b) in both if a != b])


def load_contests(data: Sandbox, num_instructions: int | None = None) -> Pairs:
    """Each writer's responses to the eval instructions, all or some evenly spread, against the stored references."""
    instructions, references = data.instructions("eval"), data.references("eval")
    chosen = subset(len(instructions), num_instructions or len(instructions))
    rows = [
        (str(instructions[i]), references[i], writers.write(writer, instructions[i], keyed_rng(0, name, "contest", i)))
        for name, writer in WRITERS.items()
        for i in chosen
    ]
    return Pairs.of(rows)


def judge_rows(judge: str, question: Question) -> list[Row]:
    """The rows of one of `MEANINGS`; for `SINGLE` those of the mean, then of each of the 13.

    Raises:
        DataError: The pairs are not of the sandbox's world.
    """
    if judge != SINGLE:
        judge_of = partial(sandbox.judge, judge)
        rows = rows_of(judge, question.figures(judge_of, human=judge == "human"), "sandbox", TARGETS.get(judge))
        return rows if judge == "human" else rows + _rank_rows(judge, question.correlations(judge_of))
    judges = [partial(_alone, index) for index in range(len(POOL))]
    members, ranks = [*map(question.figures, judges)], [*map(question.correlations, judges)]
    mean = [
        {name: mean_known(np.array([each[name] for each in seed])) for name in seed[0]}
        for seed in zip(*members, strict=True)
    ]
    rows = rows_of(SINGLE, mean, "sandbox", TARGETS[SINGLE]) + _rank_rows(SINGLE, np.mean(ranks, axis=0).tolist())
    for annotator, values, rank in zip(POOL, members, ranks, strict=True):
        rows += rows_of(annotator.name, values, "sandbox", {"variance": ALONE}) + _rank_rows(annotator.name, rank)
    return rows


def _alone(index: int, seed: int) -> PreferenceOracle:
    return Annotators(POOL[index].name, [POOL[index]], seed=seed)


def _rank_rows(judge: str, by_seed: Sequence[float]) -> list[Row]:
    """One row with an interval over the seeds, or none without a value.

    A few equal seeds have no interval: their spread of 0 would claim certainty.
    """
    correlations = [value for value in by_seed if not math.isnan(value)]
    if not correlations:
        return []
    estimate = replace(interval(correlations, bounds=(-1, 1)), num=len(WRITERS) + 1)
    if np.ptp(correlations) == 0:
        estimate = replace(estimate, low=math.nan, high=math.nan)
    return [make_row(judge, "spearman", estimate, "sandbox", correlations)]


def live_rows(spec: str, question: Question, cell: str, on_progress: ProgressFn) -> list[Row]:
    """Asks a judge of one's own for one seed's opinions; its rows, then of each annotator of a pool that gave any.

    Raises:
        APIError: The server refused for good, or stopped answering; answers so far are kept.
        LedgerError: The budget is reached.
        DataError: No verdict could be read.
    """
    names = list[str]()

    def judge_of(seed: int) -> PreferenceOracle:
        on_progress(ProgressUpdate(cell, seed, state=f"opinion {seed + 1}"))
        judge = make_own_comparer(spec, sandbox.SANDBOX, seed=seed)
        names.append(judge.name)
        return judge

    opinions = question.ask(judge_of, 0)
    judge, missing = names[0], np.isnan(opinions.votes)
    if missing.all():
        why = f" The first says: {opinions.reason}" if opinions.reason else ""
        raise DataError(f"{judge}: expected verdicts, got none for any of the pairs.{why}")
    members = sorted({str(name) for name in opinions.annotator.ravel().tolist() if name})
    name = f"live {judge}{' (pool)' if judge in members and len(members) > 1 else ''}"
    targets = TARGETS.get(PAPERS_POOLS.get(judge, ""))
    rows = rows_of(name, [figures(opinions, question.pairs, question.humans[0])], "live", targets)
    for member in members if len(members) > 1 else []:
        values = figures(opinions.by(member), question.pairs, question.humans[0])
        rows += rows_of(f"live {member}", [{figure: values[figure] for figure in OF_MEMBERS}], "live")
    rows += rows_of(name, [{"no_verdict": missing.mean(axis=0)}], "live")
    paid = opinions.cost_usd[~np.isnan(opinions.cost_usd)]
    return [*rows, make_row(name, SPENT, Interval(float(paid.sum()), math.nan, math.nan, len(paid)), "live")]
