"""What the over-optimization study says in sentences: each with value, interval, number of seeds and verdict."""

from __future__ import annotations

from .overoptimization_claims import CLEAN, NOISY, claims
from .overoptimization_curves import METHOD_WORDS
from .overoptimization_fits import drop, peak
from .overoptimization_results import Results, gold_text, seeds_text
from .overoptimization_trends import warning_place


def missing(results: Results, num_seeds: int) -> list[str]:
    """What was meant to run and has no rows: treatments and methods, and seeds of the others."""
    told = []
    for method in results.methods:
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


def summary(results: Results) -> list[str]:
    """The claims in sentences, then what else the curves say."""
    return [claim.sentence for claim in claims(results)] + others(results) + warnings(results)


def others(results: Results) -> list[str]:
    """The drops of the treatments that no claim singles out, in one sentence a method."""
    sentences = []
    for method in results.methods:
        groups: dict[str, list[str]] = {"falls clearly": [], "does not clearly fall": []}
        for name in results.facts:
            curves = results.get(name, method)
            if curves is None or name in (NOISY, CLEAN):
                continue
            fallen = drop(curves["gold"])
            words = f"{results.title(name)} {gold_text(fallen.estimate)} (n = {fallen.estimate.num})"
            groups["falls clearly" if fallen.clear else "does not clearly fall"].append(words)
        told = "; ".join(f"{verdict}: {', '.join(members) or 'none'}" for verdict, members in groups.items())
        if any(groups.values()):
            sentences.append(f"Drop of gold from peak to end, other treatments ({METHOD_WORDS[method]}): {told}.")
    return sentences


def warnings(results: Results) -> list[str]:
    """How early an ensemble's disagreement tells that gold will fall."""
    sentences = []
    for (name, method), curves in results.curves.items():
        if not curves.has("disagreement") or not curves["disagreement"].any():
            continue
        start, top = f"{results.title(name)} ({METHOD_WORDS[method]})", peak(curves["gold"])
        place, falls = warning_place(curves["disagreement"]), drop(curves["gold"]).clear
        ends = [float(curves["disagreement"][:, k].mean()) for k in (0, -1)]
        told = f"members' disagreement goes from {ends[0]:.3f} to {ends[1]:.3f} ({seeds_text(len(curves.seeds))})"
        if len(curves.seeds) < 2:
            sentences.append(f"{start}: {told}; one seed has no standard error to judge a warning by.")
        elif place is None:
            sentences.append(f"{start}: {told}; it never exceeds its start by two standard errors: no warning.")
        else:
            alarm = "" if falls else "; a false alarm: gold does not clearly fall"
            when = "before" if place < top else "after" if place > top else "at"
            sentences.append(
                f"{start}: {told} and exceeds its start by two standard errors from {curves.place(place)} on, {when} "
                f"the peak of gold ({curves.place(top)}){alarm}."
            )
    return sentences
