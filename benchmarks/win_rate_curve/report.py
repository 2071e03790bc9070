"""The win-rate curve for people: figures, tables and words, computed from the rows, labelled with their judges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..harness import report
from ..harness.plots import Curve, Panel, draw, write_png
from ..harness.provenance import Provenance
from ..harness.report_text import interval_text, number, signed
from .summary import POINTS, UNITS, WIN_RATES, Choice, Comparison, Curves, bounds_of, peak_and_last

NAMES = {
    "proxy": "proxy reward",
    "gold": "gold reward",
    "win_rate_simulated": "win rate by p_sim^eval",
    "win_rate_human": "win rate by human raters",
    "win_rate": "win rate by the judge",
    "kl": "KL from SFT",
    "length": "length",
    "finished": "finished share",
}
"""Measure -> what a reader calls it."""


def write_figures(
    out: Path, eval_curves: Curves, val_curves: Curves, choice: Choice, where: Provenance
) -> list[report.Figure]:
    """Writes the PNG files into `out` and returns them with captions."""
    note = where.label()
    figures = []
    for name, (title, panels) in _figures(eval_curves, val_curves, choice, where.num_val).items():
        data = write_png(out / f"{name}.png", draw(panels, title, f"{note} {where.judges()}"))
        caption = f"{title}. Thin: seeds; bold: their mean; shaded: its interval. {note}"
        figures.append(report.Figure(data, caption))
    return figures


def summary_table(comparisons: Sequence[Comparison], where: Provenance) -> report.Table:
    """SFT, chosen step, last step and the paired difference, one row a measure."""
    measured = ("SFT (step 0)", "chosen step", "last step", "chosen − SFT", "standard error", "n seeds")
    caption = f"Mean over seeds [95 % interval]; differences are paired by seed. {where.label()} {where.judges()}"
    return report.Table(("measure", "unit", *measured), [_summary_row(row) for row in comparisons], caption)


def findings(comparisons: Sequence[Comparison], curves: Curves, choice: Choice) -> list[str]:
    """What the numbers say, in sentences computed from them."""
    by_measure = {row.measure: row for row in comparisons}
    steps = ", ".join(
        f"{curves.steps[column]} (seed {seed})" for seed, column in zip(curves.seeds, choice.columns, strict=True)
    )
    sentences = [f"Step chosen on val by {NAMES[choice.measure]}: {steps}; everything below is measured on eval."]
    if choice.measure == "proxy":
        sentences.append(
            "Val has no win rate, so the proxy chose: it cannot see over-optimization. --judge gives one where val has "
            "references."
        )
    told = (*WIN_RATES, "gold", "proxy")
    sentences += [_change(by_measure[measure]) for measure in told if measure in by_measure]
    if "length" in by_measure and by_measure["length"].sft.mean > 0:
        length = by_measure["length"]
        sentences.append(f"Responses are {length.chosen.mean / length.sft.mean:.2f} times as long as SFT's.")
    return sentences + _over_optimization(by_measure, curves, choice)


def run_table(eval_curves: Curves, val_curves: Curves, choice: Choice) -> report.Table:
    """The chosen step of every seed, with its values on val and eval."""
    shown = [name for name in ("proxy", "gold", *WIN_RATES, "kl") if eval_curves.has(name)]
    header = ("seed", "chosen step", f"val: {NAMES[choice.measure]}", *(f"eval: {NAMES[name]}" for name in shown))
    rows = []
    for index, (seed, column) in enumerate(zip(eval_curves.seeds, choice.columns, strict=True)):
        values = [number(eval_curves.values[name][index, column], UNITS[name]) for name in shown]
        on_val = number(val_curves.values[choice.measure][index, column], UNITS[choice.measure])
        rows.append((str(seed), str(eval_curves.steps[column]), on_val, *values))
    return report.Table(header, rows)


def meanings(where: Provenance) -> list[str]:
    """What each column of table.csv is."""
    return [
        "proxy: mean score of the reward model that PPO was trained on. gold: mean true reward. Each in its own units.",
        "win_rate_simulated, win_rate_human: percent of responses preferred to the reference "
        f"({where.reference}), by p_sim^eval and by the human raters; win_rate, where there is one, by the judge of "
        "one's own (--judge). A tie counts half.",
        "kl: mean over the responses of log π(response) − log π_SFT(response), in nats (the k1 estimator), both at "
        f"temperature {where.temperature:g}, at which the responses were sampled: an unbiased estimate of the KL "
        "between the two distributions that responses come from. PPO's metrics (runs/seed-*/metrics.jsonl) have the "
        "KL at its training temperature.",
        "length: mean characters of a response. finished: share of those that ended by themselves, not at the limit.",
        "Intervals over seeds are Student's; of win rates and shares on the logit scale, so that they stay in their "
        "range; of length and KL they are cut at 0, below which the true value cannot be.",
        f"Every evaluation answers the same {where.num_eval} eval and {where.num_val} val instructions with the same "
        "random numbers of a seed, so that differences between steps are due to the policy. val.csv has the same "
        "columns on val, where the step is chosen.",
        where.judges(),
    ]


def _figures(curves: Curves, val: Curves, choice: Choice, num_val: int) -> dict[str, tuple[str, list[Panel]]]:
    """File name -> title and panels; what was not measured here has none."""
    steps = np.broadcast_to(np.array(curves.steps, dtype=np.float64), (len(curves.seeds), len(curves.steps)))
    root_kl = np.sqrt(np.maximum(curves.values["kl"], 0))  # an estimate near 0 may come out a little below it
    chosen = tuple(float(curves.steps[column]) for column in choice.columns)
    wins = [name for name in WIN_RATES if curves.has(name)]
    val_wins = [name for name in (choice.measure,) if name in WIN_RATES]
    of_val = f"val (n = {num_val}): "

    def panel(measures: Sequence[str], *, against_kl: bool = False, source: Curves = curves, split: str = "") -> Panel:
        x = root_kl if against_kl else steps
        lines = [Curve(NAMES[name], x, source.values[name], bounds_of(name)) for name in measures]
        won = measures[0] in WIN_RATES
        name = "win rate" if won else NAMES[measures[0]]
        return Panel(
            "√KL from SFT (√nats)" if against_kl else "PPO step",
            f"{split}{name} ({UNITS[measures[0]]})",
            lines,
            level=50.0 if won else None,
            level_label="no preference",
            marks=() if against_kl else chosen,
            marks_label="chosen on val",
            whole_x=not against_kl,
        )

    rewards = [[name] for name in ("proxy", "gold") if curves.has(name)]
    measured = [*rewards, *([wins] if wins else [])]
    found = {
        "proxy_and_gold": (
            "Proxy and gold reward during PPO" if len(rewards) > 1 else "Reward during PPO",
            [panel(measures) for measures in rewards],
        ),
        "win_rates": (
            "Win rate against the reference during PPO",
            [*([panel(wins)] if wins else []), *(panel([name], source=val, split=of_val) for name in val_wins)],
        ),
        "against_kl": (
            f"{'Rewards and win rates' if wins else 'Reward'} against the distance from SFT",
            [panel(measures, against_kl=True) for measures in measured],
        ),
        "length_and_finished": (
            "Length, finished share and KL during PPO",
            [panel([name]) for name in ("length", "finished", "kl") if curves.has(name)],
        ),
    }
    return {name: (title, panels) for name, (title, panels) in found.items() if panels}


def _summary_row(row: Comparison) -> tuple[str, ...]:
    unit = UNITS[row.measure]
    intervals = [interval_text(value, unit) for value in (row.sft, row.chosen, row.last)]
    errors = (signed(row.difference, unit), number(row.standard_error))
    return (NAMES[row.measure], unit, *intervals, *errors, str(row.chosen.num))


def _change(row: Comparison) -> str:
    unit = UNITS[row.measure]
    unit_of_difference = POINTS.get(unit, unit)
    verb = "raised" if row.difference > 0 else "lowered" if row.difference < 0 else "did not change"
    sentence = (
        f"PPO {verb} the {NAMES[row.measure]} from {interval_text(row.sft, unit)} to "
        f"{interval_text(row.chosen, unit)} {unit}: "
        f"{signed(row.difference, unit)} {unit_of_difference}"
    )
    if math.isnan(row.standard_error):
        return sentence + " (one seed, no standard error)."
    clear = "" if abs(row.difference) > 2 * row.standard_error else ": not clearly more or less than no change"
    ratio = "" if math.isnan(row.ratio) else f", the difference is {abs(row.ratio):.1f} of them"
    return f"{sentence} (standard error over {row.chosen.num} seeds {number(row.standard_error)}{ratio}){clear}."


def _over_optimization(by_measure: Mapping[str, Comparison], curves: Curves, choice: Choice) -> list[str]:
    """Whether the proxy went on rising after the chosen step while a truth fell, by more than two standard errors."""
    truths = [name for name in ("gold", "win_rate_human", "win_rate") if name in by_measure]
    if not truths or "proxy" not in by_measure:
        return []
    sentences = []
    for name in truths:
        (step, peak, last), unit = peak_and_last(curves, name), UNITS[name]
        sentences.append(
            f"The mean {NAMES[name]} is highest at step {step} ({number(peak, unit)} {unit}) and is "
            f"{number(last, unit)} {unit} at the last step, {curves.steps[-1]}."
        )
    rows = [by_measure[name] for name in ("proxy", *truths)]
    followed = sum(column < len(curves.steps) - 1 for column in choice.columns)
    if not followed:
        return [*sentences, "Every seed's chosen step is its last: nothing follows it."]
    if math.isnan(rows[0].last_standard_error):
        return sentences
    moves = [
        f"{NAMES[row.measure]} {signed(row.last_minus_chosen)} (standard error {number(row.last_standard_error)})"
        for row in rows
    ]
    rises = rows[0].last_minus_chosen > 2 * rows[0].last_standard_error
    falls = any(row.last_minus_chosen < -2 * row.last_standard_error for row in rows[1:])
    verdict = "the proxy rises while a truth falls, over-optimization" if rises and falls else "no over-optimization"
    where = (
        f"From the chosen to the last step, which {len(choice.columns) - followed} of {len(choice.columns)} seeds chose"
    )
    return [*sentences, f"{where}: {', '.join(moves)}. By two standard errors: {verdict} after the choice."]
