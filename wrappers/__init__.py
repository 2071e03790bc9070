"""Reward wrappers: who scores the responses. The batched twins, under the same names, are in `wrappers.vector`."""

from . import vector
from .audit import RewardAudit
from .rewards import AddScore, AnnotatorReward, EnsembleReward, GoldReward, SurrogateReward, WinRateReward

__all__ = [
    "AddScore",
    "AnnotatorReward",
    "EnsembleReward",
    "GoldReward",
    "RewardAudit",
    "SurrogateReward",
    "WinRateReward",
    "vector",
]
