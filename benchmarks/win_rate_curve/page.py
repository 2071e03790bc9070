"""The page of the win-rate curve: tables, sample responses, findings and figures; the words are templates.

The step is chosen on val and compared with SFT on eval, from the rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...statistics import PERCENT, POSITIVE, SHARE, UNBOUNDED
from ..experiment.engine import Experiment, read_evaluation
from ..experiment.evaluation import OWN_WIN_RATE, SCORES, missing_at, subset
from ..experiment.own_judge import has_references
from ..harness.estimates import Estimate, drop, frame_of
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import Curve, Panel, draw
from ..harness.report import Provenance, Table, interval_text, number, sentences, signed
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
NUM_SAMPLES = 6
Comparison = Mapping[str, Estimate]
"""One measure on eval, over the seeds, at SFT ("sft"), at the "chosen" and the "last" step, and the paired "difference"
of chosen and SFT; without numbers where a seed has none."""


@dataclass(frozen=True)
class Choice:
    """Which evaluation of each seed is reported, and by what measure on val it was chosen."""

    steps: Mapping[int, int]
    """Seed -> step."""
    measure: str

    def values(self, curves: pd.DataFrame, measure: str) -> pd.Series[float]:
        """[S]: each seed's value at its chosen step."""
        return curves[measure].loc[list(self.steps.items())].droplevel("step")


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    curves, val = (curves_of(read_table(folder / f"{name}.csv")) for name in ("table", "val"))
    facts = read_manifest(folder)["facts"]
    choice, where = choose(val), Provenance(**facts["provenance"])
    compared, note = compare(curves, choice), f"{where.label()} {where.judges()}"
    caption = f"Mean over seeds [95 % interval]; differences are paired by seed. {note}"
    tables = {"summary": summary_table(compared, caption), "seeds": seeds_table(curves, val, choice)}
    if (file := folder / "samples.csv").exists():
        about = f"Instructions spread evenly over those evaluated, whatever the result. {note}"
        tables["samples"] = Table.of(read_table(file), about, "Responses before and after")
    found = sentences(
        "win_rate_curve/findings.txt.j2",
        choice=choice,
        changes={name: compared[name] for name in (*WIN_RATES, "gold", "proxy") if name in compared},
        length=compared["length"],
        peaked=after_peak(curves, choice),
        where=where,
        unscored=facts["unscored"],
        NAMES=NAMES,
        UNITS=UNITS,
    )
    return Page(
        "PPO and its win-rate curve",
        tables,
        found,
        draw_figures(curves, choice, where),
        headline(compared),
        method=sentences("win_rate_curve/method.txt.j2", where=where),
        simulated=where.sandbox,
        printed=("summary",),
    )


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
    compared: dict[str, Comparison] = {}
    for name in map(str, curves.columns):
        table, chosen = curves[name].unstack("step"), choice.values(curves, name)
        values = {"sft": table[0], "chosen": chosen, "last": table.iloc[:, -1]}
        means = {key: _whole(each, BOUNDS.get(UNITS[name], UNBOUNDED)) for key, each in values.items()}
        compared[name] = means | {"difference": _whole(chosen - table[0])}
    return compared


def after_peak(curves: pd.DataFrame, choice: Choice) -> dict[str, Any] | None:
    """How gold, or win rate where there is no gold, falls from its peak to the last step; None for one seed or neither.

    `fall`: its drop, each seed's peak chosen on the other seeds; `lost`: its value at the `step` at which the mean is
    highest less that at the chosen step; `won`: what the measure by which the step was chosen has gained meanwhile.
    """
    truth = next((name for name in ("gold", "win_rate_human", "win_rate") if name in curves), None)
    if truth is None or len(choice.steps) < 2:
        return None
    table = curves[truth].unstack("step")
    step = int(table.columns[int(table.mean().argmax())])
    won = choice.values(curves, choice.measure) - curves[choice.measure].unstack("step")[step]
    return {
        "truth": truth,
        "step": step,
        "fall": _whole(pd.Series(drop(table.to_numpy()))),
        "lost": _whole(table[step] - choice.values(curves, truth)),
        "won": _whole(won),
    }


def _whole(values: pd.Series[float], bounds: tuple[float, float] = UNBOUNDED) -> Estimate:
    """Over the seeds; without numbers where a seed has none (a mean of the others would hide it)."""
    return Estimate.of(values if values.notna().all() else values[:0], bounds)


def headline(compared: Mapping[str, Comparison]) -> str:
    """The first of gold, win rates and proxy there is, of SFT and of the chosen step."""
    name = next(name for name in ("gold", *WIN_RATES, "proxy") if name in compared)
    sft, chosen = (interval_text(compared[name][key], UNITS[name]) for key in ("sft", "chosen"))
    num = compared[name]["chosen"].num
    return f"{NAMES[name]} {sft} to {chosen}, {num} seed{'' if num == 1 else 's'}"


def summary_table(compared: Mapping[str, Comparison], caption: str) -> Table:
    """SFT, chosen step, last step and the paired difference, one row per measure."""
    rows = [
        {
            "measure": NAMES[name],
            "unit": UNITS[name],
            "SFT (step 0)": interval_text(row["sft"], UNITS[name]),
            "chosen step": interval_text(row["chosen"], UNITS[name]),
            "last step": interval_text(row["last"], UNITS[name]),
            "chosen − SFT": signed(row["difference"].mean, UNITS[name]),
            "standard error": number(row["difference"].standard_error),
            "n seeds": row["chosen"].num,
        }
        for name, row in compared.items()
    ]
    return Table.of(rows, caption)


def seeds_table(curves: pd.DataFrame, val: pd.DataFrame, choice: Choice) -> Table:
    """The chosen step of every seed, with its values on val and eval."""
    table = pd.DataFrame({"seed": choice.steps.keys(), "chosen step": choice.steps.values()})
    shown = [("val", val, choice.measure)]
    shown += [("eval", curves, name) for name in ("proxy", "gold", *WIN_RATES, "kl") if name in curves]
    for split, source, name in shown:
        table[f"{split}: {NAMES[name]}"] = [number(x, UNITS[name]) for x in choice.values(source, name)]
    return Table.of(table)


def samples(plan: Experiment, step: int) -> pd.DataFrame:
    """Some eval instructions of a run with the responses at step 0 and at `step`, and the reference if there is one.

    They are spread evenly over those evaluated, whatever the result.
    """
    before, after = (pd.DataFrame(read_evaluation(plan, place)["splits"]["eval"]) for place in (0, step))
    columns = {"SFT (step 0)": before.responses, f"PPO (step {step}, seed {plan.seed})": after.responses}
    rows = pd.DataFrame({"instruction": before.instructions, **columns})
    if has_references(plan.data, "eval"):
        pairs = zip(map(str, plan.data.instructions("eval")), plan.data.references("eval"), strict=True)
        rows["reference"] = rows.instruction.map(dict(pairs))
    return rows.iloc[subset(len(rows), NUM_SAMPLES)]


def unscored(plans: Sequence[Experiment], level: str) -> dict[str, int]:
    """Measure -> evaluated responses without a verdict, of the judges that the level has."""
    files = [read_evaluation(plan, place) for plan in plans for place in plan.places]
    parts = [part for file in files for part in file["splits"].values()]
    names = [name for name in (*SCORES, OWN_WIN_RATE) if name not in missing_at(level)]
    counts = {name: sum(part[name].count(None) for part in parts if name in part) for name in names}
    return {name: count for name, count in counts.items() if count}


def draw_figures(curves: pd.DataFrame, choice: Choice, where: Provenance) -> dict[str, Drawn]:
    """The figures with captions; what was not measured has no panel."""
    rewards, wins = ([name for name in names if name in curves] for names in (("proxy", "gold"), WIN_RATES))
    drawn = {
        "proxy_and_gold": ("Proxy and gold reward" if "gold" in curves else "Reward", [[name] for name in rewards]),
        "win_rates": ("Win rate against the reference", [wins] if wins else []),
    }
    figures, how = {}, "Thin: seeds; bold: their mean; shaded: its interval; dotted: the steps chosen on val."
    for name, (subject, panels) in drawn.items():
        if panels:
            title, shown = f"{subject} during PPO", [_panel(curves, choice, each) for each in panels]
            drawing = draw(shown, title, f"{where.label()} {where.judges()}")
            figures[name] = Drawn(drawing, f"{title}. {how} {where.label()}")
    return figures


def _panel(curves: pd.DataFrame, choice: Choice, names: Sequence[str]) -> Panel:
    unit, lines = UNITS[names[0]], []
    for name in names:
        table = curves[name].unstack("step")
        lines.append(Curve(NAMES[name], table.columns.to_numpy(float), table.to_numpy(), BOUNDS.get(unit, UNBOUNDED)))
    label = f"win rate ({unit})" if unit == "%" else f"{NAMES[names[0]]} ({unit})"
    level = 50.0 if unit == "%" else None
    return Panel("PPO step", label, lines, level=level, marks=tuple(choice.steps.values()))
