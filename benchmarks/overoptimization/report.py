"""The over-optimization study for people: tables, figures, report.html, the manifest's facts, a summary on stdout."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ..harness.estimates import Estimate
from ..harness.plots import remove_drawn, write_png
from ..harness.report import (
    Figure,
    Table,
    interval_text,
    number,
    sentences,
    settings_table,
    signed,
    text_table,
    write_report,
)
from ..harness.study import Row, Study, versions, write_csv
from . import analyse
from .analyse import Results
from .curves import COLUMNS, METHOD_WORDS, Key, place_text, position
from .figures import draw_all
from .page import Measured, costs_table, falls_table, measured_by, reward_models_table
from .plans import PARTS, Plan, Sizes
from .run import read_evaluation, read_samples
from .treatments import Labels

IN_THE_GALLERY = ("ann", "none", "uwo_3")
"""Treatments whose most hacked responses are printed, as those of one's own are."""
HELD = {True: "holds", False: "does not hold", None: "cannot be judged"}
NUM_SHOWN = 6  # responses of a run that the gallery shows


def write_results(study: Study, plans: Mapping[str, list[Plan]], rows: Mapping[str, list[Row]], *, quick: bool) -> None:
    """Writes everything: of each part of the study its cells, and the rows of the finished ones."""
    _, samples, runs = (plans[part] for part in PARTS)
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
    settings = {treatment.name: treatment.settings() for treatment in treatments}
    results, measured = Results(curves, treatments), measured_by({run.kind for run in runs}, sizes, len(study.seeds))
    table, findings = write_page(
        study.out,
        results,
        measured,
        models=used,
        galleries=galleries(results, [run for run in runs if run.cell in study.done]),
        length_slope=slope([plan for plan in samples if plan.cell in study.done]),
        configuration={**study.config, "seeds": study.seeds, "treatments": settings},
        quick=sizes if quick else None,
    )
    study.note(level="sandbox", label=measured.label(), findings=findings)
    print(text_table(table), *findings, measured.label(), sep="\n")
    print(f"Written to {study.out}: report.html, tables (CSV), manifest.json, figures; responses in runs/.")


def write_page(
    out: Path,
    results: Results,
    measured: Measured,
    *,
    models: Sequence[Row] = (),
    galleries: Mapping[str, Table] | None = None,
    length_slope: float | None = None,
    configuration: Mapping[str, Any] | None = None,
    quick: Sizes | None = None,
) -> tuple[Table, list[str]]:
    """Writes the figures and report.html; returns the table to print and the findings in sentences.

    `models` are the rows of reward_models.csv, `length_slope` as `analyse.length_slope` gives it, `quick` the sizes of
    a quick study, which says so. What is left out is not in the report.
    """
    trained = analyse.reward_models(models)
    figures: dict[str, list[Figure]] = defaultdict(list)
    for section, name, title, note, drawing in draw_all(results, measured.label, trained):
        figures[section].append(Figure(write_png(out / f"{name}.png", drawing), f"{title}. {note}"))
    values: dict[str, Any] = {
        "analyse": analyse,
        "results": results,
        "measured": measured,
        "verdicts": analyse.verdicts(results),
        "words": METHOD_WORDS,
        "held": HELD,
        "place": place_text,
        "quick": quick,
    }
    values["claims"] = sentences("overoptimization/claims.txt.j2", **values)
    values["findings"] = sentences("overoptimization/findings.txt.j2", **values)
    peaks = results_table(results, measured)
    write_report(
        out / "report.html",
        "Over-optimization of a noisy reward",
        template="overoptimization/report.html.j2",
        **values,
        peaks=peaks,
        ranges=[falls_table(results, measured), costs_table(results, measured)],
        models=reward_models_table(results, trained),
        kls=[f"at {kl:g} nats" for kl in analyse.GAINED],
        figures=figures,
        length_slope=length_slope,
        galleries=galleries or {},
        configuration=settings_table(configuration or {}),
        versions=settings_table(versions()),
    )
    return peaks, values["findings"]


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


def slope(plans: Sequence[Plan]) -> float | None:
    """`analyse.length_slope` among the first seed's samples; None without samples, or where it is NaN."""
    if not plans:
        return None
    found = read_samples(plans[0])
    drawn = found.responses.iloc[found.index.ravel()]
    worth = analyse.length_slope(*(drawn[name].to_numpy() for name in ("gold", "length", "prompt")))
    return None if math.isnan(worth) else worth


def results_table(results: Results, measured: Measured) -> Table:
    """A row a treatment and method: gold at the start, its peak and end, the drop, and what the proxy did."""

    def text(estimate: Estimate) -> str:
        return interval_text(estimate.interval, "")

    rows = [
        (
            *(results.title(name), METHOD_WORDS[method], text(story.start), text(story.peak)),
            *(place_text(method, story.top), number(story.kl), text(story.end)),
            *(text(story.drop), signed(story.drop.ratio, "%")),
            *(signed(story.proxy_after.mean), signed(story.proxy_after.ratio, "%"), str(story.drop.num)),
        )
        for (name, method), story in results.stories.items()
    ]
    header = ("treatment", "method", "gold, SFT", "gold, peak", "at", "KL there", "gold, end")
    more = ("drop from peak to end", "in SE", "proxy after peak", "in SE", "n seeds")
    caption = (
        "Mean over seeds [95 % t-interval]; SE: standard errors. The peak shown is that of the mean curve; the drop "
        f"and the proxy's change are from the peak of the other seeds. {measured.label(*results.methods)}"
    )
    return Table((*header, *more), rows, caption)


def galleries(results: Results, finished: Sequence[Plan]) -> dict[str, Table]:
    """The first finished seed of some treatments: its responses at the start, the peak of mean gold and the end."""
    first: dict[Key, Plan] = {(run.treatment.name, run.kind): run for run in reversed(finished)}
    found = {}
    for (name, method), story in results.stories.items():
        run = first[name, method]
        if name in IN_THE_GALLERY or ":" in run.spec:
            places = (results.curves[name, method].places[0], story.top, story.last)
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
