"""What the over-optimization study leaves behind: tables, figures, report.html, the manifest, a summary on stdout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..harness.report import Section, text_table, write_report
from ..harness.study import Row, Study, versions, write_csv
from .curves import COLUMNS, METHOD_WORDS, POSITION, Key, all_curves
from .figures import OURS, Setting
from .fits import peak
from .gallery import Run
from .plans import Plans, RewardModelPlan, TreatmentPlan
from .report import write
from .runs import read_evaluation
from .samples import read_samples
from .treatments import Labels, Treatment
from .trends import length_slope
from .tried import TRIED

TITLE = "Over-optimization of a noisy reward"
IN_THE_GALLERY = ("ann", "none", "uwo_3")
"""Treatments whose most hacked responses are printed, beside those of one's own."""


def write_results(
    study: Study, plans: Plans, rows: Sequence[Row], models: Sequence[Row], *, notes: Sequence[str] = ()
) -> None:
    """Writes everything from the rows of the finished cells.

    Args:
        study: Whose folder it goes into.
        plans: All cells.
        rows: Of best-of-n and PPO.
        models: Of the reward models.
        notes: Sentences that come first.
    """
    places = {plan.found.name: place for place, plan in enumerate(plans.treatments)}
    rows = sorted(
        rows, key=lambda row: (places[row["treatment"]], row["method"], row["seed"], row[POSITION[row["method"]]])
    )
    study.write_table(rows, COLUMNS)
    used = reward_models_of(plans, models)
    remove_earlier(study.out)
    if used:
        write_csv(study.out / "reward_models.csv", used)
    treatments = tuple({plan.found.name: plan.as_run for plan in plans.treatments}.values())
    where = setting(study, plans)
    sections, table, sentences = write(
        study.out,
        rows,
        treatments,
        where,
        reward_models=used,
        gallery=gallery(study, plans, rows),
        length_slope=slope(study, plans),
        tried=TRIED,
        configuration={**study.config, "seeds": study.seeds, "treatments": described(treatments)},
        versions=versions(),
    )
    if notes:
        sections, sentences = [Section("A quick run", list(notes)), *sections], [*notes, *sentences]
    study.note(level="sandbox", label=where.label(), findings=sentences)
    write_report(study.out / "report.html", TITLE, sections)
    print(text_table(table), *sentences, where.label(), sep="\n")
    print(f"Written to {study.out}: report.html, tables (CSV), manifest.json, figures; responses in runs/.")


def remove_earlier(out: Path) -> None:
    """Removes what an earlier call has drawn and tabulated: it may be of other treatments, and this call not write it.

    Where no call has left its report, files of such names are somebody else's.
    """
    if (out / "report.html").exists():
        (out / "reward_models.csv").unlink(missing_ok=True)
        for file in out.glob("*.png"):
            if OURS.fullmatch(file.stem):
                file.unlink()


def setting(study: Study, plans: Plans) -> Setting:
    """What stands under every figure."""
    sizes = plans.treatments[0].sizes
    wanted = {"ppo": sizes.num_eval, "best_of_n": sizes.num_prompts}
    meant = {plan.method for plan in plans.treatments}
    counts: dict[str, int] = {name: len(sizes.instructions(num)) for name, num in wanted.items() if name in meant}
    return Setting(counts, len(study.seeds))


def described(treatments: Sequence[Treatment]) -> dict[str, dict[str, object]]:
    """Name -> what the treatment is."""
    return {treatment.name: treatment.settings() for treatment in treatments}


def reward_models_of(plans: Plans, models: Sequence[Row]) -> list[Row]:
    """A row a treatment, seed and member: reward models that several treatments share stand in each of them."""
    names = [field.name for field in fields(Labels)]
    by_plan = {(Labels(*(row[name] for name in names)), row["member"], row["seed"]): row for row in models}
    wanted: dict[tuple[str, RewardModelPlan], None] = {
        (plan.found.name, model): None for plan in plans.treatments for model in plan.reward_models()
    }
    return [
        {"treatment": name, **by_plan[model.labels, model.member, model.seed]}
        for name, model in wanted
        if (model.labels, model.member, model.seed) in by_plan
    ]


def slope(study: Study, plans: Plans) -> float | None:
    """What one character more is worth in gold among the first seed's samples.

    None without samples, and where all that answer an instruction have one length.
    """
    for plan in plans.samples:
        if plan.cell in study.done:
            found = read_samples(plan)
            index = found.index.ravel()
            gold, length = (found.measures[name][index] for name in ("gold", "length"))
            worth = length_slope(gold, length, found.prompt[index])
            return None if math.isnan(worth) else worth
    return None


def gallery(study: Study, plans: Plans, rows: Sequence[Row]) -> list[Run]:
    """The first finished seed of some treatments: its responses at the start, the peak of mean gold and the end."""
    own = {plan.found.name for plan in plans.treatments if ":" in plan.treatment}
    finished = [plan for plan in plans.treatments if plan.cell in study.done]
    first: dict[Key, TreatmentPlan] = {(plan.found.name, plan.method): plan for plan in reversed(finished)}
    runs = []
    for (name, method), curves in all_curves(rows).items():
        if name not in (*IN_THE_GALLERY, *own):
            continue
        plan, chosen = first[name, method], (0, peak(curves["gold"]), len(curves.positions) - 1)
        title = f"{plan.found.title}, {METHOD_WORDS[method]}, seed {plan.seed}"
        start, middle, end = (read_evaluation(plan, curves.positions[place]) for place in chosen)
        where = (curves.place(chosen[0]), curves.place(chosen[1]), curves.place(chosen[2]))
        runs.append(Run.of(title, where, start, middle, end))
    return runs
