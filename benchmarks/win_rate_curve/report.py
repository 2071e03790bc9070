"""The win-rate curve for people: figures, tables and findings, computed from the rows; the words are templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ...statistics import UNBOUNDED
from ..harness.plots import Curve, Panel, draw, write_png
from ..harness.report import Figure, Provenance, Table, Verdict, interval_text, number, sentences, signed
from .summary import BOUNDS, UNITS, WIN_RATES, Choice, Comparison, at_choice

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


def summary_table(comparisons: Mapping[str, Comparison]) -> Table:
    """SFT, chosen step, last step and the paired difference, one row a measure."""
    rows = []
    for name, row in comparisons.items():
        means = (interval_text(each.interval, row.unit) for each in (row.sft, row.chosen, row.last))
        difference = (signed(row.difference.mean, row.unit), number(row.difference.standard_error))
        rows.append((NAMES[name], row.unit, *means, *difference, str(row.num)))
    measured = ("SFT (step 0)", "chosen step", "last step", "chosen − SFT", "standard error", "n seeds")
    return Table(("measure", "unit", *measured), rows)


def run_table(curves: pd.DataFrame, val: pd.DataFrame, choice: Choice) -> Table:
    """The chosen step of every seed, with its values on val and eval."""
    shown = [name for name in ("proxy", "gold", *WIN_RATES, "kl") if name in curves]
    named = {f"val: {NAMES[choice.measure]}": (val, choice.measure)}
    named |= {f"eval: {NAMES[name]}": (curves, name) for name in shown}
    columns = [
        [number(value, UNITS[name]) for value in at_choice(source, name, choice)] for source, name in named.values()
    ]
    steps = [(str(seed), str(step)) for seed, step in choice.steps.items()]
    rows = [(*which, *values) for which, *values in zip(steps, *columns, strict=True)]
    return Table(("seed", "chosen step", *named), rows)


def findings(
    comparisons: Mapping[str, Comparison],
    curves: pd.DataFrame,
    choice: Choice,
    where: Provenance,
    unscored: Mapping[str, int],
) -> list[str]:
    """What the numbers say, in the sentences of findings.txt.j2."""
    told = [comparisons[name] for name in (*WIN_RATES, "gold", "proxy") if name in comparisons]
    return sentences(
        "win_rate_curve/findings.txt.j2",
        choice=choice,
        changes=told,
        length=comparisons["length"],
        optimized=over_optimization(comparisons, curves, choice),
        where=where,
        unscored=unscored,
        NAMES=NAMES,
    )


def over_optimization(comparisons: Mapping[str, Comparison], curves: pd.DataFrame, choice: Choice) -> Verdict | None:
    """Whether the proxy rises after the chosen step while a truth falls, by more than two standard errors.

    None where there is no truth; `holds` is None where nothing follows the choice, or one seed gives no error.
    """
    truths = [name for name in ("gold", "win_rate_human", "win_rate") if name in comparisons]
    if not truths or "proxy" not in comparisons:
        return None
    last = int(curves.index.get_level_values("step").max())
    means = {name: curves[name].unstack("step").mean(skipna=False) for name in truths}
    peaks = [
        (name, int(mean.index[int(mean.argmax())]), mean.max(), mean[last], UNITS[name]) for name, mean in means.items()
    ]
    moves = {name: comparisons[name].after for name in ("proxy", *truths)}
    chose_last = sum(step == last for step in choice.steps.values())
    rises = moves["proxy"].clear and moves["proxy"].mean > 0
    falls = any(moves[name].clear and moves[name].mean < 0 for name in truths)
    known = chose_last < len(choice.steps) and len(choice.steps) > 1
    numbers = {"peaks": peaks, "last": last, "moves": moves, "chose_last": chose_last, "num": len(choice.steps)}
    return Verdict("over_optimization", (rises and falls) if known else None, numbers)


def write_figures(
    out: Path, curves: pd.DataFrame, val: pd.DataFrame, choice: Choice, where: Provenance
) -> list[Figure]:
    """Writes the PNG files into `out` and returns them with captions."""
    figures = []
    for name, (title, panels) in _figures(curves, val, choice, where.num_val).items():
        data = write_png(out / f"{name}.png", draw(panels, title, f"{where.label()} {where.judges()}"))
        caption = f"{title}. Thin: seeds; bold: their mean; shaded: its interval. {where.label()}"
        figures.append(Figure(data, caption))
    return figures


def _figures(
    curves: pd.DataFrame, val: pd.DataFrame, choice: Choice, num_val: int
) -> dict[str, tuple[str, list[Panel]]]:
    """File name -> title and panels; what was not measured here has none."""

    def panel(*measures: str, kl: bool = False, source: pd.DataFrame = curves, split: str = "") -> Panel:
        tables = {name: source[name].unstack("step") for name in measures}
        first = next(iter(tables.values()))
        x = np.broadcast_to(np.array(first.columns, dtype=np.float64), first.shape)
        if kl:  # an estimate near 0 may come out a little below it
            x = np.sqrt(np.maximum(source["kl"].unstack("step").to_numpy(), 0))
        won, unit = measures[0] in WIN_RATES, UNITS[measures[0]]
        bounds = BOUNDS.get(unit, UNBOUNDED)
        return Panel(
            "√KL from SFT (√nats)" if kl else "PPO step",
            f"{split}{'win rate' if won else NAMES[measures[0]]} ({unit})",
            [Curve(NAMES[name], x, table.to_numpy(), bounds) for name, table in tables.items()],
            level=50.0 if won else None,
            level_label="no preference",
            marks=() if kl else tuple(map(float, choice.steps.values())),
            marks_label="chosen on val",
            whole_x=not kl,
        )

    rewards, wins = ([name for name in names if name in curves] for names in (("proxy", "gold"), WIN_RATES))
    measured: list[Sequence[str]] = [*([name] for name in rewards), *([wins] if wins else [])]
    on_val = [panel(choice.measure, source=val, split=f"val (n = {num_val}): ")] if choice.measure in WIN_RATES else []
    found = {
        "proxy_and_gold": (
            "Proxy and gold reward during PPO" if len(rewards) > 1 else "Reward during PPO",
            [panel(name) for name in rewards],
        ),
        "win_rates": ("Win rate against the reference during PPO", [*([panel(*wins)] if wins else []), *on_val]),
        "against_kl": (
            f"{'Rewards and win rates' if wins else 'Reward'} against the distance from SFT",
            [panel(*names, kl=True) for names in measured],
        ),
        "length_and_finished": (
            "Length, finished share and KL during PPO",
            [panel(name) for name in ("length", "finished", "kl") if name in curves],
        ),
    }
    return {name: (title, panels) for name, (title, panels) in found.items() if panels}
