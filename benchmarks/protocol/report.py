"""The protocol's rows for people: sentences computed from them, tables, figures, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..harness import plots, report
from ..harness.report import settings_table, text_table
from ..harness.report_text import SIMULATION
from ..harness.study import Row, versions
from . import figures as protocol_figures
from . import live as protocol_live
from . import pairs as protocol_pairs
from .figures import judge_name, select
from .live import EVAL, FRESH, LIVE
from .pairs import ALL, BANDS, SAME, UPSTREAM
from .sandbox import CROSS, NO_INPUT

LEVELS: Final = {"sandbox": "Sandbox (simulation)", "recorded": "Recorded (stored verdicts on real models)"}
ANSWERS: Final = ("r2", "spearman", "kendall", "shift", "largest_difference")
POWER: Final = ("needed_for_90", "gap_found_4_of_5", "sets_that_need_300_or_fewer")
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
HEADER: Final = ("level", "judge", "what", "of", "with", "value", "95 % interval", "n", "models", "paper")


def write(out: Path, rows: Sequence[Row], *, quick: bool, seeds: int, config: Mapping[str, Any]) -> list[str]:
    """Writes figures and report.html, prints tables and findings, and returns the findings."""
    said = findings(rows)
    levels = dict.fromkeys(row["level"] for row in rows)
    note = f"Level: {', '.join(LEVELS[level] for level in levels)}. {seeds} seed{'s' * (seeds > 1)} in the sandbox."
    tables = {
        "Agreement of two evaluations over generators": agreement_table(rows, "live", "judges"),
        "Agreement between sources": agreement_table(rows, "sources"),
        "Telling models apart": agreement_table(rows, "pairs"),
    }
    mode = ["A quick run: a smaller study of the same shape, for a look at it."] if quick else []
    print("\n\n".join(f"{title}\n{text_table(table)}" for title, table in tables.items() if table.rows))
    print("\n".join(["", *mode, *said, note]))
    sections = [report.Section("What the numbers say", [*mode, SIMULATION, *said, note])]
    sections += [report.Section(*section) for section in _figures(out, rows, note)]
    sections += [report.Section(title, [], table) for title, table in tables.items() if table.rows]
    sections += [
        report.Section("Win rates by source", [], rate_table(rows, "sources")),
        report.Section("Win rates on held-out instructions", [], rate_table(rows, "live")),
        report.Section("What the live users ask", list(MIXTURE), mixture_table(rows)),
        report.Section("How it was measured", measured()),
        report.Section("Configuration and versions", [], settings_table({**config, "seeds": seeds, **versions()})),
    ]
    kept = [section for section in sections if section.table is None or section.table.rows]
    report.write_report(out / "report.html", "The evaluation protocol, validated", kept)
    return said


def _figures(out: Path, rows: Sequence[Row], note: str) -> list[tuple[str, list[str], None, list[report.Figure]]]:
    """Draws what there is to draw; a figure that an earlier call left and this one has no rows for is removed."""
    drawn: dict[str, tuple[str, Any]] = {}
    for level in ("sandbox", "recorded"):
        if select(rows, part="sources", level=level, figure="win_rate"):
            label = f"Level: {LEVELS[level]}."
            figure = protocol_figures.draw_sources(rows, level, label)
            drawn[f"sources_{level}"] = (f"Win rates by source, {level}", figure)
    if select(rows, part="live", figure="win_rate"):
        drawn["live"] = ("The 805 against live users", protocol_figures.draw_live(rows, "Level: sandbox (simulation)."))
    found = select(rows, part="judges", figure="win_rate")
    if {row["judge"] for row in found} >= {"gpt4", "claude"}:
        drawn["judges"] = ("GPT-4 against Claude", protocol_figures.draw_judges(rows, "Level: recorded."))
    if select(rows, part="pairs", figure="told_apart"):
        drawn["pairs"] = (
            "How many instructions tell models apart",
            protocol_figures.draw_pairs(rows, PAIRS_NOTE + note),
        )
    for name in ("sources_sandbox", "sources_recorded", "live", "judges", "pairs"):
        if name not in drawn:
            (out / f"{name}.png").unlink(missing_ok=True)
    return [
        (title, [], None, [report.Figure(plots.write_png(out / f"{name}.png", figure), f"{title}. {note}")])
        for name, (title, figure) in drawn.items()
    ]


PAIRS_NOTE: Final = (
    "Bands: middle 95 % of the shuffles. In brackets: number of pairs, of all seeds. Dashed: 90 % and upstream's 300. "
)
MIXTURE: Final = (
    "Live users differ from the evaluation set in how often each root verb, greeting, request for a form, number, "
    "category and input occurs. The wordings are the world's 17: gold reads no others, so what real users would "
    "phrase in another way is not tested.",
)


def measured() -> list[str]:
    """What the figures are, from the modules that compute them."""
    from . import recorded as protocol_recorded
    from . import statistics as protocol_statistics

    modules = (protocol_live, protocol_statistics, protocol_pairs, protocol_recorded)
    return [text for module in modules for text in (module.__doc__ or "").strip().split("\n\n")[1:]]


# ---------------------------------------------------------------------------------------------------------- sentences


def findings(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, a sentence or two each."""
    made = [*_source_sentences(rows), *_live_sentences(rows), *_judge_sentences(rows), *_pair_sentences(rows)]
    return [sentence for sentence in made if sentence]


def _source_sentences(rows: Sequence[Row]) -> list[str]:
    found = select(rows, part="sources")
    sentences = []
    for level, judge in dict.fromkeys((row["level"], row["judge"]) for row in found):
        mine = select(found, level=level, judge=judge)
        rest = [row for row in select(mine, figure="r2", other="the other sources") if row["value"] is not None]
        rates = [row for row in select(mine, figure="win_rate") if row["other"] != "all"]
        by_model = [protocol_figures.spread(select(rates, subject=name)) for name in {row["subject"] for row in rates}]
        known = [pair for pair in by_model if pair]
        if not rest or not known:
            continue
        low, high = max(known, key=lambda pair: pair[1]["value"] - pair[0]["value"])
        best, worst = (pick(rest, key=lambda row: float(row["value"])) for pick in (max, min))
        sentences.append(
            f"{_at(level, judge)}: r² of a source with all others over {best['models']} generators is between "
            f"{_with_interval(worst)} ({worst['subject']}, n = {worst['n']}) and {_with_interval(best)} "
            f"({best['subject']}, n = {best['n']}). The widest apart is {low['subject']}: {low['value']:.1f} % ± "
            f"{low['standard_error']:.1f} on {low['other']}, {high['value']:.1f} % ± {high['standard_error']:.1f} on "
            f"{high['other']}."
        )
    return sentences


def _live_sentences(rows: Sequence[Row]) -> list[str]:
    found = select(rows, part="live")
    sentences = []
    for judge in dict.fromkeys(row["judge"] for row in found if row["figure"] == "r2"):
        told = {(row["figure"], row["other"]): row for row in select(found, judge=judge) if row["subject"] == EVAL}
        live = told["r2", LIVE]
        if judge == CROSS:
            sentences.append(
                f"Sandbox: the evaluation set judged by p_sim^eval against live users judged by human raters: r² "
                f"{_with_interval(live)}, Spearman {_with_interval(told['spearman', LIVE])}."
            )
            continue
        few = [row for (figure, other), row in told.items() if figure == "r2" and other not in (LIVE, FRESH)]
        paper = f" (paper: {live['paper']:.2f}, with 200)" if live["paper"] is not None else ""
        beside = f"; with {few[0]['n']} of them {_with_interval(few[0])}" if few else ""
        fresh = told["r2", FRESH]
        inside = fresh["low"] is not None and live["value"] >= fresh["low"]
        cause = "which live users' is not below: noise alone gives as much" if inside else "and live users' lies below"
        shift = select(found, judge=judge, figure="shift", subject=LIVE)
        moved = f" Live users' win rates are {shift[0]['value']:+.1f} points off on average, " if shift else ""
        sentences.append(
            f"{_at('sandbox', judge)}: r² between the evaluation set and {live['n']} live instructions over "
            f"{live['models']} generators is {_with_interval(live)}{paper}{beside}; Spearman "
            f"{_with_interval(told['spearman', LIVE])}. Instructions drawn anew with the evaluation set's own mixture "
            f"give {_with_interval(fresh)}, {cause}."
            + (f"{moved}{shift[0]['other']} for one generator." if shift else "")
            + "".join(
                f" Against the evaluation instructions without an input r² is {_with_interval(row)}."
                for row in select(found, judge=judge, figure="r2", subject=NO_INPUT)
            )
        )
    return sentences


def _judge_sentences(rows: Sequence[Row]) -> list[str]:
    found = select(rows, part="judges", figure="spearman")
    sentences = []
    for row in found:
        same = {"subject": row["subject"], "other": row["other"]}
        tau = select(rows, part="judges", figure="kendall", **same)[0]
        few = " Fewer than five models say little." if row["models"] < 5 else ""
        sentences.append(
            f"Recorded: {row['subject']} against {row['other']}: Spearman {_with_interval(row)}, Kendall "
            f"{_with_interval(tau)} over {row['models']} models.{few}"
        )
    return sentences


def _pair_sentences(rows: Sequence[Row]) -> list[str]:
    found = select(rows, part="pairs")
    sentences = []
    for level, judge in dict.fromkeys((row["level"], row["judge"]) for row in found):
        mine = select(found, level=level, judge=judge)
        curve = select(mine, figure="told_apart", subject=ALL)
        needs = select(mine, figure="needed_for_90", subject=ALL)[0]
        at = [row for row in curve if row["n"] == UPSTREAM]
        last = curve[-1]
        reached = f"90 % need {_needed(needs)}" if needs["value"] is not None else "90 % are not reached"
        close = [row for row in select(mine, figure="told_apart", subject=_band(2)) if row["n"] == last["n"]]
        gap = select(mine, figure="gap_found_4_of_5")[-1]
        sets = select(mine, figure="sets_that_need_300_or_fewer")
        sentence = f"{_at(level, judge)}: "
        if at:
            sentence += f"{UPSTREAM} instructions tell {_percent(at[0])} of {last['models']} pairs apart, "
        sentence += f"all {last['n']} {last['value']:.1%}; {reached} (upstream: about {UPSTREAM} of 805)."
        if close:
            sentence += f" Of the {close[0]['models']} pairs 2 to 5 points apart these tell {close[0]['value']:.0%}."
        sentence += f" A gap of {gap['value']:.1f} points is found with a chance of 80 % by {gap['n']}."
        if sets:
            sentence += (
                f" Of {sets[0]['models']} random sets of {protocol_pairs.SET_SIZE} models {_percent(sets[0])} need "
                f"{UPSTREAM} or fewer: which models are compared decides."
            )
        null = select(mine, figure="told_apart", subject=SAME)
        if null:
            wrong, pairs = round(null[-1]["value"] * null[-1]["models"]), null[-1]["models"]
            sentence += f" Of {pairs} pairs that are one generator twice {wrong} are called different."
        sentences.append(sentence)
    return sentences


def _band(low: float) -> str:
    return next(f"gap {a:g} to {b:g} points" for a, b in BANDS if a == low)


def _at(level: str, judge: str) -> str:
    return f"{level.capitalize()}, {judge_name(judge)}"


def _needed(row: Row) -> str:
    """The number with the shuffles' own; an end that some shuffles never reach is open."""
    low, high = (f"{row[end]:.0f}" if row[end] is not None else "never" for end in ("low", "high"))
    return f"{row['value']:.0f} [{low}, {high}]"


def _percent(row: Row) -> str:
    bounds = f" [{row['low']:.1%}, {row['high']:.1%}]" if row["low"] is not None else ""
    return f"{row['value']:.1%}{bounds}"


def _with_interval(row: Row) -> str:
    if row["value"] is None:
        return "–"
    bounds = f" [{row['low']:.3f}, {row['high']:.3f}]" if row["low"] is not None else ""
    return f"{row['value']:.3f}{bounds}"


# ------------------------------------------------------------------------------------------------------------- tables


def agreement_table(rows: Sequence[Row], *parts: str) -> report.Table:
    """Every figure but win rates, curves and shares."""
    chosen = [row for row in rows if row["part"] in parts and row["figure"] in (*ANSWERS, *POWER)]
    return report.Table(HEADER, [_cells(row) for row in chosen], "n: instructions, of two sets the smaller one.")


def _cells(row: Row) -> tuple[str, ...]:
    whole = row["figure"] == "needed_for_90"
    value, low, high = (_number(row[key], whole) for key in ("value", "low", "high"))
    span = "–" if row["low"] is None and row["high"] is None else f"{low} to {high}"
    paper = "–" if row["paper"] is None else f"{row['paper']:g}"
    counts = ("–" if row[key] is None else str(row[key]) for key in ("n", "models"))
    what = NAMES[row["figure"]]
    return row["level"], judge_name(row["judge"]), what, row["subject"], row["other"], value, span, *counts, paper


def _number(value: float | None, whole: bool) -> str:
    return ("never" if whole else "–") if value is None else f"{value:.0f}" if whole else f"{value:.3f}"


def rate_table(rows: Sequence[Row], part: str) -> report.Table:
    """A line a judge and generator, a column a source or set: win rate, standard error and n."""
    found = select(rows, part=part, figure="win_rate")
    columns = list(dict.fromkeys(row["other"] for row in found))
    lines = []
    for level, judge, subject in dict.fromkeys((row["level"], row["judge"], row["subject"]) for row in found):
        mine = {row["other"]: row for row in select(found, level=level, judge=judge, subject=subject)}
        lines.append((level, judge_name(judge), subject, *(_rate(mine.get(column)) for column in columns)))
    return report.Table(
        ("level", "judge", "generator", *columns), lines, "Win rate, % ± standard error (n instructions)."
    )


def _rate(row: Row | None) -> str:
    if row is None or row["value"] is None:
        return "–"
    error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.1f}"
    return f"{row['value']:.1f}{error} ({row['n']})"


def mixture_table(rows: Sequence[Row]) -> report.Table:
    """How far the sets are from the evaluation set, and the share of each value in each set."""
    found = select(rows, part="mixture")
    values = list(dict.fromkeys((row["figure"], row["other"]) for row in reversed(found)))
    cells = {(row["figure"], row["other"], row["subject"]): row["value"] for row in found}
    lines = [
        (figure, other, *(f"{cells.get((figure, other, which)) or 0.0:.3f}" for which in (EVAL, LIVE, FRESH)))
        for figure, other in sorted(values, key=lambda key: (not key[0].startswith("total"), key))
    ]
    return report.Table(
        ("what", "value", EVAL, LIVE, FRESH), lines, "Total variation: half the sum of the differences."
    )
