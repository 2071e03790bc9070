"""The page of the study of monitors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure

from ...monitors import SIGNALS
from ...statistics import Interval
from ..harness.page import Drawn, Page, read_manifest, read_table, records
from ..harness.plots import COLORS, MARKERS, grid, titled
from ..harness.report import Table, interval_text, number, sentences
from .analysis import ALL, FALSE_ALARMS, KL, SHUFFLED, STEP
from .real import GOLDS
from .runs import ERRORS

METHOD: Final = (
    "A run's signals at a place are made of its metrics up to there; gold at that place decides the outcome and is "
    "read apart. Gold has fallen where it lies two standard errors, over instructions, below that of its peak, which "
    "the other seeds choose; it may come back. A detector is a logistic regression, fitted on the runs of all other "
    "methods (or, of all other kinds of labels); it warns where its score is above the threshold that lets "
    f"{100 * FALSE_ALARMS:g} % of those be warned of wrongly. Stopped runs keep the policy of the place before the "
    "warning."
)


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    detectors, groups, real = (read_table(folder / f"{name}.csv") for name in ("detectors", "groups", "real"))
    manifest = read_manifest(folder)
    runs, fallen = int(groups.runs.sum()), int(groups.falls.sum())
    note = (
        f"{'Quick form, no result. ' if manifest['quick'] else ''}Level: sandbox (simulation); {runs} runs, {fallen} "
        "with a fall of gold; 95 % intervals over methods and runs within them."
    )
    rows = {str(row["detector"]): row for row in records(detectors)}
    tables = {"detectors": detector_table(detectors, note), "groups": group_table(groups, note)}
    if len(real):
        tables["real"] = real_table(real)
    best = max((name for name in rows if name in SIGNALS), key=lambda name: rows[name]["auroc"])
    found = sentences("monitors/findings.txt.j2", rows=rows, best=best, all=ALL, kl=KL, step=STEP, shuffled=SHUFFLED,
                      about=SIGNALS, ends=ends, real=real)  # fmt: skip
    headline = f"AUROC on methods never seen {ends(rows[ALL], 'auroc')}; {runs} runs"
    return Page("Monitors", tables, found, {"auroc": draw(detectors, note)}, headline, method=(METHOD,))


def ends(row: Mapping[str, Any], name: str, unit: str = "") -> str:
    """A number with its interval; nothing where there is none."""
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    return "" if value != value else interval_text(Interval(value, low, high, 0), unit)


def detector_table(detectors: pd.DataFrame, note: str) -> Table:
    """What each detector is worth."""
    rows = [
        {
            "detector": row["detector"],
            "AUROC, methods never seen": ends(row, "auroc"),
            "at equal step": ends(row, "at_step"),
            "AUROC, labels never seen": ends(row, "labels_auroc"),
            "labels, at equal step": ends(row, "labels_at_step"),
            "false alarms, share of runs without a fall": ends(row, "false_alarms"),
            "falls warned of, share": ends(row, "warned_of_falls"),
            "lead, samples": ends(row, "lead", "samples"),
            "gold kept, less without a stop": ends(row, "saved"),
            "gold kept, less the best fixed step": ends(row, "kept"),
            "by the threshold that kept most": ends(row, "tuned"),
            "gold lost to an oracle": ends(row, "lost"),
        }
        for row in records(detectors)
    ]
    caption = (
        "The lead is the median over warned falls; below 0 the warning came after the fall. The best fixed step is the "
        "one that kept most gold of the other methods' runs; last but one: of the same, by the threshold that kept "
        "most gold of these runs, instead of the one of few false alarms. An oracle stops at each run's own highest "
        f"gold, whose noise it takes for gold. {note}"
    )
    return Table.of(rows, caption, "Detectors")


def group_table(groups: pd.DataFrame, note: str) -> Table:
    """Runs and falls by method and labels."""
    rows = [
        {
            "study": row["study"],
            "method": row["method"],
            "labels": row["labels"],
            "runs": str(row["runs"]),
            "with a fall": str(row["falls"]),
            "places after a fall, on the method": str(row["places"]),
            "AUROC on the method": number(row["auroc"]) if row["auroc"] == row["auroc"] else "",
        }
        for row in records(groups)
    ]
    return Table.of(
        rows,
        f"The AUROC is of all signals, on all labels of the method, which the detector has not seen. {note}",
        "Runs",
    )


def real_table(real: pd.DataFrame) -> Table:
    """Runs of a real policy: what was warned of, and what became of both golds."""
    rows = []
    for row in records(real):
        line = {name: str(row[name]) for name in ("method", "seed")} | {"flips, %": number(100 * row["flip"])}
        line |= {"last step": str(row["step"]), "warned at step": f"{row['warned']:.0f}".replace("nan", "–")}
        for name in GOLDS:
            start = f"gold {name.upper()}: "
            line[f"{start}peak, at step"] = f"{number(row[f'{name}_peak'])}, {row[f'{name}_peak_step']}"
            error = ERRORS * row[f"{name}_lost_error"]
            line[f"{start}lost by the end"] = f"{number(row[f'{name}_lost'])} ± {number(error)}"
            line[f"{start}falls"] = "yes" if row[f"{name}_fallen"] else "no"
        rows.append(line)
    caption = (
        "By the detector of all sandbox runs, which knows no real policy. Gold A and B are those of the study of a "
        f"real policy; ± {ERRORS:g} standard errors over instructions. The peak is the run's own, so that the loss is "
        "too large. Level: recorded and live."
    )
    return Table.of(rows, caption, "A real policy's runs")


def draw(detectors: pd.DataFrame, note: str) -> Drawn:
    """The AUROC of each detector, among all runs and at equal step."""
    rows = detectors.iloc[::-1]
    figure = Figure(figsize=(7.0, 0.6 + 0.32 * len(rows)), dpi=150, layout="constrained")
    axis = figure.subplots()
    for place, (name, label) in enumerate({"auroc": "all places", "at_step": "at equal step"}.items()):
        errors = [rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]]
        look: dict[str, Any] = {"fmt": MARKERS[place], "color": COLORS[place], "label": label, "markersize": 5}
        axis.errorbar(rows[name], [row + 0.2 - 0.4 * place for row in range(len(rows))], xerr=errors, **look)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    axis.axvline(0.5, color="#888888", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(rows)), list(rows.detector))
    axis.set_xlabel("AUROC")
    grid(axis, "x")
    title = "What tells that gold has fallen, on methods never seen"
    return Drawn(titled(figure, title, note), f"{title}. {note}")
