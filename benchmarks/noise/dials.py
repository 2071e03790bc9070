"""Judges by gold with one fault each, as strong as leaves equal agreement with gold: which fault costs how much?

A fault that is too weak at any strength (a taste for lists says nothing of two responses without one) is at its
strongest, and flips do the rest; so they do between two strengths of one that acts by steps. Each instruction has
several pairs, so that what its labels share is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from ... import sandbox
from ...oracles import Dialed, Flip, HigherReward
from ...oracles.base import NoDeepCopy, PreferenceOracle, RewardOracle
from ...oracles.dials import DIALS, MOST
from ..experiment.reward_models import hits
from ..harness.study import Row
from ..surrogates.curves import TwoWay
from ..surrogates.features import Array
from ..surrogates.scarcity import Curve, Key, Setting, claim_row, estimate_cells
from .cells import OWN, Plan

AGREEMENT: Final = 0.66
"""Share of the pairs on which people agree with each other in the paper (Dubois et al. 2023, section 4.1)."""
CLEAN: Final = "no fault"
FLIP: Final = "flip"
KINDS: Final = (CLEAN, FLIP, *DIALS)
_STRENGTHS: Final = (-3.0, float(np.log10(MOST)))
"""Range of a dial's strength, powers of ten of gold's unit."""
_FINE: Final = 1e-3


@dataclass(frozen=True)
class Fault:
    """How strong a dial is, and which share of the verdicts is flipped after it."""

    strength: float
    flip: float
    agreement: float
    """With gold, on all pairs of the seed."""


@dataclass(frozen=True)
class DialPlan(Plan):
    """A seed's judges with the fault `kind`; settings are told by their number of labels."""

    kind: str = CLEAN
    pairs_name: ClassVar[str] = "pairs of dials"  # which all kinds share
    pairs_each: ClassVar[int] = 4

    @property
    def settings(self) -> list[Setting]:
        """A quarter of the pairs, and all."""
        most = max(self.sizes.labels)
        return [Setting(most // 4, 0.0), Setting(most, 0.0)]

    @property
    def largest_n(self) -> int:
        """Of how many samples the best is chosen at most."""
        return min(self.sizes.num_samples_of_faults, self.sizes.num_samples)

    @cached_property
    def fault(self) -> Fault:
        """The fault that leaves `AGREEMENT`; of judges without one, nothing."""
        from scipy.optimize import bisect

        instructions, texts = self.pairs(max(self.sizes.labels))
        rows = list(map(str, instructions)), [a for a, _ in texts], [b for _, b in texts]
        # Gold is asked once: each strength is tried on all pairs.
        gold = Known(rows[0] * 2, rows[1] + rows[2])
        right = HigherReward(gold).compare(*rows)

        def agreement(strength: float, flip: float = 0.0) -> float:
            return float(hits(self._faulty(gold, strength, flip).compare(*rows), right).mean())

        strength = flip = 0.0
        if self.kind in DIALS:
            low, high = _STRENGTHS
            strength = MOST
            if agreement(MOST) < AGREEMENT:
                power = bisect(lambda power: agreement(10**power) - AGREEMENT, low, high, xtol=_FINE)
                strength = 10 ** (power - _FINE)  # the side that agrees too much: gold goes by steps
        if self.kind != CLEAN and agreement(strength) > AGREEMENT + 0.002:
            flip = bisect(lambda share: agreement(strength, share) - AGREEMENT, 0.0, 0.5, xtol=1e-4)
        return Fault(strength, flip, agreement(strength, flip))

    def annotator(self, setting: Setting) -> PreferenceOracle:
        """Gold with the fault."""
        return self._faulty(sandbox.gold_oracle(), self.fault.strength, self.fault.flip)

    def _faulty(self, gold: RewardOracle, strength: float, flip: float) -> PreferenceOracle:
        judge: PreferenceOracle = HigherReward(gold)
        if strength:
            dial: dict[str, Any] = {self.kind: strength}
            judge = Dialed(judge, seed=self.seed, **dial)
        return Flip(judge, flip, seed=self.seed) if flip else judge

    def facts(self, setting: Setting) -> Row:
        """Columns that tell a kind's rows from others, and the fault."""
        fault = self.fault
        told = {"strength": fault.strength, "flips": fault.flip, "agreement": fault.agreement}
        return {"kind": self.kind, **vars(setting), **told}

    def named(self, setting: Setting) -> str:
        """Its name, which all seeds share."""
        return f"{setting.labels} labels with {self.kind.replace('_', ' ')}"


class Known(NoDeepCopy):
    """Gold of responses, found once."""

    name = "gold"

    def __init__(self, instructions: Sequence[str], responses: Sequence[str]) -> None:
        scores = sandbox.gold_oracle().score(instructions, responses)
        self._scores = dict(zip(zip(instructions, responses, strict=True), scores.tolist(), strict=True))

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> Array:
        """Gold [B]; KeyError for another response."""
        return np.array([self._scores[row] for row in zip(map(str, instructions), responses, strict=True)])


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
