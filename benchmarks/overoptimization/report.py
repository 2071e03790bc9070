"""The over-optimization study's folder: tables, figures, report.html, the manifest's facts, and a summary on stdout."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ..harness.page import Page
from ..harness.plots import remove_drawn
from ..harness.report import SIMULATION, Section, Table, settings_table, signed, text_table, write_report
from ..harness.study import Row, Study, versions, write_csv
from .analyse import Results
from .curves import COLUMNS, METHOD_WORDS, Key, place_text, position
from .page import page_of
from .plans import PARTS, Plan
from .run import read_evaluation
from .treatments import Labels

IN_THE_GALLERY = ("ann", "none", "uwo_3")
"""Treatments whose most hacked responses are printed, as those of one's own are."""
NUM_SHOWN = 6  # responses of a run that the gallery shows


def write_results(study: Study, plans: Mapping[str, list[Plan]], rows: Mapping[str, list[Row]], *, quick: bool) -> None:
    """Writes everything: of each part of the study its cells, and the rows of the finished ones."""
    *_, runs = (plans[part] for part in PARTS)
    models, _, curves = (rows[part] for part in PARTS)
    sizes, places = runs[0].sizes, {run.treatment.name: place for place, run in enumerate(runs)}
    curves = sorted(
        curves, key=lambda row: (places[row["treatment"]], row["method"], row["seed"], row[position(row["method"])])
    )
    study.write_table(curves, COLUMNS)
    remove_earlier(study.out)
    if used := reward_models_of(runs, models):
        write_csv(study.out / "reward_models.csv", used)
    # With the number of labels that they really have.
    treatments = [replace(run.treatment, num_labels=run.treatment.labels(sizes.num_labels).num_labels) for run in runs]
    results = Results(curves, treatments)
    settings = {treatment.name: treatment.settings() for treatment in treatments}
    found = page_of(results, used, sizes)
    told = [SIMULATION, *found.findings]
    if quick:
        told.insert(1, "Quick run: to see that everything works, not to tell treatments apart.")
    shown = galleries(results, [run for run in runs if run.cell in study.done])
    write_page(study.out, found, told, shown, {**study.config, "seeds": study.seeds, "treatments": settings})
    study.note(level="sandbox", label=found.tables["falls"].caption, findings=told)
    print(text_table(found.tables["falls"]), *told, found.tables["falls"].caption, sep="\n")
    print(f"Written to {study.out}: report.html, tables (CSV), manifest.json, figures; responses in runs/.")


def write_page(
    out: Path, found: Page, told: Sequence[str], shown: Mapping[str, Table], settings: Mapping[str, Any]
) -> None:
    """Writes the figures and report.html."""
    figures = found.write_figures(out)
    sections = [
        Section("Result", told, figures=[*figures.values()]),
        *(Section(name.replace("_", " ").capitalize(), table=table) for name, table in found.tables.items()),
        *(Section(f"Reward hacking: {title}", table=table) for title, table in shown.items()),
        Section("Settings", table=settings_table({**settings, **versions()})),
    ]
    write_report(out / "report.html", "Over-optimization of a noisy reward", sections)


def remove_earlier(out: Path) -> None:
    """Removes what an earlier call has drawn and tabulated, perhaps of other treatments."""
    if (out / "report.html").exists():  # else a file of that name is somebody else's
        (out / "reward_models.csv").unlink(missing_ok=True)
    remove_drawn(out)


def reward_models_of(runs: Sequence[Plan], models: Sequence[Row]) -> list[Row]:
    """A row a treatment, seed and member: reward models that several treatments share stand in each of them."""
    names = [*(field.name for field in fields(Labels)), "member", "seed"]
    by_model = {tuple(row[name] for name in names): row for row in models}
    wanted = dict.fromkeys(
        (run.treatment.name, (*vars(model.labels).values(), model.member, model.seed))
        for run in runs
        for model in run.reward_models()
    )
    return [{"treatment": name, **by_model[model]} for name, model in wanted if model in by_model]


def galleries(results: Results, finished: Sequence[Plan]) -> dict[str, Table]:
    """The first finished seed of some treatments: its responses at the start, the peak of mean gold and the end."""
    first: dict[Key, Plan] = {(run.treatment.name, run.kind): run for run in reversed(finished)}
    found = {}
    for (name, method), curves in results.curves.items():
        run = first[name, method]
        if name in IN_THE_GALLERY or ":" in run.spec:
            top = curves.places[int(curves["gold"].mean(axis=0).argmax())]
            places = (curves.places[0], top, curves.places[-1])
            title = f"{results.title(name)}, {METHOD_WORDS[method]}, seed {run.seed}"
            evaluations = [read_evaluation(run, place) for place in places]
            found[title] = gallery_table(title, [place_text(method, place) for place in places], evaluations)
    return found


def gallery_table(title: str, places: Sequence[str], evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """The responses whose proxy rose most from the peak of gold to the end while gold fell, next to what they were.

    `places` are start, peak and end ("step 0", "step 6", "step 40"), `evaluations` those of `run.read_evaluation`.
    """
    scores = [pd.DataFrame({name: each[name] for name in ("proxy", "gold")}, dtype=float) for each in evaluations]
    change = scores[2] - scores[1]
    # Without a verdict a change is NaN, and counts as none.
    hacked = change[(change.proxy > 0) & (change.gold < 0)].sort_values("proxy", ascending=False, kind="stable")
    rows = []
    for i in map(int, hacked.index[:NUM_SHOWN]):
        texts = [
            f"{each['responses'][i]}\n\nproxy {score.proxy.iloc[i]:.2f}; gold {score.gold.iloc[i]:.2f}"
            for each, score in zip(evaluations, scores, strict=True)
        ]
        texts[2] += f"\nsince {places[1]}: proxy {signed(change.proxy.iloc[i])}, gold {signed(change.gold.iloc[i])}"
        rows.append((str(evaluations[0]["instructions"][i]), *texts))
    caption = (
        f"{title}: of {len(change)} responses {len(hacked)} have a higher proxy and a lower gold at {places[2]} "
        f"than at {places[1]}, the peak of mean gold; shown are the {len(rows)} whose proxy rose most, chosen for that "
        "and not typical."
    )
    header = ("instruction", *map("{} ({})".format, ("SFT", "peak of gold", "end"), places))
    return Table(header, rows, caption)
