"""What the over-optimization study says in sentences: each with value, interval, number of seeds and verdict."""

from __future__ import annotations

from collections.abc import Iterable

from ..harness.estimates import Estimate
from .claims import CLEAN, NOISY
from .curves import METHOD_WORDS, paired
from .fits import drop, peak
from .results import Results, gold_text, seeds_text
from .trends import warning_place


def missing(results: Results, methods: Iterable[str], num_seeds: int) -> list[str]:
    """What was meant to run and has no rows: treatments of the `methods`, and seeds of those that have some."""
    told = []
    for method in methods:
        gone = [results.title(name) for name in results.facts if results.get(name, method) is None]
        if gone:
            told.append(f"No rows of {METHOD_WORDS[method]} for: {'; '.join(gone)}.")
        short = [
            f"{results.title(name)} {len(curves.seeds)}"
            for name in results.facts
            if (curves := results.get(name, method)) is not None and len(curves.seeds) < num_seeds
        ]
        if short:
            told.append(f"Fewer than {num_seeds} seeds of {METHOD_WORDS[method]}: {'; '.join(short)}.")
    return told


def others(results: Results) -> list[str]:
    """The drops of the treatments that no claim singles out, in one sentence a method."""
    sentences = []
    for method in results.methods:
        groups: dict[str, list[str]] = {"falls clearly": [], "does not clearly fall": [], "one seed, not judged": []}
        for name in results.facts:
            curves = results.get(name, method)
            if curves is None or name in (NOISY, CLEAN):
                continue
            fallen = drop(curves["gold"])
            words = f"{results.title(name)} {gold_text(fallen.estimate)} (n = {fallen.estimate.num})"
            verdict = "falls clearly" if fallen.clear else "does not clearly fall"
            groups[verdict if fallen.estimate.num > 1 else "one seed, not judged"].append(words)
        told = "; ".join(f"{verdict}: {', '.join(members)}" for verdict, members in groups.items() if members)
        if told:
            sentences.append(f"Drop of gold from peak to end, other treatments ({METHOD_WORDS[method]}): {told}.")
    return sentences


def beside(results: Results) -> list[str]:
    """How much higher gold ends than by the noisy reward of the paper, of every treatment, in one sentence a method."""
    sentences = []
    for method in results.methods:
        told = []
        for name in results.facts:
            pair = [curves for each in (name, NOISY) if (curves := results.get(each, method)) is not None]
            if name == NOISY or len(pair) < 2 or not (common := paired(*pair))[0].seeds:
                continue
            ends = [curves["gold"][:, -1] for curves in common]
            told.append(f"{results.title(name)} {gold_text(Estimate.of(ends[0] - ends[1]))}")
        if told:
            title = f"Gold at the end less that by {results.title(NOISY)}, paired by seed ({METHOD_WORDS[method]})"
            sentences.append(f"{title}: {'; '.join(told)}.")
    return sentences


def warnings(results: Results) -> list[str]:
    """How early an ensemble's disagreement tells that gold will fall."""
    sentences = []
    for (name, method), curves in results.curves.items():
        if not curves.disagrees:
            continue
        start, top = f"{results.title(name)} ({METHOD_WORDS[method]})", peak(curves["gold"])
        place, falls = warning_place(curves["disagreement"]), drop(curves["gold"]).clear
        ends = [float(curves["disagreement"][:, k].mean()) for k in (0, -1)]
        told = f"members' disagreement goes from {ends[0]:.3f} to {ends[1]:.3f} ({seeds_text(len(curves.seeds))})"
        if len(curves.seeds) < 2:
            sentences.append(f"{start}: {told}; one seed has no standard error to judge a warning by.")
        elif place is None:
            sentences.append(f"{start}: {told}; it is never clearly above its start: no warning.")
        else:
            alarm = "" if falls else "; gold does not clearly fall"
            when = "before" if place < top else "after" if place > top else "at"
            sentences.append(
                f"{start}: {told} and is first clearly above its start (95 % t-interval above 0) at "
                f"{curves.place(place)}, {when} the peak of gold ({curves.place(top)}){alarm}."
            )
    return sentences
