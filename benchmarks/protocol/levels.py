"""The rows of the table: of the sandbox, and of recorded verdicts on real models with the published leaderboards."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from ... import sandbox
from ...data import RecordedDataset
from ...data.schema import TEXT, Field, is_text
from ...errors import DataError
from ...oracles.base import compare
from ...statistics import win_rate
from ..harness.estimates import FEWEST
from ..harness.sources import eval_rows, extra_files, judgements, published_table
from ..harness.study import Row
from . import analysis
from .analysis import Credits, Rates, agreement_rows, make_row, over_seeds, placed, rate_row
from .answers import EVAL, FRESH, LIVE, Question, distances, shares

SANDBOX: Final = "sandbox"
RECORDED: Final = "recorded"
JUDGES: Final = ("sim_eval", "human")
PAPER_R2: Final = 0.97
"""r^2 of win rates on the 805 and on `PAPER_LIVE` instructions of a live demo's users."""
PAPER_LIVE: Final = 200
FEW: Final = f"{LIVE}, {PAPER_LIVE} of them"
NO_INPUT: Final = f"{EVAL} without inputs"
"""The evaluation instructions that have no input, as nearly all held-out users': what the share of inputs does."""
CROSS: Final = "sim_eval on eval, human on live"
CLAUDE: Final = "claude"
TOGETHER: Final = "GPT-4 and Claude"
EARLY: Final = "gpt4, models of Claude's table"
"""Models that Claude's published table has too: the leaderboard as it was when upstream said what 300 tell apart."""
FIGURES: Final = ("spearman", "kendall", "r2")


def judge_all(answered: Iterable[Row], questions: Mapping[str, Question], judge: str) -> dict[str, Credits]:
    """Set -> a judge's verdicts against the reference; the answers of seed s are judged with seed s."""
    credits: dict[str, Any] = {which: {} for which in questions}
    for row in answered:
        question, oracle = questions[row["set"]], sandbox.judge(judge, row["seed"])
        scores = compare(oracle, question.instructions, question.references, row["answers"]).scores
        credits[row["set"]].setdefault(row["generator"], {})[row["seed"]] = scores
    return credits


def sandbox_rows(
    answered: Sequence[Row], questions: Mapping[str, Question], *, repeats: int, resamples: int
) -> list[Row]:
    """All rows of the sandbox, with `repeats` shuffles for paired tests and `resamples` for agreements."""
    rows = placed("mixture", SANDBOX, "", mixture_rows(questions))
    sources = [row.source for row in questions[EVAL].instructions]
    bare = np.array([not row.input for row in questions[EVAL].instructions])
    judged = {judge: judge_all(answered, questions, judge) for judge in JUDGES}
    for judge, sets in judged.items():
        own = sets[EVAL]
        rows += placed("sources", SANDBOX, judge, analysis.source_rows(own, sources, resamples))
        rows += placed("live", SANDBOX, judge, live_rows({**sets, NO_INPUT: analysis.select(own, bare)}, resamples))
        rows += placed("pairs", SANDBOX, judge, analysis.pair_rows(own, repeats) + analysis.null_rows(own, repeats))
    simulated, human = judged.values()
    crossed = agreement_rows({EVAL: simulated[EVAL], LIVE: human[LIVE]}, resamples)
    return rows + placed("live", SANDBOX, CROSS, crossed)


def live_rows(sets: Mapping[str, Credits], resamples: int) -> list[Row]:
    """Win rates on the held-out sets, and how they agree with those on the evaluation set."""
    means = {which: {name: over_seeds(seeds) for name, seeds in sets[which].items()} for which in (EVAL, LIVE, FRESH)}
    rows = [rate_row(name, which, mean) for which, each in means.items() for name, mean in each.items()]
    others = {LIVE: sets[LIVE], FRESH: sets[FRESH]}
    if len(next(iter(means[LIVE].values()))) > PAPER_LIVE:
        others[FEW] = analysis.select(sets[LIVE], slice(PAPER_LIVE))
    for which, credits in others.items():
        paper = None if which == FRESH else PAPER_R2
        rows += agreement_rows({EVAL: sets[EVAL], which: credits}, resamples, paper=paper)
    for which in (LIVE, FRESH):  # how much harder than the evaluation set, in points
        gaps = np.array([100 * (np.nanmean(own) - np.nanmean(means[EVAL][name])) for name, own in means[which].items()])
        size, spread = len(next(iter(means[which].values()))), f"at most {np.abs(gaps).max():.1f}"
        rows.append(make_row("shift", which, spread, gaps.mean(), n=size, models=len(gaps)))
    return rows + agreement_rows({which: sets[which] for which in (NO_INPUT, LIVE)}, resamples)


def mixture_rows(questions: Mapping[str, Question]) -> list[Row]:
    """The share of each property's values in each set, and how far each set is from the evaluation set."""
    rows = []
    for which, question in questions.items():
        texts = question.instructions
        own = [(f"share of {name}", each.sort_index()) for name, each in sorted(shares(texts).items())]
        if which != EVAL:
            own.append(("total variation", pd.Series(distances(questions[EVAL].instructions, texts))))
        rows += [
            make_row(f, which, str(other), value, n=len(texts)) for f, each in own for other, value in each.items()
        ]
    return rows


def recorded_rows(dataset: RecordedDataset, *, repeats: int, resamples: int) -> list[Row]:
    """All rows of the recorded level, as `sandbox_rows`.

    Raises:
        DataError: A file is faulty.
    """
    extras, questions = dataset.path / "extras", eval_rows(dataset, Field("dataset", TEXT, is_text, ""))
    short = dataset.judge.removeprefix("alpaca_eval_")
    stored: dict[str, Credits] = {short: {name: {0: dataset.judgements(name)} for name in dataset.judged}}
    if file := extra_files(dataset.path).get("preferences_claude"):
        stored[CLAUDE] = read_credits(file, questions["index"].tolist())
    boards = {short: f"leaderboard_{dataset.judge}.csv.gz", CLAUDE: "leaderboard_claude.csv.gz"}
    tables = {judge: published(extras / name) for judge, name in boards.items() if (extras / name).is_file()}
    rows = []
    for judge, credits in stored.items():
        rows += placed("sources", RECORDED, judge, analysis.source_rows(credits, questions.dataset.tolist(), resamples))
        rows += placed("pairs", RECORDED, judge, analysis.pair_rows(credits, repeats))
    rows += leaderboard_rows(stored, tables, resamples)
    early = {name: each for name, each in stored[short].items() if name in tables.get(CLAUDE, {})}
    return rows + placed("pairs", RECORDED, EARLY, analysis.pair_rows(early, repeats) if len(early) >= FEWEST else [])


def read_credits(path: Path, indices: Sequence[int]) -> Credits:
    """The credits in a file of judgements of the instructions with these indices, all under seed 0.

    Raises:
        DataError: The file is faulty, judges something twice, or an instruction that is not there.
    """
    frame = judgements(path)
    if (unknown := ~frame["index"].isin(indices)).any():
        row = frame[unknown].iloc[0]
        raise DataError(f"{path}: record {row.number}: expected the index of an instruction, got {row['index']!r}.")
    table = frame.pivot(index="index", columns="generator", values="preference").reindex([*indices]).astype(float)
    return {name: {0: table[name].to_numpy()} for name in frame.generator.unique()}


def published(path: Path) -> Rates:
    """A published leaderboard without the reference itself, a win rate of 50 without error; DataError if none."""
    table = published_table(path, ("win_rate", "standard_error"))
    return {str(name): (rate, error) for name, rate, error in table[table.standard_error > 0].itertuples()}


def leaderboard_rows(stored: Mapping[str, Credits], tables: Mapping[str, Rates], resamples: int) -> list[Row]:
    """Win rates of both judges, and how their rankings agree: on verdicts, on published tables, on both."""
    rows = []
    for judge, credits in stored.items():
        own = [rate_row(name, "recorded", over_seeds(each)) for name, each in credits.items()]
        rows += placed("judges", RECORDED, judge, own)
    for judge, table in tables.items():
        for name, (rate, error) in table.items():
            bounds = (max(0.0, rate - 1.96 * error), min(100.0, rate + 1.96 * error))
            own = [make_row("win_rate", name, "published", rate, bounds, standard_error=error)]
            rows += placed("judges", RECORDED, judge, own)
    if len(stored) > 1:
        sides = {f"{judge} recorded": credits for judge, credits in stored.items()}
        rows += placed("judges", RECORDED, TOGETHER, agreement_rows(sides, resamples, FIGURES, same=True))
    boards = {(judge, "recorded"): recorded_rates(credits) for judge, credits in stored.items()}
    boards |= {(judge, "published"): table for judge, table in tables.items()}
    for (a, one), (b, two) in combinations(boards.items(), 2):
        gaps = [abs(one[name][0] - two[name][0]) for name in one if name in two]
        if a[0] == b[0] and gaps:  # the same verdicts: how far are the win rates apart, in points?
            own = [make_row("largest_difference", "recorded", "published", max(gaps), models=len(gaps))]
            rows += placed("judges", RECORDED, a[0], own)
        elif a[0] != b[0] and "published" in (a[1], b[1]):
            rows += placed("judges", RECORDED, TOGETHER, table_rows({" ".join(a): one, " ".join(b): two}, resamples))
    return rows


def recorded_rates(credits: Credits) -> Rates:
    """Win rates with standard errors, of the models that have two or more verdicts."""
    rates = {name: win_rate(over_seeds(each)) for name, each in credits.items()}
    return {name: (each.win_rate, each.standard_error) for name, each in rates.items() if each.num_total > 1}


def table_rows(tables: Mapping[str, Rates], resamples: int) -> list[Row]:
    """Agreement of two tables; then without models whose row equals another one's, as one may be a copy."""
    (name, one), (other, two) = tables.items()
    copies = {model for table in (one, two) for model, row in table.items() if [*table.values()].count(row) > 1}
    rows = agreement_rows(tables, resamples, FIGURES)
    if any(model in one and model in two for model in copies):
        clean = {model: row for model, row in one.items() if model not in copies}
        rows += agreement_rows({name: clean, f"{other}, without rows that are equal": two}, resamples, FIGURES)
    return rows
