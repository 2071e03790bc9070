"""The ranking of methods for people: figures, tables and words, computed from the rows, labelled with their judges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..harness.agreement import FEWEST, Agreement, agreement_note, coefficient_text
from ..harness.estimates import CLEAR, Estimate
from ..harness.provenance import Provenance
from ..harness.report import Section, Table
from ..harness.report_text import SIMULATION, interval_text, number, signed
from ..harness.study import Row
from ..methods.methods import Method
from ..methods.runs import FEEDBACKS
from .figures import in_order, with_both, write_figures
from .summary import BASELINE, JUDGED_BY, Credits, Reversal, Summary, summarize

JUDGES = {"win_rate_simulated": "p_sim^eval", "win_rate_human": "human raters"}
"""Measure -> who judges."""
COLUMN_WORDS = {
    "simulated": "trained on simulated feedback, judged by p_sim^eval",
    "human": "trained on human feedback, judged by human raters",
}
"""Column of the paper's Table 2 -> what its numbers are."""
PAPER_LENGTH_RATIOS = {"ppo": (2.3, "PPO"), "best_of_16": (2.1, "best-of-16"), "best_of_n": (2.1, "best-of-16")}
"""Method -> its published length over SFT's (637 and 570 over 278 characters), and of which method that is."""


def write(
    study_out: Path,
    rows: Sequence[Row],
    credits: Credits,
    methods: Sequence[Method],
    where: Provenance,
    extra_sections: Sequence[Section] = (),
    *,
    feedbacks: Sequence[str] = FEEDBACKS,
    num_seeds: int | None = None,
) -> tuple[list[Section], Table, list[str]]:
    """Writes the figures and returns the report's sections, the table to print, and the findings in sentences.

    Args:
        study_out: Folder of the study, for win_rates.png and (of three methods with both win rates or more)
            human_against_simulated.png.
        rows: Of table.csv.
        credits: (method, feedback, seed) -> the credits on the same instructions, by both judges.
        methods: All that were meant to run.
        where: Level, reference, n, seeds and temperature, that stand under every figure and table.
        extra_sections: Of the command; they come after ours.
        feedbacks: The kinds of feedback that were meant to run; of others nothing is told.
        num_seeds: How many seeds were meant to run, 0 .. num_seeds - 1; None: those of the rows.

    Raises:
        ValueError: Rows or credits are faulty, or do not belong together; feedbacks or num_seeds are not those of a
            study with these rows.
    """
    summary = summarize(rows, credits, methods, feedbacks=feedbacks, num_seeds=num_seeds)
    sentences = ([SIMULATION] if where.sandbox else []) + findings(summary, methods)
    table = summary_table(summary, methods, where)
    sections = [
        Section("Result", sentences, table, write_figures(study_out, summary, methods, where)),
    ]
    if (agreements := agreement_table(summary)) is not None:
        both = len(summary.feedbacks) > 1
        heading = "Agreement of the rankings" if both else "Agreement with the paper's ranking"
        sections.append(Section(heading, [agreement_note()], agreements))
    if summary.has_baseline:
        sections.append(Section("Difference to SFT", table=difference_table(summary, methods, where)))
    sections += [
        Section("Order other than the paper's", order_sentences(summary, methods), reversal_table(summary, methods)),
        Section("Each feedback and judge", table=cross_table(summary, methods, where)),
        Section("What the columns mean", meanings(where)),
    ]
    told = [section for section in sections if section.paragraphs or section.table or section.figures]
    return [*told, *extra_sections], table, sentences


# ------------------------------------------------------------------------------------------------------------- tables


def summary_table(summary: Summary, methods: Sequence[Method], where: Provenance) -> Table:
    """One row a method, as the paper's Table 2, the best of the first column on top, its columns beside ours."""
    shown = summary.feedbacks
    header = ("method", *(name for feedback in shown for name in (f"{feedback}, %", "paper")), *COSTS, "n")
    rows = []
    for method in in_order(summary, methods):
        means = {measure: summary.mean(measure, method.name, shown[0]) for measure in COSTS}
        wins = {feedback: summary.mean(JUDGED_BY[feedback], method.name, feedback) for feedback in shown}
        papers = dict(zip(FEEDBACKS, method.paper, strict=True))
        pairs = [(with_error(wins[feedback]), published(papers[feedback])) for feedback in shown]
        counts = [str(estimate.num) for estimate in wins.values()]
        rows.append(
            (
                method.title,
                *(cell for pair in pairs for cell in pair),
                *(number(means[measure].mean, COSTS[measure]) for measure in COSTS),
                counts[0] if len(set(counts)) == 1 else ", ".join(counts),
            )
        )
    notes = "; ".join(f"{method.title}: {method.paper_note}" for method in methods if method.paper_note)
    caption = (
        f"Win rate ± standard error over n seeds{' (n, n: simulated, human)' if len(shown) > 1 else ''}. "
        f"{_columns_told(shown)} Gold, length (characters), seconds (wall time of training and decoding) and tokens "
        f"(generated in both) are of the models trained on {shown[0]} feedback. {NOT_TIMED} Paper: Table 2, LLaMA 7B "
        f"against Davinci003{f' ({notes})' if notes else ''}. {where.label()} {where.judges()}"
    )
    return Table(header, rows, caption)


COSTS = {"gold": "", "length": "characters", "seconds": "characters", "tokens": "characters"}
"""Measures of the summary table beside the win rates -> a unit that has as many decimals (`decimals`)."""
NOT_TIMED = (
    "Not in seconds: the training of the SFT policy that the methods start from, and that of the reward model, which "
    "all methods that need one share in a feedback and seed (its own seconds: facts in manifest.json)."
)
"""What `seconds` leaves out."""


def cross_table(summary: Summary, methods: Sequence[Method], where: Provenance) -> Table:
    """Every method and feedback under both judges, with intervals; methods that need no feedback have one row."""
    rows = []
    for method in in_order(summary, methods):
        needy = method.needs != "nothing"
        for feedback in summary.feedbacks if needy else summary.feedbacks[:1]:
            wins = [interval_text(summary.mean(measure, method.name, feedback).interval, "%") for measure in JUDGES]
            costs = [number(summary.mean(name, method.name, feedback).mean, unit) for name, unit in COSTS.items()]
            count = str(summary.mean("length", method.name, feedback).num)
            rows.append((method.title, feedback if needy else "none", *wins, *costs, count))
    judged = (f"by {judge}, %" for judge in JUDGES.values())
    header = ("method", "trained on", *judged, *COSTS, "n")
    caption = f"Mean over n seeds [95 % t-interval]; both judges for both kinds of training labels. {where.label()}"
    return Table(header, rows, caption)


def difference_table(summary: Summary, methods: Sequence[Method], where: Provenance) -> Table:
    """Each method less SFT, paired by seed, in win rate and gold, and its length over SFT's: a row a column."""
    rows = []
    for method in in_order(summary, methods):
        if method.name == BASELINE:
            continue
        for feedback in summary.feedbacks:
            wins = summary.difference(JUDGED_BY[feedback], method.name, feedback)
            gold = summary.difference("gold", method.name, feedback)
            ratio = interval_text(summary.length_ratio(method.name, feedback).interval, "")
            won = (signed(wins.mean, "%"), number(wins.standard_error), signed(wins.ratio, "%"))
            rows.append(
                (method.title, feedback, *won, signed(gold.mean), number(gold.standard_error), ratio, str(wins.num))
            )
    header = ("method", "column", "win rate", "± SE", "in SE", "gold", "± SE", "length ratio", "n")
    caption = (
        "Method − SFT of the same seed, mean over n seeds, with its standard error (SE) and in standard errors (more "
        f"than {CLEAR:g}: clear); length of a response over SFT's with its 95 % t-interval. Win rates in points. "
        f"{_columns_told(summary.feedbacks)} {where.label()}"
    )
    return Table(header, rows, caption)


def agreement_table(summary: Summary) -> Table | None:
    """Spearman and Kendall between the rankings here, and of each with the published one; None where there is none."""
    pairs = {
        "simulated and human, here": summary.agreement,
        **{f"{feedback} here and in the paper": summary.with_paper[feedback] for feedback in FEEDBACKS},
        "simulated and human, in the paper (its numbers, of the methods here)": summary.in_paper,
    }
    rows = [
        (words, coefficient_text(found.spearman), coefficient_text(found.kendall), str(len(found.methods)))
        for words, found in pairs.items()
        if found is not None
    ]
    return Table(("rankings", "Spearman", "Kendall tau-b", "methods"), rows) if rows else None


def reversal_table(summary: Summary, methods: Sequence[Method]) -> Table | None:
    """Pairs in another order than in the paper, the clear ones first; None where there is none."""
    titles = _titles(methods)
    rows = [
        (
            each.feedback,
            titles[each.higher],
            titles[each.lower],
            signed(each.paper, "%"),
            signed(each.here.mean, "%"),
            number(each.here.standard_error),
            "–" if each.here.num < 2 else "yes" if each.here.clear else "no",
            str(each.here.num),
        )
        for each in summary.reversals
    ]
    header = ("column", "higher there", "higher here", "there", "here", "standard error", "clear here", "n")
    caption = (
        "Differences in points, the method that is higher in the paper less the other; here paired by seed. Clear: "
        f"more than {CLEAR:g} standard errors over seeds, the instructions being the same."
    )
    return Table(header, rows, caption) if rows else None


# -------------------------------------------------------------------------------------------------------------- words


def findings(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """What the numbers say, in sentences computed from them."""
    return [
        *_missing(summary, methods),
        *_not_compared(summary, methods),
        *_against_sft(summary, methods),
        *_first(summary, methods),
        *_correlations(summary),
        *order_sentences(summary, methods),
        *_lengths(summary, methods),
    ]


def order_sentences(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """Where the order differs from the paper's: the clear pairs by name, the others by number."""
    titles = _titles(methods)
    sentences = []
    for feedback in summary.feedbacks:
        count = summary.compared[feedback]
        if summary.with_paper[feedback] is None or not count:
            continue
        found = [each for each in summary.reversals if each.feedback == feedback]
        start = f"Order in the {feedback} column: {len(found)} of {count} pairs of methods differ from the paper"
        if len(summary.cells.seeds) < 2:
            sentences.append(f"{start}; with one seed there is no standard error, so none can be called clear.")
            continue
        clear = [each for each in found if each.here.clear]
        told = "; ".join(_reversal_text(each, titles) for each in clear)
        sentences.append(
            f"{start}, {len(clear)} of them clearly (more than {CLEAR:g} standard errors){f': {told}' if told else ''}."
        )
    return sentences


def meanings(where: Provenance) -> list[str]:
    """What each column of table.csv is."""
    return [
        "feedback: whose labels a method was trained on, simulated (p_sim^ann: p_sim^eval with 25 % of its labels "
        "flipped) or human raters'. A method that needs no feedback is run once a seed and stands in both.",
        f"win_rate_simulated, win_rate_human: percent of responses preferred to {where.reference}, by p_sim^eval and "
        "by the human raters; a tie counts half. gold: mean true reward, in its own units.",
        "length: mean characters of a response. seconds: wall time of training and decoding, what an interrupted "
        f"call lost included. tokens: generated in the two. {NOT_TIMED}",
        "Standard errors and t-intervals are over seeds, the instructions being the same: they say how much another "
        "run would differ, not how much other instructions would.",
        where.judges(),
    ]


def with_error(estimate: Estimate) -> str:
    """For instance "47.1 ± 0.4"; the mean alone for one seed."""
    error = "" if math.isnan(estimate.standard_error) else f" ± {number(estimate.standard_error, '%')}"
    return f"{number(estimate.mean, '%')}{error}"


def published(value: float | None) -> str:
    """A number of the paper; "–" where it gives none."""
    return "–" if value is None else number(value, "%")


def _missing(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """What was meant to run and has no row: columns, seeds, and cells of the columns and seeds that are there."""
    found, wanted = summary.cells.seeds, summary.num_seeds
    told = []
    needy = any(method.needs != "nothing" for method in methods)
    gone = [feedback for feedback in summary.asked if needy and not _learned(summary, methods, feedback)]
    if gone:
        told.append(f"Every cell trained on {' or '.join(gone)} feedback failed.")
    if len(found) < wanted:
        lost = [str(seed) for seed in range(wanted) if seed not in found]
        told.append(f"Every cell of seed{'s' * (len(lost) > 1)} {', '.join(lost)} failed.")
    lacking = []
    for feedback in summary.feedbacks:
        for method in methods:
            alone = method.needs == "nothing"
            num = summary.mean("length", method.name, feedback).num
            # A method that needs no feedback is one cell a seed, and is told of once.
            if num < len(found) and (feedback == summary.feedbacks[0] if alone else feedback not in gone):
                lacking.append(f"{method.title}{'' if alone else f' ({feedback})'} {num} of {wanted}")
    return told + ([f"Not all cells are there; seeds found: {', '.join(lacking)}."] if lacking else [])


def _learned(summary: Summary, methods: Sequence[Method], feedback: str) -> bool:
    """Whether any method that needs feedback has a cell of this kind."""
    return any(summary.mean("length", method.name, feedback).num for method in methods if method.needs != "nothing")


def _not_compared(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """Why human and simulated win rates are not set against each other, where they are not."""
    if len(summary.feedbacks) == 1:
        here = summary.feedbacks[0]
        (other,) = (feedback for feedback in FEEDBACKS if feedback != here)
        return [f"There are {here} labels only: no {other} ranking to compare with, nor a figure of the two."]
    count = len(with_both(summary, methods))
    if count < FEWEST:
        return [f"Human is not drawn against simulated: {count} methods have both win rates, fewer than {FEWEST}."]
    return []


def _against_sft(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """Which trained methods are clearly above, clearly below and not clearly apart from SFT, or have no error."""
    sentences = []
    for feedback in summary.feedbacks if summary.has_baseline else ():
        groups: dict[str, list[str]] = {"above": [], "below": [], "neither": [], "single": []}
        for method in in_order(summary, methods, feedback):
            found = summary.difference(JUDGED_BY[feedback], method.name, feedback)
            if method.name == BASELINE or not method.trained or not found.num:
                continue
            verdict = "neither" if not found.clear else "above" if found.mean > 0 else "below"
            error = "" if found.num < 2 else f" ± {number(found.standard_error, '%')}"
            groups[verdict if error else "single"].append(f"{method.title} ({signed(found.mean, '%')}{error})")
        listed = {name: ", ".join(members) or "none" for name, members in groups.items()}
        single = f"with one seed, so without a standard error: {listed['single']}" if groups.pop("single") else ""
        if any(groups.values()):
            sentences.append(
                f"Win rate in points over SFT, ± standard error, {COLUMN_WORDS[feedback]}: clearly above (more than "
                f"{CLEAR:g} standard errors): {listed['above']}; clearly below: {listed['below']}; not clearly apart: "
                f"{listed['neither']}{f'; {single}' if single else ''}."
            )
        elif single:
            sentences.append(f"Win rate in points over SFT, {COLUMN_WORDS[feedback]}, {single}.")
    return sentences


def _first(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """The best trained method of each column, and how far it is from the second."""
    by_name = {method.name: method for method in methods}
    sentences = []
    for feedback in summary.feedbacks:
        ranked = [name for name in summary.ranking(feedback) if by_name[name].trained]
        if len(ranked) < 2:
            continue
        measure, (first, second) = JUDGED_BY[feedback], ranked[:2]
        lead = summary.difference(measure, first, feedback, second)
        how = "clearly before" if lead.clear else "not clearly before" if lead.num > 1 else "before"
        sentences.append(
            f"First among the trained methods in the {feedback} column: {by_name[first].title} "
            f"({with_error(summary.mean(measure, first, feedback))} %), {how} {by_name[second].title} "
            f"({with_error(summary.mean(measure, second, feedback))} %){', by one seed' if lead.num == 1 else ''}."
        )
    return sentences


def _correlations(summary: Summary) -> list[str]:
    sentences = []
    if summary.agreement is not None:
        text = _coefficients(summary.agreement)
        sentences.append(f"Simulated and human ranking: {text} (the paper: Spearman 0.98).")
    for feedback in FEEDBACKS:
        found = summary.with_paper[feedback]
        if found is not None:
            sentences.append(f"The {feedback} ranking here and the published one: {_coefficients(found)}.")
    return sentences


def _coefficients(found: Agreement) -> str:
    return (
        f"Spearman {coefficient_text(found.spearman)}, Kendall tau-b {coefficient_text(found.kendall)} over "
        f"{len(found.methods)} methods"
    )


def _lengths(summary: Summary, methods: Sequence[Method]) -> list[str]:
    """Responses' length over SFT's of every method that has a published ratio, beside it."""
    told = []
    for method in methods if summary.has_baseline else ():
        ratios = [summary.length_ratio(method.name, feedback).interval for feedback in summary.feedbacks]
        if method.name in PAPER_LENGTH_RATIOS and any(ratio.num for ratio in ratios):
            value, of = PAPER_LENGTH_RATIOS[method.name]
            texts = " and ".join(interval_text(ratio, "") for ratio in ratios)
            told.append(f"{method.title} {texts} (the paper's {of}: {value:g})")
    kinds = " and on ".join(summary.feedbacks)
    return [f"Length over SFT's, trained on {kinds} feedback: {'; '.join(told)}."] if told else []


def _columns_told(feedbacks: Sequence[str]) -> str:
    told = "; ".join(f"{feedback}: {COLUMN_WORDS[feedback]}" for feedback in feedbacks)
    return f"{told[0].upper()}{told[1:]}."


def _reversal_text(each: Reversal, titles: Mapping[str, str]) -> str:
    return (
        f"{titles[each.lower]} above {titles[each.higher]} by {number(-each.here.mean, '%')} ± "
        f"{number(each.here.standard_error, '%')} points (there {number(each.paper, '%')} below)"
    )


def _titles(methods: Sequence[Method]) -> dict[str, str]:
    return {method.name: method.title for method in methods}
