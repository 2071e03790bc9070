"""The figures of the over-optimization study: curves by group of treatments, drops, reward models, fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.figure import Figure as Drawing

from ..harness.plots import Curve, Panel, draw, write_png
from ..harness.report import Figure
from ..harness.study import Row
from .claims import FLIPS, NOISY
from .curves import METHOD_WORDS, METHODS, Curves
from .drawings import FITTED, draw_drops, draw_fits, draw_reward_models, draw_warnings
from .fits import Array
from .plans import TEMPERATURE
from .results import Results
from .trends import length_residual

GROUPS: Final = {
    "flips": ("Share of flipped labels", FLIPS),
    "labellers": ("Who labels", ("ann", "human", "none", "gpt4", "gpt4_utility")),
    "sizes": ("Number of labels, size of the reward model", ("ann", "labels_10000", "layers_1")),
    "ensembles": ("Ensembles", ("ann", "mean_3", "wco_3", "uwo_3")),
}
"""Treatments that are drawn together: file name -> title and names. Others are drawn beside `NOISY`."""


LEFT_OUT: Final = {"win rates": ("sizes", "ensembles"), "length": ("sizes", "labellers")}
"""Section -> groups that are not drawn in it: their numbers stand in table.csv, and a report has an end."""
OURS: Final = re.compile(
    rf"({'|'.join(GROUPS)}|own(_\d+)?)_(against_kl|along_optimization|win_rates|length)_({'|'.join(METHODS)})"
    rf"|disagreement_({'|'.join(METHODS)})|fits|drop_against_flips|reward_models"
)
"""Names of the files that are drawn here."""
FRESH = (
    "Level: sandbox (simulation); fresh pairs of responses of the SFT policy, the same for all treatments of a seed; "
    "95 % t-intervals of the mean over seeds."
)
"""What stands under the reward models' figure and table."""


@dataclass(frozen=True)
class Setting:
    """What stands under every figure and table: how much was measured."""

    num_instructions: Mapping[str, int]
    """Method -> eval instructions that it is measured on."""
    num_seeds: int
    """Seeds that were meant to run."""

    def label(self, *methods: str) -> str:
        """Level, judges, n, seeds and interval, in one or two lines."""
        shown = [method for method in methods or METHODS if method in self.num_instructions]
        counts = ", ".join(
            f"{METHOD_WORDS[each]} n = {self.num_instructions[each]} eval instructions" for each in shown
        )
        seeds = (
            "1 seed, no interval" if self.num_seeds == 1 else f"{self.num_seeds} seeds, 95 % t-intervals of the mean"
        )
        return (
            f"Level: sandbox (simulation); {counts}, the same for all treatments, temperature {TEMPERATURE:g}; "
            f"{seeds}. Proxy: each treatment's own reward (of one reward model 1 is the standard deviation of SFT's "
            "answers to an instruction). Gold: the sandbox's true reward."
        )


def write_figures(
    out: Path,
    results: Results,
    where: Setting,
    *,
    reward_models: Sequence[Row] = (),
    length_slope: float | None = None,
) -> dict[str, list[Figure]]:
    """Writes the PNG files into `out` and returns them with captions: section ("against KL", ...) -> figures.

    Args:
        out: Folder of the study.
        results: The curves.
        where: What the figures are of.
        reward_models: Rows treatment, seed, accuracy_gold, accuracy_judge, calibration_error; none: not drawn.
        length_slope: Gold units for one character more (`length_slope`); None: gold is not residualised.
    """
    found: dict[str, list[Figure]] = {}
    for section, name, title, drawing, methods in _all(results, where, reward_models, length_slope):
        data = write_png(out / f"{name}.png", drawing)
        note = where.label(*methods) if methods else FRESH
        found.setdefault(section, []).append(Figure(data, f"{title}. {note}"))
    return found


Drawn = tuple[str, str, str, Drawing, tuple[str, ...]]
"""Section, file name, title, drawing, the methods in it."""


def _all(results: Results, where: Setting, reward_models: Sequence[Row], length_slope: float | None) -> Iterator[Drawn]:
    panels: dict[str, tuple[str, Callable[[Sequence[Curves]], list[Panel]]]] = {
        "against KL": ("against the distance from SFT", lambda group: _pair(results, group, _root_kl)),
        "along optimization": ("along optimization", lambda group: _pair(results, group, _position)),
        "win rates": ("win rates against the reference", lambda group: _wins(results, group)),
    }
    if length_slope is not None:
        slope = length_slope
        panels["length"] = ("gold and length", lambda group: _lengths(results, group, slope))
    for method in results.methods:
        for group, title, shown in _groups(results, method):
            for section, (words, make) in panels.items():
                if group in LEFT_OUT.get(section, ()):
                    continue
                full = f"{title}: {words}, {METHOD_WORDS[method]}"
                name = f"{group}_{section.replace(' ', '_')}_{method}".lower()
                yield section, name, full, draw(make(shown), full, where.label(method)), (method,)
    if any(results.get(name, method) for name in FITTED for method in METHODS):
        methods = " and ".join(METHOD_WORDS[method] for method in results.methods)
        title = f"Gold gained against the distance from SFT, {methods}, with fits"
        yield "fits", "fits", title, draw_fits(results, title, where.label()), results.methods
    if any(sum(results.get(name, method) is not None for name in FLIPS) > 1 for method in results.methods):
        title = "Drop of gold from its peak to the end against flipped labels"
        yield "noise", "drop_against_flips", title, draw_drops(results, title, where.label()), results.methods
    if sum(any(row["treatment"] == name for row in reward_models) for name in FLIPS) > 1:
        title = "Reward models against flipped labels"
        yield "noise", "reward_models", title, draw_reward_models(results, reward_models, title, FRESH), ()
    for method in results.methods:
        shown = [each for each in results.curves.values() if each.method == method and each.disagrees]
        if shown:
            title = f"Ensembles: members' disagreement beside gold, {METHOD_WORDS[method]}"
            drawing = draw_warnings(results, shown, title, where.label(method))
            yield "warning", f"disagreement_{method}", title, drawing, (method,)


def _groups(results: Results, method: str) -> Iterator[tuple[str, str, list[Curves]]]:
    """File name, title and curves of every group, less those that show nothing that another does not show too."""
    known = {name for _, names in GROUPS.values() for name in names}
    rest = [name for name, kind in results.curves if kind == method and name not in known]
    groups = dict(GROUPS)
    # Palettes end, and so does the eye: a few of one's own treatments in each figure.
    for number in range(0, len(rest), 3):
        groups[f"own_{number // 3}" if number else "own"] = ("Own treatments", (NOISY, *rest[number : number + 3]))
    present = {group: [name for name in names if results.get(name, method)] for group, (_, names) in groups.items()}
    told: list[set[str]] = []
    for group, names in present.items():
        shown = set(names)
        if names and shown not in told and not any(shown < set(others) for others in present.values()):
            told.append(shown)
            yield group, groups[group][0], [results.curves[name, method] for name in names]


def _root_kl(curves: Curves) -> tuple[str, Array]:
    return "√KL from SFT (√nats)", curves.root_kl


def _position(curves: Curves) -> tuple[str, Array]:
    label, x = curves.along
    return label, np.broadcast_to(x, curves["gold"].shape)


def _pair(results: Results, group: Sequence[Curves], axis: Callable[[Curves], tuple[str, Array]]) -> list[Panel]:
    return [
        _panel(results, group, axis, "gold reward (gold units)", lambda curves: curves["gold"]),
        _panel(results, group, axis, "proxy reward (of reward models: SFT's std)", lambda curves: curves["proxy"]),
    ]


def _wins(results: Results, group: Sequence[Curves]) -> list[Panel]:
    def wins(measure: str, judge: str) -> Panel:
        ylabel = f"win rate by {judge} (%)"
        return _panel(results, group, _position, ylabel, lambda curves: curves[measure], level=50.0)

    return [wins("win_rate_simulated", "p_sim^eval"), wins("win_rate_human", "human raters")]


def _lengths(results: Results, group: Sequence[Curves], slope: float) -> list[Panel]:
    def residual(curves: Curves) -> Array:
        return length_residual(curves["gold"], curves["length"], slope)

    return [
        _panel(results, group, _position, "length (characters)", lambda curves: curves["length"]),
        _panel(results, group, _position, f"gold less {slope:+.4f} a character (gold units)", residual),
    ]


def _panel(
    results: Results,
    group: Sequence[Curves],
    axis: Callable[[Curves], tuple[str, Array]],
    ylabel: str,
    measure: Callable[[Curves], Array],
    *,
    level: float | None = None,
) -> Panel:
    lines = [Curve(results.title(curves.treatment), axis(curves)[1], measure(curves)) for curves in group]
    return Panel(axis(group[0])[0], ylabel, lines, level=level, level_label="no preference" if level else "")
