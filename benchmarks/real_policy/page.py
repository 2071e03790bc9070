"""The page of the study of a real policy: curves of gold, falls, what flips cost, runs, and texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ...statistics import Interval
from ..harness.estimates import Estimate, rejected
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import COLORS, MARKERS, grid, titled
from ..harness.report import Table, interval_text, number, sentences
from ..surrogates.figures import INFORMATION

ENDS: Final = ("mean", "low", "high", "error", "chance")
WHO: Final = ("gold", "source", "kind", "labels", "samples")
TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "curves": (*WHO, "flip", "n", "kl", "proxy", *ENDS),
    "falls": (
        *(*WHO, "flip", "repeats", "instructions", "accuracy", "n_peak"),
        *(f"{name}_{part}" for name in ("drop", "peak", "end") for part in ENDS),
    ),
    "slopes": (*WHO, "of", *ENDS),
    "golds": ("gold", "verdicts", "ridge", "accuracy", "mean", "sd_within", "sd_between", "length_within"),
    "runs": (
        *("method", "flip", "seed", "step", "kl", "proxy", "length"),
        *("gold_a", "gold_a_error", "gold_b", "gold_b_error"),
    ),
    "texts": (
        *("instruction", "samples", "best_by", "proxy", "gold_a", "gold_b", "proxy_rank", "gold_a_rank", "gold_b_rank"),
        "text",
    ),
    "times": ("part", "seconds"),
}
"""Columns of each table; that of curves is table.csv."""
PILOT_FLIPS: Final = (0.0, 0.25, 0.35, 0.45)
PILOT_GAINS: Final = {250: (0.22, 0.14, 0.08, 0.03), 1000: (0.32, 0.2, 0.16, 0.02), 4000: (0.36, 0.36, 0.29, 0.15)}
PILOT: Final = {
    (labels, flip): gain for labels, gains in PILOT_GAINS.items() for flip, gain in zip(PILOT_FLIPS, gains, strict=True)
}
"""(labels, share of flips) -> gold gained at n = 32 by own pairs in the pilot (80 instructions, 64 tokens)."""
SHOWN_LABELS: Final = 1000
POWER: Final = 2.8
"""Standard errors of a difference that is seen, at 5 % on both sides, with a chance of 80 %."""
PREDICTIONS: Final = "real_policy/predictions.txt.j2"
WORDS: Final = {"own": "own pairs", "recorded": "recorded pairs", "linear": "linear", "trees": "trees", "lora": "LoRA"}


CURVE: Final = {
    "labels of": "{gold}", "pairs": "{source}", "proxy": "{kind}", "N": "{labels:,}", "n to": "{samples:,}",
}  # fmt: skip
FALL: Final = {
    **CURVE, "flips, %": "{flips:g}", "right, %": "{accuracy:.1f}", "gained at the peak": "interval:peak",
    "peak at n": "{n_peak}", "gained at the end": "interval:end", "fall": "interval:drop", "by Holm": "{said}",
    "fall that would be seen": "{seen_text}", "repeats, instructions": "{repeats}, {instructions}",
}  # fmt: skip
SLOPE: Final = {**CURVE, "fall, per 10 points of flips": "interval:", "by Holm": "{said}"}
GOLD: Final = {
    "gold": "{name}", "verdicts": "{verdicts:,}", "right about held-out verdicts, %": "{accuracy:.1f}",
    "mean of samples": "{mean:.2f}", "SD within an instruction": "{sd_within:.2f}", "SD between": "{sd_between:.2f}",
    "correlation with length, within": "{length_within:.2f}",
}  # fmt: skip
TEXT: Final = {
    "instruction": "{instruction}", "best by": "{name}", "proxy (rank)": "{proxy:.2f} ({proxy_rank})",
    "gold A (rank)": "{gold_a:.2f} ({gold_a_rank})", "gold B (rank)": "{gold_b:.2f} ({gold_b_rank})",
    "of": "{samples}", "answer": "{text}",
}  # fmt: skip
TIME: Final = {"part": "{part}", "cells": "{cells}", "hours of one core": "{hours:.2f}"}


def page(folder: Path) -> Page:
    """The result that the study's files hold, whatever is done of it."""
    manifest = read_manifest(folder)
    found = {name: read_table(folder / f"{'table' if name == 'curves' else name}.csv") for name in TABLES}
    falls = found["falls"].copy()
    falls["holm"] = rejected(falls.drop_chance.to_numpy()) if len(falls) else []
    # Of a curve that is highest at its end nothing tells the error of a fall.
    falls["seen"] = (POWER * falls.drop_error).where(falls.n_peak < falls.samples)
    falls["clear"] = falls.holm & (falls.drop_mean > 0)
    slopes = found["slopes"][found["slopes"].of == "drop"].copy()
    slopes["holm"] = rejected(slopes.chance.to_numpy()) if len(slopes) else []
    missing = manifest["facts"].get("missing", {})
    found["runs"] = found["runs"].sort_values(["method", "flip", "seed", "step"])
    runs = run_ends(found["runs"])
    falls["said"] = np.where(falls.clear, "clear", np.where(falls.holm, "rises", "not clear"))
    slopes["said"] = np.where(slopes.holm.astype(bool), "clear", "not clear")
    golds = found["golds"].assign(name=found["golds"].gold.str.upper())
    liked = found["texts"].assign(name=found["texts"].best_by.map({"proxy": "proxy", "gold_a": "gold A"}))
    times = found["times"].groupby("part", sort=False).seconds.agg(cells="count", hours=lambda s: s.sum() / 3600)
    parts = {"falls": (named(falls), FALL), "slopes": (named(slopes), SLOPE), "golds": (golds, GOLD)}
    parts |= {"texts": (liked, TEXT), "times": (times.reset_index(), TIME)}
    rows = {name: [texts_of(row, forms) for row in frame.itertuples()] for name, (frame, forms) in parts.items()}
    rows |= {"information": information_rows(falls), "training": [run_row(row) for row in runs]}
    tables = {name: Table.of(each, caption(name)) for name, each in rows.items()}
    tables["predictions"] = Table(("predicted before the runs",), [(line,) for line in sentences(PREDICTIONS)])
    figures = {
        f"best_of_n_{source}": Drawn(draw_curves(found["curves"], source), caption("curves", source=WORDS[source]))
        for source in ("own", "recorded")
        if (shown(found["curves"], source).size)
    }
    if len(found["runs"]):
        figures["training"] = Drawn(draw_runs(found["runs"]), caption("runs"))
    said = sentences(
        "real_policy/findings.txt.j2", falls=falls, slopes=slopes, runs=runs, missing=missing, words=WORDS,
        kept=information(falls), information=INFORMATION,
    )  # fmt: skip
    return Page(
        "Over-optimization of a real policy",
        tables,
        said,
        figures,
        headline(falls),
        method=sentences("real_policy/method.txt.j2", sizes=manifest["config"]["sizes"]),
        simulated=False,
        printed=("falls", "slopes", "training", "times"),
    )


def caption(name: str, **values: Any) -> str:
    """What stands under a table or a figure."""
    lines = dict(line.split(": ", 1) for line in sentences("real_policy/captions.txt.j2", **{"source": "", **values}))
    return lines[name]


def headline(falls: pd.DataFrame) -> str:
    """How many of the curves fall."""
    if not len(falls):
        return ""
    most = falls.samples.max()
    return f"{falls.clear.sum()} of {len(falls)} best-of-n curves of gold fall clearly (Holm), to n = {most}"


def ends(row: Any, name: str = "", unit: str = "") -> str:
    """A mean with its interval."""
    before = f"{name}_" if name else ""
    mean, low, high = (float(getattr(row, before + part)) for part in ("mean", "low", "high"))
    return interval_text(Interval(mean, low, high, 0), unit)


def texts_of(row: Any, formats: Mapping[str, str]) -> dict[str, str]:
    """The cells of a row: heading -> a format string of its fields, "interval:NAME" for a mean with its interval."""
    fields = row._asdict()
    return {
        heading: ends(row, form[9:]) if form.startswith("interval:") else form.format_map(fields)
        for heading, form in formats.items()
    }


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """With words for the columns that say whose labels, pairs and proxy a row is of."""
    known = {"gold": {"a": "gold A", "b": "gold B"}, "source": WORDS, "kind": WORDS}
    words = {name: frame[name].map(names) for name, names in known.items()}
    extra = {"flips": 100 * frame.flip, "seen_text": frame.seen.map(number)} if "flip" in frame else {}
    return frame.assign(**words, **extra)


def information_rows(falls: pd.DataFrame) -> list[dict[str, str]]:
    """Gold gained at the smallest tier's end against N(1 - 2e)^2, beside the pilot's own pairs."""
    if not len(falls):
        return []
    chosen = falls[(falls.samples == falls.samples.min()) & (falls.kind != "lora")].copy()
    chosen["effective"] = chosen.labels * (1 - 2 * chosen.flip) ** 2
    ours = (chosen.source == "own") & (chosen.kind == "linear") & (chosen.gold == "a")
    pilot = [PILOT.get((row.labels, row.flip)) for row in chosen.itertuples()]
    chosen["pilot"] = [number(x) if x is not None and own else "" for x, own in zip(pilot, ours, strict=True)]
    formats = {**CURVE, "flips, %": "{flips:g}", INFORMATION: "{effective:,.0f}", "gained": "interval:end"}
    ranked = named(chosen.sort_values([*WHO[:3], "effective"]))
    return [texts_of(row, {**formats, "pilot, n = 32": "{pilot}"}) for row in ranked.itertuples()]


def information(falls: pd.DataFrame) -> dict[str, float]:
    """Correlation of the gain with log N(1 - 2e)^2 over the cells of own pairs, by linear models, of each gold."""
    if not len(falls):
        return {}
    chosen = falls[(falls.samples == falls.samples.min()) & (falls.source == "own") & (falls.kind == "linear")]
    logs = np.log(chosen.labels * (1 - 2 * chosen.flip) ** 2)
    each = {gold: chosen.gold == gold for gold in chosen.gold.unique()}
    return {gold: float(logs[rows].corr(chosen.end_mean[rows], method="spearman")) for gold, rows in each.items()}


def run_ends(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each method and share of flips: peak and end of both golds, over seeds and instructions."""
    found = []
    for (method, flip), group in runs.groupby(["method", "flip"], sort=False):
        row: dict[str, Any] = {"method": method, "flip": flip, "seeds": group.seed.nunique()}
        for gold in ("gold_a", "gold_b", "proxy", "kl"):
            table = group.pivot(index="seed", columns="step", values=gold).to_numpy()
            row[gold] = Estimate.of(table[:, -1])
            if gold in ("gold_a", "gold_b"):
                errors = group.pivot(index="seed", columns="step", values=f"{gold}_error").to_numpy()
                peak = int(table.mean(axis=0).argmax())
                row[f"{gold}_step"] = sorted(group.step.unique())[peak]
                row[gold] = widened(table[:, -1], errors[:, -1])
                row[f"{gold}_peak"] = widened(table[:, peak], errors[:, peak])
                drop = widened(table[:, peak] - table[:, -1], errors[:, -1])
                row[f"{gold}_drop"] = interval_text(drop, "") if peak < table.shape[1] - 1 else ""
        found.append(row)
    return found


def widened(values: Any, errors: Any) -> Interval:
    """The mean over seeds with an interval for other instructions too: theirs are the same for all seeds."""
    one = Estimate.of(values)
    error = math.hypot(0.0 if math.isnan(one.standard_error) else one.standard_error, float(np.mean(errors)))
    return Interval(one.mean, one.mean - 1.96 * error, one.mean + 1.96 * error, one.num)


def run_row(row: Mapping[str, Any]) -> dict[str, str]:
    """A method by a share of flips."""
    texts = {"method": row["method"].upper(), "flips, %": f"{100 * row['flip']:g}", "seeds": str(row["seeds"])}
    texts |= {"KL at the end, nats": interval_text(row["kl"], ""), "proxy at the end": interval_text(row["proxy"], "")}
    for gold in ("gold_a", "gold_b"):
        name = f"gold {gold[-1].upper()}"
        texts |= {f"{name}, peak": interval_text(row[f"{gold}_peak"], ""), f"{name}, at step": str(row[f"{gold}_step"])}
        texts |= {f"{name}, end": interval_text(row[gold], ""), f"{name}, fall": row[f"{gold}_drop"]}
    return texts


def shown(curves: pd.DataFrame, source: str) -> pd.DataFrame:
    """The curves that are drawn: linear, gold A, of `SHOWN_LABELS` labels or the most there are."""
    chosen = curves[(curves.source == source) & (curves.kind == "linear") & (curves.gold == "a")]
    labels = SHOWN_LABELS if (chosen.labels == SHOWN_LABELS).any() else chosen.labels.max()
    return chosen[chosen.labels == labels]


def draw_curves(curves: pd.DataFrame, source: str) -> Drawing:
    """Gold gained against sqrt(KL), a pair of axes a tier, a line a share of flips."""
    chosen = shown(curves, source)
    tiers = sorted(chosen.samples.unique())
    figure = Drawing(figsize=(1.2 + 4.2 * len(tiers), 4.2), dpi=150, layout="constrained")
    for axis, samples in zip(figure.subplots(1, len(tiers), squeeze=False, sharey=True)[0], tiers, strict=True):
        for place, (flip, line) in enumerate(chosen[chosen.samples == samples].groupby("flip")):
            draw_line(axis, np.sqrt(line.kl), line, f"{100 * float(str(flip)):g} % flips", place)
        axis.set(
            xlabel=f"√KL, √nats (n to {samples:,})", ylabel="gold A gained, log-odds" if samples == tiers[0] else ""
        )
        axis.legend(fontsize=8, frameon=False)
        grid(axis)
    labels = int(chosen.labels.iloc[0])
    return titled(figure, f"Best-of-n by linear proxies of {labels:,} labels, {WORDS[source]}")


def draw_line(axis: Axes, x: Iterable[float], line: pd.DataFrame, label: str, place: int) -> None:
    """A mean with its interval."""
    distances = np.asarray(x, dtype=np.float64)
    axis.plot(distances, line["mean"], color=COLORS[place], marker=MARKERS[place], markersize=3, label=label)
    axis.fill_between(distances, line.low, line.high, color=COLORS[place], alpha=0.12, linewidth=0)


def draw_runs(runs: pd.DataFrame) -> Drawing:
    """The proxy and both golds against sqrt(KL) along training, a line a method and share of flips."""
    figure = Drawing(figsize=(12.6, 4.2), dpi=150, layout="constrained")
    measures = {"proxy": "proxy gained, SD within", "gold_a": "gold A gained", "gold_b": "gold B gained"}
    for axis, (measure, label) in zip(figure.subplots(1, 3), measures.items(), strict=True):
        for (method, flip), group in runs.groupby(["method", "flip"], sort=False):
            place, noise = ([*runs[name].unique()].index(own) for name, own in (("method", method), ("flip", flip)))
            steps = group.groupby("step")
            x, y = np.sqrt(steps.kl.mean().clip(lower=0)), steps[measure].mean()
            line = {"color": COLORS[place], "marker": MARKERS[noise], "linestyle": ("-", "--")[noise], "markersize": 4}
            line |= {"label": f"{str(method).upper()}, {100 * float(str(flip)):g} % flips", "capsize": 2}
            spans = [widened(own[measure], own[f"{measure}_error"]) for _, own in steps] if measure != "proxy" else []
            axis.errorbar(x, y, [span.high - span.mean for span in spans] or None, elinewidth=0.7, **line)
        axis.set(xlabel="√KL, √nats", ylabel=label)
        grid(axis)
    figure.axes[0].legend(fontsize=8, frameon=False)
    return titled(figure, "Training by LoRA against a proxy, and on its labels")
