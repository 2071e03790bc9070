"""The protocol's rows for people: tables, figures, and sentences computed from the numbers."""

import math
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from ..harness.plots import COLORS, place_labels, titled
from ..harness.report import Table, seeds_text, sentences
from .analysis import ALL, BANDS, POWER, SAME, SET_SIZE, SETS, UPSTREAM, WANTED
from .answers import EVAL, FRESH, LIVE
from .levels import CROSS, EARLY, FEW, NO_INPUT

LEVELS: Final = {"sandbox": "Sandbox (simulation)", "recorded": "Recorded (stored verdicts on real models)"}
JUDGES: Final = {
    "sim_eval": "p_sim^eval",
    "human": "16 simulated human raters",
    "gpt4": "GPT-4",
    "claude": "Claude",
    "gpt4, models of Claude's table": "GPT-4, models of Claude's table",
}
NAMES: Final = {
    "r2": "r²",
    "spearman": "Spearman",
    "kendall": "Kendall's tau-b",
    "shift": "mean change of win rate, points",
    "largest_difference": "largest difference, points",
    "needed_for_90": "instructions that tell 90 % of the pairs apart",
    "gap_found_4_of_5": "gap found with a chance of 80 %, points",
    "sets_that_need_300_or_fewer": "share of random sets that need 300 or fewer",
}
"""Figures in the tables of agreement."""
SETS_DRAWN: Final = {
    LIVE: ("held-out users", "o", COLORS[0], COLORS[0]),
    FRESH: ("drawn anew with eval’s mixture", "s", COLORS[1], "none"),
}
"""Set -> its name, mark and colors in the figure."""
PAIRS_NOTE: Final = (
    "Bands: middle 95 % of the shuffles. In brackets: number of pairs, of all seeds. Dashed: 90 % and upstream's 300."
)


def judge_name(judge: Any) -> str:
    """A judge's name for readers."""
    return JUDGES.get(judge, str(judge))


def agreement_table(rows: pd.DataFrame, title: str, *parts: str) -> Table:
    """The figures in `NAMES` of some parts of the table."""
    rows = rows[rows.part.isin(parts) & rows.figure.isin(NAMES)]
    # 300 instructions are AlpacaEval's own figure, of pairs of models.
    models, paper = ("pairs or sets", "AlpacaEval") if parts == ("pairs",) else ("models", "paper")
    whole = rows.figure == "needed_for_90"
    value, low, high = (
        _texts(rows[name], ".3f").where(~whole, _texts(rows[name], ".0f", "never")) for name in ("value", "low", "high")
    )
    columns = {
        "level": rows.level,
        "judge": rows.judge.map(judge_name),
        "what": rows.figure.map(NAMES),
        "of": rows.subject,
        "with": rows.other,
        "value": value,
        "95 % interval": (low + " to " + high).where(rows.low.notna() | rows.high.notna(), "–"),
        "n": _texts(rows.n, ".0f"),
        models: _texts(rows.models, ".0f"),
        paper: _texts(rows.paper, "g"),
    }
    lines = list(zip(*columns.values(), strict=True))
    return Table(tuple(columns), lines, "n: instructions, of two sets the smaller one.", title)


def _texts(numbers: pd.Series, form: str, none: str = "–") -> pd.Series:
    return numbers.map(lambda value: none if math.isnan(value) else format(value, form))


def _spans(rows: pd.DataFrame, form: str) -> pd.Series:
    """Values with their intervals."""
    value, low, high = (_texts(rows[name], form) for name in ("value", "low", "high"))
    return value + (" [" + low + ", " + high + "]").where(rows.low.notna(), "")


def tables(rows: pd.DataFrame) -> dict[str, Table]:
    """All tables, by name; without lines where there are no rows."""
    return {
        "agreement": agreement_table(rows, "Agreement of two evaluations over generators", "live", "judges"),
        "sources": agreement_table(rows, "Agreement between sources", "sources"),
        "pairs": agreement_table(rows, "Telling models apart", "pairs"),
    }


def note(rows: pd.DataFrame, num_seeds: int) -> str:
    """The levels and the number of seeds."""
    levels = ", ".join(LEVELS[level] for level in rows.level.unique())
    return f"Level: {levels}. {seeds_text([num_seeds])} in the sandbox."


def headline(rows: pd.DataFrame) -> str:
    """How well the evaluation set agrees with held-out users' instructions."""
    live = rows[(rows.figure == "r2") & (rows.subject == EVAL) & (rows.other == LIVE) & (rows.judge != CROSS)]
    texts = ", ".join(_spans(live, ".3f") + " by " + live.judge.map(judge_name))
    generators = f"{live.models.max():.0f} generators of the sandbox"
    return f"r² with held-out users' instructions: {texts}; {generators}" if texts else ""


def findings(rows: pd.DataFrame) -> list[str]:
    """The sentences, one each line of the template."""
    shown = rows.assign(text=_spans(rows, ".3f"), share=_spans(rows, ".1%"))
    parts: dict[str, list[dict[str, Any]]] = {part: [] for part in ("live", "judges", "pairs")}
    for (part, level, judge), own in shown.groupby(["part", "level", "judge"], sort=False):
        # For the template: rows by what they compare, and by the number of their instructions.
        by, of = ({(row.figure, row.subject, row[key]): row for _, row in own.iterrows()} for key in ("other", "n"))
        at = f"{str(level).capitalize()}, {judge_name(judge)}"
        parts.setdefault(str(part), []).append({"at": at, "judge": judge, "by": by, "of": of, "most": own.n.max()})
    names = {"crossed": CROSS, "few": FEW, "bare": NO_INPUT, "all": ALL, "same": SAME, "sets": SETS, "close": BANDS[1]}
    shares = {"wanted": f"{100 * WANTED:.0f}", "power": f"{100 * POWER:.0f}"}
    numbers = {**shares, "upstream": UPSTREAM, "set_size": SET_SIZE}
    return sentences("protocol/findings.txt.j2", parts=parts, names=names, **numbers)


def drawings(rows: pd.DataFrame) -> dict[str, tuple[str, Drawing]]:
    """File -> title and figure, of what there are rows for."""
    drawn = {}
    if ((rows.part == "live") & (rows.figure == "win_rate")).any():
        drawn["live"] = ("The 805 against held-out users", draw_live(rows, "Level: sandbox (simulation)."))
    pairs = rows[(rows.figure == "told_apart") & (rows.judge != EARLY)]
    if len(pairs):
        drawn["pairs"] = ("How many instructions tell models apart", draw_pairs(pairs))
    return drawn


def draw_live(rows: pd.DataFrame, note: str) -> Drawing:
    """A panel for each judge: win rates on held-out users' (filled) and fresh instructions (hollow) against eval."""
    live = rows[rows.part == "live"]
    agreed = live[(live.figure == "r2") & (live.subject == EVAL)].set_index(["judge", "other"]).value
    judges = live[live.figure == "win_rate"].groupby("judge", sort=False)
    figure, axes = _panels(len(judges), 6.4, 6.0)
    for axis, (judge, own) in zip(axes, judges, strict=True):
        sets = {which: each.set_index("subject") for which, each in own.groupby("other")}
        for which, (who, mark, color, fill) in SETS_DRAWN.items():
            x, y = sets[EVAL].loc[sets[which].index], sets[which]
            errors = {"xerr": x.standard_error.fillna(0), "yerr": y.standard_error.fillna(0), "elinewidth": 0.7}
            style: dict[str, Any] = {"fmt": mark, "color": color, "markerfacecolor": fill, "markersize": 5, **errors}
            axis.errorbar(x.value, y.value, label=f"{who} (n = {y.n.iloc[0]:.0f})", **style)
        ends = max(-3.0, own.value.min() - 8), min(103.0, own.value.max() + 8)
        axis.plot(ends, ends, color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
        axis.set(xlim=ends, ylim=ends, aspect="equal", axisbelow=True)
        axis.set(xlabel="win rate on the evaluation set (%)", ylabel="win rate on the held-out set (%)")
        axis.legend(fontsize=8, frameon=False, loc="upper left")
        words = [f"r² {which} {agreed[judge, which]:.3f}" for which in SETS_DRAWN if (judge, which) in agreed.index]
        axis.set_title(f"{judge_name(judge)}: {', '.join(words)}", fontsize=10, loc="left")
    titled(figure, "Win rates on held-out instructions against those on the evaluation set", note)
    for axis, (_, own) in zip(axes, judges, strict=True):
        points = own.pivot(index="subject", columns="other", values="value").dropna(subset=[EVAL, LIVE])
        place_labels(axis, {str(name): (x, y) for name, x, y in points[[EVAL, LIVE]].itertuples()})
    return figure


def draw_pairs(rows: pd.DataFrame) -> Drawing:
    """Share of pairs told apart against the number of instructions, a panel for each judge."""
    judges = rows.groupby(["level", "judge"], sort=False)
    figure, axes = _panels(len(judges), 7.0, 3.0)
    for axis, ((level, judge), own) in zip(axes, judges, strict=True):
        for number, (subject, curve) in enumerate(own[own.subject != SETS].groupby("subject", sort=False)):
            color = "black" if subject == ALL else COLORS[(number - 1) % len(COLORS)]
            low, high = (curve[end].fillna(curve.value) for end in ("low", "high"))
            axis.fill_between(curve.n, low, high, color=color, alpha=0.12, linewidth=0)
            line = ":" if subject == SAME else ("-", "--", "-.")[number % 3]
            label = f"{subject} ({curve.models.iloc[0]:.0f})"
            axis.plot(curve.n, curve.value, label=label, linestyle=line, color=color, linewidth=1.8)
        axis.axhline(WANTED, color="#888888", linestyle="--", linewidth=1)
        axis.axvline(UPSTREAM, color="#888888", linestyle="--", linewidth=1)
        axis.set(ylim=(-0.02, 1.02), xlabel="instructions", ylabel="share of pairs told apart")
        axis.set_title(f"{judge_name(judge)} ({level})", fontsize=10, loc="left")
        axis.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return titled(figure, "Pairs of models told apart by a paired t-test, p < .05", PAIRS_NOTE)


def _panels(count: int, width: float, height: float) -> tuple[Drawing, list[Axes]]:
    """A figure of panels below each other, with the size of each in inches."""
    figure = Drawing(figsize=(1 + width, 1 + height * count), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    axes = figure.subplots(count, 1, squeeze=False).ravel().tolist()
    for axis in axes:
        axis.grid(color="#eeeeee")
    return figure, axes
