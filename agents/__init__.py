"""Agents: language models that learn in AlpacaFarm's environments, one file an algorithm.

Every agent has `act(instructions)`, `updates()` (a generator of metrics), `learn()`, `save(folder)` and `load(folder)`.
Names are imported at first use, so that `import alpacafarm_env.agents` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .language_model import LanguageModel
    from .ppo import PPO, PPOConfig
    from .reward_modeling import RewardModeling, RewardModelingConfig
    from .rollouts import Rollouts
    from .sft import SFT, SFTConfig
    from .value_model import ValueModel

_MODULES = {
    "LanguageModel": "language_model",
    "PPO": "ppo",
    "PPOConfig": "ppo",
    "RewardModeling": "reward_modeling",
    "RewardModelingConfig": "reward_modeling",
    "Rollouts": "rollouts",
    "SFT": "sft",
    "SFTConfig": "sft",
    "ValueModel": "value_model",
}

__all__ = [
    "PPO",
    "SFT",
    "LanguageModel",
    "PPOConfig",
    "RewardModeling",
    "RewardModelingConfig",
    "Rollouts",
    "SFTConfig",
    "ValueModel",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
