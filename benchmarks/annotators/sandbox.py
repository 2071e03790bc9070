"""The sandbox's judges, measured: human raters, the pool with and without noise, its 13 alone, the greedy one.

A seed is a disjoint set of opinions: with four of them, seed s has those of the judge seeds 4s .. 4s + 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np

from ... import sandbox
from ...oracles.base import PreferenceOracle
from ...sandbox import writers
from ...sandbox.dataset import Sandbox
from ...sandbox.judges import POOL, Annotators
from ...seeding import keyed_rng
from ...statistics import interval
from ..harness.estimates import correlation, mean_known
from ..harness.evaluation import subset
from ..harness.study import Row
from .targets import ALONE, SINGLE, make_row, rows_of, targets_of
from .votes import Array, Opinions, Pairs, ask, figures, majority, require_verdicts

LEVEL: Final = "sandbox"
MEANINGS: Final = {
    "human": "16 simulated human raters, one drawn for each pair and opinion",
    "sim_eval": "p_sim^eval: the pool of 13 simulated annotators, one drawn for each pair and opinion",
    "sim_ann": "p_sim^ann: the pool with 25 % of its labels flipped",
    SINGLE: "each of the 13 alone, mean of the 13",
    "sim_gpt4": "p_sim^GPT-4: one greedy simulated annotator",
}
WRITERS: Final = {"crowd": writers.CROWD, **writers.API_MODELS}
"""Who is ranked by win rate, beside the reference's own 50 %."""

JudgeOf = Callable[[int], PreferenceOracle]


@dataclass(frozen=True)
class Question:
    """What every judge of a study is asked."""

    pairs: Pairs
    contests: Pairs
    """For each writer in turn, its response (b) against the reference (a) to the same instructions."""
    num_opinions: int = 4
    """Opinions on each pair in one seed."""
    num_seeds: int = 3

    def seeds(self, seed: int) -> range:
        """The judge seeds of a seed."""
        return range(seed * self.num_opinions, (seed + 1) * self.num_opinions)

    def ask(self, pairs: Pairs, judge_of: JudgeOf, seed: int) -> Opinions:
        """A seed's opinions."""
        return ask(pairs, judge_of, self.seeds(seed))

    @cached_property
    def humans(self) -> list[Array]:
        """`human_majority` of each seed. Asked once: every judge is compared with them.

        Raises:
            DataError: The pairs are not of the sandbox's world.
        """
        return [human_majority(self.pairs, self.seeds(seed)) for seed in range(self.num_seeds)]

    @cached_property
    def human_rates(self) -> list[Array]:
        """`win_rates` by the human raters, one array a seed."""
        return [win_rates(partial(sandbox.judge, "human"), self, seed) for seed in range(self.num_seeds)]


def load_pairs(data: Sandbox, num_pairs: int | None = None) -> Pairs:
    """The unequal ones of the stored preference pairs, all or `num_pairs` of them evenly spread."""
    both = zip(data.instructions("preference"), data.pairs(), strict=True)
    rows = [(instruction, a, b) for instruction, (a, b) in both if a != b]
    instructions, a, b = zip(*(rows[i] for i in subset(len(rows), num_pairs or len(rows))), strict=True)
    return Pairs(instructions, a, b)


def load_contests(data: Sandbox, num_instructions: int | None = None) -> Pairs:
    """Each writer's responses to the eval instructions, all or some evenly spread, against the stored references."""
    instructions, references = data.instructions("eval"), data.references("eval")
    chosen = subset(len(instructions), num_instructions or len(instructions))
    rows = [
        (str(instructions[i]), references[i], writers.write(writer, instructions[i], keyed_rng(0, name, "contest", i)))
        for name, writer in WRITERS.items()
        for i in chosen
    ]
    asked, a, b = zip(*rows, strict=True)
    return Pairs(asked, a, b)


def judge_rows(judge: str, question: Question) -> list[Row]:
    """The rows of one judge's figures; for `SINGLE` those of the mean, then of each of the 13.

    Raises:
        DataError: The pairs are not of the sandbox's world.
    """
    if judge != SINGLE:
        judge_of = partial(sandbox.judge, judge)
        rows = rows_of(judge, _figures(judge, judge_of, question), LEVEL, targets_of(judge))
        return rows if judge == "human" else rows + _rank_rows(judge, correlations(judge_of, question))
    members = [_figures(SINGLE, partial(_alone, index), question) for index in range(len(POOL))]
    mean = [
        {name: mean_known(np.array([member[seed][name] for member in members])) for name in members[0][seed]}
        for seed in range(question.num_seeds)
    ]
    ranks = [correlations(partial(_alone, index), question) for index in range(len(POOL))]
    rows = rows_of(SINGLE, mean, LEVEL, targets_of(SINGLE)) + _rank_rows(SINGLE, np.mean(ranks, axis=0).tolist())
    for annotator, found, rank in zip(POOL, members, ranks, strict=True):
        rows += rows_of(annotator.name, found, LEVEL, {"variance": ALONE}) + _rank_rows(annotator.name, rank)
    return rows


def human_majority(pairs: Pairs, seeds: Sequence[int]) -> Array:
    """What most of the simulated raters' opinions of these seeds say, [n]: 1 for b, -1 for a, 0 for an even vote.

    Raises:
        DataError: The pairs are not of the sandbox's world.
    """
    opinions = ask(pairs, partial(sandbox.judge, "human"), seeds)
    require_verdicts(pairs, opinions, "human")
    return majority(opinions.votes)


def win_rates(judge_of: JudgeOf, question: Question, seed: int) -> Array:
    """Share of the contests that each of `WRITERS` wins by a seed's opinions, then the reference's own half."""
    credit = mean_known(question.ask(question.contests, judge_of, seed).votes)
    return np.append(credit.reshape(len(WRITERS), -1).mean(axis=1), 0.5)


def correlations(judge_of: JudgeOf, question: Question) -> list[float]:
    """Spearman's correlation of the judge's win rates with the humans', one a seed; NaN where all are equal."""
    rates = enumerate(question.human_rates)
    return [correlation("spearman", win_rates(judge_of, question, seed), wanted) for seed, wanted in rates]


def _figures(judge: str, judge_of: JudgeOf, question: Question) -> list[dict[str, Array]]:
    """Of each seed."""
    found = []
    for seed, human in enumerate(question.humans):
        opinions = question.ask(question.pairs, judge_of, seed)
        require_verdicts(question.pairs, opinions, judge)
        found.append(figures(opinions, question.pairs, None if judge == "human" else human))
    return found


def _rank_rows(judge: str, by_seed: Sequence[float]) -> list[Row]:
    """One row, or none without a value; its interval is over the seeds, there are no pairs to take one over.

    A few equal seeds have no interval: their spread of 0 would claim certainty.
    """
    known = [value for value in by_seed if not math.isnan(value)]
    if not known:
        return []
    found = interval(known, bounds=(-1, 1))
    bounds = (found.low, found.high) if np.ptp(known) > 0 else (math.nan, math.nan)
    return [make_row(judge, "spearman", found.mean, bounds, len(WRITERS) + 1, LEVEL, known)]


def _alone(index: int, seed: int) -> PreferenceOracle:
    return Annotators(POOL[index].name, [POOL[index]], seed=seed)
