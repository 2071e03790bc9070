"""The over-optimization study for people: tables, figures, report.html, the manifest's facts, a summary on stdout."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ..harness.estimates import Estimate, estimates
from ..harness.plots import write_png
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
from .analyse import NOISY, Results
from .curves import COLUMNS, METHOD_WORDS, POSITION, Key, place_text
from .figures import FRESH, OURS, draw_all
from .plans import PARTS, TEMPERATURE, Plan, Sizes
from .run import read_evaluation
from .samples import read_samples
from .treatments import Labels

TITLE = "Over-optimization of a noisy reward"
IN_THE_GALLERY = ("ann", "none", "uwo_3")
"""Treatments whose most hacked responses are printed, beside those of one's own."""
FOLDER = "overoptimization"
"""Of the templates."""
HELD = {True: "holds", False: "does not hold", None: "cannot be judged"}
NUM_SHOWN = 6
"""Responses of a run that the gallery shows."""


@dataclass(frozen=True)
class Setting:
    """What stands under every figure and table: how much was measured."""

    num_instructions: Mapping[str, int]
    """Method -> eval instructions that it is measured on."""
    num_seeds: int
    """Seeds that were meant to run."""

    def label(self, *methods: str) -> str:
        """Level, judges, n, seeds and interval, in one or two lines; of the methods given or, with none, of all."""
        counts = ", ".join(
            f"{METHOD_WORDS[method]} n = {num} eval instructions"
            for method, num in self.num_instructions.items()
            if method in (methods or METHOD_WORDS)
        )
        several = f"{self.num_seeds} seeds, 95 % t-intervals of the mean"
        return (
            f"Level: sandbox (simulation); {counts}, the same for all treatments, temperature {TEMPERATURE:g}; "
            f"{several if self.num_seeds > 1 else '1 seed, no interval'}. Proxy: each treatment's own reward (of one "
            "reward model 1 is the standard deviation of SFT's answers to an instruction). Gold: the sandbox's true "
            "reward."
        )


def write_results(study: Study, plans: Mapping[str, list[Plan]], rows: Mapping[str, list[Row]], *, quick: bool) -> None:
    """Writes everything: of each part of the study its cells, and the rows of the finished ones."""
    _, samples, runs = (plans[part] for part in PARTS)
    models, _, curves = (rows[part] for part in PARTS)
    places = {run.found.name: place for place, run in enumerate(runs)}
    curves = sorted(
        curves, key=lambda row: (places[row["treatment"]], row["method"], row["seed"], row[POSITION[row["method"]]])
    )
    study.write_table(curves, COLUMNS)
    remove_earlier(study.out)
    if used := reward_models_of(runs, models):
        write_csv(study.out / "reward_models.csv", used)
    # With the number of labels that they really have.
    most = runs[0].sizes.num_labels
    treatments = {run.found.name: replace(run.found, num_labels=run.found.labels(most).num_labels) for run in runs}
    results, where = Results(curves, treatments.values()), setting(runs, len(study.seeds))
    settings = {name: treatment.settings() for name, treatment in treatments.items()}
    table, findings = write_page(
        study.out,
        results,
        where,
        models=used,
        galleries=galleries(results, [run for run in runs if run.cell in study.done]),
        length_slope=slope([plan for plan in samples if plan.cell in study.done]),
        configuration={**study.config, "seeds": study.seeds, "treatments": settings},
        quick=runs[0].sizes if quick else None,
    )
    study.note(level="sandbox", label=where.label(), findings=findings)
    print(text_table(table), *findings, where.label(), sep="\n")
    print(f"Written to {study.out}: report.html, tables (CSV), manifest.json, figures; responses in runs/.")


def write_page(
    out: Path,
    results: Results,
    where: Setting,
    *,
    models: Sequence[Row] = (),
    galleries: Mapping[str, Table] | None = None,
    length_slope: float | None = None,
    configuration: Mapping[str, Any] | None = None,
    quick: Sizes | None = None,
) -> tuple[Table, list[str]]:
    """Writes the figures and report.html; returns the table to print and the findings in sentences.

    Args:
        out: Folder of the study.
        results: Of table.csv.
        where: Instructions and seeds that were meant to be measured; it stands under every figure and table.
        models: Rows treatment, seed, num_trained (labels without the ties), accuracy_gold and accuracy_judge (shares of
            pairs), calibration_error (in [0, 1]); several of a seed are an ensemble's members.
        galleries: Runs -> their most hacked responses.
        length_slope: What one character more is worth in gold among SFT's responses (`analyse.length_slope`).
        configuration: Names and values.
        quick: Sizes of a quick study, which says so.
    """
    trained = analyse.reward_models(models)
    figures: dict[str, list[Figure]] = defaultdict(list)
    for section, name, title, note, drawing in draw_all(results, where.label, trained, length_slope):
        figures[section].append(Figure(write_png(out / f"{name}.png", drawing), f"{title}. {note}"))
    found, methods = analyse.verdicts(results), results.methods
    words = {"title": results.title, "words": METHOD_WORDS, "noisy": NOISY, "verdicts": found}
    claims = sentences(f"{FOLDER}/claims.txt.j2", **words)
    findings = sentences(
        f"{FOLDER}/findings.txt.j2",
        **words,
        claims=claims,
        held=HELD,
        results=results,
        place=place_text,
        quick=quick,
        num_seeds=where.num_seeds,
        gaps=analyse.gaps(results, where.num_instructions, where.num_seeds),
        others={method: analyse.other_falls(results, method) for method in methods},
        beside={method: analyse.ends_beside(results, method) for method in methods},
        warnings=analyse.warnings(results),
    )
    peaks, measures = results_table(results, where), trained.columns[2:]
    write_report(
        out / "report.html",
        TITLE,
        template=f"{FOLDER}/report.html.j2",
        findings=findings,
        claims=[(claim, HELD[verdict.holds]) for claim, verdict in zip(claims, found, strict=True)],
        peaks=peaks,
        results=results,
        words=METHOD_WORDS,
        models={name: estimates(trained, ["treatment"], name) for name in measures} if len(trained) else {},
        fresh=FRESH,
        kls=[f"at {kl:g} nats" for kl in analyse.GAINED],
        gains={
            key: [interval_text(gain.interval, "") if gain else "–" for gain in analyse.gains(curves)]
            for key, curves in results.curves.items()
        },
        lengths={} if length_slope is None else analyse.lengths(results, length_slope),
        figures=figures,
        length_slope=length_slope,
        galleries=galleries or {},
        label=where.label(),
        ran=where.label(*methods),
        configuration=settings_table(configuration or {}),
        versions=settings_table(versions()),
    )
    return peaks, findings


def remove_earlier(out: Path) -> None:
    """Removes what an earlier call has drawn and tabulated: it may be of other treatments, and this call not write it.

    Where no call has left its report, files of such names are somebody else's.
    """
    if (out / "report.html").exists():
        (out / "reward_models.csv").unlink(missing_ok=True)
        for file in out.glob("*.png"):
            if OURS.fullmatch(file.stem):
                file.unlink()


def setting(runs: Sequence[Plan], num_seeds: int) -> Setting:
    """What stands under every figure: as many instructions as there are, which may be fewer than were asked for."""
    wanted = {"ppo": runs[0].sizes.num_eval, "best_of_n": runs[0].sizes.num_prompts}
    meant = {run.kind for run in runs}
    return Setting({x: len(runs[0].sizes.instructions(num)) for x, num in wanted.items() if x in meant}, num_seeds)


def reward_models_of(runs: Sequence[Plan], models: Sequence[Row]) -> list[Row]:
    """A row a treatment, seed and member: reward models that several treatments share stand in each of them."""
    names = [field.name for field in fields(Labels)]
    by_model = {(Labels(*(row[name] for name in names)), row["member"], row["seed"]): row for row in models}
    wanted = dict.fromkeys(
        (run.found.name, (model.labels, model.member, model.seed)) for run in runs for model in run.reward_models()
    )
    return [{"treatment": name, **by_model[model]} for name, model in wanted if model in by_model]


def slope(plans: Sequence[Plan]) -> float | None:
    """What one character more is worth in gold among the first seed's samples.

    None without samples, and where all that answer an instruction have one length.
    """
    if not plans:
        return None
    found = read_samples(plans[0])
    index = found.index.ravel()
    worth = analyse.length_slope(found.measures["gold"][index], found.measures["length"][index], found.prompt[index])
    return None if math.isnan(worth) else worth


# ------------------------------------------------------------------------------------------------------------- tables


def results_table(results: Results, where: Setting) -> Table:
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
        f"and the proxy's change are from the peak of the other seeds. {where.label(*results.methods)}"
    )
    return Table((*header, *more), rows, caption)


# ------------------------------------------------------------------------------------------------------------ gallery


def galleries(results: Results, finished: Sequence[Plan]) -> dict[str, Table]:
    """The first finished seed of some treatments: its responses at the start, the peak of mean gold and the end."""
    first: dict[Key, Plan] = {(run.found.name, run.kind): run for run in reversed(finished)}
    found = {}
    for (name, method), story in results.stories.items():
        run = first[name, method]
        if name in IN_THE_GALLERY or ":" in run.treatment:
            places = (int(results.curves[name, method]["gold"].columns[0]), story.top, story.last)
            title = f"{results.title(name)}, {METHOD_WORDS[method]}, seed {run.seed}"
            evaluations = [read_evaluation(run, place) for place in places]
            found[title] = gallery_table(title, [place_text(method, place) for place in places], evaluations)
    return found


def gallery_table(title: str, places: Sequence[str], evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """The responses whose proxy rose most from the peak of gold to the end while gold fell, beside what they were.

    Args:
        title: Of the run: "25 % flips, PPO, seed 0".
        places: Start, peak and end: ("step 0", "step 6", "step 40").
        evaluations: Of these places, each {"instructions", "responses", "proxy", "gold"}, [B] of the same instructions.

    Raises:
        ValueError: The instructions differ.
    """
    asked = [list(each["instructions"]) for each in evaluations]
    if not asked[0] == asked[1] == asked[2]:
        raise ValueError(f"{title}: expected three evaluations of the same instructions in the same order")
    scores = [pd.DataFrame({name: each[name] for name in ("proxy", "gold")}, dtype=float) for each in evaluations]
    change = scores[2] - scores[1]
    # Without a verdict a change is NaN, and counts as none.
    hacked = change[(change.proxy > 0) & (change.gold < 0)].sort_values("proxy", ascending=False, kind="stable")
    rows = []
    for i in map(int, hacked.index[:NUM_SHOWN]):
        told = [
            f"{each['responses'][i]}\n\nproxy {score.proxy.iloc[i]:.2f}; gold {score.gold.iloc[i]:.2f}"
            for each, score in zip(evaluations, scores, strict=True)
        ]
        told[2] += f"\nsince {places[1]}: proxy {signed(change.proxy.iloc[i])}, gold {signed(change.gold.iloc[i])}"
        rows.append((str(asked[0][i]), *told))
    caption = (
        f"{title}: of {len(change)} responses {len(hacked)} have a higher proxy and a lower gold at {places[2]} "
        f"than at {places[1]}, the peak of mean gold; shown are the {len(rows)} whose proxy rose most, chosen for that "
        "and not typical."
    )
    header = ("instruction", *map("{} ({})".format, ("SFT", "peak of gold", "end"), places))
    return Table(header, rows, caption)
