"""LoRA adapters: what trains, and merged ones that sample the same and change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_worlds import (
    ASCII,
    DEMONSTRATIONS,
    INSTRUCTIONS,
    LORA,
    TEMPLATE,
    TEXTS,
    Share,
    TinyDataset,
    build_llama,
    generator,
    load_policy,
    make_env,
    small_ppo,
)
from torch import nn

from alpacafarm_env import agents
from alpacafarm_env.agents.adapters import adapters_merged
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.quark import QuarkConfig

pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in  -:UserWarning")
KINDS = {
    "all_linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "with_a_whole_layer": {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
}


def adapted(tokenizer, kind):
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind])
    model = peft.get_peft_model(build_llama(len(tokenizer)), config)
    policy = LanguageModel(model, tokenizer, TEMPLATE, max_response_tokens=12)
    move(policy, 3)
    return policy


@torch.no_grad()
def move(policy, seed):
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.15, generator=generator(seed))
        elif parameter.requires_grad:
            parameter.mul_(1.1)


def weights(policy):
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_sample_the_same_and_leave_the_model_alone(kind, tokenizer):
    policy = adapted(tokenizer, kind)
    expected = policy.generate(INSTRUCTIONS, generator=generator())
    before, passes = weights(policy), []
    for name, module in policy.model.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            module.register_forward_hook(lambda *_, name=name: passes.append(name))
    with adapters_merged(policy.model):
        merged = policy.generate(INSTRUCTIONS, generator=generator())
    assert not passes
    assert torch.equal(merged.tokens, expected.tokens)
    torch.testing.assert_close(merged.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    after = weights(policy)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    torch.testing.assert_close(policy.logprobs(merged).detach(), merged.logprobs, atol=1e-5, rtol=0)
    assert passes or kind == "dora"  # DoRA's layers call no modules


def test_merging_spares_the_table_that_a_layer_is_tied_to(tokenizer):
    model = build_llama(len(tokenizer), tie_word_embeddings=True)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    with pytest.warns(UserWarning, match="tie"):
        policy = LanguageModel(peft.get_peft_model(model, config), tokenizer, TEMPLATE, max_response_tokens=12)
    expected = policy.generate(INSTRUCTIONS, generator=generator())
    with adapters_merged(policy.model):
        assert torch.equal(policy.generate(INSTRUCTIONS, generator=generator()).tokens, expected.tokens)
    assert model.lm_head.base_layer.weight is model.get_input_embeddings().weight


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
