"""The page of the study of noise: predictions and outcomes, what is gained and lost by setting, the claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...oracles.dials import MOST
from ..experiment.faults import AGREEMENT, CLEAN, FLIP
from ..experiment.fresh import KIND, OWN
from ..harness.page import Drawn, Page, read_manifest, read_table, records
from ..harness.plots import COLORS, MARKERS, grid, titled
from ..harness.report import Table, number, sentences
from ..surrogates.figures import INFORMATION, draw_curves, draw_information
from ..surrogates.predictions import claim_cells, ends, prediction_table, win_rate_table
from .analysis import outcomes
from .matched import ONCE

STRONGEST: Final = 0.99 * MOST
JUDGES: Final = {OWN: "gold", "sim_eval": "win rate by p_sim^eval, points", "human": "win rate by human raters, points"}
CLAIMS: Final = {
    "slope of the drop": "fall, for ten points of flips",
    "matched drop": "fall: 4N labels with 25 % flips less N clean ones",
    "matched peak": "gain at the peak: the same",
    "doubled drop": "fall, for twice N(1 − 2e)²",
    "doubled peak": "gain at the peak, for twice N(1 − 2e)²",
    "rest drop": "fall, for ten points of flips at equal N(1 − 2e)²",
    "rest peak": "gain at the peak, for ten points of flips at equal N(1 − 2e)²",
    "slope of alpha": "α, for ten points of flips",
    "slope of beta": "β, for ten points of flips",
    "lift": "gain at the peak: largest N less a quarter of it",
    "cost peak": "gain at the peak: flips less this fault",
    "cost end": "gain at the largest n: flips less this fault",
    "PPO's cost peak": "PPO's gain at the peak: flips less this fault",
    "PPO's cost end": "PPO's gain at the last step: flips less this fault",
}
FAULTS: Final = {
    CLEAN: "no fault",
    FLIP: "flips",
    "temperature": "noise of each pair (temperature)",
    "position_bias": "taste for the first shown",
    "annotator_noise": "annotators' tastes for length and lists",
    "instruction_noise": "instructions' tastes for length and lists",
    "length_bias": "shared taste for length",
    "list_bias": "shared taste for lists",
}
"""In the order of the page: by how many labels share the fault."""
TRAINED: Final = {"ppo": "PPO", "dpo": "DPO", ONCE: "best of n, labels read once"}
METHODS: Final = {"best_of_n": "best of n", **TRAINED}
AXES: Final = ("gold gained (simultaneous 95 % bands)", "KL of the best of n (nats)")


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    settings, curves, claims, fits, dials, methods = (
        read_table(folder / f"{name}.csv") for name in ("table", "curves", "claims", "fits", "dials", "methods")
    )
    manifest = read_manifest(folder)
    sizes, seeds = manifest["config"]["sizes"], len(manifest["seeds"])
    quick = "Quick form, no result. " if manifest["quick"] else ""

    def level(
        labeller: str,
        chosen: str = f"best of n to {sizes['num_samples']:,} on {sizes['num_prompts']}",
        num_seeds: int = seeds,
    ) -> str:
        return (
            f"{quick}Level: sandbox (simulation); {chosen} instructions; labels of {labeller}, fresh pairs for each of "
            f"{num_seeds} seeds; 95 % intervals over seeds and instructions."
        )

    few = min(seeds, sizes["seeds_trained"])
    note, num = level("p_sim^eval"), sizes["training"]["num_eval"]
    trained = level("p_sim^eval", str(num), few)
    to = min(sizes["num_samples_of_faults"], sizes["num_samples"])
    dialed = level("gold with faults", f"best of n to {to:,} on {sizes['num_prompts']}")
    own, far = settings[settings.judge == OWN], f"The peak is chosen on other seeds and instructions. {note}"
    told = outcomes(claims)
    shown = curves[curves.judge == OWN].assign(gold_low=lambda x: x.band_low, gold_high=lambda x: x.band_high)
    tables = {
        "predictions": prediction_table(told, len(claims)),
        "drops": grid_table(own, "Gold lost from the peak to the largest n", partial(ends, name="drop"), far),
        "peaks": grid_table(own, "Gold gained at the peak", partial(ends, name="peak"), far),
        "dials": dial_table(dials, f"{dialed} PPO: {few} of the seeds, {num} instructions."),
        "methods": method_table(methods[methods.kind != ONCE], trained),
        "read_once": method_table(methods[methods.kind == ONCE], note, "With labels read once"),
        "claims": claim_table(claims),
        "win_rates": win_rate_table(settings[settings.judge != OWN], labelled, far),
        "fits": fit_table(fits, note),
        "accuracy": grid_table(own, "Right about gold on pairs of samples, %, mean over seeds", right, note),
    }
    figures: dict[str, Drawn] = {
        "curves": draw_curves(shown, "Best of n by reward models of noisy labels", note, *AXES),
        "information": draw_information(own, {KIND: "reward models"}, note, "gold"),
        "dials": draw_dials(dials[dials.judge == OWN], dialed),
    }
    counts = {outcome: sum(each == outcome for *_, each in told) for outcome in ("held", "failed", "open")}
    gold = records(claims[claims.judge == OWN])

    def claimed(claim: str, kind: str) -> list[dict[str, Any]]:
        return [row for row in gold if (row["claim"], row["kind"]) == (claim, kind)]

    found = sentences("noise/findings.txt.j2", told=told, counts=counts, claimed=claimed, num_claims=len(claims),
                      text=ends, information=INFORMATION, grid=KIND, once=ONCE, faults=FAULTS)  # fmt: skip
    headline = ""
    if told:
        lift = {row["kind"]: ends(row) for row in gold if row["claim"] == "lift"}
        headline = (
            f"four times as many labels add {lift[FLIP]} to gold where labels are flipped, {lift['length_bias']} where "
            f"the judge likes length; {counts['held']} of {len(told)} predictions held, {counts['failed']} failed"
        )
    return Page(
        "Noise with known gold",
        tables,
        found,
        figures,
        headline,
        {"information": INFORMATION},
        printed=("predictions", "drops", "peaks"),
    )


def right(row: Mapping[str, Any]) -> str:
    """How often a setting's reward models are right."""
    return f"{row['accuracy']:.1f}"


def grid_table(own: pd.DataFrame, what: str, cell: Callable[[dict[str, Any]], str], note: str) -> Table:
    """A measure by number of labels and share of flips."""
    rows: dict[int, dict[str, str]] = {}
    for row in records(own):
        line = rows.setdefault(row["labels"], {"labels": f"{row['labels']:,}"})
        line[f"{100 * row['flip']:g} % flips"] = cell(row)
    return Table.of([*rows.values()], f"{what}. {note}", what)


def labelled(row: Mapping[str, Any]) -> dict[str, str]:
    """Number of labels and share of flips of a row."""
    return {"labels": f"{row['labels']:,}", "flips, %": f"{100 * row['flip']:g}"}


def dial_table(dials: pd.DataFrame, note: str) -> Table:
    """What each fault leaves of gold, and of the win rates."""
    rows = [
        {
            "of": JUDGES[row["judge"]],
            "fault": FAULTS[row["kind"]],
            "strength": number(row["strength"]) if row["strength"] < STRONGEST else "the strongest",
            "flips, %": number(100 * row["flips"]),
            "agreement, %": number(100 * row["agreement"]),
            "labels": f"{row['labels']:,}",
            "method": METHODS[row["method"]],
            "at the peak": ends(row, "peak"),
            "at the end": ends(row, "end"),
            "reward model right, %": "" if math.isnan(row["accuracy"]) else number(row["accuracy"]),
        }
        for row in records(dials)
    ]
    caption = (
        f"Judges by gold with one fault, as strong as leaves {100 * AGREEMENT:g} % agreement with gold; one that "
        "leaves more at its strongest has flips besides. Four pairs of each instruction. Strengths are means over "
        f"seeds, in gold's unit. The end is the largest n, or PPO's last step. {note}"
    )
    return Table.of(rows, caption, "What a fault costs at equal agreement")


def method_table(trained: pd.DataFrame, note: str, title: str = "By PPO and DPO") -> Table:
    """Gold and the win rates of settings of equal information."""
    rows = [
        {
            "of": JUDGES[row["judge"]],
            "method": TRAINED[row["kind"]],
            **labelled(row),
            INFORMATION: f"{row['effective']:,.0f}",
            "gained at the peak": ends(row, "peak"),
            "lost after it": ends(row, "drop"),
            "KL at the peak, nats": number(row["peak_kl"]),
        }
        for row in records(trained.sort_values("judge", key=lambda x: x != OWN, kind="stable"))
    ]
    caption = f"Two settings of each N(1 − 2e)²; the peak is chosen on other seeds and instructions. {note}"
    return Table.of(rows, caption, title)


def draw_dials(own: pd.DataFrame, note: str) -> Drawn:
    """Gold gained by best of n for each fault: a panel for the peak and one for the end, a mark for each N."""
    figure = Figure(figsize=(10.4, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    chosen = own[own.method == "best_of_n"]
    for axis, (name, words) in zip(axes, {"peak": "at the peak", "end": "at the largest n"}.items(), strict=True):
        for look, (size, panel) in enumerate(chosen.groupby("labels")):
            rows = panel.set_index("kind").loc[list(FAULTS)]
            errors = [rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]]
            places = np.arange(len(rows)) + 0.24 * look - 0.12
            marks = {"fmt": MARKERS[look], "color": COLORS[look], "label": f"{size:,} labels"}
            axis.errorbar(rows[name], places, xerr=errors, **marks)
        axis.set_xlabel(f"gold gained {words}")
        grid(axis)
    flips = chosen.groupby("kind").flips.mean()
    besides = {kind: f"\nand {100 * flips[kind]:.0f} % flips" for kind in FAULTS if kind != FLIP and flips[kind] > 0}
    axes[0].set_yticks(range(len(FAULTS)), [label + besides.get(kind, "") for kind, label in FAULTS.items()])
    axes[0].invert_yaxis()
    axes[0].set_xlim(left=min(0.0, axes[0].get_xlim()[0]))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, frameon=False, loc="outside right upper")
    title = f"Best of n by labels of which {100 * AGREEMENT:g} % agree with gold, for one fault or another"
    return Drawn(titled(figure, title, note), f"{title}: gold gained. {note}")


def claim_table(claims: pd.DataFrame) -> Table:
    """The family."""
    rows = [
        {
            "of": JUDGES[row["judge"]],
            "claim": CLAIMS[row["claim"]],
            "by": FAULTS.get(row["kind"], TRAINED.get(row["kind"], "best of n")),
            "N": f"{row['labels']:,}" if row["labels"] else "all",
            **claim_cells(row),
            "within, at 5 %": number(row["within"]),
        }
        for row in records(claims)
    ]
    return Table.of(rows, f"Holm: among these {len(claims)} claims.", "Claims")


def fit_table(fits: pd.DataFrame, note: str) -> Table:
    """Gao's parameters of each setting."""
    rows = [
        {
            **labelled(row),
            INFORMATION: f"{row['effective']:,.0f}",
            "α": ends(row, "alpha"),
            "β": ends(row, "beta"),
        }
        for row in records(fits)
    ]
    return Table.of(rows, f"Gold gained as d(α − β d), d = √KL in √nats. {note}", "Gao et al.'s form")
