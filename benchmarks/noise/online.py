"""Cells by PPO and DPO: settings of equal N(1 - 2e)^2, PPO against their reward models and DPO on their labels.

PPO also learns from judges with a fault, of the most labels. Settings of training are those of the study of
over-optimization, past the peak of gold; all of a seed see the same prompts and draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Final

import numpy as np

from ...instructions import Preference
from ..experiment.engine import read_evaluation
from ..experiment.engine import run as run_experiment
from ..experiment.reward_models import RewardModelRun
from ..experiment.treated import TreatmentRun
from ..experiment.treatments import Treatment
from ..harness.runner import ProgressFn
from ..harness.study import Row
from ..surrogates.scarcity import HALF_AWAY, Curve, Key, Setting, claim_row, pack
from .cells import GOLDS, OWN, UNITS, Plan

METHODS: Final = ("ppo", "dpo")


def matched(plan: Plan) -> list[Setting]:
    """The settings: numbers of labels without flips, each with four times as many of which a quarter is flipped."""
    labels = plan.sizes.labels
    few = [size for size in labels if 4 * size in labels]
    return [Setting(size * share, flip) for size in few for share, flip in ((1, 0.0), (4, HALF_AWAY))]


@dataclass(frozen=True, kw_only=True)
class SettingRun(TreatmentRun):
    """A method on a setting of a seed."""

    plan: Plan
    setting: Setting
    kind: str
    """What its rows are told by: the method, or the fault."""
    treatment: str = field(init=False, default="none")

    NOT_DECIDING: ClassVar[frozenset[str]] = TreatmentRun.NOT_DECIDING | {"plan", "setting", "kind"}

    @cached_property
    def treated(self) -> Treatment:
        """The setting as a treatment: labels of the pool, flipped, on fresh pairs."""
        labels, flip = self.setting.labels, self.setting.flip
        name = self.plan.named(self.setting)
        return Treatment(name, name, flip=flip, num_labels=labels)

    @property
    def members(self) -> list[RewardModelRun]:
        """The setting's reward model."""
        return [self.plan.reward_model(self.setting)]

    def preferences(self) -> tuple[Preference, ...]:
        """The setting's labels."""
        return self.plan.labelled(self.setting)


def run_method(run: SettingRun, on_progress: ProgressFn) -> list[Row]:
    """Trains and evaluates; a row for each of `GOLDS`, along steps as `cells.run_setting` has them along n."""
    rows = run_experiment(run, on_progress)
    told = [read_evaluation(run, place)["splits"]["eval"] for place in run.places]
    facts = {**run.plan.facts(run.setting), "kind": run.kind, "seed": run.seed, "n": list(run.places)}
    facts |= {"kl": [row["kl_exact"] for row in rows], "proxy": [row["proxy"] - rows[0]["proxy"] for row in rows]}
    return [
        {"judge": name, **facts, "gold": pack(UNITS[column] * np.array([each[column] for each in told], float).T)}
        for column, name in GOLDS.items()
    ]


def method_claims(curves: Mapping[Key, Curve]) -> list[Row]:
    """matched: 4N labels with 25 % flips less N clean ones, in drop and in peak, by each method."""
    measures = {key: curve.measures for key, curve in curves.items() if key[0] == OWN}
    rows = []
    for (judge, kind, labels, flip), few in measures.items():
        if not flip:
            many = measures[judge, kind, 4 * labels, HALF_AWAY]
            rows += [
                claim_row(f"matched {name}", judge, kind, labels, many[name] - few[name]) for name in ("drop", "peak")
            ]
    return rows
