"""The page of the win-rate curve: tables, sample responses, findings and figures; the words are templates.

The step is chosen on val and compared with SFT on eval, from the rows alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...statistics import PERCENT, POSITIVE, SHARE, UNBOUNDED
from ..experiment.engine import Experiment, read_evaluation
from ..experiment.evaluation import OWN_WIN_RATE, SCORES, missing_at, subset
from ..experiment.own_judge import has_references
from ..harness.estimates import Estimate, drop, frame_of
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import Curve, Panel, draw
from ..harness.report import Provenance, Table, Verdict, interval_text, number, sentences, signed
from ..harness.study import Row

COLUMNS = ("seed", "step", "proxy", "gold", "win_rate_simulated", "win_rate_human", "kl", "length", "finished")
"""Columns of table.csv (eval) and val.csv: one row per seed and evaluation."""
WIN_RATES = ("win_rate_simulated", "win_rate_human", "win_rate")
"""Win rates in %; the last, by a judge of one's own, is a column where there is one."""
MEASURES = {
    "proxy": ("proxy reward", "reward-model units"),
    "gold": ("gold reward", "gold units"),
    "win_rate_simulated": ("win rate by p_sim^eval", "%"),
    "win_rate_human": ("win rate by human raters", "%"),
    "win_rate": ("win rate by the judge", "%"),
    "kl": ("KL from SFT", "nats a response"),
    "length": ("length", "characters"),
    "finished": ("finished share", "share"),
}
"""Measure -> what a reader calls it, and its unit."""
NAMES, UNITS = ({measure: both[i] for measure, both in MEASURES.items()} for i in (0, 1))
BOUNDS = {"%": PERCENT, "share": SHARE, "characters": POSITIVE, "nats a response": POSITIVE}
"""Unit -> the range of its means, where that is bounded."""
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
    return f"{NAMES[row.measure]} {sft} to {chosen}, {row.num} seed{'' if row.num == 1 else 's'}"


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


def samples(plan: Experiment, step: int) -> list[Row]:
    """Some eval instructions of a run with the responses at step 0 and at `step`, and the reference if there is one.

    They are spread evenly over those evaluated, whatever the result.
    """
    dataset, before, after = plan.data, *(read_evaluation(plan, number)["splits"]["eval"] for number in (0, step))
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


def unscored(plans: Sequence[Experiment], level: str) -> dict[str, int]:
    """Measure -> evaluated responses without a verdict, of the judges that the level has."""
    counts: Counter[str] = Counter()
    for plan in plans:
        for place in plan.places:
            for part in read_evaluation(plan, place)["splits"].values():
                counts.update({name: part[name].count(None) for name in (*SCORES, OWN_WIN_RATE) if name in part})
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


@dataclass(frozen=True)
class Choice:
    """Which evaluation of each seed is reported, and by what measure on val it was chosen."""

    steps: Mapping[int, int]
    """Seed -> step."""
    measure: str


@dataclass(frozen=True)
class Comparison:
    """One measure on eval, over the seeds; estimates without numbers where a seed has none."""

    measure: str
    unit: str
    sft: Estimate
    chosen: Estimate
    last: Estimate
    difference: Estimate
    """Chosen - SFT of the same seed."""
    after: Estimate
    """Last - chosen of the same seed."""
    num: int
    """Seeds that have a value at the chosen step."""


def curves_of(rows: Sequence[Row] | pd.DataFrame) -> pd.DataFrame:
    """The evaluations of one split: rows (seed, step), a column for each measure of the level."""
    frame = frame_of(rows).set_index(["seed", "step"]).sort_index()
    return frame.reindex(columns=list(MEASURES)).astype(float).dropna(axis="columns", how="all")


def choose(val: pd.DataFrame) -> Choice:
    """The step of each seed with the highest simulated win rate on val (the earliest of equals), as the paper does.

    Step 0 is not a candidate: it is SFT itself, and a choice that may fall back on it could never show that PPO did
    harm. Where the level has no simulated judge, one's own decides, else the proxy, which cannot see over-optimization.

    Raises:
        ValueError: No measure to choose by.
    """
    later = val.drop(index=0, level="step")
    for measure in ("win_rate_simulated", "win_rate", "proxy"):
        if measure in later and (table := later[measure].unstack("step")).notna().any(axis="columns").all():
            best = table.idxmax(axis="columns")
            return Choice(dict(zip(best.index.tolist(), best.tolist(), strict=True)), measure)
    raise ValueError("nothing to choose by: val has neither a win rate nor a proxy for every seed")


def compare(curves: pd.DataFrame, choice: Choice) -> dict[str, Comparison]:
    """Measure -> comparison, for each measure of the level, in the order of the table."""
    found = {}
    for name in map(str, curves.columns):
        table, unit = curves[name].unstack("step"), UNITS[name]
        sft, last, picked = table[0], table.iloc[:, -1], at_choice(curves, name, choice)
        before, after, end = (_whole(values, BOUNDS.get(unit, UNBOUNDED)) for values in (sft, picked, last))
        num = int(picked.notna().sum())
        found[name] = Comparison(name, unit, before, after, end, _whole(picked - sft), _whole(last - picked), num)
    return found


def after_peak(curves: pd.DataFrame, choice: Choice) -> Verdict | None:
    """Whether gold falls from its peak, wherever that is, to the last step; None without gold, or for one seed.

    `fall`: its drop, each seed's peak chosen on the other seeds; `lost`: gold at the step at which the mean is highest
    less that at the chosen step; `won`: what the win rate by which the step was chosen has gained meanwhile.
    """
    if "gold" not in curves or len(choice.steps) < 2:
        return None
    table = curves["gold"].unstack("step")
    step = int(table.columns[int(table.mean().argmax())])
    fall = _whole(pd.Series(drop(table.to_numpy())))
    lost = _whole(table[step] - at_choice(curves, "gold", choice))
    won = _whole(at_choice(curves, choice.measure, choice) - curves[choice.measure].unstack("step")[step])
    numbers = {"step": step, "fall": fall, "lost": lost, "won": won, "measure": choice.measure}
    return Verdict("gold_falls", fall.interval.low > 0, numbers)


def at_choice(curves: pd.DataFrame, measure: str, choice: Choice) -> pd.Series[float]:
    """[S]: each seed's value at its chosen step."""
    return curves[measure].loc[list(choice.steps.items())].droplevel("step")


def _whole(values: pd.Series[float], bounds: tuple[float, float] = UNBOUNDED) -> Estimate:
    """Over the seeds; without numbers where a seed has none (a mean of the others would hide it)."""
    known = values if values.notna().all() else values[:0]
    return Estimate.of(np.array(known, dtype=np.float64), bounds)


def over_optimization(comparisons: Mapping[str, Comparison], curves: pd.DataFrame, choice: Choice) -> Verdict | None:
    """Whether the proxy rises after the chosen step while a truth falls, both by their 95 % t-intervals.

    None where there is no truth; `holds` is None where nothing follows the choice, or one seed gives no error.
    """
    truths = [name for name in ("gold", "win_rate_human", "win_rate") if name in comparisons]
    if not truths or "proxy" not in comparisons:
        return None
    means = {name: curves[name].unstack("step").mean(skipna=False) for name in truths}
    last = int(curves.index.get_level_values("step").max())
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
