"""How often the sandbox's reward models are right: accuracy against gold on fresh pairs, with intervals.

    python -m alpacafarm_env.benchmarks.reward_model_accuracy [--num 2000] [--quick] [--seeds N] [--out DIR]

The pairs are new: instructions that stand in no split, each answered twice by the shipped SFT policy at temperature 1.
A pair of equal gold has no right answer and is drawn again; the share of such pairs is reported. The judges are asked
about the same pairs: their labels are what a reward model was given to learn from.

Calibration: a reward model says P(b preferred) = sigmoid(score(b) - score(a)), in the units it was trained in. Its
reliability compares that with the share of pairs on which the label of its own training judge agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing
from pydantic import Field

from .. import sandbox
from ..cli.options import Count
from ..folders import hash_folder, hash_model
from ..sandbox.dataset import ASSETS, Sandbox
from .experiment.reward_models import against_gold, fresh_pairs, predicted, reliability, share_row
from .harness.page import Drawn, Page, publish, read_table
from .harness.plots import grid, looks, titled
from .harness.report import Table, sentences
from .harness.runner import Cell, run_cells
from .harness.study import Row, StudyOptions, run_command

NAME = "reward_model_accuracy"
COLUMNS = (
    *("seed", "judge", "against", "subset", "accuracy", "low", "high", "n", "num_correct"),
    *("mean_gold_gap", "confidence", "num_equal"),
)
TRAINED_ON: Final = {"reward_model": "sim_ann", "reward_model_clean": "gold"}
"""Folder of a reward model -> the judge whose labels it was trained on."""
JUDGES: Final = ("gold", "sim_eval", "sim_ann", "sim_gpt4", "human")
MEANINGS: Final = {
    "reward_model": "the surrogate reward model, trained on labels of p_sim^ann (25 % flips)",
    "reward_model_clean": "the same model trained on gold's own labels",
    "gold": "labels of the true reward, right by definition",
    "sim_eval": "labels of p_sim^eval, the pool of 13 simulated annotators",
    "sim_ann": "labels of p_sim^ann, the same with 25 % flips",
    "sim_gpt4": "labels of p_sim^GPT-4, one greedy simulated annotator",
    "human": "labels of simulated human raters, one of 16 for each pair",
}
"""Who is measured, in the order of the tables."""
NUM_QUICK: Final = 400
FEWEST: Final = 30
"""Pairs of a point of the reliability figure."""
MERGED: Final = f"Confidences of fewer than {FEWEST} pairs are taken together with those below."
TARGET: Final = 80.0
"""The accuracy in percent that clean labels should lead to."""


@dataclass(frozen=True)
class AccuracyOptions(StudyOptions):
    """Measures the reward models' and the judges' accuracy against gold on fresh pairs."""

    name: ClassVar[str] = NAME

    seeds: Count = 1
    """Number of independent draws of fresh pairs; what is printed is over all of them together."""
    num: Annotated[int, Field(ge=8)] = 2000
    """Pairs of each draw, which are split into quartiles; with --quick 400 at most."""
    data: str | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""


def measure(assets: Path, num: int, seed: int) -> list[Row]:
    """All rows of one draw of fresh pairs: judges and reward models against gold, then the models' reliability."""
    pairs = fresh_pairs(Sandbox(assets / "data"), assets / "policy", seed, num)
    labels = {name: sandbox.judge(name, seed).compare(pairs.instructions, pairs.a, pairs.b) for name in JUDGES}
    chances = {name: predicted(assets / name, pairs) for name in TRAINED_ON}
    rows: list[Row] = []
    for name, chance in (chances | labels).items():
        rows += against_gold(name, chance, pairs.gap)
    for name, chance in chances.items():
        rows += reliability(name, chance, TRAINED_ON[name], labels[TRAINED_ON[name]])
    return [{"seed": seed, **row, "num_equal": pairs.num_equal} for row in rows]


def run(options: AccuracyOptions) -> int:
    """Draws, scores, prints and writes; the exit status says that all was done, not that an accuracy was reached."""
    assets = Path(options.data) if options.data else ASSETS
    num = min(options.num, NUM_QUICK) if options.quick else options.num
    sources = {name: partial(hash_model, assets / name) for name in ("policy", *TRAINED_ON)}
    sources["data"] = partial(hash_folder, assets / "data")
    with options.study(NAME, {"num": num}, sources=sources) as study:
        cells = [Cell.silent(f"seed {seed}", partial(measure, assets, num, seed)) for seed in range(options.seeds)]
        if rows := run_cells(study, cells):
            study.write_table(rows, COLUMNS)
            study.note(level="sandbox", reference="gold", judges=MEANINGS)
            publish(study, page(study.out))
            return study.finish()
        return study.exit_status


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    frame = read_table(folder / "table.csv")
    rows, note = pooled(frame), label(frame)
    total, bins = rows[rows.subset == "all"].set_index("judge"), merged(rows.dropna(subset="confidence"))
    shares = [f"{share(total.loc[name])} % by {judge}'s labels" for name, judge in TRAINED_ON.items()]
    return Page(
        "Accuracy of the sandbox's reward models",
        {"accuracy": accuracy_table(rows, note), "reliability": reliability_table(bins, f"{note} {MERGED}")},
        sentences(
            f"{NAME}.findings.txt.j2",
            models=list(TRAINED_ON),
            meanings=MEANINGS,
            target=TARGET,
            errors=calibration_errors(rows),
            judges=total.to_dict("index"),
        ),
        {"accuracy": draw_accuracy(rows, note), "reliability": draw_reliability(bins, note)},
        f"right against gold: {', '.join(shares)}; n = {total.n.iloc[0]} fresh pairs",
        method=sentences(f"{NAME}.method.txt.j2", meanings=MEANINGS),
    )


def label(rows: pd.DataFrame) -> str:
    """Level, n, seeds, interval and the share of pairs without a right answer, in one line."""
    draws = rows[rows.subset == "all"].drop_duplicates("seed")
    num, equal = draws.n.sum(), draws.num_equal.sum()
    return (
        f"Level: sandbox (simulation); n = {num} fresh pairs, seeds: {len(draws)}; Wilson 95 % intervals. "
        f"{100 * equal / (equal + num):.1f} % of the pairs drawn had equal gold and were drawn again."
    )


def pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each (judge, against, subset), in percent: the pairs of all seeds, or of several rows, together."""

    def pool(group: pd.DataFrame) -> pd.Series[Any]:
        means = {name: np.average(group[name], weights=group.n) for name in ("mean_gold_gap", "confidence")}
        return pd.Series({**share_row(group.num_correct.sum(), int(group.n.sum())), **means})

    together = rows.groupby(["judge", "against", "subset"], sort=False)[[*rows]].apply(pool).reset_index()
    together[["accuracy", "low", "high", "confidence"]] *= 100
    return together.astype({"n": int})


def merged(bins: pd.DataFrame) -> pd.DataFrame:
    """Bins of confidence, those of fewer than `FEWEST` pairs in one with those below: a few pairs say nothing."""
    place = (bins.n >= FEWEST).groupby(bins.judge).cumsum().clip(lower=1)
    ends = bins.groupby([bins.judge, place]).subset
    low, high = (ends.transform(which).str.split() for which in ("first", "last"))
    names = low.str[0] + " " + low.str[1] + " to " + high.str[3]
    return pooled(bins.assign(subset=names, confidence=bins.confidence / 100))


def calibration_errors(rows: pd.DataFrame) -> dict[str, float]:
    """Model -> expected calibration error: mean over the pairs of |mean confidence - agreement| of their bin, in %."""
    bins = rows.dropna(subset="confidence").groupby("judge", sort=False)
    return {str(model): float(np.average((own.confidence - own.accuracy).abs(), weights=own.n)) for model, own in bins}


def share(row: Any) -> str:
    """An accuracy with its interval."""
    return f"{row.accuracy:.1f} [{row.low:.1f}, {row.high:.1f}]"


def accuracy_table(rows: pd.DataFrame, note: str) -> Table:
    """Accuracy against gold in percent with its interval: of all pairs, and by quartile of |gold gap|."""
    against = rows.dropna(subset="mean_gold_gap")
    # Every judge is asked about the same pairs, so the counts of the first hold for all.
    first = against[against.judge == against.judge.iloc[0]]
    names = [f"{row.subset} (n = {row.n}, mean {row.mean_gold_gap:.2f})" for row in first.itertuples()]
    table = against.assign(cell=against.apply(share, axis=1)).pivot(index="judge", columns="subset", values="cell")
    table = table.loc[[*MEANINGS], first.subset].set_axis(names, axis=1).rename_axis("accuracy, %").reset_index()
    return Table.of(table, f"{note} mean: of |gold gap|. Quartile: bands by quartiles of the gap; ties fall together.")


def reliability_table(bins: pd.DataFrame, caption: str) -> Table:
    """How sure a reward model was, and how often the labels of its training judge agreed."""
    columns = {
        "reward model": bins.judge,
        "labels of": bins.against,
        "pairs": bins.subset,
        "mean confidence, %": bins.confidence.map("{:.1f}".format),
        "agreement, % [95 % interval]": bins.apply(share, axis=1),
        "n": bins.n,
    }
    return Table.of(pd.DataFrame(columns), caption)


def draw_accuracy(rows: pd.DataFrame, note: str) -> Drawn:
    """Accuracy by quartile; judges side by side at each, so that their intervals can be told apart."""
    quartiles = rows[rows.mean_gold_gap.notna() & (rows.subset != "all")]
    judges = {name: quartiles[quartiles.judge == name] for name in MEANINGS}
    x = {name: own.subset.str[-1].astype(int) + 0.06 * (place - 3) for place, (name, own) in enumerate(judges.items())}
    axes = {
        "xlabel": "band by quartiles of |gold gap|, smallest first",
        "ylabel": "pairs ordered as gold orders them (%)",
        "xticks": [1, 2, 3, 4],
    }
    title, how = "Accuracy against gold, by the size of the gold gap", "Solid: reward models; dotted: judges."
    return _draw({name: (x[name], own) for name, own in judges.items()}, ([1, 4], [50, 50]), axes, title, how, note)


def draw_reliability(bins: pd.DataFrame, note: str) -> Drawn:
    """Agreement by mean confidence, and where both are equal."""
    models = {str(name): (own.confidence, own) for name, own in bins.groupby("judge", sort=False)}
    axes = {"xlabel": "mean confidence, max(p, 1 - p) (%)", "ylabel": "pairs on which the label agrees (%)"}
    title = "Confidence and agreement with the training judge's labels"
    return _draw(models, ([50, 100], [50, 100]), axes, title, MERGED, note)


def _draw(lines: Any, dashed: Any, axes: Mapping[str, Any], title: str, how: str, note: str) -> Drawn:
    """Name -> x and shares with their intervals, a line each; models and the judge they learned from share a color."""
    figure = Drawing(figsize=(8.5, 4.6), dpi=150, layout="constrained")
    axis = figure.subplots()
    for (name, (x, own)), (color, marker) in zip(lines.items(), looks(lines), strict=True):
        line = "-" if name.startswith("reward_model") else ":"
        error = (own.accuracy - own.low, own.high - own.accuracy)
        axis.errorbar(x, own.accuracy, error, color=color, marker=marker, markersize=4.5, linestyle=line, label=name)
    axis.plot(*dashed, color="#888888", linestyle="--", linewidth=1)
    axis.set(**axes)
    grid(axis)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return Drawn(titled(figure, title, f"{how} {note}"), f"{title}. {how} {note}")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for 2 MB of weights breaks the study's own
    return run_command(lambda: run(AccuracyOptions.parse(args)))


if __name__ == "__main__":
    sys.exit(main())
