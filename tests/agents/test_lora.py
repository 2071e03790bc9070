"""Every agent that trains a policy, with LoRA over a base in bfloat16: float32 adapters train, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LORA
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Share, TinyDataset, load_policy, make_env, small_ppo

from alpacafarm_env import agents
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.quark import QuarkConfig

PREFERENCES = TinyDataset().preferences()
SFT = agents.SFTConfig(batch_size=5, epochs=1, learning_rate=1e-2)
QUARK = QuarkConfig(total_steps=1, rollout_batch_size=16, minibatch_size=4, learning_rate=1e-2, warmup_steps=0)
MAKERS: dict[str, Any] = {
    "sft": lambda policy: agents.SFT(policy, DEMONSTRATIONS, config=SFT),
    "binary_feedme": lambda policy: agents.BinaryFeedME(
        policy, PREFERENCES, config=agents.BinaryFeedMEConfig(batch_size=5, epochs=1, learning_rate=1e-2)
    ),
    "dpo": lambda policy: agents.DPO(
        policy, PREFERENCES, config=agents.DPOConfig(batch_size=5, epochs=1, learning_rate=1e-2)
    ),
    "expert_iteration": lambda policy: agents.ExpertIteration(
        policy, TEXTS, Share(ASCII), config=ExpertIterationConfig(num_samples=2, sft=SFT)
    ),
    "ppo": lambda policy: agents.PPO(make_env(), policy, config=small_ppo(total_steps=1, learning_rate=1e-2)),
    "quark": lambda policy: agents.Quark(make_env(), policy, config=QUARK),
}


@pytest.mark.parametrize("name", MAKERS)
def test_float32_adapters_over_a_bfloat16_base_are_what_trains(name: str, policy_folder: Path, tmp_path: Path) -> None:
    lora = replace(LORA, init_lora_weights=False)  # from the identity, half of it would not move in the first update
    policy = load_policy(policy_folder, lora=lora, dtype=torch.bfloat16, max_response_tokens=16)
    before = {key: value.clone() for key, value in policy.model.state_dict().items()}
    agent = MAKERS[name](policy)
    agent.learn()
    after = policy.model.state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {key for key in after if "lora_" in key}
    assert {value.dtype for key, value in after.items() if "lora_" in key} == {torch.float32}
    assert {value.dtype for key, value in after.items() if "lora_" not in key} == {torch.bfloat16}
    agent.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", dtype=torch.bfloat16, max_response_tokens=16)
    rollouts = policy.as_rollouts(TEXTS, ["fine"] * len(TEXTS))
    torch.testing.assert_close(loaded.logprobs(rollouts), policy.logprobs(rollouts), rtol=0, atol=0)
