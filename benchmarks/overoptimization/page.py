"""The page of the over-optimization study: within which KL gold falls, and what noise costs there."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pandas as pd

from ...statistics import PERCENT
from ..harness.estimates import Estimate, estimates
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.report import Table, interval_text, number, seeds_text, sentences
from ..harness.study import Row
from .analysis import CLEAN, FLIPS, METHOD_WORDS, NOISY, Along, Curves, Results, peak, place_text, reward_models
from .figures import NOISE, draw_compared, draw_groups
from .runs import TEMPERATURE, Sizes
from .treatments import TREATMENTS

NOWHERE: Final = "nowhere"
UNJUDGED: Final = "–"
GROUPED: Final = ("best_of_n", "ppo")
"""Methods under which the treatments are drawn beside each other."""
POINTWISE: Final = (
    "Gold is compared at equal KL, up to the largest that all seeds reach. Ranges: of the KL, from the first one "
    "measured on, at which the 95 % t-interval over seeds is above 0, each of one KL and not of all of them together; "
    "a dash: fewer than three seeds, or one that stayed at SFT. By Holm: whether it stays clear at the largest KL when "
    "all rows of this table are tested together."
)
FRESH: Final = (
    "Level: sandbox (simulation); fresh pairs of responses of the SFT policy, the same for all treatments of a seed; "
    "95 % t-intervals of the mean over seeds."
)


@dataclass(frozen=True)
class Measured:
    """How much was meant to be measured; its text stands under every figure and table."""

    num_instructions: Mapping[str, int]
    """Method -> instructions of eval."""
    num_seeds: int
    """That were meant to run."""
    seeds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Method -> fewest and most that ran, of all treatments; where it is not known, `num_seeds`."""

    def label(self, *methods: str) -> str:
        """Level, judges, n, seeds and interval; of the methods given or, with none, of all."""
        shown = [method for method in self.num_instructions if method in (methods or METHOD_WORDS)]
        words: dict[int, list[str]] = {}
        for method in shown:
            words.setdefault(self.num_instructions[method], []).append(METHOD_WORDS[method])
        counts = "; ".join(f"{', '.join(each)}: n = {num} eval instructions" for num, each in words.items())
        ends = [end for each in shown for end in self.seeds.get(each, (self.num_seeds,))] or [self.num_seeds]
        several = f"{seeds_text(ends)}, {'95 % t-intervals of the mean' if max(ends) > 1 else 'no interval'}"
        return (
            f"Level: sandbox (simulation); {counts}, the same for all treatments, temperature {TEMPERATURE:g}; "
            f"{several}. Proxy: each treatment's own reward; a single reward model's is in standard deviations of "
            "SFT's scores within an instruction. Gold: the sandbox's true reward."
        )


def measured_by(kinds: Collection[str], sizes: Sizes, num_seeds: int) -> Measured:
    """The extent that methods are meant to measure; there may be fewer instructions than were asked for."""
    wanted = {kind: sizes.num_prompts if kind == "best_of_n" else sizes.num_eval for kind in METHOD_WORDS}
    return Measured({kind: len(sizes.instructions(num)) for kind, num in wanted.items() if kind in kinds}, num_seeds)


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    rows: Any = read_table(folder / "table.csv").to_dict("records")
    trained: Any = read_table(folder / "reward_models.csv").to_dict("records")
    return page_of(Results(rows, TREATMENTS), trained, Sizes(**read_manifest(folder)["config"]["sizes"]))


def page_of(results: Results, trained: Sequence[Row], sizes: Sizes) -> Page:
    """The result in the curves and the rows of reward_models.csv."""
    spans: dict[str, tuple[int, int]] = {}
    for (_, kind), each in results.curves.items():
        low, high = spans.get(kind, (len(each.seeds),) * 2)
        spans[kind] = min(low, len(each.seeds)), max(high, len(each.seeds))
    measured = replace(measured_by(results.methods, sizes, max(high for _, high in spans.values())), seeds=spans)
    shown = [draw_compared(results, measured.label), *(draw_groups(results, measured.label, kind) for kind in GROUPED)]
    clean = f" {clean_labels(results)}"
    drawn = {
        name: Drawn(drawing, f"{title}: proxy and gold gained over SFT, against √KL.{clean * (name == NOISE)} {note}")
        for name, title, note, drawing in chain(*shown)
    }
    models, label = reward_models(trained), measured.label(*results.methods)
    tables = {
        "falls": falls_table(results, label),
        "costs": costs_table(results, label),
        "win_rates": win_rates_table(results, label),
        "fits": fits_table(results, label),
        "reward_models": reward_models_table(results, models),
    }
    return Page(
        "Over-optimization of a noisy reward",
        tables,
        findings(results, models, sizes),
        drawn,
        headline(results),
        values(results, models, trained),
        printed=("falls",),
    )


def clean_labels(results: Results) -> str:
    """Under which methods labels without flips are over-optimized too."""
    fell, stayed = (under(results, FLIPS[0], fallen=way) for way in (True, False))
    not_all = f", not under {stayed}" if stayed else ""
    return f"At equal KL gold by clean labels too clearly falls under {fell}{not_all}." if fell else ""


def under(results: Results, name: str, *, fallen: bool) -> str:
    """The methods under which gold has, or has not, clearly fallen at equal KL by a treatment's labels."""
    along = {kind: each for (treatment, kind), each in results.falls.items() if treatment == name and each.judged}
    *most, last = [METHOD_WORDS[kind] for kind, each in along.items() if bool(each.ranges) == fallen] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def values(results: Results, models: pd.DataFrame, trained: Sequence[Row]) -> dict[str, str]:
    """Numbers for sentences about these results that are written by hand."""
    found = {
        "clean_falls": under(results, FLIPS[0], fallen=True),
        "clean_stays": under(results, FLIPS[0], fallen=False),
    }
    if counts := sorted({int(row["num_labels"]) for row in trained if "num_labels" in row}):
        found["labels"] = " or ".join(f"{num:,}" for num in counts)
    right = estimates(models, ["treatment"], "accuracy_gold", PERCENT)
    found |= {f"right.{name}": number(each.mean, "%") for (name,), each in right.items()}
    for (name, method), fallen in results.falls.items():
        key = f"{name}.{method}"
        found[f"fall.{key}"] = interval_text(fallen.end.interval, "")
        found[f"share.{key}"] = whole(results.relative((name, method)))
        found[f"to_ends.{key}"] = interval_text(Estimate.of(results.ends[name, method]).interval, "")
        found[f"ends.{key}"] = ends(results.curves[name, method])
        found[f"peak.{key}"] = number(peak(results.curves[name, method])[0])
        for measure, (_, drop) in results.won((name, method)).items():
            found[f"{measure}.{key}"] = interval_text(drop.interval, "%")
    return found


def findings(results: Results, models: pd.DataFrame, sizes: Sizes) -> list[str]:
    """The sentences of findings.txt.j2."""
    by_treatment: dict[str, dict[str, Along]] = {}
    for (name, method), fallen in results.falls.items():
        by_treatment.setdefault(results.title(name), {})[method] = fallen
    later = {
        (results.title(name), method): (ends(results.curves[name, method]), found.interval)
        for (name, method), each in results.ends.items()
        if (found := Estimate.of(each)).interval.low > 0
    }
    deeper = {method: more for method in results.methods if (more := results.deeper(NOISY, method))}
    won = {key: results.won(key) for key in results.keys if key[0] in (NOISY, CLEAN)}
    falling = sum(
        drops["win_rate_simulated"][1].interval.low > 0
        for (name, method), drops in won.items()
        if name == NOISY and method in GROUPED
    )
    right = estimates(models, ["treatment"], "accuracy_gold", PERCENT)
    return sentences(
        "overoptimization/findings.txt.j2",
        falls=by_treatment,
        later=later,
        words=METHOD_WORDS,
        nats=nats,
        results=results,
        noisy=NOISY,
        clean=CLEAN,
        unflipped=FLIPS[0],
        deeper=deeper,
        won=won,
        falling=falling,
        slopes={method: slope for method in GROUPED if (slope := results.slopes(method))},
        right={str(name): each for (name,), each in right.items()},
        kl_coef=sizes.kl_coef,
        place=place_text,
        estimate=Estimate.of,
        whole=whole,
    )


def falls_table(results: Results, label: str) -> Table:
    """A row a treatment and method: where gold peaks at equal KL, and within which KL it has fallen."""
    rows = []
    for (name, method), fallen in results.falls.items():
        curves = results.curves[name, method]
        kl, gained = peak(curves)
        cells = (interval_text(gained.interval, ""), number(kl), number(fallen.reached))
        share = whole(results.relative((name, method)))
        there = (interval_text(fallen.end.interval, ""), share, _kept(results.kept_falls.get((name, method))))
        at = nats(fallen) or NOWHERE if fallen.judged else UNJUDGED
        last = (ends(curves), interval_text(Estimate.of(results.ends[name, method]).interval, ""))
        rows.append((results.title(name), METHOD_WORDS[method], str(fallen.end.num), *cells, *there, at, *last))
    caption = (
        f"Fall: from each seed's peak, chosen on the other seeds. {POINTWISE} % of the gain: the fall as a share of "
        "the gold gained at the peak. Fall to their ends: by step, at each seed's own KL, which may have been higher "
        f"before. {label}"
    )
    header = ("treatment", "method", "n seeds", "gold gained, peak", "at, nats", "all seeds reach, nats", "fall there")
    more = ("% of the gain", "by Holm", "falls at, nats", "runs end at, nats", "fall to their ends")
    return Table((*header, *more), rows, caption)


def costs_table(results: Results, label: str) -> Table:
    """A row a share of flips and method: how much less gold there is than without flips, and how much more it falls."""
    rows = []
    for (name, method), less in results.costs.items():
        cells = (str(less.end.num), number(less.reached), interval_text(less.end.interval, ""))
        at = (_kept(results.kept_costs.get((name, method))), nats(less) or NOWHERE if less.judged else UNJUDGED)
        deeper = [interval_text(each.interval, "") for each in results.deeper(name, method) or ()]
        rows.append((METHOD_WORDS[method], results.title(name), *cells, *at, *deeper))
    header = ("method", "labels", "n seeds", "compared to, nats", "gold less than without flips", "by Holm")
    more = ("less at, nats", "falls more, there", "falls more, to the runs' ends")
    caption = (
        f"Paired by seed. {POINTWISE} Falls more: than without flips; the two are different questions, since runs end "
        f"at different KL. {label}"
    )
    return Table((*header, *more), rows, caption)


def win_rates_table(results: Results, label: str) -> Table:
    """A row a treatment and method: how far win rates, the paper's own measure, fall from their peaks."""
    rows = []
    for name, method in results.keys:
        won = results.won((name, method)).values()
        cells = [(place_text(method, place), interval_text(drop.interval, "%")) for place, drop in won]
        num = str(len(results.curves[name, method].seeds))
        rows.append((results.title(name), METHOD_WORDS[method], num, *chain(*cells)))
    header = [(f"highest {words}", f"drop {words}, points") for words in ("by p_sim^eval", "by human raters")]
    caption = (
        "Drop of the win rate from its peak to the end of the run, each seed's peak chosen on the other seeds; "
        f"highest: where the mean over seeds is. {label}"
    )
    return Table(("treatment", "method", "n seeds", *chain(*header)), rows, caption)


def fits_table(results: Results, label: str) -> Table:
    """A row a treatment and method: alpha and beta of Gao et al.'s form."""
    rows = [
        (
            *(METHOD_WORDS[method], results.title(name), str(found.alpha.num)),
            *(interval_text(each, "") for each in (found.alpha, found.beta)),
        )
        for (name, method), found in results.fits().items()
    ]
    caption = (
        "Gold gained over SFT as d(α − β d), d = √KL in √nats: least squares on the mean over seeds at equal d, "
        f"without the start; 95 % intervals by leaving out one seed at a time. {label}"
    )
    return Table(("method", "labels", "n seeds", "α", "β"), sorted(rows, key=lambda row: row[0]), caption)


def reward_models_table(results: Results, models: pd.DataFrame) -> Table:
    """A row a treatment: how often its reward models are right, from `analysis.reward_models`."""
    places = {name: place for place, name in enumerate(results.facts)}
    models = models.sort_values("treatment", key=lambda names: names.map(places), kind="stable")
    columns = {"num_trained": estimates(models, ["treatment"], "num_trained")}
    columns |= {name: estimates(models, ["treatment"], name, PERCENT) for name in models.columns[3:]}
    rows = [
        (
            *(results.title(str(name)), f"{num.mean:,.0f}"),
            *(interval_text(columns[measure][name,].interval, "%") for measure in models.columns[3:]),
            str(num.num),
        )
        for (name,), num in columns["num_trained"].items()
    ]
    header = ("reward models of", "labels", "right about gold, %", "agree with their judge, %")
    caption = (
        "Mean over seeds; labels: that they learn from, without the ties. Their judge's verdicts on the fresh pairs "
        f"are as noisy as its labels. {FRESH}"
    )
    return Table((*header, "calibration error, points", "n seeds"), rows, caption)


def whole(value: float) -> str:
    """Without decimals; a dash for NaN."""
    return number(value, "characters")


def _kept(kept: bool | None) -> str:
    return {True: "clear", False: "not clear", None: UNJUDGED}[kept]


def nats(along: Along) -> str:
    """For instance "1.20 to 5.93"; nothing where there is no range."""
    return " and ".join(f"{number(low)} to {number(high)}" for low, high in along.ranges)


def ends(curves: Curves) -> str:
    """Where the seeds' runs end: for instance "3.90 to 9.12", in nats."""
    last = curves["kl_exact"][:, -1]
    return " to ".join(dict.fromkeys([number(last.min()), number(last.max())]))


def headline(results: Results) -> str:
    """How far gold has fallen by noisy labels."""
    methods = [method for method in ("best_of_n", *results.methods) if (NOISY, method) in results.curves]
    if not methods:
        return ""
    fallen, share = results.falls[NOISY, methods[0]], results.relative((NOISY, methods[0]))
    who = f"{METHOD_WORDS[methods[0]]} by {results.title(NOISY)}"
    return (
        f"{who}: from its peak to {fallen.reached:.1f} nats gold falls by "
        f"{interval_text(fallen.end.interval, '')}, {whole(share)} % of its gain, {seeds_text([fallen.end.num])}"
    )
