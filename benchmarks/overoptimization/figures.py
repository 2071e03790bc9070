"""The figures of the over-optimization study: proxy and gold gained against the distance from SFT."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ..harness.plots import band, looks, titled
from ..harness.report import seeds_text
from .analysis import FEWEST, FLIPS, METHOD_WORDS, NOISY, Key, Results, distances, gain_at

GROUPS: Final = {
    "flips": ("share of flipped labels", FLIPS),
    "labellers": ("who labels", ("ann", "human", "none", "gpt4", "gpt4_utility")),
    "sizes": ("number of labels, size of the reward model", ("ann", "labels_10000", "layers_1")),
    "ensembles": ("ensembles", ("ann", "mean_3", "wco_3", "uwo_3")),
}
"""Treatments that are drawn together: file name -> title and names. Others are drawn next to `NOISY`."""
NOISE: Final = "overoptimization"
"""The figure of noisy against clean labels."""
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
GAINED: Final = {"proxy": "proxy gained (SFT's std)", "gold": "gold gained (gold units)"}
KL_LABEL: Final = "√KL from SFT (√nats)"

Drawings = Iterator[tuple[str, str, str, Drawing]]
"""File name, title, the note below, drawing."""


def draw_compared(results: Results, label: Callable[..., str]) -> Drawings:
    """Noisy against clean labels under one method, and all methods by either."""
    for method in ("best_of_n", "ppo"):
        keys = {results.title(name): (name, method) for name in (NOISY, FLIPS[0])}
        if all(key in results.curves for key in keys.values()):
            title = f"{_capital(METHOD_WORDS[method])} by a reward model of noisy and of clean labels"
            yield NOISE, title, label(method), draw_gains(results, keys, title)
            break
    for name in (NOISY, FLIPS[0]):
        keys = {METHOD_WORDS[method]: (name, method) for method in METHOD_WORDS if (name, method) in results.curves}
        if len(keys) > 1:
            title, methods = f"Every method against one KL: {results.title(name)}", [key[1] for key in keys.values()]
            yield f"methods_{name}", title, label(*methods), draw_gains(results, keys, title)


def draw_groups(results: Results, label: Callable[..., str], method: str) -> Drawings:
    """The treatments of each group under one method."""
    for group, (group_title, names) in groups(results, method).items():
        keys = {results.title(name): (name, method) for name in names}
        title = f"{_capital(METHOD_WORDS[method])}: {group_title}"
        yield f"{group}_against_kl_{method}", title, label(method), draw_gains(results, keys, title)


def draw_gains(results: Results, keys: Mapping[str, Key], title: str) -> Drawing:
    """Proxy and gold gained over SFT against sqrt(KL), a line for each of `keys`: to the farthest that all seeds reach.

    Large enough to be read at half its size.
    """
    figure = Drawing(figsize=(11, 4.8), dpi=150, layout="constrained")
    treatments, methods = ([key[part] for key in keys.values()] for part in (0, 1))
    shown_as = looks(treatments if len(set(treatments)) == len(keys) else methods)
    for axis, (measure, ylabel) in zip(figure.subplots(1, 2), GAINED.items(), strict=True):
        ends: list[float] = []
        for (color, marker), line, (words, key) in zip(shown_as, LINES, keys.items(), strict=False):
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


def _short(words: str) -> str:
    """Two lines of a legend at the most."""
    return textwrap.fill(words, 24, break_long_words=False, max_lines=2, placeholder=" …")


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _grid(axis: Axes) -> None:
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
