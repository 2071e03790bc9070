"""The annotators' rows for people: tables, sentences computed from the numbers, and the figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..sandbox.judges import POOL
from . import report
from .annotator_sandbox import MEANINGS
from .annotator_targets import ALONE, COST, FIGURES, SINGLE, TARGETS, Target
from .study import Row

HEADER: Final = ("figure", "judge", "level", "paper", "value", "95 % interval", "seeds", "n", "tolerance", "within?")
MEMBERS: Final = tuple(annotator.name for annotator in POOL)
_SHOWN: Final = ("agreement", "bias", "variance", "prefers_first", "prefers_longer", "prefers_lists", "spearman")
_FAMILIES: Final = {"gpt4": "#0072b2", "chatgpt": "#009e73", "davinci003": "#d55e00"}


def figure_table(rows: Sequence[Row], caption: str) -> report.Table:
    """Rows in full, figure by figure, each beside the published value."""
    order = list(FIGURES) + [row["figure"] for row in rows]
    return report.Table(HEADER, [_cells(row) for row in sorted(rows, key=lambda r: order.index(r["figure"]))], caption)


def member_table(rows: Sequence[Row], caption: str) -> report.Table:
    """One line for each of the pool's annotators alone."""
    found = {(row["judge"], row["figure"]): row["value"] for row in rows}
    lines = [(name, *(_number(found.get((name, figure))) for figure in _SHOWN)) for name in MEMBERS]
    return report.Table(("annotator", *_SHOWN), lines, caption)


def is_member(row: Row) -> bool:
    """Whether a row is about one of the pool's annotators alone."""
    return row["level"] == "sandbox" and row["judge"] in MEMBERS


def _cells(row: Row) -> tuple[str, ...]:
    target = _target(row)
    tolerance, within = "–", "–"
    if row["tolerance"] is not None:
        small = row["tolerance"] < 0.001
        tolerance = "equal" if small else f"{'+' if target.upper_bound else '±'}{row['tolerance']:.2f}"
        within = "yes" if row["within"] else "NO"
    span = "–" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
    seeds = f"{row['seed_min']:.3f} to {row['seed_max']:.3f}" if (row["seeds"] or 0) > 1 else "–"
    beside = "–" if row["paper"] is None else target.text() if target.upper_bound else _number(row["paper"])
    value = _number(row["value"])
    return row["figure"], row["judge"], row["level"], beside, value, span, seeds, str(row["n"]), tolerance, within


def _target(row: Row) -> Target:
    if row["level"] == "sandbox" and (row["judge"], row["figure"]) in TARGETS:
        return TARGETS[row["judge"], row["figure"]]
    return Target(row["paper"] or 0.0, row["tolerance"])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, one sentence each."""
    return [*_sandbox_verdicts(rows), *_recorded_verdicts(rows), *_live_verdicts(rows)]


def _sandbox_verdicts(rows: Sequence[Row]) -> list[str]:
    told = [row for row in rows if row["level"] == "sandbox" and row["within"] is not None and not is_member(row)]
    sentences = []
    if told:
        outside = [row for row in told if not row["within"]]
        names = "; ".join(
            f"{row['judge']} {row['figure']} {row['value']:.3f} (paper {_target(row).text()}, off by "
            f"{abs(row['value'] - row['paper']):.3f}, allowed {row['tolerance']:.2f})"
            for row in outside
        )
        count = f"{len(told) - len(outside)} of {len(told)} figures are within tolerance of the paper's."
        sentences.append(f"Sandbox: {count}{f' Outside: {names}.' if names else ''}")
        turns = [row for row in told if row["seeds"] > 1 and not _same_in_every_seed(row)]
        if told[0]["seeds"] > 1:
            which = ", ".join(f"{row['judge']} {row['figure']}" for row in turns)
            sentences.append(
                f"Every one of the {told[0]['seeds']} seeds says so."
                if not turns
                else f"Not the same in every one of the {told[0]['seeds']} seeds: {which}."
            )
    alone = [row for row in rows if is_member(row) and row["figure"] == "variance"]
    if alone:
        below = sum(row["value"] < ALONE.paper for row in alone)
        near = sum(bool(row["within"]) for row in alone)
        greatest = max(alone, key=lambda row: float(row["value"]))
        sentences.append(
            f"Of the {len(alone)} annotators alone {below} have a variance below {ALONE.paper:.2f}, {near} one within "
            f"+{ALONE.tolerance:.2f} of it; the greatest is {greatest['judge']}'s, {greatest['value']:.3f}."
        )
    return sentences


def _same_in_every_seed(row: Row) -> bool:
    target = _target(row)
    return all(target.holds(row[key]) is row["within"] for key in ("seed_min", "seed_max"))


def _recorded_verdicts(rows: Sequence[Row]) -> list[str]:
    found = {(row["judge"], row["figure"]): row for row in rows if row["level"] == "recorded"}
    sentences = []
    equal = [row for row in found.values() if row["within"] is not None]
    if equal:
        wrong = [f"{row['judge']} {row['figure']}" for row in equal if not row["within"]]
        sentences.append(
            f"Recorded: {len(equal) - len(wrong)} of {len(equal)} figures of the rule that takes the longer response "
            f"equal the published table{': not ' + ', '.join(wrong) if wrong else ''}."
        )
    if ("gpt4_b1", "variance") in found:
        one, five = (found[judge, "variance"] for judge in ("gpt4_b1", "gpt4_b5"))
        sentences.append(
            f"Recorded: GPT-4 differs from the majority of its other verdicts on {one['value']:.2%} of {one['n']} "
            f"pairs with one pair a prompt, on {five['value']:.2%} with five."
        )
    if ("claude", "agreement_with_gpt4") in found:
        both, kappa = found["claude", "agreement_with_gpt4"], found.get(("claude", "kappa_with_gpt4"))
        each = [row["value"] for (_, figure), row in found.items() if figure.startswith("agreement_with_gpt4: ")]
        beside = found["longer_response", "agreement_with_gpt4 where both judged"]["value"]
        corrected = f", kappa {kappa['value']:.2f}" if kappa else ""
        sentences.append(
            f"Recorded: Claude agrees with GPT-4 on {both['value']:.1%} of {both['n']} verdicts on {len(each)} models "
            f"({min(each):.1%} to {max(each):.1%} by model{corrected}); the "
            f"longer response always would on {beside:.1%}."
        )
    return sentences


def _live_verdicts(rows: Sequence[Row]) -> list[str]:
    sentences = []
    live = {(row["judge"], row["figure"]): row for row in rows if row["level"] == "live"}
    for (judge, figure), row in live.items():
        if figure == "spent_usd":
            cost = live.get((judge, COST))
            per = f"${cost['value']:.2f} per 1,000" if cost else "all of them kept from before, or without a price"
            sentences.append(f"Live: {judge.removeprefix('live ')} cost ${row['value']:.4f} for this study ({per}).")
    return sentences


def draw(rows: Sequence[Row], note: str) -> Drawing:
    """Left: the paper's figures with tolerance, and the sandbox's. Right: every annotator alone, and the pools."""
    told = [r for r in rows if r["level"] == "sandbox" and r["tolerance"] is not None and not is_member(r)][::-1]
    figure = Drawing(figsize=(13, 2.4 + 0.3 * max(len(told), 8)), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    if told:
        _draw_targets(left, told)
    _draw_members(right, rows)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(note, fontsize=7, color="#555555", x=0.01, ha="left")
    return figure


def _draw_targets(axis: Axes, told: Sequence[Row]) -> None:
    places = np.arange(len(told))
    values: Any = np.array([[row[key] for key in ("paper", "tolerance", "value", "low", "high")] for row in told]).T
    paper, tolerance, value, low, high = values
    below = [row["paper"] if _target(row).upper_bound else row["tolerance"] for row in told]
    reach = (below, tolerance)
    axis.errorbar(paper, places, xerr=reach, fmt="none", ecolor="#cccccc", elinewidth=8, label="paper, tolerance")
    axis.plot(paper, places, "|", color="#555555", markersize=12, label="paper")
    span = np.array([value - low, high - value])
    axis.errorbar(value, places, xerr=span, fmt="o", color="#0072b2", markersize=5, label="sandbox, 95 % interval")
    axis.set_yticks(places, [f"{row['figure']}: {row['judge']}" for row in told], fontsize=8)
    axis.set(xlim=(0, 1), xlabel="share of pairs")
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _draw_members(axis: Axes, rows: Sequence[Row]) -> None:
    found = {(r["judge"], r["figure"]): r["value"] for r in rows if r["level"] == "sandbox"}
    judges = [name for name in (*MEMBERS, *MEANINGS) if (name, "variance") in found and name != SINGLE]
    for name in judges:
        x, y = found[name, "variance"], found[name, "agreement"]
        member = name in MEMBERS
        color = _FAMILIES[name.split("_")[0]] if member else "#000000"
        axis.plot(x, y, "o" if member else "D", color=color, markersize=5 if member else 7)
        if not member:
            below = name in ("sim_eval", "sim_gpt4")  # their neighbours are written above
            place = (0, -14 if below else 8)
            axis.annotate(name, (x, y), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    for family, color in _FAMILIES.items():
        axis.plot([], [], "o", color=color, label=f"{family}-like, alone")
    axis.axvline(ALONE.paper, color="#888888", linestyle=":", linewidth=1, label="paper: one annotator stays left")
    axis.set(xlabel="variance: share of opinions against the judge's own majority", ylabel="agreement with the humans")
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def meanings(rows: Iterable[Row]) -> list[str]:
    """Who the judges are and what the figures say, for those that are in the table."""
    present = {row["judge"] for row in rows}
    who = [f"{judge}: {meaning}." for judge, meaning in MEANINGS.items() if judge in present]
    return who + [f"{figure}: {meaning}." for figure, meaning in FIGURES.items()]
