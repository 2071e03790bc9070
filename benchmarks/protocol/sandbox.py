"""The sandbox's part of the protocol: sources, live users, telling generators apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ... import sandbox
from ...oracles.base import compare
from ..harness.study import Row
from .answers import RANKED
from .live import EVAL, FRESH, LIVE, Question, distances, shares
from .pairs import by_seed, null_rows, pair_rows
from .statistics import Array, Credits, agreement_rows, make_row, over_seeds, placed, rate_row, source_rows

LEVEL: Final = "sandbox"
JUDGES: Final = ("sim_eval", "human")
PAPER_R2: Final = 0.97
"""r^2 of win rates on the 805 and on 200 instructions of a live demo's users."""
PAPER_LIVE: Final = 200
FEW: Final = f"{LIVE}, {PAPER_LIVE} of them"
"""As many live instructions as the paper had."""
NO_INPUT: Final = f"{EVAL} without inputs"
"""The evaluation instructions that have no input, as nearly all live ones: what the share of inputs alone does."""
CROSS: Final = "sim_eval on eval, human on live"

Texts = Mapping[str, Mapping[str, Mapping[int, Sequence[str]]]]
"""Generator -> set of instructions -> seed -> answers."""


def judge_all(answers: Texts, asked: Mapping[str, Question], judge: str) -> dict[str, dict[str, dict[int, Array]]]:
    """Set -> generator -> seed -> a judge's verdicts [B] against the reference; seed s's answers by judge seed s."""
    found: dict[str, dict[str, dict[int, Array]]] = {which: {} for which in asked}
    for generator, by_set in answers.items():
        for which, seeds in by_set.items():
            question = asked[which]
            found[which][generator] = {
                seed: compare(sandbox.judge(judge, seed), question.instructions, question.references, texts).scores
                for seed, texts in seeds.items()
            }
    return found


def rows_of(answers: Texts, asked: Mapping[str, Question], *, repeats: int, resamples: int) -> list[Row]:
    """All rows of the sandbox.

    Args:
        answers: Of every generator.
        asked: The sets of instructions.
        repeats: Shuffles of the paired tests.
        resamples: For the intervals of agreements.
    """
    rows = placed("mixture", LEVEL, "", mixture_rows(asked))
    sources = [row.source for row in asked[EVAL].instructions]
    bare = np.array([not row.input for row in asked[EVAL].instructions])
    known: dict[str, dict[str, Credits]] = {}
    for judge in JUDGES:
        judged = judge_all(answers, asked, judge)
        # Most figures are over a generator's seeds, whichever they are.
        sets = {which: {name: list(seeds.values()) for name, seeds in each.items()} for which, each in judged.items()}
        known[judge] = {**sets, NO_INPUT: {name: [row[bare] for row in each] for name, each in sets[EVAL].items()}}
        rows += placed("sources", LEVEL, judge, source_rows(sets[EVAL], sources, resamples))
        rows += placed("live", LEVEL, judge, live_rows(known[judge], resamples))
        rows += placed("pairs", LEVEL, judge, pair_rows(by_seed(judged[EVAL]), repeats))
        # Two seeds of a ranked method are two trainings, which may differ in truth.
        same = {name: seeds for name, seeds in sets[EVAL].items() if not name.startswith(RANKED)}
        rows += placed("pairs", LEVEL, judge, null_rows(same, repeats))
    simulated, human = known.values()
    crossed = agreement_rows((EVAL, LIVE), simulated[EVAL], human[LIVE], resamples=resamples)
    return rows + placed("live", LEVEL, CROSS, crossed)


def live_rows(sets: Mapping[str, Credits], resamples: int) -> list[Row]:
    """Win rates on the live and the fresh instructions, and how they agree with those on the evaluation set."""
    rows = [
        rate_row(generator, which, over_seeds(seeds))
        for which in (EVAL, LIVE, FRESH)
        for generator, seeds in sets[which].items()
        if generator in sets[LIVE]
    ]
    others = {LIVE: sets[LIVE], FRESH: sets[FRESH]}
    if len(next(iter(sets[LIVE].values()))[0]) > PAPER_LIVE:
        others[FEW] = {name: [row[:PAPER_LIVE] for row in seeds] for name, seeds in sets[LIVE].items()}
    for which, credits in others.items():
        paper = None if which == FRESH else PAPER_R2
        rows += agreement_rows((EVAL, which), sets[EVAL], credits, resamples=resamples, paper=paper)
    rows += [shift_row(sets, which) for which in (LIVE, FRESH)]
    return rows + agreement_rows((NO_INPUT, LIVE), sets[NO_INPUT], sets[LIVE], resamples=resamples)


def shift_row(sets: Mapping[str, Credits], which: str) -> Row:
    """How much harder a set is than the evaluation set: mean difference of the generators' win rates, in points."""

    def rate(on: str, name: str) -> float:
        return float(np.nanmean(over_seeds(sets[on][name])))

    gaps = np.array([100 * (rate(which, name) - rate(EVAL, name)) for name in sets[which]])
    size = len(next(iter(sets[which].values()))[0])
    spread = f"at most {np.abs(gaps).max():.1f}"
    return make_row("shift", which, spread, float(gaps.mean()), n=size, models=len(gaps))


def mixture_rows(asked: Mapping[str, Question]) -> list[Row]:
    """What the sets ask: the share of each property's values, and how far each set is from the evaluation set."""
    rows = []
    for which, question in asked.items():
        size = len(question)
        for (name, value), share in sorted(shares(question.instructions).items()):
            rows.append(make_row(f"share of {name}", which, value, share, n=size))
        if which != EVAL:
            for name, distance in distances(asked[EVAL].instructions, question.instructions).items():
                rows.append(make_row("total variation", which, name, distance, n=size))
    return rows
