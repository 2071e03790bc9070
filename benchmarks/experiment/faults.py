"""Judges by gold with one fault each, as strong as leaves equal agreement with gold: which fault costs how much?

A fault that is too weak at any strength (a taste for lists says nothing of two responses without one) is at its
strongest, and flips do the rest; so they do between two strengths of one that acts by steps. Each instruction has
several pairs, so that what its labels share is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from ... import sandbox
from ...oracles import Dialed, Flip, FunctionOracle, HigherReward
from ...oracles.base import PreferenceOracle, RewardOracle
from ...oracles.dials import DIALS, MOST
from ..harness.labels import Setting
from ..harness.study import Row
from .fresh import Plan
from .reward_models import hits

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
    agreed: ClassVar[float] = AGREEMENT
    """Share of the pairs on which a judge with a fault agrees with gold."""

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
        """The fault that leaves `agreed`; of judges without one, nothing."""
        from scipy.optimize import bisect

        instructions, texts = self.pairs(max(self.sizes.labels))
        rows = list(map(str, instructions)), [a for a, _ in texts], [b for _, b in texts]
        # Gold is asked once: each strength is tried on all pairs.
        asked = rows[0] * 2, rows[1] + rows[2]
        known = dict(zip(zip(*asked, strict=True), sandbox.gold_oracle().score(*asked).tolist(), strict=True))
        gold = FunctionOracle(lambda *given: [known[row] for row in zip(*given, strict=True)], name="gold")
        right = HigherReward(gold).compare(*rows)

        def agreement(strength: float, flip: float = 0.0) -> float:
            return float(hits(self._faulty(gold, strength, flip).compare(*rows), right).mean())

        strength = flip = 0.0
        if self.kind in DIALS:
            low, high = _STRENGTHS
            strength = MOST
            if agreement(MOST) < self.agreed:
                power = bisect(lambda power: agreement(10**power) - self.agreed, low, high, xtol=_FINE)
                strength = 10 ** (power - _FINE)  # the side that agrees too much: gold goes by steps
        if self.kind != CLEAN and agreement(strength) > self.agreed + 0.002:
            flip = bisect(lambda share: agreement(strength, share) - self.agreed, 0.0, 0.5, xtol=1e-4)
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
