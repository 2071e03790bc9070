"""The sandbox's judges, measured: human raters, the pool with and without noise, its 13 alone, the greedy one.

A seed is a disjoint set of opinions: with four of them, seed s has those of the judge seeds 4s .. 4s + 3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np

from ... import sandbox
from ...annotators.analysis import Array, Opinions, Pairs, ask, figures, majority
from ...oracles.base import PreferenceOracle
from ...sandbox import writers
from ...sandbox.dataset import Sandbox
from ...sandbox.judges import POOL, Annotators
from ...seeding import keyed_rng
from ...statistics import interval, mean_known
from ..experiment.evaluation import subset
from ..harness.estimates import correlation
from ..harness.study import Row
from .rows import ALONE, SINGLE, TARGETS, make_row, rows_of

LEVEL: Final = "sandbox"
MEANINGS: Final = {
    "human": "16 simulated human raters, one drawn for each pair and opinion",
    "sim_eval": "p_sim^eval: the pool of 13 simulated annotators, one drawn for each pair and opinion",
    "sim_ann": "p_sim^ann: the pool with 25 % of its labels flipped",
    SINGLE: "each of the 13 alone, mean of the 13",
    "sim_gpt4": "p_sim^GPT-4: one greedy simulated annotator",
}
WRITERS: Final = {"crowd": writers.CROWD, **writers.API_MODELS}
"""Ranked by win rate, together with the reference's own 50 %."""

JudgeOf = Callable[[int], PreferenceOracle]


@dataclass(frozen=True)
class Question:
    """The pairs and contests that every judge of a study is asked about."""

    pairs: Pairs
    contests: Pairs
    """For each writer in turn, its response (b) against the reference (a) to the same instructions."""
    num_opinions: int = 4
    """On each pair in one seed."""
    num_seeds: int = 3

    def seeds(self, seed: int) -> range:
        """The judge seeds of a seed."""
        return range(seed * self.num_opinions, (seed + 1) * self.num_opinions)

    def ask(self, judge_of: JudgeOf, seed: int) -> Opinions:
        """A seed's opinions on the pairs."""
        return ask(self.pairs, judge_of, self.seeds(seed))

    def win_rates(self, judge_of: JudgeOf, seed: int) -> Array:
        """Share of the contests that each of `WRITERS` wins by a seed's opinions, then the reference's own half."""
        credit = mean_known(ask(self.contests, judge_of, self.seeds(seed)).votes)
        return np.append(credit.reshape(len(WRITERS), -1).mean(axis=1), 0.5)

    # Asked once: every judge is compared with them.
    @cached_property
    def humans(self) -> list[Array]:
        """For each seed, the majority of the simulated raters' opinions [n], see `votes.majority`.

        Raises:
            DataError: The pairs are not of the sandbox's world.
        """
        human = partial(sandbox.judge, "human")
        return [majority(self.ask(human, seed).votes) for seed in range(self.num_seeds)]

    @cached_property
    def human_rates(self) -> list[Array]:
        """`win_rates` by the human raters for each seed."""
        return [self.win_rates(partial(sandbox.judge, "human"), seed) for seed in range(self.num_seeds)]

    def figures(self, judge_of: JudgeOf, *, human: bool = False) -> list[dict[str, Array]]:
        """`votes.figures` of a judge for each seed."""
        sides = enumerate(self.humans)
        return [figures(self.ask(judge_of, seed), self.pairs, None if human else side) for seed, side in sides]

    def correlations(self, judge_of: JudgeOf) -> list[float]:
        """Spearman's correlation of the judge's win rates with the humans' for each seed; NaN where all are equal."""
        rates = enumerate(self.human_rates)
        return [correlation("spearman", self.win_rates(judge_of, seed), human) for seed, human in rates]


def load_pairs(data: Sandbox, num_pairs: int | None = None) -> Pairs:
    """The stored preference pairs with unequal responses, all or `num_pairs` of them evenly spread."""
    both = zip(data.instructions("preference"), data.pairs(), strict=True)
    rows = [(instruction, a, b) for instruction, (a, b) in both if a != b]
    return Pairs.of([rows[i] for i in subset(len(rows), num_pairs or len(rows))])


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
    """The rows of one judge's figures; for `SINGLE` those of the mean, then of each of the 13.

    Raises:
        DataError: The pairs are not of the sandbox's world.
    """
    if judge != SINGLE:
        judge_of = partial(sandbox.judge, judge)
        rows = rows_of(judge, question.figures(judge_of, human=judge == "human"), LEVEL, TARGETS.get(judge))
        return rows if judge == "human" else rows + _rank_rows(judge, question.correlations(judge_of))
    judges = [partial(_alone, index) for index in range(len(POOL))]
    members = [question.figures(judge_of) for judge_of in judges]
    mean = [
        {name: mean_known(np.array([member[seed][name] for member in members])) for name in members[0][seed]}
        for seed in range(question.num_seeds)
    ]
    ranks = [question.correlations(judge_of) for judge_of in judges]
    rows = rows_of(SINGLE, mean, LEVEL, TARGETS[SINGLE]) + _rank_rows(SINGLE, np.mean(ranks, axis=0).tolist())
    for annotator, values, rank in zip(POOL, members, ranks, strict=True):
        rows += rows_of(annotator.name, values, LEVEL, {"variance": ALONE}) + _rank_rows(annotator.name, rank)
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
    estimate = interval(correlations, bounds=(-1, 1))
    bounds = (estimate.low, estimate.high) if np.ptp(correlations) > 0 else (math.nan, math.nan)
    return [make_row(judge, "spearman", estimate.mean, bounds, len(WRITERS) + 1, LEVEL, correlations)]
