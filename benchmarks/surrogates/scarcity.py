"""Is noise scarcity? Best-of-n curves by number of labels and share of flips: drop, peak and end, and the claims.

Of N labels that are flipped with probability e, a score that is near even learns as much (Fisher information) as of
N(1 - 2e)^2 clean ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..harness.estimates import Estimate, rejected
from ..harness.labels import Setting
from ..harness.stored import unpack
from ..harness.study import Row
from .curves import TwoWay, drop_and_peak, slope
from .features import Array

UP_TO: Final = 0.35
"""Flips over which the slope is taken: beyond, hardly anything is left to learn from."""
HALF_AWAY: Final = 0.25
"""Flips by which a label is worth a quarter: (1 - 2e)^2."""
Key = tuple[str, str, int, float]
"""Judge, kind, labels, flips."""


@dataclass(frozen=True)
class Curve:
    """One setting's curves: gold [R, I, n] in its unit, proxy [R, n] in its spread, KL [n] in nats."""

    n: list[int]
    gold: Array
    proxy: Array
    kl: Array
    accuracy: Array

    @cached_property
    def measures(self) -> dict[str, Array]:
        """[R, I] each: how far gold falls from its peak, its gain there, and at the end."""
        drop, peak = drop_and_peak(self.gold)
        return {"drop": drop, "peak": peak, "end": self.gold[..., -1] - self.gold[..., 0]}


def tables_of(rows: Sequence[Row], unit: float = 100.0) -> dict[Key, Curve]:
    """The curves of cells' rows, gold times `unit`; instructions that a judge has not judged at all are left out."""
    groups: dict[Key, list[Row]] = {}
    for row in sorted(
        rows, key=lambda row: (row["judge"] != "own", row["kind"], row["labels"], row["flip"], row["seed"])
    ):
        groups.setdefault((row["judge"], row["kind"], row["labels"], row["flip"]), []).append(row)
    curves = {}
    for key, own in groups.items():
        n, gold = own[0]["n"], unit * np.stack([unpack(row["gold"], len(row["n"])) for row in own])
        proxy, kl = (np.array([row[name] for row in own]) for name in ("proxy", "kl"))
        known = ~np.isnan(gold).any(axis=(0, 2))
        accuracy = 100 * np.array([row.get("accuracy", math.nan) for row in own])
        curves[key] = Curve(n, gold[:, known], proxy, kl.mean(axis=0), accuracy)
    return curves


def setting_rows(curves: Mapping[Key, Curve]) -> list[Row]:
    """A row a setting: each measure with its interval, in the unit of gold."""
    rows = []
    for key, curve in curves.items():
        row = _named(key) | {"effective": Setting(*key[2:]).effective, "accuracy": float(curve.accuracy.mean())}
        place = int(curve.gold.mean(axis=(0, 1)).argmax())
        row |= {"repeats": len(curve.gold), "instructions": curve.gold.shape[1], "most": curve.n[-1]}
        row |= {
            "uniform": float(curve.gold[..., 0].mean()),
            "peak_n": curve.n[place],
            "peak_kl": float(curve.kl[place]),
        }
        for name, table in curve.measures.items():
            row |= estimate_cells(name, TwoWay.of(table))
        rows.append(row)
    return rows


def curve_rows(curves: Mapping[Key, Curve]) -> list[Row]:
    """A row a setting and n: the gain over one candidate, of gold with its interval and of the proxy, and KL."""
    rows = []
    for key, curve in curves.items():
        for place, n in enumerate(curve.n):
            gain = TwoWay.of(curve.gold[..., place] - curve.gold[..., 0])
            row = _named(key) | {"n": n, "kl": float(curve.kl[place]), "proxy": float(curve.proxy[:, place].mean())}
            rows.append(row | estimate_cells("gold", gain))
    return rows


def claims(curves: Mapping[Key, Curve]) -> list[Row]:
    """Claims of every study of scarcity, which are a family or a part of one: see `corrected`.

    slope: of the drop by flips up to `UP_TO`, for ten points of flips, and its interval by repeats alone.
    matched: 4 k labels with 25 % flips less k clean ones, whose N(1 - 2e)^2 is equal, in drop and in peak.
    doubled: what drop and peak change by a doubling of N(1 - 2e)^2, over all settings of a kind; their `labels` are 0.
    """
    measures = {key: curve.measures for key, curve in curves.items()}
    flips = [flip for flip in sorted({key[3] for key in curves}) if flip <= UP_TO]
    rows: list[Row] = []
    for judge, kind, labels in dict.fromkeys(key[:3] for key in curves):
        drops = np.stack([measures[judge, kind, labels, flip]["drop"] for flip in flips])
        rows.append(claim_row("slope of the drop", judge, kind, labels, slope(drops, flips) / 10))
        many, few = (judge, kind, 4 * labels, HALF_AWAY), (judge, kind, labels, 0.0)
        if judge == "own" and many in curves and few in curves:
            for measure in ("drop", "peak"):
                differences = measures[many][measure] - measures[few][measure]
                rows.append(claim_row(f"matched {measure}", judge, kind, labels, differences))
    for kind in dict.fromkeys(key[1] for key in curves):
        own = [key for key in curves if key[:2] == ("own", kind)]
        doublings = [math.log2(Setting(*key[2:]).effective) for key in own]
        for measure in ("drop", "peak"):
            values = np.stack([measures[key][measure] for key in own])
            rows.append(claim_row(f"doubled {measure}", "own", kind, 0, slope(values, doublings)))
    return rows


def claim_row(what: str, judge: str, kind: str, labels: int, table: Array) -> Row:
    """A claim that a table of repeats by instructions [R, I] has another mean than 0."""
    alone = Estimate.of(table.mean(axis=1))
    row = {"judge": judge, "kind": kind, "labels": labels, "claim": what} | tested(table)
    return row | {"repeats_low": alone.low, "repeats_high": alone.high}


def tested(table: Array) -> Row:
    """The columns of a mean that is tested against 0, and within which bound of it it lies."""
    value = TwoWay.of(table)
    return estimate_cells("", value) | {"within": value.within}


def corrected(rows: Sequence[Row]) -> list[Row]:
    """A family of claims, with whether each is clear by Holm's procedure."""
    holds = rejected([row["chance"] for row in rows])
    return [{**row, "holm": kept} for row, kept in zip(rows, holds, strict=True)]


def _named(key: Key) -> dict[str, Any]:
    return dict(zip(("judge", "kind", "labels", "flip"), key, strict=True))


def estimate_cells(name: str, value: TwoWay) -> dict[str, Any]:
    """The columns of an estimate."""
    start = f"{name}_" if name else ""
    ends = {"low": value.low, "high": value.high, "error": value.standard_error, "chance": value.chance}
    return {name or "mean": value.mean} | {f"{start}{end}": number for end, number in ends.items()}
