"""Reward wrappers for single environments, and what they share with their batched twins in `wrappers.vector`.

A reward wrapper decides who scores the responses; it computes nothing itself. Stack as many as you like:

* The OUTERMOST of `SurrogateReward`, `EnsembleReward`, `AnnotatorReward`, `WinRateReward` and `GoldReward` decides. It
  alone is asked, once a step, and the environment's own oracle is not even built.
* `AddScore` reports a further oracle's score in `info` and leaves the reward bit-identical.

They work over any AlpacaFarm environment at any depth of other wrappers. Instructions are drawn by the environment
alone: two runs that differ only in their wrappers see the same instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv

from ..envs.scoring import RESERVED_KEYS, Scoring
from ..oracles.base import PreferenceOracle, RewardOracle

OracleSpec = str | Mapping[str, Any] | RewardOracle
JudgeSpec = str | Mapping[str, Any] | PreferenceOracle

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class Scored:
    """The core of every wrapper here: it names an oracle while the environment's `step` runs."""

    env: Any
    oracle: RewardOracle

    def __init__(self, env: Any, **keywords: Any) -> None:
        raise NotImplementedError  # the single and the batched form each have their own

    def choose(self, spec: OracleSpec) -> None:
        """Sets the oracle, by the data set of the environment; TypeError if that is no AlpacaFarm environment."""
        self._scoring = scoring_of(self.env, type(self).__name__)
        self.oracle = self._scoring.make_oracle(spec)

    def scoring(self) -> AbstractContextManager[None]:
        """Within a step this oracle decides, unless an outer wrapper already said who does."""
        return self._scoring.scored_by(self.oracle)

    def step(self, action: Any) -> Any:
        """Steps the environment while `scoring` holds."""
        with self.scoring():
            return self.env.step(action)


class Surrogate(Scored):
    """The core of `SurrogateReward`."""

    def __init__(self, env: Any, *, oracle: OracleSpec = "surrogate") -> None:
        super().__init__(env, oracle=oracle)
        self.choose(oracle)


class Ensemble(Scored):
    """The core of `EnsembleReward`."""

    def __init__(
        self, env: Any, *, oracles: Sequence[OracleSpec], combine: str = "mean", weight: float | None = None
    ) -> None:
        super().__init__(env, oracles=oracles, combine=combine, weight=weight)
        self.choose({"ensemble": oracles, "combine": combine, "weight": weight})


class Judged(Scored):
    """The core of rewards by a judge."""

    def __init__(self, env: Any, *, judge: JudgeSpec) -> None:
        super().__init__(env, judge=judge)
        self.choose(judge if isinstance(judge, Mapping) else {"judge": judge})


class Annotated(Judged):
    """The core of `AnnotatorReward`."""

    def __init__(self, env: Any, *, judge: JudgeSpec = "sim_ann") -> None:
        super().__init__(env, judge=judge)


class Won(Judged):
    """The core of `WinRateReward`."""

    def __init__(self, env: Any, *, judge: JudgeSpec = "sim_eval") -> None:
        super().__init__(env, judge=judge)


class Gold(Scored):
    """The core of `GoldReward`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.choose("gold")


class Reported(Scored):
    """The core of `AddScore`."""

    key: str

    def __init__(self, env: Any, *, key: str | None = None, oracle: OracleSpec = "gold") -> None:
        """Raises ValueError if the key is empty, starts with an underscore or is taken."""
        super().__init__(env, key=key, oracle=oracle)
        if key is None and oracle != "gold":
            raise ValueError(
                f"AddScore: expected key='..._reward', the info key for the scores of {oracle!r}, got none"
            )
        named: Any = "gold_reward" if key is None else key
        inner = self.env
        while inner is not inner.unwrapped:
            if isinstance(inner, Reported) and inner.key == named:
                raise ValueError(f"{type(inner).__name__} already reports a score under {named!r}; give another key.")
            inner = inner.env
        if not isinstance(named, str) or not named or named.startswith("_") or named in RESERVED_KEYS:
            raise ValueError(
                "The key of a score must be a text without a leading underscore that info does not use itself, got "
                f"{key!r}; taken: {', '.join(sorted(RESERVED_KEYS))}."
            )
        self.key = named
        self.choose(oracle)

    def scoring(self) -> AbstractContextManager[None]:
        """Within a step this oracle's score is reported too."""
        return self._scoring.also_scored_by(self.key, self.oracle)


def scoring_of(env: Any, wrapper: str) -> Scoring:
    """The AlpacaFarm environment under any wrappers; TypeError if there is none."""
    base = env.unwrapped
    if isinstance(base, Scoring):
        return base
    advice = "Make one with gym.make('AlpacaFarm-PPO-v0')"
    if isinstance(env, VectorEnv):
        advice = (
            "Make it with gym.make_vec('AlpacaFarm-PPO-v0', num_envs=n) and no vectorization_mode, or wrap each single "
            f"environment: SyncVectorEnv([lambda: wrappers.{wrapper}(gym.make('AlpacaFarm-PPO-v0'))] * n)"
        )
    raise TypeError(f"{wrapper} needs an AlpacaFarm environment, got {base!r} of type {type(base).__name__}. {advice}.")


class _Single(
    Scored, gym.Wrapper[ObsType, ActType, ObsType, ActType], RecordConstructorArgs, Generic[ObsType, ActType]
):
    """The single form: its keywords are recorded, so that `env.spec` names it."""

    def __init__(self, env: Any, **keywords: Any) -> None:
        name = type(self).__name__
        if isinstance(env, VectorEnv):
            raise TypeError(f"{name} wraps one environment; for a batch of them use wrappers.vector.{name}.")
        # Not copied: an oracle object may be a model.
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **keywords)
        gym.Wrapper.__init__(self, env)


class SurrogateReward(Surrogate, _Single[ObsType, ActType]):
    """Rewards by a learned reward model: "surrogate", `{"reward_model": folder}`, or any other oracle."""


class EnsembleReward(Ensemble, _Single[ObsType, ActType]):
    """Rewards by several oracles at once, such as reward models that differ in their seed (see `oracles.Ensemble`).

    `info` also holds `disagreement`, the standard deviation over the members, and each member's score, `score:<name>`.
    """


class AnnotatorReward(Annotated, _Single[ObsType, ActType]):
    """Rewards by verdicts of noisy annotators, 1 where the response is preferred to the reference.

    `judge` is "sim_ann", the pool with 25 % flips; another judge's name; a mapping such as
    `{"judge": "sim_eval", "flip": 0.175}`; LLM annotators behind a server, `{"pool": "ann", "base_url": url}`; or a
    `PreferenceOracle`.
    """


class WinRateReward(Won, _Single[ObsType, ActType]):
    """Rewards by verdicts without added noise, as in evaluation; `judge` as in `AnnotatorReward`."""


class GoldReward(Gold, _Single[ObsType, ActType]):
    """Rewards by the sandbox's true reward."""


class AddScore(Reported, _Single[ObsType, ActType]):
    """Reports a second oracle's score under `info[key]`, next to a reward that stays bit-identical.

    Gold's key is "gold_reward" by default; another oracle's score needs a key that says what it is (ValueError).
    """
