"""Settings of equal N(1 - 2e)^2 by other means: by PPO and DPO, and with reward models that read each label once.

PPO learns against their reward models, DPO on their labels, PPO also from judges with a fault, of the most labels.
Settings of training are those of the study of over-optimization, past the peak of gold; all of a seed see the same
prompts and draws. With the number of updates held equal few labels are read often, and what is read often is learned by
heart, flips too; read once they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..experiment.fresh import OWN, Plan
from ..experiment.reward_models import RewardModelRun
from ..harness.labels import Setting
from ..harness.study import Row
from ..surrogates.scarcity import HALF_AWAY, Curve, Key, claim_row

METHODS: Final = ("ppo", "dpo")
ONCE: Final = "read once"


@dataclass(frozen=True)
class OncePlan(Plan):
    """A seed's settings whose reward models read each label once, however few there are."""

    def reward_model(self, setting: Setting) -> RewardModelRun:
        """As the seed's others, but the fewer the labels, the fewer the updates."""
        return replace(super().reward_model(setting), epochs=1)

    def facts(self, setting: Setting) -> Row:
        """Columns that tell a setting's rows from others."""
        return {**super().facts(setting), "kind": ONCE}

    def named(self, setting: Setting) -> str:
        """Its name, which all seeds share."""
        return f"{super().named(setting)}, {ONCE}"

    @property
    def settings(self) -> list[Setting]:
        """Those of `matched` that the grid reads more than once."""
        return [setting for setting in matched(self) if setting.labels < max(self.sizes.labels)]


def matched(plan: Plan) -> list[Setting]:
    """The settings: numbers of labels without flips, each with four times as many of which a quarter is flipped."""
    labels = plan.sizes.labels
    few = [size for size in labels if 4 * size in labels]
    return [Setting(size * share, flip) for size in few for share, flip in ((1, 0.0), (4, HALF_AWAY))]


def read_once(grid: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """The rows of labels that are read once: of the most labels the grid's, else those of `OncePlan`."""
    most = max(row["labels"] for row in grid)
    return [*others, *({**row, "kind": ONCE} for row in grid if (row["labels"], row["flip"]) == (most, HALF_AWAY))]


def method_claims(curves: Mapping[Key, Curve]) -> list[Row]:
    """matched: 4N labels with 25 % flips less N clean ones, in drop and in peak, by each of these means."""
    measures = {key: curve.measures for key, curve in curves.items() if key[0] == OWN}
    rows = []
    for (judge, kind, labels, flip), few in measures.items():
        if not flip:
            many = measures[judge, kind, 4 * labels, HALF_AWAY]
            rows += [
                claim_row(f"matched {name}", judge, kind, labels, many[name] - few[name]) for name in ("drop", "peak")
            ]
    return rows
