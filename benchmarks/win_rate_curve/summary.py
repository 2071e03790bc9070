"""What the win-rate curve says: the step chosen on val and the comparison with SFT on eval, from the rows alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...statistics import PERCENT, POSITIVE, SHARE, UNBOUNDED
from ..harness.estimates import Estimate, drop, frame_of
from ..harness.report import Verdict
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


def at_choice(curves: pd.DataFrame, measure: str, choice: Choice) -> "pd.Series[float]":
    """[S]: each seed's value at its chosen step."""
    return curves[measure].loc[list(choice.steps.items())].droplevel("step")


def _whole(values: "pd.Series[float]", bounds: tuple[float, float] = UNBOUNDED) -> Estimate:
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
