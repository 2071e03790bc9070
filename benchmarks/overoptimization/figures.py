"""The figures of the over-optimization study: curves by treatment and method, drops, fits, reward models, warnings."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ...statistics import PERCENT
from ..harness.estimates import Estimate, estimates
from ..harness.plots import COLORS, MARKERS, band, titled
from ..harness.report import seeds_text
from .analyse import FLIPS, NOISY, Results, warning_place
from .curves import FORMS, METHOD_WORDS, Array, Curves, Key, gain_at, place_text, shared_distances
from .ranges import FEWEST, distances

GROUPS: Final = {
    "flips": ("share of flipped labels", FLIPS),
    "labellers": ("who labels", ("ann", "human", "none", "gpt4", "gpt4_utility")),
    "sizes": ("number of labels, size of the reward model", ("ann", "labels_10000", "layers_1")),
    "ensembles": ("ensembles", ("ann", "mean_3", "wco_3", "uwo_3")),
}
"""Treatments that are drawn together: file name -> title and names. Others are drawn next to `NOISY`."""
NOISE: Final = "overoptimization"
"""The figure of noisy against clean labels."""
FITTED = ("none", "ann", "gpt4", "human")  # treatments whose fits are drawn
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
GAINED: Final = {"proxy": "proxy gained (SFT's std)", "gold": "gold gained (gold units)"}
KL_LABEL: Final = "√KL from SFT (√nats)"
FRESH = (
    "Level: sandbox (simulation); fresh pairs of responses of the SFT policy, the same for all treatments of a seed; "
    "95 % t-intervals of the mean over seeds."
)
"""What stands under the reward models' figure and table."""


Drawings = Iterator[tuple[str, str, str, str, Drawing]]
"""Section of the report, file name, title, the note below, drawing."""


def draw_all(results: Results, label: Callable[..., str], models: pd.DataFrame) -> Drawings:
    """What there is to draw.

    `label` says how the given methods were measured; `models` are `analyse.reward_models`, perhaps without rows.
    """
    yield from draw_compared(results, label)
    for method in results.methods:
        yield from draw_groups(results, label, method)
    note = label(*results.methods)
    if fitted := [method for method in reversed(FORMS) if any((name, method) in results.curves for name in FITTED)]:
        methods = " and ".join(METHOD_WORDS[method] for method in fitted)
        title = f"Gold gained against the distance from SFT, {methods}, with fits"
        yield "fits", "fits", title, note, draw_fits(results, title, note)
    if any(sum((name, method) in results.curves for name in FLIPS) > 1 for method in results.methods):
        title = "Drop of gold from its peak to the end against flipped labels"
        yield "noise", "drop_against_flips", title, note, draw_drops(results, title, note)
    if len(set(FLIPS) & set(models.treatment)) > 1:
        title = "Reward models against flipped labels"
        yield "noise", "reward_models", title, FRESH, draw_reward_models(results, models, title, FRESH)
    for method in results.methods:
        keys = [key for key, curves in results.curves.items() if key[1] == method and curves.disagree]
        if keys:
            title, note = f"Ensembles: members' disagreement beside gold, {METHOD_WORDS[method]}", label(method)
            yield "warning", f"disagreement_{method}", title, note, draw_warnings(results, keys, title, note)


def draw_compared(results: Results, label: Callable[..., str]) -> Drawings:
    """Noisy against clean labels under one method, and all methods by either."""
    for method in ("best_of_n", "ppo"):
        keys = {results.title(name): (name, method) for name in (NOISY, FLIPS[0])}
        if all(key in results.curves for key in keys.values()):
            title = f"{_capital(METHOD_WORDS[method])} by a reward model of noisy and of clean labels"
            yield "noise", NOISE, title, label(method), draw_gains(results, keys, title)
            break
    for name in (NOISY, FLIPS[0]):
        keys = {METHOD_WORDS[method]: (name, method) for method in METHOD_WORDS if (name, method) in results.curves}
        if len(keys) > 1:
            title, methods = f"Every method against one KL: {results.title(name)}", [key[1] for key in keys.values()]
            yield "methods", f"methods_{name}", title, label(*methods), draw_gains(results, keys, title)


def draw_groups(results: Results, label: Callable[..., str], method: str) -> Drawings:
    """The treatments of each group under one method."""
    for group, (group_title, names) in groups(results, method).items():
        keys = {results.title(name): (name, method) for name in names}
        title = f"{_capital(METHOD_WORDS[method])}: {group_title}"
        yield "against KL", f"{group}_against_kl_{method}", title, label(method), draw_gains(results, keys, title)


def draw_gains(results: Results, keys: Mapping[str, Key], title: str) -> Drawing:
    """Proxy and gold gained over SFT against sqrt(KL), a line for each of `keys`: to the farthest that all seeds reach.

    Large enough to be read at half its size.
    """
    figure = Drawing(figsize=(11, 4.8), dpi=150, layout="constrained")
    for axis, (measure, ylabel) in zip(figure.subplots(1, 2), GAINED.items(), strict=True):
        ends: list[float] = []
        for color, marker, line, (words, key) in zip(COLORS, MARKERS, LINES, keys.items(), strict=False):
            x = distances(results.curves[key])
            gains = gain_at(results.curves[key], x, measure)
            mean, low, high = band(gains)
            shown = [mean]
            if len(gains) >= FEWEST:  # the band of two seeds would cover all lines
                axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
                shown += [low, high]
            ends += [float(limit(each)) for each in shown for limit in (np.min, np.max)]
            look = {"color": color, "marker": marker, "linestyle": line, "markevery": max(1, len(x) // 8)}
            axis.plot(x, mean, linewidth=3, markersize=9, label=_short(words), **look)
        room = 0.08 * float(np.ptp(ends)) or 1.0  # of flat lines
        axis.set_ylim(min(ends) - room, max(ends) + room)
        axis.set_title(ylabel, fontsize=16, loc="left")
        axis.set_xlabel(KL_LABEL, fontsize=16)
        axis.tick_params(labelsize=14)
        _grid(axis)
    figure.axes[0].legend(fontsize=14, frameon=False, loc="upper left")
    titled(figure).suptitle(title, fontsize=18, x=0.01, ha="left")
    seeds = [len(results.curves[key].seeds) for key in keys.values()]
    shaded = "their 95 % t-intervals" + (f", from {FEWEST} seeds on" if min(seeds) < FEWEST else "")
    words = f"Sandbox (simulation). Lines: means of {seeds_text(seeds)}; shaded: {shaded}."
    figure.supxlabel(words, fontsize=14, color="#555555", x=0.01, ha="left")
    return figure


def groups(results: Results, method: str) -> dict[str, tuple[str, list[str]]]:
    """File name -> title and treatments of every group, less those that show nothing that another does not show too."""
    known = {name for _, names in GROUPS.values() for name in names}
    rest = [name for name, kind in results.curves if kind == method and name not in known]
    found: dict[str, tuple[str, Sequence[str]]] = dict(GROUPS)
    # Palettes end, and so does the eye: a few of one's own treatments in each figure.
    for number in range(0, len(rest), 3):
        found[f"own_{number // 3}" if number else "own"] = ("own treatments", (NOISY, *rest[number : number + 3]))
    present = {key: [name for name in names if (name, method) in results.curves] for key, (_, names) in found.items()}
    # Of groups with the same treatments the first is drawn, and none that is a part of another.
    first = {frozenset(names): key for key, names in reversed(present.items()) if names}
    return {
        key: (found[key][0], names)
        for key, names in present.items()
        if first.get(frozenset(names)) == key and not any(set(names) < others for others in first)
    }


def _along(key: Key, curves: Curves) -> tuple[str, Array]:
    """The axis along optimization: its label, and [K] steps, rounds or log2 n."""
    places = np.array(curves.places, dtype=np.float64)
    if key[1] == "best_of_n":
        return "log₂ n", np.log2(places)
    return f"{METHOD_WORDS[key[1]]}, {'round' if key[1] == 'expert_iteration' else 'step'}", places


def draw_drops(results: Results, title: str, note: str) -> Drawing:
    """Mean drop with its 95 % t-interval against the share of flips, a colour a method; small dots are seeds."""
    figure = Drawing(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axis = figure.subplots()
    for place, method in enumerate(results.methods):
        found = {name: results.stories[name, method] for name in FLIPS if (name, method) in results.stories}
        # Side by side, so that bars can be told apart.
        shift = 0.6 * (place - (len(results.methods) - 1) / 2)
        x = np.array([100 * results.facts[name].flip + shift for name in found])
        if found:
            _bars(axis, x, [story.drop for story in found.values()], place, METHOD_WORDS[method])
        for at, story in zip(x, found.values(), strict=True):
            axis.plot(np.full(len(story.drops), at + 0.35), story.drops, ".", color=COLORS[place], alpha=0.5)
    axis.axhline(0, color="#888888", linestyle="--", linewidth=1)
    axis.set(xlabel="flipped labels (%)", ylabel="drop from peak to end (gold units)")
    return _finish(figure, title, f"Peak chosen on the other seeds. Small dots: seeds. {note}")


def draw_reward_models(results: Results, models: pd.DataFrame, title: str, note: str) -> Drawing:
    """Two panels against the share of flips: accuracy against gold and against the judge; calibration error."""
    figure = Drawing(figsize=(1.2 + 4.6 * 2, 4.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [name for name in FLIPS if name in set(models.treatment) and name in results.facts]
    flips = np.array([100 * results.facts[name].flip for name in names])
    shown = (
        (left, -0.3, "accuracy_gold", "against gold"),
        (left, 0.3, "accuracy_judge", "against the labels' judge"),
        (right, 0.0, "calibration_error", "calibration error"),
    )
    for place, (axis, shift, measure, label) in enumerate(shown):
        found = estimates(models, ["treatment"], measure, PERCENT)
        _bars(axis, flips + shift, [found[name,] for name in names], place, label)
    left.set(xlabel="flipped labels (%)", ylabel="pairs ordered alike (%)")
    right.set(xlabel="flipped labels (%)", ylabel="mean |confidence − agreement| (points)")
    right.set_ylim(bottom=0)
    return _finish(figure, title, note)


def draw_fits(results: Results, title: str, note: str) -> Drawing:
    """A panel a treatment: gold gained against sqrt(KL) by both methods on the same axes, with fits.

    Dashed in the form of Gao et al. for the method, dotted in that for the other.
    """
    names = [name for name in FITTED if any((name, method) in results.curves for method in FORMS)]
    columns = min(len(names), 2)
    rows = -(-len(names) // columns)
    figure = Drawing(figsize=(1.2 + 4.6 * columns, 0.8 + 3.4 * rows), dpi=150, layout="constrained")
    # One scale for all, or gains could not be compared.
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        for color, marker, method in zip(COLORS, MARKERS, reversed(FORMS), strict=False):
            if (name, method) in results.curves:
                _draw_fit(axis, results, (name, method), color, marker)
        axis.set_title(results.title(name), fontsize=10)
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.set(xlabel=KL_LABEL, ylabel="gold gained over SFT (gold units)")
    for axis in axes.flat[len(names) :]:
        axis.remove()
    words = "Seeds averaged at equal √KL. Dashed: the method's form; dotted: the other's."
    return _finish(figure, title, f"{words} {note}")


def _draw_fit(axis: Axes, results: Results, key: Key, color: str, marker: str) -> None:
    curves = results.curves[key]
    x = np.r_[0.0, shared_distances(curves)]  # where the fit has its points
    mean, low, high = band(gain_at(curves, x))
    axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    axis.plot(x, mean, color=color, linestyle="", marker=marker, markersize=4.5, label=METHOD_WORDS[key[1]])
    for method, form in FORMS.items():
        if (found := results.fits.get((*key, form))) is not None:
            along, line = np.linspace(0, found.measured, 201), "--" if method == key[1] else ":"
            label = f"{form}, R² {found.r_squared:.2f}"
            axis.plot(along, found.at(along), color=color, linestyle=line, linewidth=1.6, label=label)


def draw_warnings(results: Results, keys: Sequence[Key], title: str, note: str) -> Drawing:
    """A column an ensemble: gold above with its peak (dashed), disagreement below with the first warning (dotted)."""
    figure = Drawing(figsize=(1.2 + 4.2 * len(keys), 6.4), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(keys), squeeze=False, sharex="col", sharey="row")
    for column, key in zip(axes.T, keys, strict=True):
        curves = results.curves[key]
        label, x = _along(key, curves)
        warning = warning_place(curves)
        marks = {"peak": (results.stories[key].top, "--", 1.2), "warning": (warning, ":", 1.8)}
        for axis, measure, color, marker in zip(column, ("gold", "disagreement"), COLORS, MARKERS, strict=False):
            values = curves[measure]
            mean, low, high = band(values)
            axis.plot(x, values.T, color=color, linewidth=0.6, alpha=0.45)
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            axis.plot(x, mean, color=color, linewidth=2, marker=marker, markersize=3.5)
            for (words, (place, line, width)), shade in zip(marks.items(), COLORS, strict=False):
                if place is not None:
                    at, text = x[curves.places.index(place)], f"{words}: {place_text(key[1], place)}"
                    axis.axvline(at, color=shade, linestyle=line, linewidth=width, label=text)
            _grid(axis)
        column[0].set_title(results.title(key[0]), fontsize=10)
        column[1].set_xlabel(label)
        column[0].legend(fontsize=8, frameon=False, title="no warning" if warning is None else None)
    axes[0, 0].set_ylabel("gold reward (gold units)")
    axes[1, 0].set_ylabel("members' disagreement, std\n(reward-model units)")
    words = "Warning: the first evaluation at which disagreement less that at the start has a 95 % t-interval above 0."
    return titled(figure, title, f"{words} {note}")


def _bars(axis: Axes, x: Array, found: Sequence[Estimate], place: int, label: str) -> None:
    half = np.nan_to_num([each.interval.high - each.mean for each in found])  # one seed has no interval
    means, marker, color = [each.mean for each in found], MARKERS[place % len(MARKERS)], COLORS[place]
    axis.errorbar(x, means, yerr=half, color=color, marker=marker, markersize=5, capsize=3, linewidth=1.5, label=label)


def _finish(figure: Drawing, title: str, note: str) -> Drawing:
    for axis in figure.axes:
        _grid(axis)
        axis.legend(fontsize=8, frameon=False)
    return titled(figure, title, note)


def _short(words: str) -> str:
    """Two lines of a legend at the most."""
    return textwrap.fill(words, 24, break_long_words=False, max_lines=2, placeholder=" …")


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _grid(axis: Axes) -> None:
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
