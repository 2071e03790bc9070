"""Agents: language models that learn in AlpacaFarm's environments.

An agent that trains a policy has `act(instructions)`, `updates()` (a generator of metrics), `learn()`, `save(folder)`
and `load(folder)`.
Names are imported at first use, so that `import alpacafarm_env.agents` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api_policy import APIPolicy as APIPolicy
    from .api_policy import APIPolicyConfig as APIPolicyConfig
    from .api_policy import paper_baselines as paper_baselines
    from .best_of_n import BestOfN as BestOfN
    from .best_of_n import BestOfNConfig as BestOfNConfig
    from .best_of_n import BestOfNSamples as BestOfNSamples
    from .best_of_n import best_of_k as best_of_k
    from .best_of_n import best_of_n_kl as best_of_n_kl
    from .dpo import DPO as DPO
    from .dpo import DPOConfig as DPOConfig
    from .expert_iteration import ExpertIteration as ExpertIteration
    from .expert_iteration import ExpertIterationConfig as ExpertIterationConfig
    from .group_policy import DAPOConfig as DAPOConfig
    from .group_policy import DrGRPOConfig as DrGRPOConfig
    from .group_policy import GroupPolicy as GroupPolicy
    from .group_policy import GroupPolicyConfig as GroupPolicyConfig
    from .group_policy import GRPOConfig as GRPOConfig
    from .group_policy import GSPOConfig as GSPOConfig
    from .group_policy import ReinforcePPConfig as ReinforcePPConfig
    from .group_policy import RLOOConfig as RLOOConfig
    from .kto import KTO as KTO
    from .kto import KTOConfig as KTOConfig
    from .language_model import LanguageModel as LanguageModel
    from .online_dpo import OnlineDPO as OnlineDPO
    from .online_dpo import OnlineDPOConfig as OnlineDPOConfig
    from .policy_agent import PolicyActor as PolicyActor
    from .policy_agent import PolicyConfig as PolicyConfig
    from .ppo import PPO as PPO
    from .ppo import PPOConfig as PPOConfig
    from .quark import Quark as Quark
    from .quark import QuarkConfig as QuarkConfig
    from .rating_modeling import RatingModeling as RatingModeling
    from .reward_modeling import RewardModeling as RewardModeling
    from .reward_modeling import RewardModelingConfig as RewardModelingConfig
    from .rollouts import Rollouts as Rollouts
    from .sft import SFT as SFT
    from .sft import BinaryFeedME as BinaryFeedME
    from .sft import BinaryFeedMEConfig as BinaryFeedMEConfig
    from .sft import BinaryRewardConditioning as BinaryRewardConditioning
    from .sft import FeedME as FeedME
    from .sft import RewardConditioningConfig as RewardConditioningConfig
    from .sft import SFTConfig as SFTConfig
    from .value_model import ValueModel as ValueModel

_NAMES = {
    "api_policy": ("APIPolicy", "APIPolicyConfig", "paper_baselines"),
    "best_of_n": ("BestOfN", "BestOfNConfig", "BestOfNSamples", "best_of_k", "best_of_n_kl"),
    "dpo": ("DPO", "DPOConfig"),
    "expert_iteration": ("ExpertIteration", "ExpertIterationConfig"),
    "group_policy": (
        "DAPOConfig",
        "DrGRPOConfig",
        "GRPOConfig",
        "GSPOConfig",
        "GroupPolicy",
        "GroupPolicyConfig",
        "RLOOConfig",
        "ReinforcePPConfig",
    ),
    "kto": ("KTO", "KTOConfig"),
    "language_model": ("LanguageModel",),
    "online_dpo": ("OnlineDPO", "OnlineDPOConfig"),
    "policy_agent": ("PolicyActor", "PolicyConfig"),
    "ppo": ("PPO", "PPOConfig"),
    "quark": ("Quark", "QuarkConfig"),
    "rating_modeling": ("RatingModeling",),
    "reward_modeling": ("RewardModeling", "RewardModelingConfig"),
    "rollouts": ("Rollouts",),
    "sft": (
        "SFT",
        "BinaryFeedME",
        "BinaryFeedMEConfig",
        "BinaryRewardConditioning",
        "FeedME",
        "RewardConditioningConfig",
        "SFTConfig",
    ),
    "value_model": ("ValueModel",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - a list, sorted


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
