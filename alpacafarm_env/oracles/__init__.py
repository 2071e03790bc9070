"""Oracles: who rewards a response, and how judges of pairs become rewards; made by name or mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from .base import NAMES, Constant, FunctionOracle, OracleError, PreferenceOracle, RewardOracle, Verdicts, compare, judge
from .batched import MicroBatched
from .dials import Dialed
from .ensemble import BaselineSubtracted, Ensemble
from .judges import BothOrders, Flip, HigherReward, WinRate
from .reward_model import RewardModel
from .stored import HumanJudge, HumanRatings, Recorded, RecordedJudge, References, rated

if TYPE_CHECKING:
    from ..data import Dataset

__all__ = [
    "BaselineSubtracted",
    "BothOrders",
    "Constant",
    "Dialed",
    "Ensemble",
    "Flip",
    "FunctionOracle",
    "HigherReward",
    "HumanJudge",
    "HumanRatings",
    "MicroBatched",
    "OracleError",
    "PreferenceOracle",
    "Recorded",
    "RecordedJudge",
    "References",
    "RewardModel",
    "RewardOracle",
    "Verdicts",
    "WinRate",
    "compare",
    "judge",
    "make_judge",
    "make_oracle",
    "rated",
]

AnySpec = str | Mapping[str, Any]


def make_oracle(spec: AnySpec | RewardOracle, *, dataset: Dataset | str, seed: int = 0) -> RewardOracle:
    """Returns the oracle that a name or a mapping (see `registry`) stands for; an oracle is returned as it is.

    A function of instructions and responses becomes a `FunctionOracle`. `dataset` may be a name, as of `gym.make`.

    The same specification, dataset and seed give the same object, so a model is loaded once however many environments
    and wrappers name it. A user's own module that is reloaded gives another one. A mapping's own `seed` counts more.

    Raises:
        UnknownNameError: No oracle or judge of that name, or a keyword that it does not take.
        TypeError, ValueError: The specification is of another type, or names no oracle or more than one.
        DataError: A value is not as expected, or the dataset lacks what the oracle needs.
    """
    from ..data import load_dataset
    from .registry import read_spec

    dataset = load_dataset(dataset) if isinstance(dataset, str) else dataset
    return cast(RewardOracle, read_spec("oracle", spec).make(dataset, seed))


def make_judge(spec: AnySpec | PreferenceOracle, *, dataset: Dataset | str, seed: int = 0) -> PreferenceOracle:
    """Returns the judge that a name or a mapping stands for; a judge is returned as it is. Errors as of `make_oracle`.

    `spec` is "eval", "ann", "greedy", "human" or "gold" of the sandbox, "recorded" of a recorded dataset,
    "module:Name" or {"name": "module:Name", ...} of one's own, or a mapping {"judge": any of these, "flip": 0.0,
    "both_orders": False, "seed": 0} (see `Dialed` for further keys), {"pool": name, ...} or {"human": file}.
    """
    from ..data import load_dataset
    from .registry import read_spec

    dataset = load_dataset(dataset) if isinstance(dataset, str) else dataset
    return cast(PreferenceOracle, read_spec("judge", spec)._judge(dataset, seed))


def check_oracle(spec: object) -> None:
    """Refuses what can be no oracle before anything is built, so that `gym.make` reports it and not the first step.

    Errors are those of `make_oracle`, or PoolError for an unknown or badly written pool of annotators.
    """
    if spec not in NAMES["oracle"]:  # else it is right, and pydantic takes a tenth of a second to load
        from .registry import read_spec

        read_spec("oracle", spec)
