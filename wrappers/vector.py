"""The reward wrappers of `alpacafarm_env.wrappers` for batched environments: one oracle call a step.

Same names, keywords and rules; they wrap what `gym.make_vec(id, num_envs=n)` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.vector import VectorEnv, VectorWrapper

from .audit import Audited
from .rewards import Annotated, Ensemble, Gold, Reported, Scored, Surrogate, Won

__all__ = [
    "AddScore",
    "AnnotatorReward",
    "EnsembleReward",
    "GoldReward",
    "RewardAudit",
    "SurrogateReward",
    "WinRateReward",
]


if TYPE_CHECKING:
    _AnyVectorWrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:  # takes no types before Gymnasium 1.4
    _AnyVectorWrapper = VectorWrapper


class _Vector(Scored, _AnyVectorWrapper):
    def __init__(self, env: Any, **_: Any) -> None:
        name = type(self).__name__
        if not isinstance(env, VectorEnv):
            raise TypeError(f"{name} wraps a batch of environments; for a single one use wrappers.{name}.")
        VectorWrapper.__init__(self, env)


class SurrogateReward(Surrogate, _Vector):
    """Rewards by a learned reward model; see `alpacafarm_env.wrappers.SurrogateReward`."""


class EnsembleReward(Ensemble, _Vector):
    """Rewards by several oracles at once; see `alpacafarm_env.wrappers.EnsembleReward`."""


class AnnotatorReward(Annotated, _Vector):
    """Rewards by noisy annotators; see `alpacafarm_env.wrappers.AnnotatorReward`."""


class WinRateReward(Won, _Vector):
    """Rewards by wins over the reference; see `alpacafarm_env.wrappers.WinRateReward`."""


class GoldReward(Gold, _Vector):
    """Rewards by the sandbox's true reward; see `alpacafarm_env.wrappers.GoldReward`."""


class AddScore(Reported, _Vector):
    """Reports a second oracle's score in `infos`; see `alpacafarm_env.wrappers.AddScore`."""


class RewardAudit(Audited, _Vector):
    """Reports what a reward is worth by others in `infos`; see `alpacafarm_env.wrappers.RewardAudit`."""
