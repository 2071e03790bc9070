"""The accuracy of reward models for people: tables, figures and sentences, computed from the rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..harness.estimates import pivot
from ..harness.plots import COLORS, titled
from ..harness.report import Table, Verdict, sentences
from ..harness.reward_models import share_row

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
TARGET: Final = 80.0
"""The accuracy in percent that clean labels should lead to."""


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


def accuracy_table(rows: pd.DataFrame, caption: str) -> Table:
    """Accuracy against gold in percent with its interval: of all pairs, and by quartile of |gold gap|."""
    against = rows.dropna(subset="mean_gold_gap")
    cells = pivot(against.assign(cell=_shares(against).agg(" ".join, axis=1)), "judge", "subset", "cell")
    # Every judge is asked about the same pairs, so the counts of the first hold for all.
    first = against[against.judge == against.judge.iloc[0]]
    header = [f"{row.subset} (n = {row.n}, mean {row.mean_gold_gap:.2f})" for row in first.itertuples()]
    lines = [(name, *cells.loc[name]) for name in MEANINGS]
    return Table(("accuracy, %", *header), lines, f"{caption} mean: of |gold gap|.")


def reliability_table(rows: pd.DataFrame, caption: str) -> Table:
    """How sure a reward model was, beside how often the labels of its training judge agreed."""
    header = ("reward model", "labels of", "pairs", "mean confidence, %", "agreement, %", "95 % interval", "n")
    own = rows.dropna(subset="confidence")
    cells = pd.concat(
        [own[["judge", "against", "subset"]], own.confidence.map("{:.1f}".format), _shares(own), own.n.astype(str)],
        axis=1,
    )
    return Table(header, cells.to_numpy().tolist(), caption)


def findings(rows: pd.DataFrame) -> list[str]:
    """What the numbers say, in sentences."""
    errors = calibration_errors(rows)
    total = rows[rows.subset == "all"].set_index("judge")
    reached = Verdict("clean_labels_suffice", bool(total.accuracy["reward_model_clean"] >= TARGET), {"target": TARGET})
    models = {name: total.loc[name] for name in errors}
    return sentences(
        "reward_model_accuracy/findings.txt.j2", models=models, meanings=MEANINGS, verdict=reached, errors=errors
    )


def calibration_errors(rows: pd.DataFrame) -> dict[str, float]:
    """Model -> expected calibration error: mean over the pairs of |mean confidence - agreement| of their bin, in %."""
    own = rows.dropna(subset="confidence")
    return {
        str(model): float(np.average((bins.confidence - bins.accuracy).abs(), weights=bins.n))
        for model, bins in own.groupby("judge", sort=False)
    }


def draw(rows: pd.DataFrame, note: str) -> dict[str, tuple[str, Drawing]]:
    """File name -> (title, drawing)."""
    drawings = {
        "accuracy": ("Accuracy against gold, by the size of the gold gap", _draw_accuracy),
        "reliability": ("Confidence and agreement with the training judge's labels", _draw_reliability),
    }
    result = {}
    for name, (title, fill) in drawings.items():
        figure = Drawing(figsize=(8.5, 4.6), dpi=150, layout="constrained")
        axis = figure.subplots()
        fill(axis, rows)
        axis.grid(color="#eeeeee")
        axis.set_axisbelow(True)
        axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        result[name] = (title, titled(figure, title, note))
    return result


def _draw_accuracy(axis: Axes, rows: pd.DataFrame) -> None:
    quartiles = rows[rows.mean_gold_gap.notna() & (rows.subset != "all")]
    for place, (name, color) in enumerate(zip(MEANINGS, COLORS, strict=True)):
        own = quartiles[quartiles.judge == name]
        # Judges side by side at each quartile, so that their intervals can be told apart.
        _draw_shares(axis, own.subset.str[-1].astype(int) + 0.06 * (place - 3), own, color, name)
    axis.axhline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_xticks([1, 2, 3, 4])
    axis.set(xlabel="quartile of |gold gap|, smallest first", ylabel="pairs ordered as gold orders them (%)")


def _draw_reliability(axis: Axes, rows: pd.DataFrame) -> None:
    models = rows.dropna(subset="confidence").groupby("judge", sort=False)
    for (model, own), color in zip(models, COLORS, strict=False):
        _draw_shares(axis, own.confidence, own, color, f"{model}\n(labels of {own.against.iloc[0]})")
    axis.plot([50, 100], [50, 100], color="#888888", linestyle="--", linewidth=1, label="calibrated")
    axis.set(xlabel="mean confidence, max(p, 1 - p) (%)", ylabel="pairs on which the label agrees (%)")


def _draw_shares(axis: Axes, x: pd.Series[float], rows: pd.DataFrame, color: str, name: str) -> None:
    reach = (rows.accuracy - rows.low, rows.high - rows.accuracy)
    axis.errorbar(x, rows.accuracy, yerr=reach, color=color, marker="o", markersize=3.5, linewidth=1.2, label=name)


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Share and interval as text, a column each."""
    interval = [f"[{row.low:.1f}, {row.high:.1f}]" for row in rows.itertuples()]
    return pd.DataFrame({"share": rows.accuracy.map("{:.1f}".format), "interval": interval}, index=rows.index)
