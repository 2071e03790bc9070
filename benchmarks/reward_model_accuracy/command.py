"""How often the sandbox's reward models are right: accuracy against gold on fresh pairs, with intervals.

    python -m alpacafarm_env.benchmarks.reward_model_accuracy [--num 2000] [--quick] [--seeds N] [--out DIR]

The pairs are new: instructions that stand in no split, each answered twice by the shipped SFT policy at temperature 1.
A pair of equal gold has no right answer and is drawn again; the share of such pairs is reported. The judges are asked
about the same pairs: their labels are what a reward model was given to learn from.

Calibration: a reward model says P(b preferred) = sigmoid(score(b) - score(a)), in the units it was trained in. Its
reliability compares that with the share of pairs on which the label of its own training judge agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ... import sandbox
from ...cli.options import parse
from ...errors import CheckpointError
from ...folders import hash_folder, hash_model
from ...sandbox.dataset import ASSETS, Sandbox
from ..experiment.reward_models import against_gold, fresh_pairs, predicted, reliability, share_row
from ..harness.estimates import pivot
from ..harness.page import Drawn, Page, publish, read_table
from ..harness.plots import looks, titled
from ..harness.report import Table, Verdict, sentences
from ..harness.runner import Cell, run_cells
from ..harness.study import Row, StudyOptions, run_command

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

    seeds: int = 1
    """Number of independent draws of fresh pairs; what is printed is over all of them together."""
    num: int = 2000
    """Pairs of each draw; with --quick 400 at most."""
    data: str | None = None
    """A folder of the sandbox's assets, as build_sandbox writes it, instead of the shipped one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num < 8:
            raise ValueError(f"--num: expected 8 pairs or more, as they are split into quartiles, got {self.num!r}")


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
    if missing := [name for name in ("data", "policy", *TRAINED_ON) if not (assets / name).is_dir()]:
        raise CheckpointError(
            f"{assets}: expected the sandbox's assets, found no folder {', '.join(missing)}. Rebuild them with "
            "python -m alpacafarm_env.benchmarks.build_sandbox, or give their folder by --data."
        )
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
    every, note = pooled(frame), label(frame)
    rows = merged(every)
    tables = {"accuracy": accuracy_table(rows, note), "reliability": reliability_table(rows, note)}
    figures = {name: Drawn(drawing, f"{title} {note}") for name, (title, drawing) in draw(rows, note).items()}
    return Page(
        "Accuracy of the sandbox's reward models",
        tables,
        findings(every),
        figures,
        headline(rows),
        method=sentences(f"{NAME}/method.txt.j2", meanings=MEANINGS),
    )


def headline(rows: pd.DataFrame) -> str:
    """The accuracy of both reward models."""
    total = rows[rows.subset == "all"].set_index("judge")
    shares = _shares(total).agg(" ".join, axis=1)
    told = [f"{shares[name]} % by {judge}'s labels" for name, judge in TRAINED_ON.items()]
    return f"right against gold: {', '.join(told)}; n = {total.n.iloc[0]} fresh pairs"


def label(rows: pd.DataFrame) -> str:
    """Level, n, seeds, interval and the share of pairs without a right answer, in one line."""
    draws = rows[rows.subset == "all"].drop_duplicates("seed")
    num, equal = draws.n.sum(), draws.num_equal.sum()
    return (
        f"Level: sandbox (simulation); n = {num} fresh pairs, seeds: {len(draws)}; Wilson 95 % intervals. "
        f"{100 * equal / (equal + num):.1f} % of the pairs drawn had equal gold and were drawn again."
    )


def pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each (judge, against, subset), in percent: the pairs of all seeds together."""

    def pool(group: pd.DataFrame) -> pd.Series[Any]:
        means = {name: np.average(group[name], weights=group.n) for name in ("mean_gold_gap", "confidence")}
        return pd.Series({**share_row(group.num_correct.sum(), int(group.n.sum())), **means})

    found = rows.groupby(["judge", "against", "subset"], sort=False)[list(rows.columns)].apply(pool).reset_index()
    found[["accuracy", "low", "high", "confidence"]] *= 100
    return found.astype({"n": int})


def merged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, confidences of fewer than `FEWEST` pairs in one with those below: a few pairs say nothing."""
    kept: list[Any] = []
    row: Any
    for row in rows.to_dict("records"):
        if row["confidence"] == row["confidence"] and kept and kept[-1]["judge"] == row["judge"]:
            last = kept[-1]
            if last["confidence"] == last["confidence"] and min(row["n"], last["n"]) < FEWEST:
                kept[-1] = _joined(last, row)
                continue
        kept.append(row)
    return pd.DataFrame(kept)


def _joined(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    right, num = low["num_correct"] + high["num_correct"], low["n"] + high["n"]
    share = share_row(right, num)
    confidence = (low["confidence"] * low["n"] + high["confidence"] * high["n"]) / num
    subset = f"{low['subset'].partition(' to ')[0]} to {high['subset'].partition(' to ')[2]}"
    percent = {name: 100 * share[name] for name in ("accuracy", "low", "high")}
    return {**low, **share, **percent, "subset": subset, "confidence": confidence}


def accuracy_table(rows: pd.DataFrame, caption: str) -> Table:
    """Accuracy against gold in percent with its interval: of all pairs, and by quartile of |gold gap|."""
    against = rows.dropna(subset="mean_gold_gap")
    cells = pivot(against.assign(cell=_shares(against).agg(" ".join, axis=1)), "judge", "subset", "cell")
    # Every judge is asked about the same pairs, so the counts of the first hold for all.
    first = against[against.judge == against.judge.iloc[0]]
    header = [f"{row.subset} (n = {row.n}, mean {row.mean_gold_gap:.2f})" for row in first.itertuples()]
    lines = [(name, *cells.loc[name]) for name in MEANINGS]
    return Table(
        ("accuracy, %", *header),
        lines,
        f"{caption} mean: of |gold gap|. Quartile: bands by quartiles of the gap; ties fall together.",
    )


def reliability_table(rows: pd.DataFrame, caption: str) -> Table:
    """How sure a reward model was, and how often the labels of its training judge agreed."""
    caption += f" {MERGED}"
    header = ("reward model", "labels of", "pairs", "mean confidence, %", "agreement, %", "95 % interval", "n")
    own = rows.dropna(subset="confidence")
    columns = [
        own[["judge", "against", "subset"]],
        own.confidence.map("{:.1f}".format),
        _shares(own),
        own.n.astype(str),
    ]
    return Table(header, pd.concat(columns, axis=1).to_numpy().tolist(), caption)


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share and interval as text, a column each."""
    interval = [f"[{row.low:.1f}, {row.high:.1f}]" for row in rows.itertuples()]
    return pd.DataFrame({"share": rows.accuracy.map("{:.1f}".format), "interval": interval}, index=rows.index)


def findings(rows: pd.DataFrame) -> list[str]:
    """The numbers in sentences."""
    errors = calibration_errors(rows)
    total = rows[rows.subset == "all"].set_index("judge")
    reached = Verdict("clean_labels_suffice", bool(total.accuracy["reward_model_clean"] >= TARGET), {"target": TARGET})
    models = {name: total.loc[name] for name in errors}
    return sentences(
        f"{NAME}/findings.txt.j2",
        models=models,
        meanings=MEANINGS,
        verdict=reached,
        errors=errors,
        judges=total.to_dict("index"),
    )


def calibration_errors(rows: pd.DataFrame) -> dict[str, float]:
    """Model -> expected calibration error: mean over the pairs of |mean confidence - agreement| of their bin, in %."""
    own = rows.dropna(subset="confidence")
    return {
        str(model): float(np.average((bins.confidence - bins.accuracy).abs(), weights=bins.n))
        for model, bins in own.groupby("judge", sort=False)
    }


def draw(rows: pd.DataFrame, note: str) -> dict[str, tuple[str, Drawing]]:
    """File name -> (title and what is drawn how, drawing)."""
    drawings = {
        "accuracy": (
            "Accuracy against gold, by the size of the gold gap",
            "Solid: reward models; dotted: judges.",
            _draw_accuracy,
        ),
        "reliability": ("Confidence and agreement with the training judge's labels", MERGED, _draw_reliability),
    }
    result = {}
    for name, (title, more, fill) in drawings.items():
        figure = Drawing(figsize=(8.5, 4.6), dpi=150, layout="constrained")
        axis = figure.subplots()
        fill(axis, rows)
        axis.grid(color="#eeeeee")
        axis.set_axisbelow(True)
        axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        result[name] = (f"{title}. {more}", titled(figure, title, f"{more} {note}"))
    return result


def _draw_accuracy(axis: Axes, rows: pd.DataFrame) -> None:
    quartiles = rows[rows.mean_gold_gap.notna() & (rows.subset != "all")]
    for place, (name, style) in enumerate(zip(MEANINGS, looks(MEANINGS), strict=True)):
        own = quartiles[quartiles.judge == name]
        # Judges side by side at each quartile, so that their intervals can be told apart.
        _draw_shares(axis, own.subset.str[-1].astype(int) + 0.06 * (place - 3), own, style, name)
    axis.axhline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_xticks([1, 2, 3, 4])
    axis.set(xlabel="band by quartiles of |gold gap|, smallest first", ylabel="pairs ordered as gold orders them (%)")


def _draw_reliability(axis: Axes, rows: pd.DataFrame) -> None:
    models = rows.dropna(subset="confidence").groupby("judge", sort=False)
    for (model, own), style in zip(models, looks(TRAINED_ON), strict=True):
        _draw_shares(axis, own.confidence, own, style, f"{model}\n(labels of {own.against.iloc[0]})")
    axis.plot([50, 100], [50, 100], color="#888888", linestyle="--", linewidth=1, label="calibrated")
    axis.set(xlabel="mean confidence, max(p, 1 - p) (%)", ylabel="pairs on which the label agrees (%)")


def _draw_shares(axis: Axes, x: pd.Series[float], rows: pd.DataFrame, style: tuple[str, str], name: str) -> None:
    reach, (color, marker) = (rows.accuracy - rows.low, rows.high - rows.accuracy), style
    # Models and the judge that they learned from have one color: lines tell models from judges.
    line: dict[str, Any] = {"linestyle": "-" if name.startswith("reward_model") else ":", "linewidth": 1.2}
    axis.errorbar(x, rows.accuracy, yerr=reach, color=color, marker=marker, markersize=4.5, label=name, **line)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for 2 MB of weights breaks the study's own
    prog = f"python -m alpacafarm_env.benchmarks.{NAME}"
    return run_command(lambda: run(parse(AccuracyOptions, args, prog=prog)))
