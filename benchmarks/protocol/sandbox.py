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
from .statistics import Array, Credits, agreement_rows, make_row, over_seeds, rate_row, source_rows

LEVEL: Final = "sandbox"
JUDGES: Final = {"sim_eval": "p_sim^eval, the pool of 13 simulated annotators", "human": "16 simulated human raters"}
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
Judged = dict[str, dict[str, dict[str, dict[int, Array]]]]
"""Judge -> set of instructions -> generator -> seed -> credits [B]."""


def judge_all(answers: Texts, asked: Mapping[str, Question]) -> Judged:
    """Every judge's verdict on every answer against the reference's; seed s's answers by judge seed s."""
    found: Judged = {judge: {which: {} for which in asked} for judge in JUDGES}
    for judge in JUDGES:
        for generator, by_set in answers.items():
            for which, seeds in by_set.items():
                question = asked[which]
                found[judge][which][generator] = {
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
    judged = judge_all(answers, asked)
    # Most figures are over a generator's seeds, whichever they are.
    credits = {
        judge: {
            which: {name: list(seeds.values()) for name, seeds in generators.items()}
            for which, generators in sets.items()
        }
        for judge, sets in judged.items()
    }
    sources = [row.source for row in asked[EVAL].instructions]
    rows = mixture_rows(asked)
    for judge, sets in credits.items():
        rows += source_rows(LEVEL, judge, sets[EVAL], sources, resamples)
        rows += live_rows(judge, sets, resamples)
        rows += agreement_rows(
            "live", LEVEL, judge, (NO_INPUT, LIVE), without_inputs(sets[EVAL], asked), sets[LIVE], resamples=resamples
        )
        rows += pair_rows(LEVEL, judge, by_seed(judged[judge][EVAL]), repeats=repeats)
        # Two seeds of a ranked method are two trainings, which may differ in truth.
        same = {name: seeds for name, seeds in sets[EVAL].items() if not name.startswith(RANKED)}
        rows += null_rows(LEVEL, judge, same, repeats=repeats)
    simulated, human = (credits[judge] for judge in JUDGES)
    names = (EVAL, LIVE)
    return rows + agreement_rows("live", LEVEL, CROSS, names, simulated[EVAL], human[LIVE], resamples=resamples)


def live_rows(judge: str, sets: Mapping[str, Credits], resamples: int) -> list[Row]:
    """Win rates on the live and the fresh instructions, and how they agree with those on the evaluation set."""
    rows = [
        rate_row("live", LEVEL, judge, generator, which, over_seeds(seeds))
        for which in (EVAL, LIVE, FRESH)
        for generator, seeds in sets[which].items()
        if generator in sets[LIVE]
    ]
    others: dict[str, Credits] = {LIVE: sets[LIVE], FRESH: sets[FRESH]}
    num = len(next(iter(next(iter(sets[LIVE].values())))))
    if num > PAPER_LIVE:
        others[FEW] = {name: [row[:PAPER_LIVE] for row in seeds] for name, seeds in sets[LIVE].items()}
    for which, credits in others.items():
        paper = None if which == FRESH else PAPER_R2
        rows += agreement_rows(
            "live", LEVEL, judge, (EVAL, which), sets[EVAL], credits, resamples=resamples, paper=paper
        )
    rows += [shift_row(judge, sets, which) for which in (LIVE, FRESH)]
    return rows


def without_inputs(credits: Credits, asked: Mapping[str, Question]) -> Credits:
    """The credits on the evaluation instructions that have no input."""
    chosen = np.array([not row.input for row in asked[EVAL].instructions])
    return {name: [row[chosen] for row in seeds] for name, seeds in credits.items()}


def shift_row(judge: str, sets: Mapping[str, Credits], which: str) -> Row:
    """How much harder a set is than the evaluation set: mean difference of the generators' win rates, in points."""
    gaps = np.array(
        [
            100 * (float(np.nanmean(over_seeds(credits))) - float(np.nanmean(over_seeds(sets[EVAL][name]))))
            for name, credits in sets[which].items()
        ]
    )
    spread = float(np.abs(gaps).max())
    size = len(next(iter(next(iter(sets[which].values())))))
    mean = float(gaps.mean())
    return make_row("live", LEVEL, judge, "shift", which, f"at most {spread:.1f}", mean, n=size, models=len(gaps))


def mixture_rows(asked: Mapping[str, Question]) -> list[Row]:
    """What the sets ask: the share of each property's values, and how far each set is from the evaluation set."""
    rows = []
    for which, question in asked.items():
        size = len(question)
        for (name, value), share in sorted(shares(question.instructions).items()):
            rows.append(make_row("mixture", LEVEL, "", f"share of {name}", which, value, share, n=size))
        if which != EVAL:
            for name, distance in distances(asked[EVAL].instructions, question.instructions).items():
                rows.append(make_row("mixture", LEVEL, "", "total variation", which, name, distance, n=size))
    return rows
