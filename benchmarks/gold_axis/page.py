"""The page of the study of methods: curves on one axis, peaks and falls of each method, the claims."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..experiment.faults import FLIP
from ..experiment.fresh import OWN
from ..harness.page import Drawn, Page, read_manifest, read_table, records
from ..harness.plots import COLORS, MARKERS, grid, titled
from ..harness.report import Table, number, sentences
from ..surrogates.figures import keep_in_view
from ..surrogates.predictions import claim_cells, ends, prediction_table, win_rate_table
from .analysis import PPO, outcomes
from .runs import LABELLINGS, METHODS, AxisPlan

CLAIMS: Final = {
    "peak": "gold at the peak minus PPO's",
    "fall_at_kl": "gold lost at equal KL minus PPO's",
    "gold_at_proxy": "gold at equal proxy minus PPO's",
    "cost of length": "gold at the peak by flips minus that by a taste for length",
}
AXES: Final = {"kl": "√KL to SFT (√nats a response)", "proxy": "proxy gained (SD within an instruction)"}


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    rows, curves, claimed = (read_table(folder / f"{name}.csv") for name in ("table", "curves", "claims"))
    manifest = read_manifest(folder)
    sizes, seeds = manifest["config"]["sizes"], len(manifest["seeds"])
    note = (
        f"{'Quick form, no result. ' if manifest['quick'] else ''}Level: sandbox (simulation); "
        f"{sizes['training']['num_eval']} instructions of eval, temperature 1, {max(sizes['labels']):,} labels, fresh "
        f"pairs for each of {seeds} seeds; 95 % intervals over seeds and instructions."
    )
    own = rows[rows.judge == OWN]
    told = outcomes(claimed)
    kinds = [kind for kind in LABELLINGS if kind in {*own.kind}]
    tables = {f"peaks_{kind.replace(' ', '_')}": peak_table(own[own.kind == kind], note) for kind in kinds}
    order = tuple(tables)
    tables |= {"claims": claim_table(claimed), "win_rates": win_rate_table(rows[rows.judge != OWN], named, note)}
    if told:
        tables["predictions"] = prediction_table(told, len(claimed))
    clear = [row for row in records(claimed) if row["holm"]]
    ranked = {kind: records(own[own.kind == kind].sort_values("peak", ascending=False)) for kind in kinds}
    found = sentences("gold_axis/findings.txt.j2", kinds=ranked, clear=clear, num=len(claimed), text=ends,
                      names=METHODS, labellings=LABELLINGS, claims=CLAIMS)  # fmt: skip
    figures = {
        "kl": draw(curves, "kl", "Gold gained by each method, against KL", note),
        "proxy": draw(curves, "proxy", "Gold gained by each method, against the proxy", note),
    }
    most, least = (f"{METHODS[row['method']]} ({ends(row, 'peak')})" for row in (ranked[FLIP][0], ranked[FLIP][-1]))
    headline = f"{LABELLINGS[FLIP]}: mean gold at the peak is highest by {most}, lowest by {least}"
    return Page("Methods on one gold axis", tables, found, figures, headline, printed=order)


def peak_table(own: pd.DataFrame, note: str) -> Table:
    """A labelling's methods."""
    kind = str(own.kind.iloc[0])
    first = records(own)[0]
    rows = [
        {
            "method": METHODS[row["method"]],
            "gold gained at the peak": ends(row, "peak"),
            "KL there, nats": number(row["peak_kl"]),
            "samples to it": f"{row['peak_samples']:,}" if row["peak_samples"] else "labels alone",
            "lost to the end": ends(row, "drop"),
            "KL at the end": number(row["end_kl"]),
            f"lost at {number(first['mark_kl'])} nats": ends(row, "fall_at_kl", "not reached"),
            f"gold at proxy {number(first['mark_proxy'])}": ends(row, "gold_at_proxy", "not reached"),
            "α": ends(row, "alpha"),
            "β": ends(row, "beta"),
        }
        for row in records(own)
    ]
    agreed = (
        "" if kind == next(iter(LABELLINGS)) else f", which agree with gold on {100 * AxisPlan.agreed:g} % of pairs"
    )
    caption = (
        f"Labels by gold: {LABELLINGS[kind]}{agreed}. The peak is chosen on other seeds and instructions; KL and "
        "samples are those of the highest mean. Samples: by best-of-n answers to an instruction, else answers that "
        "were trained on. Best-of-n's KL is its formula, the others' is measured. KL and proxy of the comparison: the "
        f"largest that three quarters of the methods reach with all seeds. {note}"
    )
    return Table.of(rows, caption, LABELLINGS[kind].capitalize())


def named(row: Mapping[str, Any]) -> dict[str, str]:
    """Labels and method of a row."""
    return {"labels": LABELLINGS.get(row["kind"], ""), "method": METHODS[row["method"]]}


def claim_table(claimed: pd.DataFrame) -> Table:
    """The family."""
    rows = [{"claim": CLAIMS[row["claim"]], **named(row), **claim_cells(row)} for row in records(claimed)]
    return Table.of(rows, f"Holm: among these {len(claimed)} claims.", "Claims")


def draw(curves: pd.DataFrame, along: str, title: str, note: str) -> Drawn:
    """Gold gained along KL or proxy, a panel a labelling, a line a method."""
    kinds = [kind for kind in LABELLINGS if kind in {*curves.kind}]
    figure = Figure(figsize=(1.4 + 3.8 * len(kinds), 5.2), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        for place, (method, name) in enumerate(METHODS.items()):
            own = curves[(curves.kind == kind) & (curves.method == method)]
            if len(own):
                x = np.sqrt(np.maximum(own.kl, 0)) if along == "kl" else own.proxy
                look: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
                if place >= len(COLORS):
                    look |= {"linestyle": "--", "markerfacecolor": "white"}
                axis.plot(x, own.gold, label=name, markersize=3.5, linewidth=1.6, **look)
                if method == PPO:  # thirteen bands hide each other
                    axis.fill_between(x, own.gold_low, own.gold_high, color=look["color"], alpha=0.15, linewidth=0)
        axis.set_title(LABELLINGS[kind], fontsize=10)
        axis.set_xlabel(AXES[along])
        grid(axis)
    axes[0].set_ylabel("gold gained over SFT")
    keep_in_view(axes[0], curves.gold)
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), fontsize=8, frameon=False, handlelength=3.5, loc="outside right upper")
    return Drawn(titled(figure, title, note), f"{title}; the band is PPO's. {note}")
