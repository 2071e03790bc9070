"""The reward wrappers of `alpacafarm_env.wrappers` for batched environments: one oracle call a step.

Same names, keywords and rules; they wrap what `gym.make_vec(id, num_envs=n)` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymnasium.vector import VectorEnv, VectorWrapper

from .rewards import JudgeSpec, OracleSpec, Reported, Scored, ensemble, score_key, win_rate

__all__ = ["AddScore", "AnnotatorReward", "EnsembleReward", "GoldReward", "SurrogateReward", "WinRateReward"]


if TYPE_CHECKING:
    _AnyVectorWrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:  # takes no types before Gymnasium 1.4
    _AnyVectorWrapper = VectorWrapper


class _Vector(Scored, _AnyVectorWrapper):
    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        name = type(self).__name__
        if not isinstance(env, VectorEnv):
            raise TypeError(f"{name} wraps a batch of environments; for a single one use wrappers.{name}.")
        VectorWrapper.__init__(self, env)


class SurrogateReward(_Vector):
    """Rewards by a learned reward model; see `alpacafarm_env.wrappers.SurrogateReward`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], *, oracle: OracleSpec = "surrogate") -> None:
        super().__init__(env)
        self.choose(oracle)


class EnsembleReward(_Vector):
    """Rewards by several oracles at once; see `alpacafarm_env.wrappers.EnsembleReward`."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        oracles: Sequence[OracleSpec],
        combine: str = "mean",
        weight: float | None = None,
    ) -> None:
        super().__init__(env)
        self.choose(ensemble(oracles, combine, weight))


class AnnotatorReward(_Vector):
    """Rewards by noisy annotators; see `alpacafarm_env.wrappers.AnnotatorReward`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], *, judge: JudgeSpec = "sim_ann") -> None:
        super().__init__(env)
        self.choose(win_rate(judge))


class WinRateReward(_Vector):
    """Rewards by wins over the reference; see `alpacafarm_env.wrappers.WinRateReward`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], *, judge: JudgeSpec = "sim_eval") -> None:
        super().__init__(env)
        self.choose(win_rate(judge))


class GoldReward(_Vector):
    """Rewards by the sandbox's true reward; see `alpacafarm_env.wrappers.GoldReward`."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.choose("gold")


class AddScore(Reported, _Vector):
    """Reports a second oracle's score in `infos`; see `alpacafarm_env.wrappers.AddScore`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], *, key: str | None = None, oracle: OracleSpec = "gold") -> None:
        super().__init__(env)
        self.report(score_key(key, oracle), oracle)
