"""Best-of-n curves of gold, chosen by proxies that learned from few, flipped labels of that gold.

Labels are the synthetic setting of Gao et al. 2022 (arXiv 2210.10760): of two texts gold prefers the one that it scores
higher, always; then a share is flipped. Pairs are of two kinds, never mixed: `own`, two samples of the policy, and
`recorded`, two recorded models' texts. Either way on other instructions than those that the proxy is judged on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ...agents import best_of_k
from ...errors import DataError
from ...seeding import keyed_rng
from ..harness.estimates import Estimate
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.study import Row
from ..surrogates.curves import TwoWay, drop_and_peak, policy_kl, slope
from ..surrogates.features import WordComponents
from ..surrogates.models import Kind, Score, accuracy, fit, flipped
from ..surrogates.scarcity import estimate_cells
from .golds import GoldName, gold_of, read_scores
from .plan import Array, Plan, world_of

Source = Literal["own", "recorded"]
SOURCES: Final[tuple[Source, ...]] = ("own", "recorded")
KINDS: Final[tuple[Kind, ...]] = ("linear", "trees")
FITTED_ON: Final = 6000
"""Most texts that components of words are fitted on."""
TESTED: Final = 2000
"""Fresh pairs of samples that a proxy's accuracy is measured on."""
SPARE: Final = 4
"""Pairs drawn for each that is wanted: those that gold does not decide are left out."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Where the two texts of N pairs are: (row, column) into a table of texts, and gold's label without noise."""

    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    labels: Array


def draw_pairs(golds: Array, num: int, *stream: str | int) -> Pairs:
    """Pairs of two texts of one row of a table [P, n] that gold (NaN = none) scores unequally.

    Always the same by one stream and `num`. DataError where gold decides too few.
    """
    rng = keyed_rng(0, "real policy", "pairs", *stream)
    size, width = golds.shape
    rows, one = rng.integers(size, size=SPARE * num), rng.integers(width, size=SPARE * num)
    two = (one + rng.integers(1, width, size=SPARE * num)) % width
    gap = golds[rows, one] - golds[rows, two]
    kept = np.flatnonzero(~np.isnan(gap) & (gap != 0))[:num]
    if len(kept) < num:
        raise DataError(
            f"expected {num} pairs of texts that gold scores unequally, got {len(kept)} of {len(gap)} drawn."
        )
    return Pairs(rows[kept], one[kept], two[kept], (gap[kept] > 0).astype(np.float64))


@dataclass(frozen=True, eq=False)
class Half:
    """A crossing: what a proxy learns from, and what it is judged on, as tables of components of words."""

    places: list[int]
    """Places of the instructions that it is judged on."""
    learned: Array
    """[P, n, C] components of the texts whose pairs are labelled."""
    golds: Array
    """[P, n] gold of them."""
    judged: list[Array]
    """For each of `places` the components of its samples, [m, C]."""
    center: Array
    """[C] mean of what is learned from: a score is the log-odds against it."""
    words: WordComponents


def make_half(plan: Plan, gold: GoldName, source: Source, half: int) -> Half:
    """The crossing that is judged at places of this parity."""
    world, size = world_of(plan), plan.sizes.block
    places = [place for place in range(plan.tiers[0][1]) if place % 2 == half]
    if source == "own":
        others = [place for place in range(plan.tiers[0][1]) if place % 2 != half]
        texts = [plan.texts(place, size) for place in others]
        golds = read_scores(plan, gold)[others, :size]
    else:
        table = gold_of(plan, gold).recorded[:, world.others]
        models = np.flatnonzero(~np.isnan(table).all(axis=1)).tolist()  # gold B may have read some of them alone
        texts = [[world.judged.outputs[model][number] for model in models] for number in world.others]
        golds = table[models].T
    flat = [text for row in texts for text in row]
    step = max(1, len(flat) // FITTED_ON)
    distinct = len(set(flat[::step]))
    words = WordComponents(flat[::step], min(plan.sizes.components, distinct - 1))
    learned = words(flat).reshape(len(texts), len(texts[0]), -1)
    judged = [words(plan.texts(place)) for place in places]
    return Half(places, learned, golds, judged, learned.mean(axis=(0, 1)), words)


def learn(plan: Plan, half: Half, kind: Kind, num: int, flip: float, *stream: str | int) -> Score:
    """A proxy of `num` labels, of which a share is flipped; the stream draws pairs and flips."""
    pairs = draw_pairs(half.golds, max(plan.sizes.labels), *stream)
    differences = half.learned[pairs.rows, pairs.first] - half.learned[pairs.rows, pairs.second]
    return fit(kind, differences[:num], flipped(pairs.labels[:num], flip, *stream))


def ns_of(samples: int) -> list[int]:
    """The n at which a curve is measured: powers of two, and every half between them."""
    found = {round(2 ** (power / 2)) for power in range(2 * samples.bit_length())}
    return sorted(n for n in found | {samples} if n <= samples)


def curve_cell(
    plan: Plan, key: str, gold: GoldName, source: Source, kind: Kind, num: int, on_progress: ProgressFn
) -> list[Row]:
    """The rows of one gold, kind of pairs, kind of proxy and number of labels, for all flips and tiers."""
    quiet()
    on_progress(ProgressUpdate(key, 0))
    sizes, golds = plan.sizes, read_scores(plan, gold)
    found: dict[tuple[int, str], list[list[Array]]] = {}
    right = np.zeros((len(sizes.flips), sizes.repeats, 2))
    halves = [make_half(plan, gold, source, half) for half in (0, 1)]
    for at, flip in enumerate(sizes.flips):
        for repeat in range(sizes.repeats):
            scores = dict[int, Array]()
            for number, half in enumerate(halves):
                # Recorded pairs are of other instructions in any case: one proxy is judged on both halves.
                stream = (source, repeat, number if source == "own" else 0)
                score = learn(plan, half, kind, num, flip, *stream)
                scores |= {p: score(each - half.center) for p, each in zip(half.places, half.judged, strict=True)}
                right[at, repeat, number] = right_on(score, half, golds)
            for samples, count in plan.tiers:
                proxy = np.stack([scores[place][:samples] for place in range(count)])
                for name, values in (("gold", golds[:count, :samples]), ("proxy", proxy)):
                    tables = found.setdefault((samples, name), [[] for _ in sizes.flips])
                    tables[at].append(best_of_k(proxy, values, ns_of(samples)).T)
            on_progress(ProgressUpdate(key, (1 + at * sizes.repeats + repeat) / (len(sizes.flips) * sizes.repeats)))
    who = {"gold": gold, "source": source, "kind": kind, "labels": num}
    rows: list[Row] = []
    for samples, _ in plan.tiers:
        gained, proxies = (np.array(found[samples, name]) for name in ("gold", "proxy"))
        rows += tier_rows({**who, "samples": samples}, sizes.flips, gained, proxies, right.mean(axis=2))
    return rows


def right_on(score: Score, half: Half, golds: Array) -> float:
    """Share of fresh pairs of the judged samples that a proxy orders as gold does."""
    size = min(map(len, half.judged))
    pairs = draw_pairs(golds[half.places, :size], TESTED, "tested")
    table = np.stack([each[:size] for each in half.judged])
    return accuracy(score, table[pairs.rows, pairs.first] - table[pairs.rows, pairs.second], pairs.labels)


def tier_rows(who: Row, flips: Sequence[float], golds: Array, proxies: Array, right: Array) -> list[Row]:
    """Rows of curves [F, R, I, K] of F flips, R repeats and I instructions along `ns_of(samples)`; `right` [F, R]."""
    ns, rows, drops, peaks = ns_of(who["samples"]), list[Row](), [], []
    kls = policy_kl(ns)
    for at, flip in enumerate(flips):
        gained = golds[at] - golds[at][..., :1]
        for k, n in enumerate(ns):
            proxy = float((proxies[at][..., k] - proxies[at][..., 0]).mean())
            place = {"flip": flip, "n": n, "kl": float(kls[k]), "proxy": proxy}
            rows.append({"table": "curves", **who, **place, **ends_of(gained[..., k])})
        drop, peak = drop_and_peak(golds[at])
        drops.append(drop)
        peaks.append(peak)
        fields = {"drop": drop, "peak": peak, "end": gained[..., -1]}
        values = {f"{name}_{part}": x for name, each in fields.items() for part, x in ends_of(each).items()}
        shape = {"repeats": golds.shape[1], "instructions": golds.shape[2]}
        row = {"table": "falls", **who, "flip": flip, **shape, "accuracy": 100 * float(right[at].mean())}
        rows.append({**row, "n_peak": ns[int(gained.mean(axis=(0, 1)).argmax())], **values})
    if len(flips) > 2:
        for name, each in (("drop", drops), ("peak", peaks)):
            by_ten = ends_of(slope(np.stack(each), [10 * flip for flip in flips]))
            rows.append({"table": "slopes", **who, "of": name, **by_ten})
    return rows


def ends_of(table: Array) -> Row:
    """Mean, 95 % interval, error and p-value of a table [R, I]; over instructions alone where R is 1."""
    if len(table) > 1:
        return estimate_cells("", TwoWay.of(table))
    from scipy import stats

    one = Estimate.of(table[0])
    chance = 2 * float(stats.t.sf(abs(one.ratio), one.num - 1))
    return {"mean": one.mean, "low": one.low, "high": one.high, "error": one.standard_error, "chance": chance}
