"""The over-optimization study for people: sections of report.html, computed from the rows, labelled with their judges.

The report opens with the claims in words; then figures, tables, the gallery of reward hacking, what was tried,
configuration and versions. All text is escaped by `report.render`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.estimates import Estimate
from ..harness.report import Section, Table, settings_table
from ..harness.report_text import SIMULATION, interval_text, number, signed
from ..harness.study import Row
from .claims import KLS, VERDICTS, Claim, claims
from .curves import MEASURES, METHOD_WORDS
from .figures import FRESH, Setting, write_figures
from .fits import FORMS, change_after, drop, gain_at, peak
from .gallery import Run, gallery_table
from .results import Results, gold_text
from .summary import beside, missing, others, warnings
from .treatments import Treatment
from .trends import by_seed, length_residual
from .tried import HOW_TRIED, Tried

RULES = (
    "A fall is measured for each seed from the peak of the mean curve of the other seeds to the end, so that a lucky "
    "evaluation does not pass for a peak. It is called clear where the 95 % t-interval of its mean over the seeds is "
    "above 0, and so are a rise of the proxy and an ensemble's warning. Whether an ensemble halves a drop is "
    "judged by the means; the interval beside it says how sure that is. Errors and intervals are over seeds, the "
    "instructions being the same: they say how much another run would differ, not how much other instructions would."
)
"""How claims and warnings are judged."""
FIGURES = {
    "noise": "Noise",
    "along optimization": "Gold and proxy along optimization",
    "against KL": "Gold and proxy against the distance from SFT",
    "fits": "Gold gained against the distance from SFT, with fits",
    "win rates": "Win rates",
    "warning": "Early warning by an ensemble",
    "length": "Length",
}
"""Section of figures -> its heading, in the order of the report."""


def write(
    out: Path,
    rows: Sequence[Row],
    treatments: Sequence[Treatment],
    where: Setting,
    *,
    reward_models: Sequence[Row] = (),
    gallery: Sequence[Run] = (),
    length_slope: float | None = None,
    tried: Sequence[Tried] = (),
    configuration: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> tuple[list[Section], Table, list[str]]:
    """Writes the figures and returns the report's sections, the table to print, and the findings in sentences.

    Args:
        out: Folder of the study, for the PNG files.
        rows: Of table.csv.
        treatments: All that were meant to run.
        where: Instructions and seeds that were meant to be measured; it stands under every figure and table.
        reward_models: Rows treatment, seed, num_trained (labels without the ties), accuracy_gold and accuracy_judge
            (shares of pairs), calibration_error (in [0, 1]); several of a seed are an ensemble's members.
        gallery: Runs whose most hacked responses are printed.
        length_slope: What one character more is worth in gold among SFT's responses (`trends.length_slope`).
        tried: The log of what was tried.
        configuration: Names and values.
        versions: Of packages.

    Raises:
        ValueError: Rows are faulty, or of an unknown treatment.
    """
    results = Results.of(rows, treatments)
    judged = claims(results)
    sentences = [SIMULATION, *missing(results, where.num_instructions, where.num_seeds)]
    sentences += [claim.sentence for claim in judged] + others(results) + beside(results) + warnings(results)
    table = results_table(results, where)
    figures = write_figures(out, results, where, reward_models=reward_models, length_slope=length_slope)
    tables = {
        "noise": reward_model_table(results, reward_models),
        "fits": fit_table(results),
        "along optimization": gains_table(results, where),
        "length": None if length_slope is None else length_table(results, length_slope, where),
    }
    texts = {"length": [_length_words(length_slope)]}
    sections = [
        Section("Summary", sentences),
        Section("The claims", [RULES], claims_table(judged)),
        Section("Peaks and drops", [], table),
        *(
            Section(heading, texts.get(name, ()), tables.get(name), figures.get(name, ()))
            for name, heading in FIGURES.items()
        ),
        *(Section(f"Reward hacking: {run.title}", [], gallery_table(run)) for run in gallery),
        Section("What the columns mean", meanings(where)),
        Section("Treatments", [], treatment_table(results)),
        Section("Appendix: what was tried", [], tried_table(tried)),
    ]
    if configuration:
        sections.append(Section("Configuration", [], settings_table(configuration)))
    if versions:
        sections.append(Section("Versions", [], settings_table(versions)))
    told = [section for section in sections if section.paragraphs or section.table or section.figures]
    return told, table, sentences


# ------------------------------------------------------------------------------------------------------------- tables


def claims_table(judged: Sequence[Claim]) -> Table:
    """A row a claim with its verdict."""
    return Table(("claim", "verdict"), [(claim.title, VERDICTS[claim.holds]) for claim in judged])


def results_table(results: Results, where: Setting) -> Table:
    """A row a treatment and method: gold at the start, its peak and end, the drop, and what the proxy did."""
    header = ("treatment", "method", "gold, SFT", "gold, peak", "at", "KL there", "gold, end")
    rows = []
    for (name, method), curves in results.curves.items():
        gold, top, fallen = curves["gold"], peak(curves["gold"]), drop(curves["gold"])
        ends = [gold_text(Estimate.of(gold[:, place])) for place in (0, top, -1)]
        risen = change_after(curves["proxy"], fallen.peaks)
        kl = number(float(curves["kl_exact"][:, top].mean()))
        rows.append(
            (
                results.title(name),
                METHOD_WORDS[method],
                *ends[:2],
                curves.place(top),
                kl,
                ends[2],
                gold_text(fallen.estimate),
                _ratio(fallen.estimate),
                signed(risen.mean),
                _ratio(risen),
                str(len(curves.seeds)),
            )
        )
    more = ("drop from peak to end", "in SE", "proxy after peak", "in SE", "n seeds")
    caption = (
        "Mean over seeds [95 % t-interval]; SE: standard errors. The peak shown is that of the mean curve; the drop "
        f"and the proxy's change are from the peak of the other seeds. {where.label(*results.methods)}"
    )
    return Table((*header, *more), rows, caption)


def gains_table(results: Results, where: Setting) -> Table:
    """Gold gained over SFT at given KLs, a row a treatment and method; "–" where a seed does not get there."""
    rows = []
    for (name, method), curves in results.curves.items():
        gains = gain_at(curves["kl_exact"], curves["gold"], np.sqrt((*KLS, 8.0)))
        cells = [gold_text(Estimate.of(column)) if np.isfinite(column).all() else "–" for column in gains.T]
        rows.append((results.title(name), METHOD_WORDS[method], *cells, str(len(curves.seeds))))
    header = ("treatment", "method", *(f"at {kl:g} nats" for kl in (*KLS, 8.0)), "n seeds")
    caption = f"Gold gained over SFT where KL first reaches so much. {where.label(*results.methods)}"
    return Table(header, rows, caption)


def fit_table(results: Results) -> Table | None:
    """Parameters of the fits in both forms with intervals; None where no curve has enough points."""
    rows = []
    for (name, method), form in product(results.curves, FORMS.values()):
        if (found := results.fit(name, method, form)) is None:
            continue
        top = (number(found.peak_distance), number(found.peak_gain)) if found.has_peak else ("none", "none")
        intervals = (interval_text(found.a, ""), interval_text(found.b, ""))
        counts = (str(found.num_points), str(found.a.num))
        facts = (results.title(name), METHOD_WORDS[method], found.form)
        rows.append((*facts, *intervals, f"{found.r_squared:.3f}", *top, *counts))
    header = ("treatment", "method", "R(d)", "a", "b", "R²", "d*", "R*", "points", "n seeds")
    caption = (
        "R: gold gained over SFT, d = √KL in √nats, natural logarithm; least squares on the mean over the seeds at "
        "equal d, up to the farthest that all of them reach, without the start; 95 % intervals of a and b by leaving "
        "out one seed at a time. d*, R*: the fitted peak, none: not within twice the measured d. Forms: Gao et al. "
        "2022 (arXiv 2210.10760), who give the one with d to best-of-n and the one with log d to PPO."
    )
    return Table(header, rows, caption) if rows else None


def reward_model_table(results: Results, rows: Sequence[Row]) -> Table | None:
    """Accuracy and calibration of each treatment's reward models; None without rows."""
    measures = ("accuracy_gold", "accuracy_judge", "calibration_error")
    cells = []
    for name in dict.fromkeys(str(row["treatment"]) for row in rows):
        found = [by_seed(rows, name, measure) for measure in measures]
        texts = [interval_text(Estimate.of(100 * each).interval, "%") for each in found]
        learnt = f"{by_seed(rows, name, 'num_trained').mean():,.0f}"
        cells.append((results.title(name), learnt, *texts, str(len(found[0]))))
    measured = ("right about gold, %", "agree with their judge, %", "calibration error, points")
    header = ("reward models of", "labels", *measured, "n seeds")
    caption = f"Mean over seeds [95 % t-interval]; labels: that they learn from, without the ties. {FRESH}"
    return Table(header, cells, caption) if cells else None


def length_table(results: Results, slope: float, where: Setting) -> Table:
    """Length at start and end, and the drop of gold before and after what length is worth is taken out."""
    rows = []
    for (name, method), curves in results.curves.items():
        if not curves.has("length"):
            continue
        lengths = [interval_text(Estimate.of(curves["length"][:, k]).interval, "characters") for k in (0, -1)]
        left = length_residual(curves["gold"], curves["length"], slope)
        drops = [gold_text(drop(values).estimate) for values in (curves["gold"], left)]
        rows.append((results.title(name), METHOD_WORDS[method], *lengths, *drops, str(len(curves.seeds))))
    header = ("treatment", "method", "length, SFT", "length, end", "drop of gold", "drop less length", "n seeds")
    return Table(header, rows, f"Mean over seeds [95 % t-interval]. {where.label(*results.methods)}")


def treatment_table(results: Results) -> Table:
    """What each treatment is, as it ran."""
    header = ("name", "title", "labels by", "flips, %", "labelled pairs", "models", "combined by")
    rows = [
        (
            each.name,
            each.title,
            each.judge if each.members else "–",
            f"{100 * each.flip:g}" if each.members else "–",
            f"{each.num_labels:,}" if each.members else "–",
            str(each.members),
            each.combine if each.members > 1 else "–",
        )
        for each in results.facts.values()
    ]
    return Table(header, rows)


def tried_table(tried: Sequence[Tried]) -> Table | None:
    """What was tried on the way to the settings of the study, and what came out; None for nothing."""
    return Table(("tried", "found"), [(each.what, each.found) for each in tried], HOW_TRIED) if tried else None


# -------------------------------------------------------------------------------------------------------------- words


def meanings(where: Setting) -> list[str]:
    """What each column of table.csv is."""
    words = {
        "kl_exact": "kl_exact: KL(policy ‖ SFT) in nats a response, 0 or more; of PPO the sum over a response's places "
        "of the exact KL of the two next-token distributions, mean over the evaluated responses (kl of win_rate_curve "
        "is the noisier log p − log p_SFT of what was said), of best-of-n log n − (n − 1) / n, an upper bound.",
        "proxy": "proxy: mean of the treatment's reward, which PPO and best-of-n maximise. Of one reward model 0 is "
        "the mean of SFT's answers and 1 their standard deviation within an instruction; members of an ensemble score "
        "less the mean of SFT's answers to the same instruction; an oracle or wrapper of one's own has its own units.",
        "gold": "gold: mean true reward, in its own units, the same for all treatments.",
        "win_rate_simulated": "win_rate_simulated, win_rate_human: percent of responses preferred to the reference, by "
        "p_sim^eval and by the human raters.",
        "length": "length: mean characters of a response.",
        "disagreement": "disagreement: standard deviation over an ensemble's members, mean over the responses; in the "
        "proxy's units.",
    }
    return [words[name] for name in MEASURES if name in words] + [where.label()]


def _length_words(slope: float | None) -> str:
    if slope is None:
        return "Gold is not shown without length: what a character is worth was not measured."
    return (
        f"One character more is worth {slope:+.5f} gold units among SFT's responses to the same instruction (least "
        "squares). Gold less that much for each character more than SFT's mean shows what is left when length is "
        "taken out; far beyond SFT's lengths it is an extrapolation."
    )


def _ratio(estimate: Estimate) -> str:
    return signed(estimate.ratio, "%")
