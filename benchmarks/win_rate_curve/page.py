"""The page of the win-rate curve: tables, sample responses, findings and figures; the words are templates."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...statistics import UNBOUNDED
from ..experiment.evaluation import missing_at, subset
from ..experiment.own_judge import has_references
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import Curve, Panel, draw
from ..harness.report import Provenance, Table, interval_text, number, sentences, signed
from ..harness.study import Row
from .plan import RunPlan
from .runs import read_evaluation
from .summary import (
    BOUNDS,
    NAMES,
    UNITS,
    WIN_RATES,
    Choice,
    Comparison,
    after_peak,
    at_choice,
    choose,
    compare,
    curves_of,
    over_optimization,
)

VERDICTS = {
    "gold": "gold {:.2f}",
    "proxy": "proxy {:.2f}",
    "win_rate_simulated": "win by p_sim^eval {:.2g}",
    "win_rate_human": "win by human raters {:.2g}",
    "win_rate": "win by the judge {:.2g}",
}
"""How a verdict on one response reads."""
NUM_SAMPLES = 6


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    curves, val, choice = stored_curves(folder)
    facts = read_manifest(folder)["facts"]
    where, comparisons = Provenance(**facts["provenance"]), compare(curves, choice)
    told = findings(comparisons, curves, choice, where, facts["unscored"])
    caption = f"Mean over seeds [95 % interval]; differences are paired by seed. {where.label()} {where.judges()}"
    tables = {"summary": replace(summary_table(comparisons), caption=caption), "seeds": run_table(curves, val, choice)}
    if (file := folder / "samples.csv").exists():
        tables["samples"] = samples_table(read_table(file), where)
    return Page(
        "PPO and its win-rate curve",
        tables,
        told,
        draw_figures(curves, val, choice, where),
        headline(comparisons),
        method=sentences("win_rate_curve/method.txt.j2", where=where),
        simulated=where.sandbox,
        printed=("summary",),
    )


def stored_curves(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, Choice]:
    """The evaluations on eval and on val, and the choice."""
    curves, val = (curves_of(read_table(folder / f"{name}.csv")) for name in ("table", "val"))
    return curves, val, choose(val)


def headline(comparisons: Mapping[str, Comparison]) -> str:
    """The first of gold, win rates and proxy there is, of SFT and of the chosen step."""
    names = ("gold", *WIN_RATES, "proxy")
    row = next(comparisons[name] for name in names if name in comparisons)
    sft, chosen = (interval_text(each.interval, row.unit) for each in (row.sft, row.chosen))
    return f"{NAMES[row.measure]} {sft} to {chosen}, {row.num} seeds"


def summary_table(comparisons: Mapping[str, Comparison]) -> Table:
    """SFT, chosen step, last step and the paired difference, one row per measure."""
    rows = []
    for name, row in comparisons.items():
        means = (interval_text(each.interval, row.unit) for each in (row.sft, row.chosen, row.last))
        difference = (signed(row.difference.mean, row.unit), number(row.difference.standard_error))
        rows.append((NAMES[name], row.unit, *means, *difference, str(row.num)))
    measured = ("SFT (step 0)", "chosen step", "last step", "chosen − SFT", "standard error", "n seeds")
    return Table(("measure", "unit", *measured), rows)


def run_table(curves: pd.DataFrame, val: pd.DataFrame, choice: Choice) -> Table:
    """The chosen step of every seed, with its values on val and eval."""
    table = pd.DataFrame({"seed": map(str, choice.steps), "chosen step": map(str, choice.steps.values())})
    shown = [("val", val, choice.measure)]
    shown += [("eval", curves, name) for name in ("proxy", "gold", *WIN_RATES, "kl") if name in curves]
    for split, source, name in shown:
        table[f"{split}: {NAMES[name]}"] = [number(x, UNITS[name]) for x in at_choice(source, name, choice)]
    return Table(tuple(map(str, table)), table.to_numpy().tolist())


def samples(plan: RunPlan, step: int) -> list[Row]:
    """Some eval instructions of a run with the responses at step 0 and at `step`, and the reference if there is one.

    They are spread evenly over those evaluated, whatever the result.
    """
    dataset, before, after = plan.job.data, *(read_evaluation(plan, number)["eval"] for number in (0, step))
    to_beat: dict[str, str] = {}
    if has_references(dataset, "eval"):
        to_beat = dict(zip(map(str, dataset.instructions("eval")), dataset.references("eval"), strict=True))
    rows = []
    for place in subset(len(before["instructions"]), NUM_SAMPLES):
        row = {"instruction": before["instructions"][place], "SFT (step 0)": describe_response(before, place)}
        row[f"PPO (step {step}, seed {plan.seed})"] = describe_response(after, place)
        rows.append(row | ({"reference": to_beat[row["instruction"]]} if to_beat else {}))
    return rows


def describe_response(evaluation: Mapping[str, Any], place: int) -> str:
    """A response of an evaluation file's "eval" part with its scores."""
    ending = "" if evaluation["finished"][place] else " [cut at the length limit]"
    verdicts = {text: evaluation[name][place] for name, text in VERDICTS.items() if name in evaluation}
    scores = "; ".join(text.format(value) for text, value in verdicts.items() if value is not None)
    return f"{evaluation['responses'][place]}{ending}\n\n{scores}"


def samples_table(rows: pd.DataFrame, where: Provenance) -> Table:
    """The rows of `samples`."""
    caption = (
        f"{len(rows)} instructions spread evenly over those evaluated, whatever the result. A win is a judge's verdict "
        f"on this response: 1 over the reference, 0 below it, else between. {where.label()} {where.judges()}"
    )
    return Table(tuple(map(str, rows)), rows.astype(str).to_numpy().tolist(), caption, "Responses before and after")


def unscored(plans: Sequence[RunPlan], level: str) -> dict[str, int]:
    """Measure -> evaluated responses without a verdict, of the judges that the level has."""
    counts: Counter[str] = Counter()
    for plan in plans:
        for step in plan.evaluated_steps:
            for found in read_evaluation(plan, step)["unscored"].values():
                counts.update(found)
    return {name: count for name, count in counts.items() if count and name not in missing_at(level)}


def findings(
    comparisons: Mapping[str, Comparison],
    curves: pd.DataFrame,
    choice: Choice,
    where: Provenance,
    unscored: Mapping[str, int],
) -> list[str]:
    """The sentences of findings.txt.j2."""
    return sentences(
        "win_rate_curve/findings.txt.j2",
        choice=choice,
        changes=[comparisons[name] for name in (*WIN_RATES, "gold", "proxy") if name in comparisons],
        length=comparisons["length"],
        optimized=over_optimization(comparisons, curves, choice),
        peaked=after_peak(curves, choice),
        UNITS=UNITS,
        where=where,
        unscored=unscored,
        NAMES=NAMES,
    )


def draw_figures(curves: pd.DataFrame, val: pd.DataFrame, choice: Choice, where: Provenance) -> dict[str, Drawn]:
    """The figures with captions; what was not measured has no panel."""
    panel = partial(_panel, curves, choice)
    rewards, wins, rest = (
        [name for name in names if name in curves]
        for names in (("proxy", "gold"), WIN_RATES, ("length", "finished", "kl"))
    )
    groups = [*([name] for name in rewards), *([wins] if wins else [])]
    won = [panel(*wins)] if wins else []
    if choice.measure in WIN_RATES:
        won.append(_panel(val, choice, choice.measure, split=f"val (n = {where.num_val}): "))
    drawn = {
        "proxy_and_gold": (
            "Proxy and gold reward" if len(rewards) > 1 else "Reward",
            [panel(name) for name in rewards],
        ),
        "win_rates": ("Win rate against the reference", won),
        "against_kl": ("Rewards and win rates" if wins else "Reward", [panel(*names, kl=True) for names in groups]),
        "length_and_finished": ("Length, finished share and KL", [panel(name) for name in rest]),
    }
    figures, note = {}, f"{where.label()} {where.judges()}"
    for name, (subject, panels) in drawn.items():
        if panels:
            title = f"{subject} {'against the distance from SFT' if name == 'against_kl' else 'during PPO'}"
            caption = f"{title}. Thin: seeds; bold: their mean; shaded: its interval. {where.label()}"
            figures[name] = Drawn(draw(panels, title, note), caption)
    return figures


def _panel(curves: pd.DataFrame, choice: Choice, *measures: str, kl: bool = False, split: str = "") -> Panel:
    tables = {name: curves[name].unstack("step") for name in measures}
    first = next(iter(tables.values()))
    x = np.broadcast_to(np.array(first.columns, dtype=np.float64), first.shape)
    if kl:  # an estimate near 0 may be a little below it
        x = np.sqrt(np.maximum(curves["kl"].unstack("step").to_numpy(), 0))
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
