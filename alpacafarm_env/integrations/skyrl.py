"""An environment for SkyRL. Source: skyrl-gym 0.4, `BaseTextEnv`.

skyrl_gym.register(id="alpacafarm", entry_point="alpacafarm_env.integrations.skyrl:AlpacaFarmEnv")
"""

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from . import instruction_of, scorer


class AlpacaFarmEnv(BaseTextEnv):
    """One turn, rewarded by an oracle.

    Args:
        env_config: May have `oracle` ("surrogate"), `dataset` ("sandbox") and `seed` (0).
        extras: The row's other columns; `extra_info` has the instruction, as `export --format verl` writes it.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        config = {} if env_config is None else env_config
        defaults = {"oracle": "surrogate", "dataset": "sandbox", "seed": 0}
        self._score = scorer(**{name: config.get(name, value) for name, value in defaults.items()})
        self._instruction = instruction_of((extras or {}).get("extra_info"))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """The response's reward."""
        reward = self._score([self._instruction], [action])[0]
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
