"""The settings of every agent: a bad one is refused by its name, and presets are settings of their own class."""

import math
from typing import Any

import pytest

from alpacafarm_env.agents.api_policy import APIPolicyConfig
from alpacafarm_env.agents.best_of_n import BestOfNConfig
from alpacafarm_env.agents.dpo import DPOConfig
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.ppo import PPOConfig
from alpacafarm_env.agents.quark import QuarkConfig
from alpacafarm_env.agents.reward_modeling import RewardModelingConfig
from alpacafarm_env.agents.settings import TrainingConfig
from alpacafarm_env.agents.sft import BinaryFeedMEConfig, RewardConditioningConfig, SFTConfig

INF, NAN = math.inf, math.nan
BAD: dict[Any, dict[str, tuple[object, ...]]] = {
    TrainingConfig: {
        "learning_rate": (0.0, NAN),
        "max_grad_norm": (-1.0,),
        "micro_batch_tokens": (0,),
        "keep_checkpoints": (0,),
        "save_every": ("2", -1),
        "schedule": ("lienar",),
        "mixed_precision": ("fp16",),
    },
    PPOConfig: {
        "total_steps": (2.5, 0),
        "num_epochs": (True,),
        "minibatch_size": (100,),  # of 512
        "max_response_tokens": (1.5, 0),
        "sampling_batch_size": (0, 2.5),
        "kl_coef": (INF, -0.1),
        "kl_estimator": ("k33",),
        "missing_eos_score": (NAN,),
        "target_kl": ("6", 0.0),
        "gamma": (None, 1.1),
        "temperature": (0,),
    },
    QuarkConfig: {
        "num_quantiles": (0, 513),  # of 512
        "best_quantile_only": ("yes", 1),
        "kl_coef": (-0.1,),
    },
    DPOConfig: {"beta": (0.0,), "epochs": (0,), "batch_size": (0,), "label_smoothing": (0.5,)},
    BestOfNConfig: {"num_samples": (0,), "temperature": (0.0, NAN), "max_response_tokens": (0,), "batch_size": (0,)},
    ExpertIterationConfig: {"num_samples": (0,), "temperature": (0,), "learning_rate": (1e-3,)},  # it goes into sft=
    RewardModelingConfig: {"epochs": (0,), "batch_size": (0,), "max_length": (1,), "eval_every": (-1,)},
    APIPolicyConfig: {
        "temperature": (-0.1, NAN),
        "top_p": (0.0, 1.1),
        "max_tokens": (0, 1.5, True),
        "max_tokens_field": ("n_predict",),
        "length_limit_chars": (0,),
        "seed": ("1",),
        "max_concurrency": (0,),
        "max_retries": (-1,),
        "timeout_s": (0.0,),
        "deadline_s": (INF,),
    },
}


@pytest.mark.parametrize(("config", "field"), [(config, field) for config, bad in BAD.items() for field in bad])
def test_a_bad_setting_is_named(config: Any, field: str) -> None:
    for value in BAD[config][field]:
        with pytest.raises(ValueError) as told:  # noqa: PT011 - which one is asserted below
            config(**{field: value})
        assert repr(value) in str(told.value)
        assert field in str(told.value) or field == "kl_estimator"


@pytest.mark.parametrize("config", [*BAD, SFTConfig, BinaryFeedMEConfig, RewardConditioningConfig])
def test_presets_are_settings_of_their_own_class(config: Any) -> None:
    for preset in ("paper", "sandbox") if config is not TrainingConfig else ():
        assert type(getattr(config, preset)()) is config
