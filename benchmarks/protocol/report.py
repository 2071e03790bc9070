"""The protocol's rows for people: tables, and sentences computed from the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure as Drawing

from ..harness.report import Table, Verdict, sentences
from .figures import draw_judges, draw_live, draw_pairs, draw_sources, judge_name
from .live import EVAL, FRESH, LIVE
from .pairs import ALL, BAND_NAMES, SAME, SET_SIZE, UPSTREAM
from .sandbox import CROSS, NO_INPUT

LEVELS: Final = {"sandbox": "Sandbox (simulation)", "recorded": "Recorded (stored verdicts on real models)"}
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
"""The figures of the tables of agreement; win rates, curves and shares are told elsewhere."""
PAIRS_NOTE: Final = (
    "Bands: middle 95 % of the shuffles. In brackets: number of pairs, of all seeds. Dashed: 90 % and upstream's 300. "
)


def agreement_table(rows: pd.DataFrame, *parts: str) -> Table:
    """Every figure but win rates, curves and shares."""
    header = ("level", "judge", "what", "of", "with", "value", "95 % interval", "n", "models", "paper")
    row: Any
    lines = []
    for row in rows[rows.part.isin(parts) & rows.figure.isin(NAMES)].itertuples():
        form, none = (".0f", "never") if row.figure == "needed_for_90" else (".3f", "–")
        value, low, high = (_text(number, form, none) for number in (row.value, row.low, row.high))
        span = "–" if math.isnan(row.low) and math.isnan(row.high) else f"{low} to {high}"
        counts = (_text(row.n, ".0f"), _text(row.models, ".0f"), _text(row.paper, "g"))
        words = (row.level, judge_name(row.judge), NAMES[row.figure], row.subject, row.other)
        lines.append((*words, value, span, *counts))
    return Table(header, lines, "n: instructions, of two sets the smaller one.")


def rate_table(rows: pd.DataFrame, part: str) -> Table:
    """A line a judge and generator, a column a source or set: win rate, standard error and n."""
    found = rows[(rows.part == part) & (rows.figure == "win_rate")]
    columns, lines = found.other.unique(), []
    row: Any
    for (level, judge, subject), own in found.groupby(["level", "judge", "subject"], sort=False):
        cells = dict.fromkeys(columns, "–")
        for row in own.dropna(subset="value").itertuples():
            error = "" if math.isnan(row.standard_error) else f" ± {row.standard_error:.1f}"
            cells[row.other] = f"{row.value:.1f}{error} ({row.n:.0f})"
        lines.append((str(level), judge_name(judge), str(subject), *cells.values()))
    return Table(("level", "judge", "generator", *columns), lines, "Win rate, % ± standard error (n instructions).")


def mixture_table(rows: pd.DataFrame) -> Table:
    """How far the sets are from the evaluation set, and the share of each value in each set."""
    shares = rows[rows.part == "mixture"].pivot(index=["figure", "other"], columns="subject", values="value")
    # What a set never has is a share of 0, and the evaluation set is at no distance from itself.
    cells = shares.reindex(columns=[EVAL, LIVE, FRESH]).fillna(0).sort_index().map("{:.3f}".format).reset_index()
    cells = cells.sort_values("figure", key=lambda names: ~names.str.startswith("total"), kind="stable")
    return Table(
        ("what", "value", EVAL, LIVE, FRESH),
        cells.to_numpy().tolist(),
        "Total variation: half the sum of the differences.",
    )


def drawings(rows: pd.DataFrame, note: str) -> dict[str, tuple[str, Callable[[], Drawing]]]:
    """File -> title and how it is drawn, of what there are rows for."""
    rates = rows[rows.figure == "win_rate"]
    found: dict[str, tuple[str, Callable[[], Drawing]]] = {}
    for level in LEVELS:
        if ((rates.part == "sources") & (rates.level == level)).any():
            draw = partial(draw_sources, rows, level, f"Level: {LEVELS[level]}.")
            found[f"sources_{level}"] = (f"Win rates by source, {level}", draw)
    if (rates.part == "live").any():
        found["live"] = ("The 805 against live users", partial(draw_live, rows, "Level: sandbox (simulation)."))
    if {"gpt4", "claude"} <= set(rates.judge[rates.part == "judges"]):
        found["judges"] = ("GPT-4 against Claude", partial(draw_judges, rows, "Level: recorded."))
    if (rows.figure == "told_apart").any():
        found["pairs"] = ("How many instructions tell models apart", partial(draw_pairs, rows, PAIRS_NOTE + note))
    return found


def findings(rows: pd.DataFrame) -> list[str]:
    """What the numbers say, a sentence or two each."""
    told = rows.assign(text=[_span(row, ".3f") for row in rows.itertuples()], who=rows.judge.map(judge_name))
    told["at"] = told.level.str.capitalize() + ", " + told.who
    told["share"] = [_span(row, ".1%") for row in rows.itertuples()]
    parts = {name: list(tell(told[told.part == name])) for name, tell in _PARTS.items()}
    return sentences("protocol/findings.txt.j2", **parts, upstream=UPSTREAM, set_size=SET_SIZE)


def _sources(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """How alike the sources rank, and the generator whose win rates lie widest apart."""
    for at, own in rows.dropna(subset="value").groupby("at", sort=False):
        rest = own[(own.figure == "r2") & (own.other == "the other sources")]
        rates = own[(own.figure == "win_rate") & (own.other != "all")].groupby("subject", sort=False)
        apart = (rates.value.max() - rates.value.min())[rates.size() > 1]
        if len(rest) and len(apart):
            ranked, widest = rest.sort_values("value"), rates.get_group(apart.idxmax()).sort_values("value")
            told = {"worst": ranked.iloc[0], "best": ranked.iloc[-1], "low": widest.iloc[0], "high": widest.iloc[-1]}
            yield {"at": at, **told}


def _live(rows: pd.DataFrame) -> Iterator[Verdict]:
    """Whether live users' r^2 is as high as that of instructions drawn anew, whose noise is the same."""
    for judge in rows[rows.figure == "r2"].judge.unique():
        own = rows[rows.judge == judge]
        told: dict[Any, Any] = {(row.figure, row.other): row for row in own[own.subject == EVAL].itertuples()}
        live, fresh = told["r2", LIVE], told.get(("r2", FRESH))
        numbers: dict[str, Any] = {
            "live": live,
            "fresh": fresh,
            "spearman": told["spearman", LIVE],
            "crossed": judge == CROSS,
        }
        numbers["few"] = [row for (name, other), row in told.items() if name == "r2" and other not in (LIVE, FRESH)]
        numbers["shift"] = [*own[(own.figure == "shift") & (own.subject == LIVE)].itertuples()]
        numbers["bare"] = [*own[(own.figure == "r2") & (own.subject == NO_INPUT)].itertuples()]
        yield Verdict("live_users_agree_as_much_as_noise_allows", fresh and live.value >= fresh.low, numbers)


def _judges(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """How two judges rank the same models."""
    for _, own in rows.groupby(["subject", "other"], sort=False):
        told: dict[str, Any] = {str(row.figure): row for row in own.itertuples()}
        if "spearman" in told:
            yield told


def _pairs(rows: pd.DataFrame) -> Iterator[Verdict]:
    """Whether 90 % of the pairs are told apart, and from how many instructions on."""
    for at, own in rows.groupby("at", sort=False):
        curve, power = own[own.figure == "told_apart"], own[own.figure == "gap_found_4_of_5"]
        last = curve[curve.subject == ALL].iloc[-1]
        needs = own[(own.figure == "needed_for_90") & (own.subject == ALL)].iloc[0]
        low, high = (_text(end, ".0f", "never") for end in (needs.low, needs.high))
        numbers: dict[str, Any] = {
            "at": at,
            "last": last,
            "needed": f"{needs.value:.0f} [{low}, {high}]",
            "gap": power.iloc[-1],
        }
        numbers["upstream"] = [*curve[(curve.subject == ALL) & (curve.n == UPSTREAM)].itertuples()]
        numbers["close"] = [*curve[(curve.subject == BAND_NAMES[1]) & (curve.n == last.n)].itertuples()]
        numbers["sets"] = [*own[own.figure == "sets_that_need_300_or_fewer"].itertuples()]
        numbers["null"] = [*curve[curve.subject == SAME].itertuples()][-1:]
        yield Verdict("nine_in_ten_are_told_apart", not math.isnan(needs.value), numbers)


_PARTS: Final = {"sources": _sources, "live": _live, "judges": _judges, "pairs": _pairs}


def _text(value: float, form: str, none: str = "–") -> str:
    return none if math.isnan(value) else format(value, form)


def _span(row: Any, form: str) -> str:
    """A value with its interval."""
    bounds = "" if math.isnan(row.low) else f" [{row.low:{form}}, {row.high:{form}}]"
    return _text(row.value, form) + bounds
