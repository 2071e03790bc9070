"""The protocol's rows for people: tables, figures, and sentences computed from the numbers."""

import math
from collections.abc import Iterator
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from ...statistics import Interval
from ..harness.estimates import Estimate
from ..harness.plots import COLORS, place_labels, titled
from ..harness.report import Table, seeds_text, sentences
from .analysis import ALL, BANDS, OTHERS, POWER, SAME, SET_SIZE, SETS, UPSTREAM, WANTED
from .held_out import EVAL, FRESH, LIVE
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
    "Bands: middle 95 % of the shuffles. In brackets: number of pairs, of all seeds. Dashed: 90 % and upstream's 300. "
)


def judge_name(judge: Any) -> str:
    """A judge's name for readers."""
    return JUDGES.get(judge, str(judge))


def agreement_table(rows: pd.DataFrame, title: str, *parts: str) -> Table:
    """The figures in `NAMES` of some parts of the table."""
    # 300 instructions are AlpacaEval's own figure, of pairs of models.
    counted = ("pairs or sets", "AlpacaEval") if parts == ("pairs",) else ("models", "paper")
    header = ("level", "judge", "what", "of", "with", "value", "95 % interval", "n", *counted)
    lines = []
    row: Any
    for row in rows[rows.part.isin(parts) & rows.figure.isin(NAMES)].itertuples():
        form, none = (".0f", "never") if row.figure == "needed_for_90" else (".3f", "–")
        value, low, high = (_text(number, form, none) for number in (row.value, row.low, row.high))
        bounds = "–" if math.isnan(row.low) and math.isnan(row.high) else f"{low} to {high}"
        counts = (_text(row.n, ".0f"), _text(row.models, ".0f"), _text(row.paper, "g"))
        words = (row.level, judge_name(row.judge), NAMES[row.figure], row.subject, row.other)
        lines.append((*words, value, bounds, *counts))
    return Table(header, lines, "n: instructions, of two sets the smaller one.", title)


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
    texts = [f"{_span(row, '.3f')} by {judge_name(row.judge)}" for row in live.itertuples()]
    generators = f"{live.models.max():.0f} generators of the sandbox"
    return f"r² with held-out users' instructions: {', '.join(texts)}; {generators}" if texts else ""


def findings(rows: pd.DataFrame) -> list[str]:
    """The sentences, one each line of the template."""
    shown = rows.assign(text=[_span(row, ".3f") for row in rows.itertuples()])
    shown["share"] = [_span(row, ".1%") for row in rows.itertuples()]
    parts: dict[str, list[dict[str, Any]]] = {part: [] for part in ("sources", "live", "judges", "pairs")}
    for (part, level, judge), own in shown.groupby(["part", "level", "judge"], sort=False):
        # For the template: rows by what they compare, and by the number of their instructions.
        by, of = ({(row.figure, row.subject, row[key]): row for _, row in own.iterrows()} for key in ("other", "n"))
        at = f"{str(level).capitalize()}, {judge_name(judge)}"
        parts.setdefault(str(part), []).append({"at": at, "judge": judge, "by": by, "of": of, "most": own.n.max()})
    return sentences(
        "protocol/findings.txt.j2",
        **parts | {"sources": list(_sources(shown[shown.part == "sources"]))},
        names={
            "crossed": CROSS,
            "few": FEW,
            "bare": NO_INPUT,
            "all": ALL,
            "same": SAME,
            "sets": SETS,
            "close": BANDS[1],
        },
        upstream=UPSTREAM,
        set_size=SET_SIZE,
        wanted=f"{100 * WANTED:.0f}",
        power=f"{100 * POWER:.0f}",
    )


def _sources(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """How alike the sources rank, and the generator whose win rates lie widest apart."""
    for (level, judge), own in rows.dropna(subset="value").groupby(["level", "judge"], sort=False):
        rest = own[(own.figure == "r2") & (own.other == OTHERS)].sort_values("value")
        rates = own[(own.figure == "win_rate") & (own.other != "all")].sort_values("value").groupby("subject")
        apart = (rates.value.max() - rates.value.min())[rates.size() > 1]
        if len(rest) and len(apart):
            ends = [each.iloc[place] for each in (rest, rates.get_group(apart.idxmax())) for place in (0, -1)]
            at = f"{str(level).capitalize()}, {judge_name(judge)}"
            yield {"at": at, **dict(zip(("worst", "best", "low", "high"), ends, strict=True))}


def _text(value: float, form: str, none: str = "–") -> str:
    return none if math.isnan(value) else format(value, form)


def _span(row: Any, form: str) -> str:
    """A value with its interval."""
    bounds = "" if math.isnan(row.low) else f" [{row.low:{form}}, {row.high:{form}}]"
    return _text(row.value, form) + bounds


def drawings(rows: pd.DataFrame) -> dict[str, tuple[str, Drawing]]:
    """File -> title and figure, of what there are rows for."""
    drawn = {}
    if ((rows.part == "live") & (rows.figure == "win_rate")).any():
        drawn["live"] = ("The 805 against held-out users", draw_live(rows, "Level: sandbox (simulation)."))
    for level, meaning in LEVELS.items():
        own = rows[(rows.level == level) & (rows.figure == "told_apart") & (rows.judge != EARLY)]
        if len(own):
            title = f"How many instructions tell models apart, {level}"
            drawn[f"pairs_{level}"] = (title, draw_pairs(own, f"{PAIRS_NOTE}Level: {meaning}."))
    return drawn


def draw_live(rows: pd.DataFrame, note: str) -> Drawing:
    """A panel for each judge: win rates on held-out users' (filled) and fresh instructions (hollow) against eval."""
    live = rows[rows.part == "live"]
    agreed = live[(live.figure == "r2") & (live.subject == EVAL)].set_index(["judge", "other"]).value
    judges = live[live.figure == "win_rate"].groupby("judge", sort=False)
    figure, axes = _panels(len(judges), 6.4, 6.0)
    points = []
    for axis, (judge, own) in zip(axes, judges, strict=True):
        sets = {which: each.set_index("subject") for which, each in own.groupby("other")}
        for which, (who, mark, color, fill) in SETS_DRAWN.items():
            x, y = sets[EVAL].loc[sets[which].index], sets[which]
            error: dict[str, Any] = {
                "xerr": x.standard_error.fillna(0),
                "yerr": y.standard_error.fillna(0),
                "elinewidth": 0.7,
            }
            label = f"{who} (n = {y.n.iloc[0]:.0f})"
            style: dict[str, Any] = {"fmt": mark, "color": color, "markerfacecolor": fill, "markersize": 5}
            axis.errorbar(x.value, y.value, label=label, **error, **style)
        ends = max(-3.0, own.value.min() - 8), min(103.0, own.value.max() + 8)
        axis.plot(ends, ends, color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
        axis.set(xlim=ends, ylim=ends, aspect="equal")
        axis.set(xlabel="win rate on the evaluation set (%)", ylabel="win rate on the held-out set (%)")
        axis.grid(color="#eeeeee")
        axis.set_axisbelow(True)
        axis.legend(fontsize=8, frameon=False, loc="upper left")
        words = [f"r² {which} {agreed[judge, which]:.3f}" for which in SETS_DRAWN if (judge, which) in agreed.index]
        axis.set_title(f"{judge_name(judge)}: {', '.join(words)}", fontsize=10, loc="left")
        estimates = {which: sets[which].apply(_estimate, axis=1) for which in (EVAL, LIVE)}
        points.append({name: (estimates[EVAL][name], estimates[LIVE][name]) for name in sets[LIVE].index})
    figure = titled(figure, "Win rates on held-out instructions against those on the evaluation set", note)
    for axis, each in zip(axes, points, strict=True):
        place_labels(figure, axis, each)
    return figure


def _estimate(row: Any) -> Estimate:
    return Estimate(Interval(row.value, math.nan, math.nan, 0), row.standard_error)


def draw_pairs(rows: pd.DataFrame, note: str) -> Drawing:
    """Share of pairs told apart against the number of instructions, a panel for each judge."""
    judges = rows.groupby("judge", sort=False)
    figure, axes = _panels(len(judges), 7.0, 3.0)
    for axis, (judge, own) in zip(axes, judges, strict=True):
        for number, (subject, curve) in enumerate(own[own.subject != SETS].groupby("subject", sort=False)):
            color = "black" if subject == ALL else COLORS[(number - 1) % len(COLORS)]
            low, high = (curve[end].fillna(curve.value) for end in ("low", "high"))
            axis.fill_between(curve.n, low, high, color=color, alpha=0.12, linewidth=0)
            line = ":" if subject == SAME else ("-", "--", "-.")[number % 3]
            style: dict[str, Any] = {"linestyle": line, "color": color, "linewidth": 1.8}
            axis.plot(curve.n, curve.value, label=f"{subject} ({curve.models.iloc[0]:.0f})", **style)
        axis.axhline(WANTED, color="#888888", linestyle="--", linewidth=1)
        axis.axvline(UPSTREAM, color="#888888", linestyle="--", linewidth=1)
        axis.set(ylim=(-0.02, 1.02), xlabel="instructions", ylabel="share of pairs told apart")
        axis.set_title(f"{judge_name(judge)} ({own.level.iloc[0]})", fontsize=10, loc="left")
        axis.grid(color="#eeeeee")
        axis.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return titled(figure, "Pairs of models told apart by a paired t-test, p < .05", note)


def _panels(count: int, width: float, height: float) -> tuple[Drawing, list[Axes]]:
    """A figure of panels below each other, with the size of each in inches."""
    figure = Drawing(figsize=(1 + width, 1 + height * count), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    return figure, figure.subplots(count, 1, squeeze=False).ravel().tolist()
