"""Methods on settings of fresh labels: on the labels themselves, or on the reward model that learned from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from ...instructions import Preference
from ..harness.labels import Setting
from ..harness.runner import ProgressFn
from ..harness.stored import pack
from ..harness.study import Row
from .engine import read_evaluation
from .engine import run as run_experiment
from .fresh import GOLDS, UNITS, Plan
from .reward_models import RewardModelRun
from .treated import TreatmentRun
from .treatments import Treatment


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
