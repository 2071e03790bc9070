"""The ranking of methods for people: tables and findings, computed from the rows; their words are templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ..harness.estimates import CLEAR, FEWEST, RESAMPLES, Estimate
from ..harness.report import Provenance, Table, Verdict, interval_text, number, sentences, signed
from ..methods.runs import FEEDBACKS
from .summary import BASELINE, JUDGED_BY, Summary

COLUMN_WORDS = {
    "simulated": "trained on simulated feedback, judged by p_sim^eval",
    "human": "trained on human feedback, judged by human raters",
}
"""Column of the paper's Table 2 -> what its numbers are."""
PAPER_LENGTH_RATIOS = {"ppo": (2.3, "PPO"), "best_of_16": (2.1, "best-of-16"), "best_of_n": (2.1, "best-of-16")}
"""Method -> its published length over SFT's (637 and 570 over 278 characters), and of which method that is."""
COSTS = {"gold": "", "length": "characters", "seconds": "characters", "tokens": "characters"}
"""Measures of the summary table beside the win rates -> a unit that has as many decimals (`decimals`)."""


def report_values(summary: Summary, where: Provenance, quick: str = "") -> dict[str, Any]:
    """What findings.txt.j2 and report.html.j2 show, figures and settings excepted.

    Args:
        summary: Of the study.
        where: Level, reference, n, seeds and temperature, that stand under every figure and table.
        quick: What to say of a quick run.
    """
    shown = [feedback for feedback in summary.feedbacks if summary.with_paper[feedback] is not None]
    agreements = {
        "simulated and human, here": summary.agreement,
        **{f"{feedback}, here and in the paper": found for feedback, found in summary.with_paper.items()},
        "simulated and human, in the paper (its numbers, of the methods here)": summary.in_paper,
    }
    values: dict[str, Any] = {
        "summary": summary,
        "where": where,
        "quick": quick,
        "titles": _titles(summary),
        "columns": COLUMN_WORDS,
        "clear": f"{CLEAR:g}",
        "fewest": FEWEST,
        "resamples": f"{RESAMPLES:,}",
        "agreements": {name: found for name, found in agreements.items() if found is not None},
        "missing": missing(summary),
        "gains": gains(summary),
        "firsts": [found for feedback in summary.feedbacks if (found := first(summary, feedback)) is not None],
        "orders": [found for feedback in shown if (found := order(summary, feedback)).numbers["num"]],
        "lengths": lengths(summary),
        "ranking": summary_table(summary),
        "differences": difference_table(summary),
        "reversals": reversal_table(summary),
        "crossed": cross_table(summary),
    }
    return {**values, "findings": sentences("method_ranking/findings.txt.j2", **values)}


# ------------------------------------------------------------------------------------------------------------- tables


def summary_table(summary: Summary) -> Table:
    """One row a method, as the paper's Table 2, the best of the first column on top, its columns beside ours."""
    shown, rows = summary.feedbacks, []
    header = ("method", *(name for feedback in shown for name in (f"{feedback}, %", "paper")), *COSTS, "n")
    for method in summary.in_order():
        wins = [summary.win_rate(method.name, feedback) for feedback in shown]
        papers = [method.paper[FEEDBACKS.index(feedback)] for feedback in shown]
        pairs = zip(
            map(_with_error, wins), ("–" if each is None else number(each, "%") for each in papers), strict=True
        )
        counts = dict.fromkeys(str(win.num) for win in wins)
        count = ", ".join(counts if len(counts) == 1 else [str(win.num) for win in wins])
        rows.append((method.title, *sum(pairs, ()), *_costs(summary, method.name, shown[0]), count))
    return Table(header, rows)


def cross_table(summary: Summary) -> Table:
    """Every method and feedback under both judges, with intervals; methods that need no feedback have one row."""
    rows = []
    for method in summary.in_order():
        needy = method.needs != "nothing"
        for feedback in summary.feedbacks if needy else summary.feedbacks[:1]:
            wins = [summary.mean(measure, method.name, feedback).interval for measure in JUDGED_BY.values()]
            texts = [interval_text(win, "%") for win in wins]
            count = str(summary.mean("length", method.name, feedback).num)
            costs = _costs(summary, method.name, feedback)
            rows.append((method.title, feedback if needy else "none", *texts, *costs, count))
    return Table(("method", "trained on", "by p_sim^eval, %", "by human raters, %", *COSTS, "n"), rows)


def difference_table(summary: Summary) -> Table:
    """Each method less SFT, paired by seed, in win rate and gold, and its length over SFT's; no row without SFT."""
    rows = []
    for method in summary.in_order() if summary.has_baseline else ():
        for feedback in summary.feedbacks if method.name != BASELINE else ():
            won, gold = summary.lead(method.name, feedback), summary.difference("gold", method.name, feedback)
            wins = (signed(won.mean, "%"), number(won.standard_error), signed(won.ratio, "%"))
            ratio = interval_text(summary.length_ratio(method.name, feedback).interval, "")
            golds = (signed(gold.mean), number(gold.standard_error))
            rows.append((method.title, feedback, *wins, *golds, ratio, str(won.num)))
    return Table(("method", "column", "win rate", "± SE", "in SE", "gold", "± SE", "length ratio", "n"), rows)


def reversal_table(summary: Summary) -> Table:
    """Pairs in another order than in the paper, the clear ones first."""
    titles, rows = _titles(summary), []
    for each in (verdict.numbers for verdict in summary.compared if not verdict.holds):
        here, pair = each["here"], (titles[each["higher"]], titles[each["lower"]])
        clear = "–" if here.num < 2 else "yes" if here.clear else "no"
        numbers = (signed(each["paper"], "%"), signed(here.mean, "%"), number(here.standard_error))
        rows.append((each["feedback"], *pair, *numbers, clear, str(here.num)))
    header = ("column", "higher there", "higher here", "there", "here", "standard error", "clear here", "n")
    return Table(header, rows)


def _costs(summary: Summary, method: str, feedback: str) -> list[str]:
    return [number(summary.mean(name, method, feedback).mean, unit) for name, unit in COSTS.items()]


def _with_error(found: Estimate) -> str:
    """For instance "47.1 ± 0.4"; the mean alone for one seed."""
    return number(found.mean, "%") + (f" ± {number(found.standard_error, '%')}" if found.num > 1 else "")


def _titles(summary: Summary) -> dict[str, str]:
    return {method.name: method.title for method in summary.methods}


# ----------------------------------------------------------------------------------------------------------- findings


def missing(summary: Summary) -> dict[str, list[str]]:
    """What was meant to run and has no row: columns, seeds, and cells of the columns and seeds that are there."""
    found, wanted, needy = summary.seeds, summary.num_seeds, [m for m in summary.methods if m.needs != "nothing"]
    num, cells = pd.DataFrame(summary.values["length"]).notna().sum(axis="columns"), []
    gone = [kind for kind in summary.asked if needy and not any(num[method.name, kind] for method in needy)]
    for feedback in summary.feedbacks:
        for method in summary.methods:
            # A method that needs no feedback is one cell a seed, and is told of once.
            told = feedback not in gone if method in needy else feedback == summary.feedbacks[0]
            if told and (count := num[method.name, feedback]) < len(found):
                kind = f" ({feedback})" if method in needy else ""
                cells.append(f"{method.title}{kind} {count} of {wanted}")
    return {"columns": gone, "seeds": [str(seed) for seed in range(wanted) if seed not in found], "cells": cells}


def gains(summary: Summary) -> dict[str, dict[str, list[tuple[str, Estimate]]]]:
    """Column -> whether clearly above SFT and so on -> (title, points over SFT) of the trained methods."""
    columns = {}
    for feedback in summary.feedbacks if summary.has_baseline else ():
        above, single = f"clearly above (more than {CLEAR:g} standard errors)", "with one seed, so without an error"
        groups: dict[str, list[tuple[str, Estimate]]] = {
            name: [] for name in (above, "clearly below", "not clearly apart", single)
        }
        for method in summary.in_order(feedback):
            gain = summary.lead(method.name, feedback)
            if method.name != BASELINE and method.trained and gain.num:
                clear = "not clearly apart" if not gain.clear else above if gain.mean > 0 else "clearly below"
                groups[clear if gain.num > 1 else single].append((method.title, gain))
        if found := {name: members for name, members in groups.items() if members}:
            columns[feedback] = found
    return columns


def first(summary: Summary, feedback: str) -> Verdict | None:
    """Whether the best trained method of a column is clearly before the second; None for fewer than two."""
    best = [each for each in summary.in_order(feedback) if each.trained and each.name in summary.column(feedback)][:2]
    if len(best) < 2:
        return None
    lead = summary.lead(best[0].name, feedback, best[1].name)
    rates = [summary.win_rate(method.name, feedback) for method in best]
    numbers = {"feedback": feedback, "titles": [method.title for method in best], "rates": rates, "lead": lead}
    return Verdict("first_is_clear", lead.clear if lead.num > 1 else None, numbers)


def order(summary: Summary, feedback: str) -> Verdict:
    """Whether no two methods of a column are clearly in another order than in the paper."""
    compared = [verdict for verdict in summary.compared if verdict.numbers["feedback"] == feedback]
    reversed_ = [verdict.numbers for verdict in compared if not verdict.holds]
    clear = [each for each in reversed_ if each["here"].clear]
    numbers = {"feedback": feedback, "num": len(compared), "reversed": reversed_, "clearly": clear}
    return Verdict("no_clear_reversal", None if len(summary.seeds) < 2 else not clear, numbers)


def lengths(summary: Summary) -> Sequence[tuple[str, list[Any], str, str]]:
    """Title, responses' length over SFT's in each column, and of what method the published ratio is, and how large."""
    found = []
    for method in summary.methods if summary.has_baseline else ():
        ratios = [summary.length_ratio(method.name, feedback).interval for feedback in summary.feedbacks]
        if method.name in PAPER_LENGTH_RATIOS and any(ratio.num for ratio in ratios):
            value, of = PAPER_LENGTH_RATIOS[method.name]
            found.append((method.title, ratios, of, f"{value:g}"))
    return found
