"""Figures of studies of scarcity: gold and proxy along KL, and what is gained and lost against the information."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..harness.page import Drawn
from ..harness.plots import COLORS, MARKERS, grid, titled

INFORMATION: Final = "N(1 − 2e)²"
"""What N labels tell when a share e of them is flipped, in labels without flips."""
MOST_PANELS: Final = 3
"""Sizes whose curves are drawn: the smallest, one four times as large, one four times as large as that."""


def draw_curves(own: pd.DataFrame, title: str, note: str, gold: str, kl: str) -> Drawn:
    """Gold above proxy along KL, a panel for each of some sizes, a line for each share of flips.

    Args:
        own: Rows of `scarcity.curve_rows` of one judge and kind.
        title: Of the figure.
        note: In small print below.
        gold: What the upper axes show.
        kl: What the horizontal axes show.
    """
    sizes = [size for size in sorted({*own.labels}) if np.log2(size / own.labels.min()) % 2 == 0][:MOST_PANELS]
    figure = Figure(figsize=(1.4 + 3.6 * len(sizes), 6.8), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(sizes), squeeze=False, sharex=True, sharey="row")
    for column, size in enumerate(sizes):
        for place, flip in enumerate(sorted({*own.flip})):
            rows = own[(own.labels == size) & (own.flip == flip)]
            look: dict[str, Any] = {"color": COLORS[place], "marker": MARKERS[place], "markersize": 4, "linewidth": 1.8}
            x = rows.kl.to_numpy()
            axes[0, column].fill_between(x, rows.gold_low, rows.gold_high, color=COLORS[place], alpha=0.15, linewidth=0)
            axes[0, column].plot(x, rows.gold, label=f"{100 * flip:g} % flips", **look)
            axes[1, column].plot(x, rows.proxy, **look)
        axes[0, column].set_title(f"{size:,} labels", fontsize=10)
        axes[1, column].set_xlabel(kl)
    axes[0, 0].set_ylabel(gold)
    axes[1, 0].set_ylabel("proxy gained (SD within an instruction)")
    axes[1, 0].legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="lower right")
    for axis in axes.flat:
        grid(axis)
    keep_in_view(axes[0, 0], own[own.labels.isin(sizes)].gold)
    return Drawn(titled(figure, title, note), f"{title}: gold above, proxy below. {note}")


def keep_in_view(axis: Axes, values: pd.Series) -> None:
    """Ends an axis a range above and below its values: of few repeats an interval may be many times as wide."""
    room, (bottom, top) = values.max() - values.min(), axis.get_ylim()
    axis.set_ylim(max(bottom, values.min() - room), min(top, values.max() + room))


def draw_information(own: pd.DataFrame, titles: Mapping[str, str], note: str, unit: str) -> Drawn:
    """Peak and drop of every setting (rows of `scarcity.setting_rows`) against N(1 - 2e)^2, a column a kind."""
    figure = Figure(figsize=(1.4 + 4.0 * len(titles), 7.0), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(titles), squeeze=False, sharex=True, sharey="row")
    labels = {"peak": f"gained at the peak ({unit})", "drop": f"lost after the peak ({unit})"}
    for column, kind in enumerate(titles):
        for row, (measure, label) in enumerate(labels.items()):
            axis = axes[row, column]
            for place, flip in enumerate(sorted({*own.flip})):
                rows = own[(own.kind == kind) & (own.flip == flip)]
                errors = [rows[measure] - rows[f"{measure}_low"], rows[f"{measure}_high"] - rows[measure]]
                look = {"color": COLORS[place], "marker": MARKERS[place], "label": f"{100 * flip:g} % flips"}
                axis.errorbar(rows.effective, rows[measure], errors, markersize=5, linewidth=1, elinewidth=1, **look)
            axis.set_xscale("log")
            grid(axis)
            if not column:
                axis.set_ylabel(label)
        axes[0, column].set_title(titles[kind] if len(titles) > 1 else "", fontsize=10)
        axes[1, column].set_xlabel(f"{INFORMATION}: clean labels that would tell as much")
        axes[1, column].axhline(0, color="#888888", linestyle="--", linewidth=1)
    for row, measure in enumerate(labels):
        keep_in_view(axes[row, 0], own[measure])
    axes[0, 0].legend(fontsize=8, frameon=False)
    title = "What is gained and lost, against the information in the labels"
    return Drawn(titled(figure, title, note), f"Peak and drop against N(1 - 2e)²; along a line N doubles. {note}")
