"""The accuracy of reward models for people: tables, figures and sentences, computed from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..harness.plots import COLORS, titled
from ..harness.report import Table
from ..harness.study import Row

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
TARGET: Final = 0.80
"""The accuracy that clean labels should lead to."""


def label(rows: Sequence[Row]) -> str:
    """Level, n, seeds, interval and the share of pairs without a right answer, in one line."""
    draws = {row["seed"]: row for row in rows if row["subset"] == "all"}.values()
    num, equal = sum(row["n"] for row in draws), sum(row["num_equal"] for row in draws)
    return (
        f"Level: sandbox (simulation); n = {num} fresh pairs, seeds: {len(draws)}; Wilson 95 % intervals. "
        f"{100 * equal / (equal + num):.1f} % of the pairs drawn had equal gold and were drawn again."
    )


def accuracy_table(rows: Sequence[Row], caption: str) -> Table:
    """Accuracy against gold in percent with its interval: of all pairs, and by quartile of |gold gap|."""
    found = {(row["judge"], row["subset"]): row for row in _about_gold(rows)}
    # Every judge is asked about the same pairs, so the counts of the first hold for all.
    columns = {row["subset"]: row for row in _about_gold(rows) if row["judge"] == next(iter(MEANINGS))}
    header = [f"{name} (n = {row['n']}, mean {row['mean_gold_gap']:.2f})" for name, row in columns.items()]
    cells = [(name, *(" ".join(_share(found[name, subset])[:2]) for subset in columns)) for name in MEANINGS]
    return Table(("accuracy, %", *header), cells, f"{caption} mean: of |gold gap|.")


def reliability_table(rows: Sequence[Row], caption: str) -> Table:
    """How sure a reward model was, beside how often the labels of its training judge agreed."""
    header = ("reward model", "labels of", "pairs", "mean confidence, %", "agreement, %", "95 % interval", "n")
    cells = [
        (row["judge"], row["against"], row["subset"], f"{100 * row['confidence']:.1f}", *_share(row), str(row["n"]))
        for row in _about_confidence(rows)
    ]
    return Table(header, cells, caption)


def findings(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, in sentences."""
    total = {row["judge"]: row for row in _about_gold(rows) if row["subset"] == "all"}
    models = list(dict.fromkeys(row["judge"] for row in _about_confidence(rows)))
    sentences = [
        f"Right on {100 * total[name]['accuracy']:.1f} % [{100 * total[name]['low']:.1f}, "
        f"{100 * total[name]['high']:.1f}] of {total[name]['n']} fresh pairs: {MEANINGS[name]}."
        for name in models
    ]
    reached = total["reward_model_clean"]["accuracy"] >= TARGET
    sentences.append(f"Clean labels lead to {100 * TARGET:.0f} % or more: {'yes' if reached else 'NO'}.")
    errors = ", ".join(f"{name} {100 * calibration_error(rows, name):.1f}" for name in models)
    return [*sentences, f"Expected calibration error against the training judge's labels, in points: {errors}."]


def calibration_error(rows: Sequence[Row], model: str) -> float:
    """Expected calibration error: mean over the pairs of |mean confidence - agreement| of their bin, in [0, 1]."""
    bins = [row for row in _about_confidence(rows) if row["judge"] == model]
    return float(sum(row["n"] * abs(row["confidence"] - row["accuracy"]) for row in bins) / sum(r["n"] for r in bins))


def draw(rows: Sequence[Row], note: str) -> dict[str, tuple[str, Drawing]]:
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


def _draw_accuracy(axis: Axes, rows: Sequence[Row]) -> None:
    for place, (name, color) in enumerate(zip(MEANINGS, COLORS, strict=True)):
        own = [row for row in _about_gold(rows) if row["judge"] == name and row["subset"] != "all"]
        # Judges side by side at each quartile, so that their intervals can be told apart.
        x = [int(row["subset"][-1]) + 0.06 * (place - 3) for row in own]
        _draw_shares(axis, x, own, color, name)
    axis.axhline(0.5, color="#888888", linestyle="--", linewidth=1)
    axis.set_xticks([1, 2, 3, 4])
    axis.set(xlabel="quartile of |gold gap|, smallest first", ylabel="share of pairs ordered as gold orders them")


def _draw_reliability(axis: Axes, rows: Sequence[Row]) -> None:
    for model, color in zip(dict.fromkeys(row["judge"] for row in _about_confidence(rows)), COLORS, strict=False):
        own = [row for row in _about_confidence(rows) if row["judge"] == model]
        _draw_shares(axis, [row["confidence"] for row in own], own, color, f"{model}\n(labels of {own[0]['against']})")
    axis.plot([0.5, 1], [0.5, 1], color="#888888", linestyle="--", linewidth=1, label="calibrated")
    axis.set(xlabel="mean confidence, max(p, 1 - p)", ylabel="share of pairs on which the label agrees")


def _draw_shares(axis: Axes, x: Sequence[float], rows: Sequence[Row], color: str, name: str) -> None:
    values = [row["accuracy"] for row in rows]
    below = [row["accuracy"] - row["low"] for row in rows]
    above = [row["high"] - row["accuracy"] for row in rows]
    axis.errorbar(x, values, yerr=(below, above), color=color, marker="o", markersize=3.5, linewidth=1.2, label=name)


def _about_gold(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["mean_gold_gap"] is not None]


def _about_confidence(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["confidence"] is not None]


def _share(row: Row) -> tuple[str, str]:
    return f"{100 * row['accuracy']:.1f}", f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
