"""How well signals tell that gold has fallen, on methods, or on kinds of labels, that the detector has never seen.

The runs of each method are judged by a detector fitted on the runs of all others; so are those of each kind of labels.
The area under the ROC curve (AUROC) is the chance that a place where gold has fallen has a higher score than one where
it has not; at equal step, than the same place of another run. Compared are places that one detector has judged.
Intervals resample methods, and the runs within them; detectors are not fitted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from ...monitors import SIGNALS, Detector, Past
from ...seeding import keyed_rng
from ...statistics import Interval
from ..harness.estimates import percentiles
from ..harness.study import Row
from ..surrogates.features import Array

ALL: Final = "all signals"
STEP: Final = "step"
KL: Final = "distance"
"""A threshold on the KL, which people use today, is a detector of this signal alone."""
TEXTLESS: Final = tuple(name for name in SIGNALS if name not in ("repetition", "agreement", "disagreement"))
DETECTORS: Final = {
    ALL: tuple(SIGNALS),
    "without texts": TEXTLESS,
    **{name: (name,) for name in SIGNALS},
    STEP: (STEP,),
}
"""Name -> the columns that it may use."""
SHUFFLED: Final = "all signals, outcomes shuffled"
METHOD, LABELS = 1, 2
"""What is left out: places in a run's group."""
WORTH: Final = ("false_alarms", "warned_of_falls", "lead", "saved", "kept", "tuned", "lost")
RESAMPLES: Final = 1000
FALSE_ALARMS: Final = 0.05


@dataclass(frozen=True)
class Watched:
    """A run as a detector is judged by it."""

    group: tuple[str, str, str]
    """Study, method, labels."""
    table: pd.DataFrame
    """Rows of `runs.signal_rows`, with the step."""
    gold: Array
    """[K] gained at its places."""
    past: Past
    """[K] whether it has fallen there."""

    def signals(self, names: Sequence[str]) -> Array:
        """[K, S]."""
        return self.table[list(names)].to_numpy(np.float64)


def watched_of(table: pd.DataFrame) -> list[Watched]:
    """The runs of the stored table, in its order."""
    return [
        Watched(
            (str(study), str(method), str(labels)),
            rows.assign(step=rows.place),
            rows.gold.to_numpy(np.float64),
            rows.past.to_numpy(bool),
        )
        for (study, method, labels, _), rows in table.groupby(["study", "method", "labels", "run_seed"], sort=False)
    ]


def detector_of(runs: Sequence[Watched]) -> Detector:
    """The detector of all runs by all signals."""
    facts = {"runs": len(runs), "falls": sum(bool(run.past.any()) for run in runs), "level": "sandbox"}
    tables, past = [run.signals(DETECTORS[ALL]) for run in runs], [run.past for run in runs]
    return Detector.fit(tables, past, names=DETECTORS[ALL], false_alarms=FALSE_ALARMS, facts=facts)


@dataclass(frozen=True)
class HeldOut:
    """What detectors that have not seen a run's method, or labels, say of it; NaN where there was nothing to learn."""

    scores: list[Array]
    """[K] of each run."""
    limits: list[float]
    """The threshold of each run's detector, of few false alarms."""
    tuned: list[float]
    """Its threshold that would have kept most gold of the runs that it was fitted on."""


def held_out(
    runs: Sequence[Watched], names: Sequence[str], *, by: int = METHOD, past: Sequence[Past] | None = None
) -> HeldOut:
    """Fits a detector for each method, or kind of labels, on all others; `past`: outcomes to learn from instead."""
    outcomes = [run.past for run in runs] if past is None else past
    found = HeldOut([np.full(len(run.past), np.nan) for run in runs], [np.nan] * len(runs), [np.nan] * len(runs))
    for fold in dict.fromkeys(run.group[by] for run in runs):
        others = [i for i, run in enumerate(runs) if run.group[by] != fold]
        if len({bool(each) for i in others for each in outcomes[i]}) < 2:
            continue
        tables = [runs[i].signals(names) for i in others]
        detector = Detector.fit(tables, [outcomes[i] for i in others], names=names, false_alarms=FALSE_ALARMS)
        tuned = most_kept([runs[i] for i in others], [detector.scores_of(table) for table in tables])
        for i, run in enumerate(runs):
            if run.group[by] == fold:
                found.scores[i] = detector.scores_of(run.signals(names))
                found.limits[i], found.tuned[i] = detector.threshold, tuned
    return found


def most_kept(runs: Sequence[Watched], scores: Sequence[Array]) -> float:
    """The threshold on these scores by which the runs keep most gold; infinite where no stop is best."""
    limits = np.append(np.unique(np.concatenate(list(scores))), np.inf)
    kept = np.zeros(len(limits))
    for run, own in zip(runs, scores, strict=True):
        stops = np.searchsorted(np.maximum.accumulate(own), limits, side="right")  # places before the first above it
        kept += np.append(0.0, run.gold)[stops]
    return float(limits[kept.argmax()])


def auroc(scores: Sequence[Array], past: Sequence[Past], strata: Sequence[NDArray[Any]]) -> float:
    """The area under the ROC curve within strata, [K] of each run, averaged by how many pairs each compares."""
    score, fallen, stratum = (np.concatenate(list(each)) for each in (scores, past, strata))
    known = ~np.isnan(score)
    won, pairs = 0.0, 0
    for each in np.unique(stratum[known]):
        own = known & (stratum == each)
        num = int(fallen[own].sum())
        rest = int(own.sum()) - num
        if num and rest:
            won += rankdata(score[own])[fallen[own].astype(bool)].sum() - num * (num + 1) / 2
            pairs += num * rest
    return won / pairs if pairs else float("nan")


def with_interval(runs: Sequence[Watched], of: Callable[[Sequence[int]], float], seed: int = 0) -> Interval:
    """A number of runs, by their positions, with the 95 % percentiles of resampled methods and of runs within them."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        groups.setdefault(run.group[METHOD], []).append(position)
    rng, members = keyed_rng(seed, "monitors", "resamples"), list(groups.values())
    drawn = []
    for _ in range(RESAMPLES):
        chosen = [members[i] for i in rng.integers(0, len(members), len(members))]
        drawn.append(of([int(i) for own in chosen for i in rng.choice(own, len(own))]))
    low, high = percentiles(np.array(drawn))
    return Interval(of(range(len(runs))), low, high, len(runs))


def detector_rows(runs: Sequence[Watched]) -> list[Row]:
    """A row a detector: its AUROC, false alarms, warnings in time, their lead, and gold kept by stopping at them."""
    joined = np.concatenate([run.past for run in runs])
    mixed = keyed_rng(0, "monitors", "shuffled").permutation(joined)
    shuffled = np.split(mixed, np.cumsum([len(run.past) for run in runs])[:-1])
    rows = []
    for name, columns in {**DETECTORS, SHUFFLED: DETECTORS[ALL]}.items():
        control = name == SHUFFLED
        past = shuffled if control else [run.past for run in runs]
        row: Row = {"detector": name}
        for by, start in ((METHOD, ""), (LABELS, "labels_")):
            held = held_out(runs, columns, by=by, past=past)
            folds = [np.full(len(run.past), run.group[by]) for run in runs]
            steps = [[f"{run.group[by]}, {place}" for place in run.table.place] for run in runs]
            for measure, strata in ((f"{start}auroc", folds), (f"{start}at_step", list(map(np.array, steps)))):
                row |= _ends(measure, with_interval(runs, partial(_area, held.scores, past, strata)))
            if by == METHOD and not control:
                row |= stopping(runs, held)
        rows.append(row)
    columns_of = list(rows[0])
    return [{column: row.get(column) for column in columns_of} for row in rows]


def _area(
    scores: Sequence[Array], past: Sequence[Past], strata: Sequence[NDArray[Any]], chosen: Sequence[int]
) -> float:
    return auroc([scores[i] for i in chosen], [past[i] for i in chosen], [strata[i] for i in chosen])


def stopping(runs: Sequence[Watched], held: HeldOut) -> Row:
    """What a detector's warnings are worth, each at the threshold of its training runs; means, and a median lead."""
    columns: dict[str, list[float]] = {name: [] for name in WORTH}
    for run, own, limit, tuned in zip(runs, held.scores, held.limits, held.tuned, strict=True):
        stop, fall = _first(own > limit), _first(run.past)
        kept, samples, nothing = gold_at(run, stop), run.table.samples, float("nan")
        columns["false_alarms"].append(float(stop is not None) if fall is None else nothing)
        columns["warned_of_falls"].append(nothing if fall is None else float(stop is not None))
        lead = nothing if stop is None or fall is None else float(samples.iloc[fall] - samples.iloc[stop])
        columns["lead"].append(lead)
        fixed = best_fixed(runs, run)
        columns["saved"].append(kept - gold_at(run, None))
        columns["kept"].append(kept - fixed)
        columns["tuned"].append(gold_at(run, _first(own > tuned)) - fixed)
        columns["lost"].append(max(0.0, float(run.gold.max())) - kept)
    row: Row = {"falls": sum(bool(run.past.any()) for run in runs), "runs": len(runs)}
    for name, values in columns.items():
        of = partial(_middle, np.array(values), median=name == "lead")
        row |= _ends(name, with_interval(runs, of))
    return row


def _middle(values: Array, chosen: Sequence[int], *, median: bool) -> float:
    """The mean or median of the chosen values that are known; NaN of none."""
    known = values[list(chosen)]
    known = known[~np.isnan(known)]
    return float(np.median(known) if median else known.mean()) if len(known) else float("nan")


def gold_at(run: Watched, stop: int | None) -> float:
    """Gold of the place before the warning, where the policy was kept; of the last one without a warning."""
    return float(np.append(0.0, run.gold)[len(run.gold) if stop is None else stop])


def best_fixed(runs: Sequence[Watched], run: Watched) -> float:
    """The run's gold at the place that would have been best for the runs of other methods."""
    others = [each.gold for each in runs if each.group[METHOD] != run.group[METHOD]]
    same = [gold for gold in others if len(gold) == len(run.gold)] or [run.gold]
    return float(run.gold[int(np.mean(same, axis=0).argmax())])


def _first(flags: Past) -> int | None:
    return int(flags.argmax()) if flags.any() else None


def _ends(name: str, value: Interval) -> Row:
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


def group_rows(runs: Sequence[Watched]) -> list[Row]:
    """A row a method and labels: runs, falls, and on the method places where gold has fallen and the AUROC."""
    scores = held_out(runs, DETECTORS[ALL]).scores
    rows = []
    for group in dict.fromkeys(run.group for run in runs):
        own = [run for run in runs if run.group == group]
        same = [i for i, run in enumerate(runs) if run.group[METHOD] == group[METHOD]]
        one = [np.zeros(len(runs[i].past)) for i in same]
        area = auroc([scores[i] for i in same], [runs[i].past for i in same], one)
        fallen = sum(bool(run.past.any()) for run in own)
        row = dict(zip(("study", "method", "labels"), group, strict=True))
        past = sum(int(runs[i].past.sum()) for i in same)
        rows.append({**row, "runs": len(own), "falls": fallen, "places": past, "auroc": area})
    return rows
