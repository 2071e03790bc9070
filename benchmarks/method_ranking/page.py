"""The page of the ranking of methods: tables and findings; their words are templates."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from ...statistics import Interval
from ..harness.estimates import FEWEST, RESAMPLES, Agreement, Estimate
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import COLORS, looks, place_labels, titled
from ..harness.report import (
    Provenance,
    Table,
    coefficient_text,
    interval_text,
    number,
    seeds_text,
    sentences,
    signed,
)
from ..methods.job import FEEDBACKS
from ..methods.methods import Method, find_method
from .summary import BASELINE, JUDGED_BY, Summary

WORDS = {
    "simulated": "simulated: trained on and judged by simulated feedback",
    "human": "human: trained on and judged by human raters",
}
"""Feedback -> its label in a legend."""
COLUMN_WORDS = {
    "simulated": "trained on simulated feedback, judged by p_sim^eval",
    "human": "trained on human feedback, judged by human raters",
}
"""Column of the paper's Table 2 -> what its numbers are."""
PAPER_LENGTH_RATIOS = {"ppo": (2.3, "PPO"), "best_of_16": (2.1, "best-of-16"), "best_of_n": (2.1, "best-of-16")}
"""Method -> its published length over SFT's (637 and 570 over 278 characters), and of which method that is."""
COSTS = {"gold": "", "length": "characters", "seconds": "characters", "tokens": "characters"}
"""Measures of the summary table besides the win rates -> a unit with as many decimals (`decimals`)."""


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    manifest = read_manifest(folder)
    facts = manifest["facts"]
    asked: dict[str, Any] = {"feedbacks": facts["feedback"], "num_seeds": len(manifest["seeds"])}
    methods = [find_method(spec) for spec in facts["methods"]]
    summary = Summary(read_table(folder / "table.csv"), None, methods, stored=facts["agreements"], **asked)
    return page_of(summary, Provenance(**facts["provenance"]))


def page_of(summary: Summary, where: Provenance) -> Page:
    """The result in a summary."""
    agreements = {
        "simulated and human, here": summary.agreement,
        **{f"{feedback}, here and in the paper": found for feedback, found in summary.with_paper.items()},
        "simulated and human, in the paper (its numbers, of the methods here)": summary.in_paper,
    }
    known = {name: found for name, found in agreements.items() if found is not None}
    values: dict[str, Any] = {
        "summary": summary,
        "where": where,
        "columns": COLUMN_WORDS,
        "fewest": FEWEST,
        "resamples": f"{RESAMPLES:,}",
        "agreements": known,
        "missing": missing(summary),
        "gains": {feedback: gains(summary, feedback) for feedback in summary.feedbacks if summary.has_baseline},
        "best": {feedback: best_trained(summary, feedback) for feedback in summary.feedbacks},
        "lengths": lengths(summary) if summary.has_baseline else [],
    }
    tables = {
        "ranking": summary_table(summary),
        "differences": replace(difference_table(summary), title="Difference to SFT"),
        "reversals": replace(reversal_table(summary), title="Order other than the paper's"),
        "crossed": replace(cross_table(summary), title="Each feedback and judge"),
        "agreement": replace(agreement_table(known), title="Agreement of the rankings"),
    }
    captions = sentences("method_ranking/captions.txt.j2", **values)
    return Page(
        "The methods of AlpacaFarm, ranked",
        {key: replace(tables[key], caption=caption) for key, caption in zip(tables, captions, strict=True)},
        sentences("method_ranking/findings.txt.j2", **values),
        draw_figures(summary, where),
        headline(summary),
        method=sentences("method_ranking/method.txt.j2", where=where),
        simulated=where.sandbox,
        printed=("ranking",),
    )


def agreement_table(agreements: Mapping[str, Agreement]) -> Table:
    """A row for each two rankings."""
    rows = [
        (name, coefficient_text(each.spearman), coefficient_text(each.kendall), str(len(each.methods)))
        for name, each in agreements.items()
    ]
    return Table(("rankings", "Spearman", "Kendall tau-b", "methods"), rows)


def headline(summary: Summary) -> str:
    """How well the two rankings agree."""
    if summary.agreement is None:
        return ""
    found = summary.agreement
    spearman = f"Spearman {coefficient_text(found.spearman)} over {len(found.methods)} methods"
    (sampled, _), *inner = summary.sampled.values()
    others = f", {sampled.low:.2f} to {sampled.high:.2f} with methods sampled" if sampled.low == sampled.low else ""
    more = f"; without stand-ins and base model {coefficient_text(inner[0][0])}" if inner else ""
    return f"simulated and human ranking: {spearman}, {seeds_text([summary.num_seeds])}{others}{more}"


def summary_table(summary: Summary) -> Table:
    """One row per method, the best of the first column on top, the paper's Table 2 next to ours."""
    shown, rows = summary.feedbacks, []
    header = ("method", *(name for feedback in shown for name in (f"{feedback}, %", "paper")), *COSTS, "n")
    for method in summary.in_order():
        cells = [method.title]
        wins = [summary.win_rate(method.name, feedback) for feedback in shown]
        for feedback, win in zip(shown, wins, strict=True):
            paper = method.paper[FEEDBACKS.index(feedback)]
            cells += [_with_error(win), "–" if paper is None else number(paper, "%")]
        counts = [str(win.num) for win in wins]
        count = counts[0] if len(set(counts)) == 1 else ", ".join(counts)
        rows.append((*cells, *_costs(summary, method, shown[0]), count))
    return Table(header, rows)


def cross_table(summary: Summary) -> Table:
    """Every method and feedback under both judges, with intervals; methods that need no feedback have one row."""
    rows = []
    for method in summary.in_order():
        needy = method.needs != "nothing"
        for feedback in summary.feedbacks if needy else summary.feedbacks[:1]:
            wins = [summary.mean(measure, method.name, feedback) for measure in JUDGED_BY.values()]
            texts = [interval_text(win.interval, "%") for win in wins]
            count = str(summary.mean("length", method.name, feedback).num)
            costs = _costs(summary, method, feedback)
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
    titles, rows = summary.titles, []
    for each in (pair for pair in summary.pairs if pair["reversed"]):
        here = each["here"]
        clear = "–" if here.num < 2 else "yes" if here.clear else "no"
        numbers = (signed(each["paper"], "%"), signed(here.mean, "%"), number(here.standard_error))
        rows.append((each["feedback"], titles[each["higher"]], titles[each["lower"]], *numbers, clear, str(here.num)))
    header = ("column", "higher there", "higher here", "there", "here", "standard error", "clear here", "n")
    return Table(header, rows)


def _costs(summary: Summary, method: Method, feedback: str) -> list[str]:
    return [number(summary.mean(name, method.name, feedback).mean, unit) for name, unit in COSTS.items()]


def _with_error(found: Estimate) -> str:
    """For instance "47.1 ± 0.4"; the mean alone for one seed."""
    return number(found.mean, "%") + (f" ± {number(found.standard_error, '%')}" if found.num > 1 else "")


def missing(summary: Summary) -> dict[str, list[str]]:
    """Runs that were meant to be and have no row: columns, seeds, and cells of the columns and seeds that are there."""
    found, wanted, needy = summary.seeds, summary.num_seeds, [m for m in summary.methods if m.needs != "nothing"]
    num, cells = pd.DataFrame(summary.values["length"]).notna().sum(axis="columns"), []
    gone = [kind for kind in summary.asked if needy and not any(num[method.name, kind] for method in needy)]
    for feedback in summary.feedbacks:
        for method in summary.methods:
            # A method that needs no feedback is one cell a seed, and is reported once.
            told = feedback not in gone if method in needy else feedback == summary.feedbacks[0]
            if told and (count := num[method.name, feedback]) < len(found):
                kind = f" ({feedback})" if method in needy else ""
                cells.append(f"{method.title}{kind} {count} of {wanted}")
    return {"columns": gone, "seeds": [str(seed) for seed in range(wanted) if seed not in found], "cells": cells}


def gains(summary: Summary, feedback: str) -> dict[str, list[tuple[str, Estimate]]]:
    """Whether clearly above SFT and so on -> (title, points over SFT) of the trained methods."""
    groups: dict[str, list[tuple[str, Estimate]]] = {
        "clearly above (by the 95 % t-interval)": [],
        "clearly below": [],
        "not clearly apart": [],
        "with one seed, so without an error": [],
    }
    above, below, unclear, single = groups.values()
    for method in summary.in_order(feedback):
        gain = summary.lead(method.name, feedback)
        if gain.num and method.trained and method.name != BASELINE:
            group = single if gain.num == 1 else unclear if not gain.clear else above if gain.mean > 0 else below
            group.append((method.title, gain))
    return {words: group for words, group in groups.items() if group}


def best_trained(summary: Summary, feedback: str) -> list[Method]:
    """The two best trained methods of a column, or fewer."""
    column = summary.column(feedback)
    return [each for each in summary.in_order(feedback) if each.trained and each.name in column][:2]


def lengths(summary: Summary) -> list[tuple[str, list[Interval], tuple[float, str]]]:
    """Title, responses' length over SFT's in each column, and the published ratio."""
    found = []
    for method in summary.methods:
        ratios = [summary.length_ratio(method.name, feedback).interval for feedback in summary.feedbacks]
        if method.name in PAPER_LENGTH_RATIOS and any(ratio.num for ratio in ratios):
            found.append((method.title, ratios, PAPER_LENGTH_RATIOS[method.name]))
    return found


def draw_figures(summary: Summary, where: Provenance) -> dict[str, Drawn]:
    """human_against_simulated, for three methods or more that have both win rates, and win_rates, with captions."""
    best = f"Win rate of every method, best {summary.feedbacks[0]} one on top"
    diamonds = "Hollow diamonds: the paper's win rates, of LLaMA 7B against Davinci003; other models and judges"
    rates = f"{best}, {_bars(summary, 'with 95 % t-intervals')}. {diamonds}."
    figures = {}
    if len(summary.with_both()) >= FEWEST:
        what, bars = (
            "Human against simulated win rate, one point a method",
            _bars(summary, "bars are one standard error"),
        )
        figures["human_against_simulated"] = (draw_scatter, f"{what}; {bars}, the dashed line is equality.")
    figures["win_rates"] = (draw_win_rates, rates)
    errors = "bars: one standard error" if len(summary.seeds) > 1 else ""
    labels = dict.fromkeys(figures, where.label()) | {"human_against_simulated": where.label(interval=errors)}
    return {
        name: Drawn(draw(summary, f"{labels[name]} {where.judges()}"), f"{told} {labels[name]}")
        for name, (draw, told) in figures.items()
    }


def draw_win_rates(summary: Summary, note: str) -> Drawing:
    """A row per method, the best of the first column on top: means with 95 % t-intervals, and the published values."""
    measured = {name for feedback in FEEDBACKS for name in summary.column(feedback)}
    shown = [method for method in summary.in_order() if method.name in measured]
    figure = Drawing(figsize=(9.4, 2.0 + 0.4 * len(shown)), dpi=150, layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(shown), dtype=np.float64)[::-1]
    for feedback in summary.feedbacks:
        index = FEEDBACKS.index(feedback)
        (color, _), y = looks([feedback])[0], places + ((0.14, -0.14)[index] if len(summary.feedbacks) > 1 else 0.0)
        found = [summary.win_rate(method.name, feedback).interval for method in shown]
        means, low, high = np.array([(each.mean, each.low, each.high) for each in found]).reshape(-1, 3).T
        error = np.nan_to_num([means - low, high - means])
        bars: dict[str, Any] = {
            "fmt": "os"[index],
            "markersize": 4.5,
            "elinewidth": 1.2,
            "capsize": 2.5,
            "label": WORDS[feedback],
        }
        axis.errorbar(means, y, xerr=error, color=color, **bars)
        paper = np.array([method.paper[index] for method in shown], dtype=np.float64)
        hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": color, "markersize": 5, "alpha": 0.75}
        axis.plot(paper, y, "D", label=f"the paper's {feedback} win rate (LLaMA 7B)", **hollow)
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(places, [method.title for method in shown], fontsize=9)
    axis.set(xlim=(0, 100), ylim=(-0.7, len(shown) - 0.3), xlabel="win rate against the reference (%)")
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    titled(figure, f"Win rates of {len(shown)} methods; {_bars(summary, 'bars are 95 % t-intervals')}", note)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False)
    return figure


def draw_scatter(summary: Summary, note: str) -> Drawing:
    """A point per method: human against simulated win rate, bars of one standard error, labels next to the points."""
    both = summary.with_both()
    figure = Drawing(figsize=(8.2, 7.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    axis = figure.subplots()
    means = np.array([(one.mean, two.mean) for one, two in both.values()])
    errors = np.nan_to_num([(one.standard_error, two.standard_error) for one, two in both.values()])
    (x, y), (dx, dy) = means.T, errors.T
    axis.errorbar(x, y, xerr=dx, yerr=dy, fmt="o", color=COLORS[0], ecolor="#8fb8d6", markersize=5)
    ends = np.array([means - errors, means + errors])
    margin = 0.12 * max(float(np.ptp(ends)), 10.0)  # room for labels on all sides, within [0, 100] and some
    low, high = max(-3.0, float(ends.min()) - margin), min(103.0, float(ends.max()) + margin)
    axis.plot([low, high], [low, high], color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    simulated, human = (f"{WORDS[feedback]} (%)" for feedback in FEEDBACKS)
    axis.set(xlabel=simulated, ylabel=human, aspect="equal", xlim=(low, high), ylim=(low, high))
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    titled(figure, f"Human against simulated win rate; {_bars(summary, 'bars are one standard error')}", note)
    place_labels(figure, axis, both)
    return figure


def _bars(summary: Summary, words: str) -> str:
    return f"{words} over seeds" if len(summary.seeds) > 1 else "one seed, no bars"
