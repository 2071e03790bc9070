"""The annotators' rows for people: tables, and sentences computed from the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...sandbox.judges import POOL
from ..harness import report
from ..harness.study import Row
from .sandbox import MEANINGS, Question
from .targets import ALONE, COST, FIGURES, SPENT, TARGETS, Target

HEADER: Final = ("figure", "judge", "level", "paper", "value", "95 % interval", "seeds", "n", "tolerance", "within?")
MEMBERS: Final = tuple(annotator.name for annotator in POOL)
LEVELS: Final = ("sandbox", "recorded", "live")
_SHOWN: Final = ("agreement", "bias", "variance", "prefers_first", "prefers_longer", "prefers_lists", COST, "spearman")


def figure_table(rows: Sequence[Row], caption: str) -> report.Table:
    """Rows in full, figure by figure, each beside the published value."""
    order = list(FIGURES) + [row["figure"] for row in rows]
    return report.Table(HEADER, [_cells(row) for row in sorted(rows, key=lambda r: order.index(r["figure"]))], caption)


def member_table(rows: Sequence[Row]) -> report.Table:
    """One line for each annotator of a pool by itself, from its rows of one level.

    Where a figure is about other pairs for each annotator (a live pool draws them), it says of how many.
    """
    found = {(row["judge"], row["figure"]): row for row in rows}
    names = list(dict.fromkeys(row["judge"] for row in rows))
    live = rows[0]["level"] == "live"
    known = {figure for _, figure in found if live or figure != COST}  # the sandbox's are free
    shown = [figure for figure in _SHOWN if figure in known]
    lines = [(name.removeprefix("live "), *(_short(found.get((name, f)), count=live) for f in shown)) for name in names]
    counted = "In brackets: of how many pairs; few tell little. " if live else ""
    return report.Table(("annotator", *shown), lines, f"{counted}Intervals are in table.csv.")


def members(rows: Sequence[Row], level: str) -> list[Row]:
    """The rows of a level that are about one annotator of a pool by itself."""
    if level == "live":  # what was spent is told of the pool as a whole
        pools = {row["judge"] for row in rows if row["figure"] == SPENT}
        return [row for row in rows if row["level"] == level and row["judge"] not in pools]
    return [row for row in rows if row["level"] == level == "sandbox" and row["judge"] in MEMBERS]


def whole(rows: Sequence[Row]) -> list[Row]:
    """The rows that are not about one annotator of a pool by itself."""
    alone = {(row["level"], row["judge"]) for level in LEVELS for row in members(rows, level)}
    return [row for row in rows if (row["level"], row["judge"]) not in alone]


def note(levels: Iterable[str], question: Question, num_live: int) -> str:
    """What the levels are."""
    seeds = "1 seed" if question.num_seeds == 1 else f"each of {question.num_seeds} seeds"
    said = {
        "sandbox": f"a simulation, {len(question.pairs)} preference pairs, {question.num_opinions} opinions on each in "
        f"{seeds}",
        "recorded": "stored verdicts of real judges",
        "live": f"a judge behind an API, on {num_live} pairs of the sandbox, {question.num_opinions} opinions on each",
    }
    return " ".join(f"Level {level}: {said[level]}." for level in LEVELS if level in levels)


def _cells(row: Row) -> tuple[str, ...]:
    target = target_of(row)
    tolerance, within = "–", "–"
    if row["tolerance"] is not None:
        small = row["tolerance"] < 0.001
        tolerance = "equal" if small else f"{'+' if target.upper_bound else '±'}{row['tolerance']:.2f}"
        within = "yes" if row["within"] else "NO"
    seeds = f"{row['seed_min']:.3f} to {row['seed_max']:.3f}" if (row["seeds"] or 0) > 1 else "–"
    beside = "–" if row["paper"] is None else target.text() if target.upper_bound else _number(row["paper"])
    value = _number(row["value"])
    return row["figure"], row["judge"], row["level"], beside, value, _span(row), seeds, str(row["n"]), tolerance, within


def target_of(row: Row) -> Target:
    """What a row's value stands beside."""
    if row["level"] == "sandbox" and (row["judge"], row["figure"]) in TARGETS:
        return TARGETS[row["judge"], row["figure"]]
    return Target(row["paper"] or 0.0, row["tolerance"])


def _span(row: Row) -> str:
    return "–" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"


def _short(row: Row | None, *, count: bool) -> str:
    return _number(row["value"] if row else None) + (f" ({row['n']})" if row and count else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What the numbers say, one sentence each."""
    return [*_sandbox_verdicts(rows), *_recorded_verdicts(rows), *_live_verdicts(rows)]


def _within(name: str, told: Sequence[Row]) -> str:
    outside = [row for row in told if not row["within"]]
    which = "; ".join(
        f"{row['judge']} {row['figure']} {row['value']:.3f} [{_span(row)}] (paper {target_of(row).text()}, off by "
        f"{abs(row['value'] - row['paper']):.3f}, allowed {row['tolerance']:.2f})"
        for row in outside
    )
    count = f"{name}: {len(told) - len(outside)} of {len(told)} within tolerance of the paper's figures."
    return f"{count}{f' Outside: {which}.' if which else ''}"


def _sandbox_verdicts(rows: Sequence[Row]) -> list[str]:
    told = [row for row in whole(rows) if row["level"] == "sandbox" and row["within"] is not None]
    sentences = []
    if told:
        sentences.append(_within("Sandbox", told))
        num = told[0]["seeds"]
        turns = ", ".join(f"{row['judge']} {row['figure']}" for row in told if not _same_in_every_seed(row))
        if num > 1:
            sentences.append(
                f"In some of the {num} seeds the answer is another for: {turns}."
                if turns
                else f"Each of the {num} seeds alone gives the same answers."
            )
    sentences += _unknown_orders(rows)
    alone = [row for row in members(rows, "sandbox") if row["figure"] == "variance"]
    if alone:
        below = sum(row["value"] < ALONE.paper for row in alone)
        near, most = sum(bool(row["within"]) for row in alone), ALONE.paper + (ALONE.tolerance or 0)
        greatest = max(alone, key=lambda row: float(row["value"]))
        sentences.append(
            f"Of the {len(alone)} annotators alone {below} have a variance below {ALONE.paper:.2f}, {near} one of "
            f"at most {most:.2f}; the greatest is {greatest['judge']}'s, {greatest['value']:.3f}."
        )
    return sentences


def _unknown_orders(rows: Sequence[Row]) -> list[str]:
    """Why `prefers_first` is about fewer pairs than the judge has verdicts on."""
    known = {(row["judge"], row["level"], row["figure"]): row["n"] for row in whole(rows)}
    sentences = []
    for (judge, level, figure), num in known.items():
        asked = known.get((judge, level, "agreement"), num)
        if figure == "prefers_first" and num < asked:
            sentences.append(
                f"{judge} prefers_first counts {num} of {asked} pairs: on the others all of its opinions are noise, "
                "which was shown to nobody, so that nothing stood first."
            )
    return sentences


def _same_in_every_seed(row: Row) -> bool:
    target = target_of(row)
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
    live = {(row["judge"], row["figure"]): row for row in rows if row["level"] == "live"}
    sentences = []
    for judge in dict.fromkeys(judge for judge, figure in live if figure == SPENT):
        told = [row for (name, _), row in live.items() if name == judge and row["within"] is not None]
        nothing = f"Live: the paper has no figures for a pool like {judge.removeprefix('live ')}."
        sentences.append(_within("Live", told) if told else nothing)
        wide = [row["figure"] for row in told if row["high"] - row["low"] > 2 * row["tolerance"]]
        if wide:
            sentences.append(
                f"Live: intervals wider than the tolerance: {', '.join(wide)}; more --pairs tell more surely."
            )
        cost = live.get((judge, COST))
        per = f"${cost['value']:.2f} per 1,000" if cost else "all of them kept from before, or without a price"
        spent = live[judge, SPENT]["value"]
        sentences.append(f"Live: {judge.removeprefix('live ')} cost ${spent:.4f} for this study ({per}).")
    return sentences


def meanings(rows: Iterable[Row]) -> list[str]:
    """Who the judges are and what the figures say, for those that are in the table."""
    present = {row["judge"] for row in rows}
    who = [f"{judge}: {meaning}." for judge, meaning in MEANINGS.items() if judge in present]
    return who + [f"{figure}: {meaning}." for figure, meaning in FIGURES.items()]
