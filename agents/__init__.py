"""Agents: language models that learn in AlpacaFarm's environments, one file an algorithm.

Every agent has `act(instructions)`, `updates()` (a generator of metrics), `learn()`, `save(folder)` and `load(folder)`.
Names are imported at first use, so that `import alpacafarm_env.agents` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api_policy import APIPolicy, APIPolicyConfig, paper_baselines
    from .best_of_n import BestOfN, BestOfNConfig, BestOfNSamples
    from .best_of_n_analysis import best_of_k, best_of_n_kl
    from .binary_feedme import BinaryFeedME, BinaryFeedMEConfig
    from .dpo import DPO, DPOConfig
    from .expert_iteration import ExpertIteration, ExpertIterationConfig
    from .language_model import LanguageModel
    from .policy_agent import PolicyActor, PolicyConfig
    from .ppo import PPO, PPOConfig
    from .quark import Quark, QuarkConfig
    from .reward_conditioning import BinaryRewardConditioning, RewardConditioningConfig
    from .reward_modeling import RewardModeling, RewardModelingConfig
    from .rollouts import Rollouts
    from .sft import SFT, SFTConfig
    from .value_model import ValueModel

_MODULES = {
    "APIPolicy": "api_policy",
    "APIPolicyConfig": "api_policy",
    "paper_baselines": "api_policy",
    "BestOfN": "best_of_n",
    "BestOfNConfig": "best_of_n",
    "BestOfNSamples": "best_of_n",
    "best_of_k": "best_of_n_analysis",
    "best_of_n_kl": "best_of_n_analysis",
    "BinaryFeedME": "binary_feedme",
    "BinaryFeedMEConfig": "binary_feedme",
    "BinaryRewardConditioning": "reward_conditioning",
    "DPO": "dpo",
    "DPOConfig": "dpo",
    "ExpertIteration": "expert_iteration",
    "ExpertIterationConfig": "expert_iteration",
    "LanguageModel": "language_model",
    "PPO": "ppo",
    "PPOConfig": "ppo",
    "PolicyActor": "policy_agent",
    "PolicyConfig": "policy_agent",
    "Quark": "quark",
    "QuarkConfig": "quark",
    "RewardConditioningConfig": "reward_conditioning",
    "RewardModeling": "reward_modeling",
    "RewardModelingConfig": "reward_modeling",
    "Rollouts": "rollouts",
    "SFT": "sft",
    "SFTConfig": "sft",
    "ValueModel": "value_model",
}

__all__ = [
    "DPO",
    "PPO",
    "SFT",
    "APIPolicy",
    "APIPolicyConfig",
    "BestOfN",
    "BestOfNConfig",
    "BestOfNSamples",
    "BinaryFeedME",
    "BinaryFeedMEConfig",
    "BinaryRewardConditioning",
    "DPOConfig",
    "ExpertIteration",
    "ExpertIterationConfig",
    "LanguageModel",
    "PPOConfig",
    "PolicyActor",
    "PolicyConfig",
    "Quark",
    "QuarkConfig",
    "RewardConditioningConfig",
    "RewardModeling",
    "RewardModelingConfig",
    "Rollouts",
    "SFTConfig",
    "ValueModel",
    "best_of_k",
    "best_of_n_kl",
    "paper_baselines",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
