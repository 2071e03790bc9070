"""What faults of judges cost: claims and rows of the judges of `experiment.faults`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...oracles.dials import DIALS
from ..experiment.faults import FLIP, KINDS
from ..experiment.fresh import OWN
from ..harness.study import Row
from ..surrogates.curves import TwoWay
from ..surrogates.scarcity import Curve, Key, claim_row, estimate_cells


def dial_claims(curves: Mapping[Key, Curve], by_ppo: Mapping[Key, Curve]) -> list[Row]:
    """What the page claims of faults, before correction; nothing without curves.

    lift: what four times as many labels add to gold gained at the peak, by each judge.
    cost, PPO's cost: gold that a fault costs beyond what flips of equal agreement cost, at the peak and at the end.
    """
    rows = []
    for start, found in ("", curves), ("PPO's ", by_ppo):
        measures = {key[1:3]: curve.measures for key, curve in found.items() if key[0] == OWN}
        sizes = sorted({labels for _, labels in measures})
        for kind in KINDS if sizes else ():
            if len(sizes) > 1:
                few, many = (measures[kind, labels]["peak"] for labels in sizes)
                rows.append(claim_row(f"{start}lift", OWN, kind, 0, many - few))
            for labels in sizes if kind in DIALS else ():
                for name in ("peak", "end"):
                    cost = measures[FLIP, labels][name] - measures[kind, labels][name]
                    rows.append(claim_row(f"{start}cost {name}", OWN, kind, labels, cost))
    return rows


def dial_rows(method: str, curves: Mapping[Key, Curve], rows: Sequence[Row]) -> list[Row]:
    """A row a judge, fault and number of labels: the fault, mean over seeds, and what is gained at peak and end."""
    made = []
    for (judge, kind, labels, _), curve in curves.items():
        own = [row for row in rows if (row["judge"], row["kind"], row["labels"]) == (judge, kind, labels)]
        told = {name: float(np.mean([row[name] for row in own])) for name in ("strength", "flips", "agreement")}
        row = {"method": method, "judge": judge, "kind": kind, "labels": labels, **told}
        row["accuracy"] = float(curve.accuracy.mean())
        for name in ("peak", "end"):
            row |= estimate_cells(name, TwoWay.of(curve.measures[name]))
        made.append(row)
    return sorted(made, key=lambda row: (row["judge"] != OWN, row["judge"], KINDS.index(row["kind"]), row["labels"]))
