"""Oracles: who rewards a response, and how judges of pairs become rewards."""

from .base import Constant, FunctionOracle, OracleError, PreferenceOracle, RewardOracle, Verdicts, compare, judge
from .ensemble import BaselineSubtracted, Ensemble
from .judges import BothOrders, Flip, HigherReward, MicroBatched, WinRate
from .registry import make_judge, make_oracle
from .reward_model import RewardModel
from .stored import HumanJudge, HumanRatings, Recorded, RecordedJudge, References, rated

__all__ = [
    "BaselineSubtracted",
    "BothOrders",
    "Constant",
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
