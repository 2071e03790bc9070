"""The page: gold and proxy along KL, what is lost and gained against N(1 - 2e)^2, the claims and their family."""

from pathlib import Path
from typing import Final

import pandas as pd

from ..harness.estimates import Estimate, rejected
from ..harness.page import Page, read_manifest, read_table
from ..harness.report import Table, interval_text, number, sentences, signed
from ..surrogates.figures import INFORMATION, draw_curves, draw_information
from ..surrogates.predictions import claim_cells, ends
from ..surrogates.scarcity import HALF_AWAY
from .runs import PREDICTORS

TITLES: Final = {"linear": "linear reward models", "trees": "boosted trees"}
MATCHED: Final = {"matched drop": "drop", "matched peak": "gain at the peak"}
DOUBLED: Final = {"doubled drop": "drop", "doubled peak": "gain at the peak"}
AXES: Final = ("gold: win rate gained over n = 1 (points)", "KL from the uniform choice (nats)")
PRIMARY: Final = 1000
"""Labels of the first finding."""


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    names = ("table", "curves", "claims", "accuracy")
    settings, curves, claims, accuracy = (read_table(folder / f"{name}.csv") for name in names)
    manifest = read_manifest(folder)
    facts, seeds = manifest["facts"], len(manifest["seeds"])
    others = claims.judge.eq("other").any()
    quick = "Quick form, no result. " if manifest["quick"] else ""
    note = (
        f"{quick}Level: recorded; judge {facts['judge']}, {facts['num_verdicts']} verdicts on {facts['num_models']} "
        f"models and {facts['num_instructions']} instructions; {seeds} repeats; 95 % intervals over repeats and "
        "instructions."
    )
    slopes, matched = claims[claims.claim == "slope of the drop"], claims[claims.claim.isin(MATCHED)]
    doubled, own = claims[claims.claim.isin(DOUBLED)], slopes[slopes.judge == "own"]
    own = own.assign(alone=rejected(own.chance.to_list()))
    tables = {f"drops_{kind}": drop_table(settings, "own", kind, "drop", note) for kind in TITLES}
    tables |= {f"peaks_{kind}": drop_table(settings, "own", kind, "peak", note) for kind in TITLES}
    tables["slopes"] = slope_table(slopes, own.alone, len(claims))
    tables["doubled"] = doubled_table(doubled, len(claims))
    tables["matched"] = matched_table(matched, len(claims))
    if others:
        tables |= {f"second_{kind}": drop_table(settings, "other", kind, "drop", note) for kind in TITLES}
    tables["accuracy"] = accuracy_table(accuracy, note)
    own_curves, own_settings = (each[each.judge == "own"] for each in (curves, settings))
    figures = {
        kind: draw_curves(own_curves[own_curves.kind == kind], f"Best of n held-out responses by {title}", note, *AXES)
        for kind, title in TITLES.items()
    }
    figures["information"] = draw_information(own_settings, TITLES, note, "points")
    size = PRIMARY if (slopes.labels == PRIMARY).any() else int(slopes.labels.max())
    first = {
        judge: by_kind(rows[rows.labels == size])
        for judge, rows in (("own", own), ("other", slopes[slopes.judge == "other"]))
    }
    values = {f"slope_{kind}": ends(row) for kind, row in first["own"].items()} | {"information": INFORMATION}
    found = sentences(
        "recorded_noise/findings.txt.j2",
        first=first,
        size=size,
        num_claims=len(claims),
        doubled={(row.kind, DOUBLED[row.claim]): row for _, row in doubled.iterrows()},
        information=INFORMATION,
        away=f"{100 * HALF_AWAY:g}",
        slopes=own,
        matched={measure: matched[matched.claim == claim] for claim, measure in MATCHED.items()},
        text=ends,
        number=number,
        TITLES=TITLES,
    )
    peak, drop = (
        ends(doubled[(doubled.kind == "linear") & (doubled.claim == name)].iloc[0]) for name in reversed(DOUBLED)
    )
    return Page(
        "Noise in recorded verdicts",
        tables,
        found,
        figures,
        f"linear reward models: a doubling of {INFORMATION} changes what best of n gains by {peak} points of win rate "
        f"and its drop after the peak by {drop}; {seeds} repeats, {facts['num_instructions']} instructions",
        values,
        simulated=False,
        printed=("drops_linear", "slopes", "accuracy"),
    )


def by_kind(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Kind -> its row."""
    return {str(row.kind): row for _, row in rows.iterrows()}


def drop_table(settings: pd.DataFrame, judge: str, kind: str, measure: str, note: str) -> Table:
    """A measure by labels and flips."""
    rows = settings[(settings.judge == judge) & (settings.kind == kind)]
    cells = {
        f"{labels:,}": {f"{100 * row.flip:g} % flips": ends(row, measure) for _, row in own.iterrows()}
        for labels, own in rows.groupby("labels")
    }
    what = {"drop": "lost after the peak", "peak": "gained at the peak"}[measure]
    who = "" if judge == "own" else f", by the second judge, on {rows.instructions.max()} instructions"
    title = f"Points of win rate {what}: {TITLES[kind]}{who}"
    gold = "" if judge == "own" else "Gold: the second judge. "
    caption = f"{gold}To n = {rows.most.max()}. The peak is chosen on other repeats and instructions. {note}"
    if (rows.drop_error == 0).any():
        caption = f"A drop of 0 without an interval: each curve is highest at its end. {caption}"
    return Table.of([{"labels": name, **row} for name, row in cells.items()], caption, title)


def slope_table(slopes: pd.DataFrame, alone: pd.Series, size: int) -> Table:
    """The slopes of the drop by flips; `alone` says which of the first judge's are clear among themselves."""
    names = {"own": "the judge", "other": "second judge"}
    verdicts = {place: "clear" if each else "no" for place, each in alone.items()}
    rows = [
        {"gold": names[row.judge], "reward models": TITLES[row.kind], "labels": f"{row.labels:,}"}
        | claim_cells(row, "points")
        | {"among the judge's slopes": verdicts.get(place, "")}
        | {"by repeats alone": f"[{number(row.repeats_low)}, {number(row.repeats_high)}]"}
        for place, row in slopes.iterrows()
    ]
    caption = (
        f"Points of win rate that ten points of flips, up to 35 %, add to the drop. Holm: clear among {size} claims; "
        f"then among the {len(alone)} slopes by the judge alone."
    )
    return Table.of(rows, caption, "What flips add to the drop")


def matched_table(matched: pd.DataFrame, size: int) -> Table:
    """Pairs of settings with equal N(1 - 2e)^2."""
    rows = [
        {
            "reward models": TITLES[row.kind],
            "noisy less clean": f"{4 * row.labels:,} with 25 % flips less {row.labels:,} clean",
            "measure": MATCHED[row.claim],
        }
        | claim_cells(row, "points")
        for _, row in matched.iterrows()
    ]
    caption = (
        f"Both have the same N(1 - 2e)². Points of win rate; paired by repeat and instruction. Holm: of {size} claims."
    )
    return Table.of(rows, caption, "Noise against scarcity")


def doubled_table(doubled: pd.DataFrame, size: int) -> Table:
    """Drop and peak by N(1 - 2e)^2, over all settings."""
    rows = [
        {"reward models": TITLES[row.kind], "measure": DOUBLED[row.claim]} | claim_cells(row, "points")
        for _, row in doubled.iterrows()
    ]
    caption = f"Points of win rate for each doubling of N(1 − 2e)², over all sizes and flips. Holm: of {size} claims."
    return Table.of(rows, caption, "What a doubling of the information changes")


def accuracy_table(accuracy: pd.DataFrame, note: str) -> Table:
    """How often verdicts are predicted, near the reference and on all models, with the errors over models."""
    wide = accuracy.pivot(index="model", columns="predictor", values="accuracy") * 100
    near = accuracy.groupby("model").near.first()
    base, rows = "linear on length and list", []
    for name in PREDICTORS:
        row = {"who": name}
        for title, part in (("near the reference", wide[near]), ("all models", wide)):
            own, gap = Estimate.of(part[name]), Estimate.of(part[name] - part[base])
            row[f"{title}, %"] = interval_text(own, "%")
            row[f"over length and list, {title}"] = (
                "–" if name == base else f"{signed(gap.mean, '%')} ± {number(gap.standard_error)}"
            )
        rows.append(row)
    return Table.of(
        rows,
        f"Models and instructions held out, {int(near.sum())} of {len(near)} models near the reference (a win rate of "
        f"25 to 75 %); means over models, 95 % intervals over models, ± a standard error. {note.split(';')[0]}.",
        "How often verdicts are predicted",
    )
