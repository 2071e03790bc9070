"""Reward wrappers: who scores the responses. The batched twins, under the same names, are in `wrappers.vector`."""

from . import vector
from .rewards import AddScore, AnnotatorReward, EnsembleReward, GoldReward, SurrogateReward, WinRateReward

__all__ = ["AddScore", "AnnotatorReward", "EnsembleReward", "GoldReward", "SurrogateReward", "WinRateReward", "vector"]
