"""What the stored table of the over-optimization study says: within which KL gold falls, and what noise costs there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pandas as pd

from ...statistics import PERCENT
from ..harness.estimates import estimates
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.report import Table, interval_text, number, seeds_text, sentences
from .analyse import FLIPS, NOISY, Results, reward_models
from .curves import METHOD_WORDS, Curves, Key
from .figures import FRESH, draw_compared, draw_groups
from .plans import Sizes
from .ranges import Along, cost, fall, peak
from .run import TEMPERATURE
from .treatments import TREATMENTS

NOWHERE: Final = "nowhere"
UNJUDGED: Final = "–"
GROUPED: Final = ("best_of_n", "ppo")
"""Methods under which the treatments are drawn beside each other."""
POINTWISE: Final = (
    "Gold is compared at equal KL, up to the largest that all seeds reach. Ranges: of the KL, from the first one "
    "measured on, at which the 95 % t-interval over seeds is above 0, each of one KL and not of all of them together; "
    "a dash: fewer than three seeds, or one that stayed at SFT."
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
    """What methods are meant to measure; there may be fewer instructions than were asked for."""
    wanted = {kind: sizes.num_prompts if kind == "best_of_n" else sizes.num_eval for kind in METHOD_WORDS}
    return Measured({kind: len(sizes.instructions(num)) for kind, num in wanted.items() if kind in kinds}, num_seeds)


def page(folder: Path) -> Page:
    """What the study's stored files say."""
    rows: Any = read_table(folder / "table.csv").to_dict("records")
    results = Results(rows, TREATMENTS)
    sizes = Sizes(**read_manifest(folder)["config"]["sizes"])
    counts = {
        kind: [len(each.seeds) for (_, k), each in results.curves.items() if k == kind] for kind in results.methods
    }
    spans = {kind: (min(found), max(found)) for kind, found in counts.items()}
    measured = replace(measured_by(results.methods, sizes, max(map(max, counts.values()))), seeds=spans)
    shown = [draw_compared(results, measured.label), *(draw_groups(results, measured.label, kind) for kind in GROUPED)]
    drawn = {
        name: Drawn(drawing, f"{title}: proxy and gold gained over SFT, against √KL. {note}")
        for _, name, title, note, drawing in chain(*shown)
    }
    tables = {"falls": falls_table(results, measured), "costs": costs_table(results, measured)}
    trained: Any = read_table(folder / "reward_models.csv").to_dict("records")
    tables["reward_models"] = reward_models_table(results, reward_models(trained))
    return Page(tables, findings(results), drawn, headline(results))


def falls(results: Results) -> dict[Key, Along]:
    """How far gold has fallen, of each treatment and method, treatment by treatment."""
    names = dict.fromkeys((*results.facts, *(name for name, _ in results.curves)))
    return {
        (name, method): fall(results.curves[name, method])
        for name in names
        for method in results.methods
        if (name, method) in results.curves
    }


def costs(results: Results) -> dict[Key, Along]:
    """How much less gold there is than without flips, of each share of flips and method."""
    pairs = {
        (name, method): results.paired((FLIPS[0], method), (name, method))
        for name in FLIPS[1:]
        for method in results.methods
    }
    return {key: cost(*pair) for key, pair in pairs.items() if pair}


def findings(results: Results) -> list[str]:
    """Within which KL gold falls, a sentence a treatment."""
    by_treatment: dict[str, dict[str, Along]] = {}
    for (name, method), fallen in falls(results).items():
        by_treatment.setdefault(results.title(name), {})[method] = fallen
    later = {
        (results.title(name), method): (ends(results.curves[name, method]), story.drop.interval)
        for (name, method), story in results.stories.items()
        if story.falls
    }
    words = {"words": METHOD_WORDS, "nats": nats}
    return sentences("overoptimization/ranges.txt.j2", falls=by_treatment, later=later, **words)


def falls_table(results: Results, measured: Measured) -> Table:
    """A row a treatment and method: where gold peaks at equal KL, and within which KL it has fallen."""
    rows = []
    for (name, method), fallen in falls(results).items():
        kl, gained = peak(results.curves[name, method])
        cells = (interval_text(gained.interval, ""), number(kl), number(fallen.reached))
        told = (interval_text(fallen.end.interval, ""), nats(fallen) or NOWHERE if fallen.judged else UNJUDGED)
        last = (ends(results.curves[name, method]), interval_text(results.stories[name, method].drop.interval, ""))
        rows.append((results.title(name), METHOD_WORDS[method], str(fallen.end.num), *cells, *told, *last))
    last_step = "Fall to their ends: by step, at each seed's own KL, which may have been higher before."
    caption = (
        f"Fall: from each seed's peak, chosen on the other seeds. {POINTWISE} {last_step} "
        f"{measured.label(*results.methods)}"
    )
    header = ("treatment", "method", "n seeds", "gold gained, peak", "at, nats", "all seeds reach, nats", "fall there")
    return Table((*header, "falls at, nats", "runs end at, nats", "fall to their ends"), rows, caption)


def costs_table(results: Results, measured: Measured) -> Table:
    """A row a share of flips and method: how much less gold there is than without flips, paired by seed."""
    rows = []
    for (name, method), less in costs(results).items():
        cells = (str(less.end.num), number(less.reached), interval_text(less.end.interval, ""))
        at = nats(less) or NOWHERE if less.judged else UNJUDGED
        rows.append((METHOD_WORDS[method], results.title(name), *cells, at))
    header = ("method", "labels", "n seeds", "compared to, nats", "gold less than without flips", "less at, nats")
    return Table(header, rows, f"Paired by seed. {POINTWISE} {measured.label(*results.methods)}")


def reward_models_table(results: Results, models: pd.DataFrame) -> Table:
    """A row a treatment: how often its reward models are right, from `analyse.reward_models`."""
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
    fallen = fall(results.curves[NOISY, methods[0]])
    return (
        f"{METHOD_WORDS[methods[0]]} by 25 % flips: from its peak to {fallen.reached:.1f} nats gold falls by "
        f"{interval_text(fallen.end.interval, '')}, {seeds_text([fallen.end.num])}"
    )
