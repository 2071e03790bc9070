"""The page of the ranking of methods: means over seeds, rankings and how well they agree; the words are templates."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from ...statistics import PERCENT, UNBOUNDED, Interval
from ..harness.estimates import FEWEST, RESAMPLES, Array, Estimate, agreement, resampled, sampled_methods
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import COLORS, grid, looks, place_labels, titled
from ..harness.report import Provenance, Table, interval_text, number, seeds_text, sentences, signed
from ..methods.job import FEEDBACKS
from ..methods.methods import Method, find_method

JUDGED_BY = {"simulated": "win_rate_simulated", "human": "win_rate_human"}
"""Column of the paper's Table 2 -> our measure, of the models trained on that feedback."""
WORDS = {
    "simulated": "trained on simulated feedback, judged by p_sim^eval",
    "human": "trained on human feedback, judged by human raters",
}
"""Column of the paper's Table 2 -> what its numbers are."""
COSTS = {"gold": "", "length": "characters", "seconds": "characters", "tokens": "characters"}
"""Measures of the table besides the win rates -> a unit with as many decimals (`number`)."""
BASELINE = "sft"
"""The method that the others start from and are compared with."""
ANCHORS = ("gpt4", "chatgpt", "davinci001", "base")
"""Stand-ins whose habits are set so that they come near the published win rates, and the policy before SFT: they spread
a ranking over its whole range whatever the methods do."""
BOTH = "both"
"""Name of the agreement of the two columns."""
Agreements = Mapping[str, Mapping[str, Interval] | None]
"""`BOTH`, or a column beside the paper's -> rank correlations with intervals; None for too few methods."""


class Summary:
    """The rows of table.csv, where cells may be missing.

    `methods`, in the order of the tables, and `feedbacks`, the columns, are those that were meant to run.

    Attributes:
        values: Rows (method, feedback), columns (measure, seed); NaN where a cell is missing.
        columns: Column -> method -> mean win rate, of those that have one, the highest first.
        paper: Column -> method -> published win rate.
    """

    def __init__(self, frame: pd.DataFrame, methods: Sequence[Method], feedbacks: Sequence[str] = FEEDBACKS) -> None:
        self.methods, self.titles = tuple(methods), {method.name: method.title for method in methods}
        self.feedbacks = tuple(feedback for feedback in FEEDBACKS if feedback in feedbacks)
        measures = [*JUDGED_BY.values(), *COSTS]
        cells = pd.MultiIndex.from_product([self.titles, FEEDBACKS])
        shown = frame[frame.feedback.isin(self.feedbacks)].astype(dict.fromkeys(measures, float))
        self.values = shown.pivot(index=["method", "feedback"], columns="seed", values=measures).reindex(cells)
        means = {kind: {name: self.win_rate(name, kind).mean for name in self.titles} for kind in FEEDBACKS}
        self.columns = {
            kind: dict(sorted(((k, v) for k, v in each.items() if v == v), key=lambda item: -item[1]))
            for kind, each in means.items()
        }
        self.paper = {
            kind: {each.name: float(rate) for each in methods if (rate := each.paper[place]) is not None}
            for place, kind in enumerate(FEEDBACKS)
        }

    def at(self, measure: str, method: str, feedback: str) -> Array:
        """[S]: the seeds of one method and feedback."""
        return np.asarray(self.values[measure].loc[(method, feedback)], dtype=np.float64)

    def mean(self, measure: str, method: str, feedback: str) -> Estimate:
        """Mean of a measure over the seeds."""
        bounds = PERCENT if measure in JUDGED_BY.values() else UNBOUNDED
        return Estimate.of(self.at(measure, method, feedback), bounds)

    def win_rate(self, method: str, feedback: str) -> Estimate:
        """In a column of the paper's table."""
        return self.mean(JUDGED_BY[feedback], method, feedback)

    def lead(self, method: str, feedback: str, other: str = BASELINE) -> Estimate:
        """Win rate less another method's in a column of the paper's table, in points, paired by seed."""
        measure = JUDGED_BY[feedback]
        return Estimate.of(self.at(measure, method, feedback) - self.at(measure, other, feedback))

    def in_order(self, feedback: str | None = None) -> list[Method]:
        """By win rate in a column (None: the first), the best first; methods without one last, in their own order."""
        order = [*self.columns[feedback or self.feedbacks[0]]]
        return sorted(self.methods, key=lambda each: order.index(each.name) if each.name in order else len(order))

    def both(self) -> list[str]:
        """Methods that have a simulated and a human win rate."""
        return [name for name in self.titles if all(name in column for column in self.columns.values())]

    def pairs(self, feedback: str) -> list[dict[str, Any]]:
        """Methods whose published win rates differ: `higher` and `lower` there; clear differences first, then by size.

        `paper` is the difference there in points, and `here` the same, paired by seed.
        """
        paper, pairs = self.paper[feedback], []
        for pair in combinations([name for name in self.columns[feedback] if name in paper], 2):
            higher, lower = sorted(pair, key=lambda name: -paper[name])
            difference, here = paper[higher] - paper[lower], self.lead(higher, feedback, lower)
            if difference and here.num:
                pairs.append({"higher": higher, "lower": lower, "paper": difference, "here": here})
        return sorted(pairs, key=lambda pair: (not pair["here"].clear, pair["here"].mean))


def agreements_of(summary: Summary, credits: Mapping[str, Mapping[str, Sequence[Array]]]) -> Agreements:
    """How well the rankings agree; credits: column -> method -> verdicts on the instructions, [B] of each seed."""
    draws = {kind: resampled(credits[kind], seed=0) for kind in FEEDBACKS}
    compared = {kind: agreement(summary.columns[kind], summary.paper[kind], draws[kind]) for kind in FEEDBACKS}
    simulated, human = (summary.columns[kind] for kind in FEEDBACKS)
    return {BOTH: agreement(simulated, human, *draws.values()), **compared}


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    facts = read_manifest(folder)["facts"]
    methods = [find_method(spec) for spec in facts["methods"]]
    summary = Summary(read_table(folder / "table.csv"), methods, facts["feedback"])
    agreements = {
        name: stored and {figure: Interval(**each) for figure, each in stored.items()}
        for name, stored in facts["agreements"].items()
    }
    return page_of(summary, agreements, Provenance(**facts["provenance"]))


def page_of(summary: Summary, agreements: Agreements, where: Provenance) -> Page:
    """The result in a summary and the agreements of its rankings."""
    simulated, human = (
        {name: rate for name, rate in summary.paper[kind].items() if name in summary.columns[kind]}
        for kind in FEEDBACKS
    )
    rankings = {
        "simulated and human, here": agreements[BOTH],
        **{f"{feedback}, here and in the paper": agreements[feedback] for feedback in FEEDBACKS},
        "simulated and human, in the paper (its numbers, of the methods here)": agreement(simulated, human),
    }
    sampled = sampled_anew(summary, agreements)
    pairs = {feedback: summary.pairs(feedback) for feedback in summary.feedbacks}
    values: dict[str, Any] = {
        "summary": summary,
        "where": where,
        "columns": WORDS,
        "rankings": {name: each for name, each in rankings.items() if each},
        "sampled": sampled,
        "gains": {feedback: gains(summary, feedback) for feedback in summary.feedbacks},
        "best": {feedback: best_trained(summary, feedback) for feedback in summary.feedbacks},
        "pairs": pairs,
    }
    ranking, reversals = sentences("method_ranking/captions.txt.j2", **values)
    tables = {
        "ranking": ranking_table(summary, ranking),
        "reversals": reversal_table(summary, pairs, reversals),
    }
    return Page(
        "The methods of AlpacaFarm, ranked",
        tables,
        sentences("method_ranking/findings.txt.j2", **values),
        draw_figures(summary, where),
        headline(agreements[BOTH], [*sampled.values()], len(summary.values["length"].columns)),
        method=sentences("method_ranking/method.txt.j2", where=where, resamples=f"{RESAMPLES:,}"),
        simulated=where.sandbox,
        printed=("ranking",),
    )


def sampled_anew(summary: Summary, agreements: Agreements) -> dict[str, Interval]:
    """Spearman of rankings, with an interval for methods like these."""
    inner = {
        kind: {name: rate for name, rate in column.items() if name not in ANCHORS}
        for kind, column in summary.columns.items()
    }
    rankings = {
        "simulated and human, here": agreements[BOTH],
        "simulated and human, here, without stand-ins and base model": agreement(inner["simulated"], inner["human"]),
        **{
            f"{kind}, here and in the paper, without them": agreement(inner[kind], summary.paper[kind])
            for kind in FEEDBACKS
        },
    }
    return {name: sampled_methods(each["spearman"]) for name, each in rankings.items() if each}


def headline(both: Mapping[str, Interval] | None, sampled: Sequence[Interval], num_seeds: int) -> str:
    """How well the two rankings agree."""
    if both is None:
        return ""
    first, *inner = sampled
    spearman = f"Spearman {interval_text(both['spearman'], '')} over {first.num} methods, {seeds_text([num_seeds])}"
    others = f", {first.low:.2f} to {first.high:.2f} with methods sampled" if first.low == first.low else ""
    more = f"; without stand-ins and base model {interval_text(inner[0], '')}" if inner else ""
    return f"simulated and human ranking: {spearman}{others}{more}"


def ranking_table(summary: Summary, caption: str) -> Table:
    """One row per method, the best of the first column on top, the paper's Table 2 next to ours."""
    rows = []
    for method in summary.in_order():
        row, wins = {"method": method.title}, [summary.win_rate(method.name, each) for each in summary.feedbacks]
        for feedback, win in zip(summary.feedbacks, wins, strict=True):
            row[f"{feedback}, %"] = with_error(win)
            row[f"{feedback} in the paper"] = number(summary.paper[feedback].get(method.name, np.nan), "%")
        for name, unit in COSTS.items():
            row[name] = number(summary.mean(name, method.name, summary.feedbacks[0]).mean, unit)
        rows.append({**row, "n": ", ".join(dict.fromkeys(str(win.num) for win in wins))})
    return Table.of(rows, caption)


def reversal_table(summary: Summary, pairs: Mapping[str, Sequence[Mapping[str, Any]]], caption: str) -> Table:
    """Pairs in another order than in the paper, the clear ones first."""
    rows = [
        {
            "column": feedback,
            "higher there": summary.titles[pair["higher"]],
            "higher here": summary.titles[pair["lower"]],
            "there": signed(pair["paper"], "%"),
            "here": signed(pair["here"].mean, "%"),
            "standard error": number(pair["here"].standard_error),
            "clear here": "–" if pair["here"].num < 2 else "yes" if pair["here"].clear else "no",
            "n": pair["here"].num,
        }
        for feedback, each in pairs.items()
        for pair in each
        if pair["here"].mean < 0
    ]
    return Table.of(rows, caption, "Order other than the paper's")


def with_error(win: Estimate) -> str:
    """For instance "47.1 ± 0.4"; the mean alone for one seed."""
    return number(win.mean, "%") + (f" ± {number(win.standard_error, '%')}" if win.num > 1 else "")


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
    return [each for each in summary.in_order(feedback) if each.trained and each.name in summary.columns[feedback]][:2]


def draw_figures(summary: Summary, where: Provenance) -> dict[str, Drawn]:
    """human_against_simulated, for three methods or more that have both win rates, and win_rates, with captions."""
    figures = {}
    if len(summary.both()) >= FEWEST:
        begin = "Human against simulated win rate, one point a method; bars are one standard error over seeds, the "
        drawing = draw_scatter(summary, f"{where.label(interval='bars: one standard error')} {where.judges()}")
        caption = f"{begin}dashed line is equality. {where.label(interval='bars: one standard error')}"
        figures["human_against_simulated"] = Drawn(drawing, caption)
    begin = f"Win rate of every method, best {summary.feedbacks[0]} one on top, with 95 % t-intervals over seeds. "
    begin += "Hollow diamonds: the paper's win rates, of LLaMA 7B against Davinci003; other models and judges."
    drawing = draw_win_rates(summary, f"{where.label()} {where.judges()}")
    return figures | {"win_rates": Drawn(drawing, f"{begin} {where.label()}")}


def draw_win_rates(summary: Summary, note: str) -> Drawing:
    """A row per method, the best of the first column on top: means with 95 % t-intervals, and the published values."""
    shown = [each for each in summary.in_order() if any(each.name in column for column in summary.columns.values())]
    figure = Drawing(figsize=(9.4, 2.0 + 0.4 * len(shown)), dpi=150, layout="constrained")
    axis, places = figure.subplots(), np.arange(len(shown), dtype=np.float64)[::-1]
    for index, feedback in enumerate(summary.feedbacks):
        (color, marker), y = looks([feedback])[0], places - 0.14 * index
        wins = [summary.win_rate(method.name, feedback) for method in shown]
        means, low, high = np.array([(win.mean, win.low, win.high) for win in wins]).T
        error = np.nan_to_num([means - low, high - means])
        label = f"{feedback}: {WORDS[feedback]}"
        axis.errorbar(means, y, xerr=error, fmt=marker, color=color, markersize=4.5, capsize=2.5, label=label)
        paper = [summary.paper[feedback].get(method.name, np.nan) for method in shown]
        label = f"the paper's {feedback} win rate (LLaMA 7B)"
        axis.plot(paper, y, "D", markerfacecolor="none", markeredgecolor=color, markersize=5, alpha=0.75, label=label)
    axis.axvline(50, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(places, [method.title for method in shown], fontsize=9)
    axis.set(xlim=(0, 100), ylim=(-0.7, len(shown) - 0.3), xlabel="win rate against the reference (%)")
    grid(axis, "x")
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, frameon=False)
    return titled(figure, f"Win rates of {len(shown)} methods", note)


def draw_scatter(summary: Summary, note: str) -> Drawing:
    """A point per method: human against simulated win rate, bars of one standard error, labels beside the points."""
    figure = Drawing(figsize=(9.4, 7.4), dpi=150, layout="constrained")
    axis, names = figure.subplots(), summary.both()
    simulated, human = ([summary.win_rate(name, feedback) for name in names] for feedback in FEEDBACKS)
    (x, dx), (y, dy) = (np.array([(w.mean, w.standard_error) for w in wins]).T for wins in (simulated, human))
    error = {"xerr": np.nan_to_num(dx), "yerr": np.nan_to_num(dy)}
    axis.errorbar(x, y, **error, fmt="o", color=COLORS[0], ecolor="#8fb8d6", markersize=5)
    axis.axline((50, 50), slope=1, color="#bbbbbb", linestyle="--", linewidth=1, zorder=0)
    axis.set(xlabel=f"{WORDS['simulated']} (%)", ylabel=f"{WORDS['human']} (%)")
    grid(axis)
    titles = [summary.titles[name] for name in names]
    place_labels(axis, dict(zip(titles, zip(x.tolist(), y.tolist(), strict=True), strict=True)))
    return titled(figure, "Human against simulated win rate", note)
