"""The page of the over-optimization study: within which KL gold falls, and what noise costs there."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure as Drawing

from ..experiment.treatments import TREATMENTS
from ..harness.estimates import Estimate
from ..harness.page import Drawn, Page, read_manifest, read_table
from ..harness.plots import band, grid, looks, titled
from ..harness.report import Table, interval_text, number, seeds_text, sentences
from .analysis import (
    CLEAN,
    FEWEST,
    FLIPS,
    METHOD_WORDS,
    NOISY,
    Along,
    Cost,
    Key,
    Results,
    distances,
    gain_at,
    reward_models,
    transfer,
)

UNJUDGED: Final = "–"
GROUPED: Final = ("best_of_n", "ppo")
"""Methods under which the treatments are drawn beside each other."""
GROUPS: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "flips": ("share of flipped labels", FLIPS),
    "labellers": ("who labels", (NOISY, "human", CLEAN, "gpt4")),
    "penalties": ("KL penalty", ("kl_0125", "kl_025", NOISY, "kl_1", "kl_2")),
}
"""Treatments that are drawn together: file name -> title and names. Others are drawn next to `NOISY`."""
NOISE: Final = "overoptimization"
"""The figure of noisy against clean labels."""
PAPER: Final = {NOISY: 43, "gpt4": 50, "human": 55}
"""Win rates of PPO by p_sim^ann, by p_sim^GPT-4 and by people's labels, as people judge: Dubois et al. 2023."""
WIDTH: Final = 100
"""Of a figure's legend, in letters."""
GAINED: Final = {"proxy": "proxy gained (SFT's std)", "gold": "gold gained (gold units)"}


class Labelled:
    """Results with the words for treatments, methods and how much was measured."""

    def __init__(self, results: Results, titles: Mapping[str, str], sizes: Mapping[str, Any]) -> None:
        self.results, self.titles, self.sizes = results, titles, sizes

    def key(self, key: Key) -> dict[str, str]:
        """The first columns of a table."""
        num = str(len(self.results.curves[key]))
        return {"treatment": self.titles[key[0]], "method": METHOD_WORDS[key[1]], "n seeds": num}

    def label(self, *methods: str) -> str:
        """Level, judges, n, seeds and interval; of the methods given or, with none, of all."""
        shown = [method for method in self.results.methods if method in (methods or METHOD_WORDS)]
        words: dict[int, list[str]] = {}
        for method in shown:
            size = "num_prompts" if method == "best_of_n" else "num_eval"
            words.setdefault(self.sizes[size], []).append(METHOD_WORDS[method])
        counts = "; ".join(f"{', '.join(each)}: n = {num} eval instructions" for num, each in words.items())
        nums = [len(curves) for (_, method), curves in self.results.curves.items() if method in shown]
        several = f"{seeds_text(nums)}, {'95 % t-intervals of the mean' if max(nums) > 1 else 'no interval'}"
        return (
            f"Level: sandbox (simulation); {counts}, the same for all treatments, temperature 1; {several}. Proxy: "
            "each treatment's own reward; a single reward model's is in standard deviations of SFT's scores within an "
            "instruction. Gold: the sandbox's true reward."
        )


def page(folder: Path) -> Page:
    """The result that the study's files hold."""
    manifest = read_manifest(folder)
    results, trained = Results(read_table(folder / "table.csv")), read_table(folder / "reward_models.csv")
    several = {*trained[trained.member > 0].treatment}
    own = {name: each.get("title", name) for name, each in manifest["facts"].get("treatments", {}).items()}
    titles = dict.fromkeys((name for name, _ in results.curves), "") | own | {x.name: x.title for x in TREATMENTS}
    shown, models = Labelled(results, titles, manifest["config"]["sizes"]), reward_models(trained)
    rows = {
        "falls": fall_rows(shown),
        "costs": cost_rows(shown, shown.results.costs, shown.results.kept_costs, "less", "without flips"),
        "eased": cost_rows(shown, shown.results.eased, shown.results.kept_eased, "more", f"by {titles.get(NOISY)}"),
        "win_rates": win_rate_rows(shown),
        "transfer": transfer_rows(shown),
        "fits": fit_rows(shown),
        "reward_models": model_rows(models, titles),
        "proxies": proxy_rows(shown, {name: each for name, each in models.items() if name not in several}),
    }
    captions = sentences("overoptimization/captions.txt.j2", label=shown.label())
    return Page(
        "Over-optimization of a noisy reward",
        {name: Table.of(each, caption) for (name, each), caption in zip(rows.items(), captions, strict=True)},
        sentences(
            "overoptimization/findings.txt.j2",
            results=results,
            titles=titles,
            words=METHOD_WORDS,
            nats=nats,
            noisy=NOISY,
            methods=GROUPED,
            paper=PAPER,
        ),
        draw_figures(shown),
        headline(shown),
        values(results, trained, models),
        printed=("falls",),
    )


def headline(shown: Labelled) -> str:
    """How far gold has fallen by noisy labels."""
    keys = [(NOISY, method) for method in ("best_of_n", *shown.results.methods)]
    for key in (key for key in keys if key in shown.results.falls):
        fall = shown.results.falls[key]
        who, end = f"{METHOD_WORDS[key[1]]} by {shown.titles[NOISY]}", fall.along.end
        return (
            f"{who}: from its peak to {fall.along.reached:.1f} nats gold falls by {interval_text(end, '')}, "
            f"{whole(fall.share)} % of its gain, {seeds_text([end.num])}"
        )
    return ""


def values(results: Results, trained: pd.DataFrame, models: Mapping[str, Mapping[str, Estimate]]) -> dict[str, str]:
    """Numbers for sentences about these results that are written by hand."""
    said = {
        "clean_falls": under(results, fallen=True),
        "clean_stays": under(results, fallen=False),
        "labels": " or ".join(f"{num:,}" for num in sorted(set(trained.get("num_labels", ())))),
    }
    said |= {f"right.{name}": number(each["accuracy_gold"].mean, "%") for name, each in models.items()}
    for (name, method), fall in results.falls.items():
        texts = {
            "fall": interval_text(fall.along.end, ""),
            "share": whole(fall.share),
            "to_ends": interval_text(fall.to_ends, ""),
            "ends": ends(fall.last),
            "peak": number(fall.peak),
            **{measure: interval_text(dropped, "%") for measure, (_, dropped) in fall.won.items()},
        }
        said |= {f"{what}.{name}.{method}": text for what, text in texts.items()}
    return said


def under(results: Results, *, fallen: bool) -> str:
    """The methods under which gold has, or has not, clearly fallen at equal KL by labels without flips."""
    along = {kind: each.along for (name, kind), each in results.falls.items() if name == CLEAN and each.along.judged}
    *most, last = [METHOD_WORDS[kind] for kind, each in along.items() if bool(each.ranges) == fallen] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def fall_rows(shown: Labelled) -> list[dict[str, str]]:
    """A row a treatment and method: where gold peaks at equal KL, and within which KL it has fallen."""
    return [
        {
            **shown.key(key),
            "gold gained, peak": interval_text(fall.gained, ""),
            "at, nats": number(fall.peak),
            "all seeds reach, nats": number(fall.along.reached),
            "fall there": interval_text(fall.along.end, ""),
            "% of the gain": whole(fall.share),
            "by Holm": clear(shown.results.kept_falls.get(key)),
            "falls at, nats": within(fall.along),
            "runs end at, nats": ends(fall.last),
            "fall to their ends": interval_text(fall.to_ends, ""),
        }
        for key, fall in shown.results.falls.items()
    ]


def cost_rows(
    shown: Labelled, costs: Mapping[Key, Cost], kept: Mapping[Key, bool], which: str, than: str
) -> list[dict[str, str]]:
    """A row a treatment and method: how much less, or more, gold there is than by another, and what that does to falls.

    Args:
        shown: The results.
        costs: Of each row.
        kept: Which of them stay clear.
        which: "less" or "more" gold.
        than: By what.
    """
    falls = {"less": "more", "more": "less"}[which]
    return [
        {
            **shown.key(key),
            "n seeds": str(cost.deeper.num),
            "compared to, nats": number(cost.along.reached),
            f"gold {which} than {than}": interval_text(cost.along.end, ""),
            "by Holm": clear(kept.get(key)),
            f"{which} at, nats": within(cost.along),
            f"falls {falls}, there": interval_text(cost.deeper, ""),
            f"falls {falls}, to the runs' ends": interval_text(cost.to_ends, ""),
        }
        for key, cost in costs.items()
    ]


def win_rate_rows(shown: Labelled) -> list[dict[str, str]]:
    """A row a treatment and method: how far win rates, the paper's own measure, fall from their peaks."""
    rows = []
    for key, fall in shown.results.falls.items():
        row = shown.key(key)
        for words, (place, dropped) in zip(("p_sim^eval", "human raters"), fall.won.values(), strict=True):
            row[f"highest by {words}"] = place_text(key[1], place)
            row[f"drop by {words}, points"] = interval_text(dropped, "%")
        rows.append(row)
    return rows


def transfer_rows(shown: Labelled) -> list[dict[str, str]]:
    """A row a labeller: what the human raters think of PPO by its labels, beside what people did in the paper."""
    rows = []
    for name, paper in PAPER.items():
        if (curves := shown.results.curves.get((name, "ppo"))) is not None:
            found = transfer(curves)
            rows.append(
                {
                    **shown.key((name, "ppo")),
                    "by human raters, %": interval_text(found["win_rate_human"], "%"),
                    "in the paper, by people, %": f"{paper}",
                    "by p_sim^eval, %": interval_text(found["win_rate_simulated"], "%"),
                    "gold gained": interval_text(found["gold"], ""),
                    "KL, nats": interval_text(found["kl_exact"], ""),
                }
            )
    return rows


def proxy_rows(shown: Labelled, models: Mapping[str, Mapping[str, Estimate]]) -> list[dict[str, str]]:
    """A row a treatment of one reward model, and method: how far it has risen, in its unit and in the model's own."""
    rows = []
    for key, fall in shown.results.falls.items():
        if (scale := models.get(key[0], {}).get("scale")) is not None and scale.num:
            gained = fall.proxy.mean
            rows.append(
                {
                    **shown.key(key),
                    "to, nats": number(fall.along.reached),
                    "proxy gained, standard deviations of SFT": interval_text(fall.proxy, ""),
                    "one of them, logits": interval_text(scale, ""),
                    "proxy gained, logits": number(gained * scale.mean),
                    "gold gained": number(fall.gained.mean - fall.along.end.mean),
                }
            )
    return rows


def fit_rows(shown: Labelled) -> list[dict[str, str]]:
    """A row a treatment and method: alpha and beta of Gao et al.'s form."""
    fits = {key: each for method in GROUPED for key, each in shown.results.fits.items() if key[1] == method}
    return [
        shown.key(key) | {"α": interval_text(alpha, ""), "β": interval_text(beta, "")}
        for key, (alpha, beta) in fits.items()
    ]


def model_rows(models: Mapping[str, Mapping[str, Estimate]], titles: Mapping[str, str]) -> list[dict[str, str]]:
    """A row a treatment: how often its reward models are right."""
    return [
        {
            "reward models of": titles[name],
            "labels": f"{each['num_trained'].mean:,.0f}",
            "right about gold, %": interval_text(each["accuracy_gold"], "%"),
            "agree with their judge, %": interval_text(each["accuracy_judge"], "%"),
            "calibration error, points": interval_text(each["calibration_error"], "%"),
            "n seeds": str(each["num_trained"].num),
        }
        for name, each in models.items()
    ]


def whole(value: float) -> str:
    """Without decimals; a dash for NaN."""
    return number(value, "characters")


def clear(kept: bool | None) -> str:
    """Whether something stays clear by Holm's method."""
    return {True: "clear", False: "not clear", None: UNJUDGED}[kept]


def nats(along: Along) -> str:
    """For instance "1.20 to 5.93"; nothing where there is no range."""
    return " and ".join(f"{number(low)} to {number(high)}" for low, high in along.ranges)


def within(along: Along) -> str:
    """The ranges as a table has them."""
    return nats(along) or "nowhere" if along.judged else UNJUDGED


def ends(last: Any) -> str:
    """Where the seeds' runs end: for instance "3.90 to 9.12", in nats."""
    return " to ".join(dict.fromkeys([number(last.min()), number(last.max())]))


def place_text(method: str, place: object) -> str:
    """For instance "step 10", "round 2" or "n = 16"."""
    return {"best_of_n": f"n = {place}", "expert_iteration": f"round {place}"}.get(method, f"step {place}")


def draw_figures(shown: Labelled) -> dict[str, Drawn]:
    """Noisy against clean labels under one method, all methods by either, and each group of treatments."""
    curves, titles, figures = shown.results.curves, shown.titles, dict[str, Drawn]()

    def add(name: str, title: str, keys: Mapping[str, Key], more: str = "") -> None:
        there = {words: key for words, key in keys.items() if key in curves}
        if len(there) > 1:
            label = shown.label(*(method for _, method in there.values()))
            heading = f"{title[0].upper()}{title[1:]}"
            drawing = draw_gains(shown.results, there, heading)
            figures[name] = Drawn(drawing, f"{heading}: proxy and gold gained over SFT, against √KL.{more} {label}")

    fell, stayed = (under(shown.results, fallen=way) for way in (True, False))
    not_all = f", not under {stayed}" if stayed else ""
    clean = f" At equal KL gold by clean labels too clearly falls under {fell}{not_all}." if fell else ""
    for method in reversed(GROUPED):  # the first there is stays
        both = {titles[name]: (name, method) for name in (NOISY, CLEAN) if name in titles}
        add(NOISE, f"{METHOD_WORDS[method]} by a reward model of noisy and of clean labels", both, clean)
    for name in (NOISY, CLEAN):
        title = f"Every method against one KL: {titles.get(name)}"
        add(f"methods_{name}", title, {METHOD_WORDS[method]: (name, method) for method in METHOD_WORDS})
    drawn = {name for _, names in GROUPS.values() for name in names}
    others = (NOISY, *dict.fromkeys(name for name, _ in curves if name not in drawn))
    for method in GROUPED:
        for group, (title, names) in {**GROUPS, "others": ("other treatments", others)}.items():
            keys = {titles[name]: (name, method) for name in names if name in titles}
            add(f"{group}_against_kl_{method}", f"{METHOD_WORDS[method]}: {title}", keys)
    return figures


def draw_gains(results: Results, keys: Mapping[str, Key], title: str) -> Drawing:
    """Proxy and gold gained over SFT against sqrt(KL), a line for each of `keys`: to the farthest that all seeds reach.

    Large enough to be read at half its size.
    """
    figure = Drawing(figsize=(11, 5.4), dpi=150, layout="constrained")
    treatments, methods = ([key[part] for key in keys.values()] for part in (0, 1))
    shown_as = looks(treatments if len(set(treatments)) == len(keys) else methods)
    *axes, below = figure.subplot_mosaic([["proxy", "gold"], ["legend"] * 2], height_ratios=[6, 1]).values()
    for axis, (measure, ylabel) in zip(axes, GAINED.items(), strict=True):
        for (color, marker), line, (words, key) in zip(shown_as, cycle(("-", "--", "-.", ":")), keys.items()):
            x = distances(results.curves[key])
            gains = gain_at(results.curves[key], x, measure)
            mean, low, high = band(gains)
            if len(gains) >= FEWEST:  # the band of two seeds would cover all lines
                axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
            label = textwrap.shorten(textwrap.fill(words, 24), 48, placeholder=" …")
            axis.plot(x, mean, line, color=color, marker=marker, markevery=20, linewidth=3, markersize=9, label=label)
        axis.set_title(ylabel, fontsize=16, loc="left")
        axis.set_xlabel("√KL from SFT (√nats)", fontsize=16)
        axis.tick_params(labelsize=14)
        grid(axis)
    below.axis("off")  # the legend's place: lines may run anywhere within the axes
    handles, labels = axes[0].get_legend_handles_labels()
    columns = next(num for num in (3, 2, 1) if num * (6 + max(map(len, labels))) <= WIDTH or num == 1)
    below.legend(handles, labels, fontsize=14, frameon=False, loc="upper left", ncols=columns)
    titled(figure).suptitle(title, fontsize=18, x=0.01, ha="left")
    words = f"Sandbox (simulation). Lines: means of {seeds_text(len(results.curves[key]) for key in keys.values())}; "
    words += f"shaded: their 95 % t-intervals, from {FEWEST} seeds on."
    figure.supxlabel(words, fontsize=14, color="#555555", x=0.01, ha="left")
    return figure
