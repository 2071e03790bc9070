"""The value model: zero at the start, causal, over the policy's tokens."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_worlds import (
    INSTRUCTIONS,
    LORA,
    TEMPLATE,
    TinyDataset,
    assert_near,
    build_llama,
    generator,
    load_policy,
    make_env,
    small_ppo,
)
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from alpacafarm_env.agents.adapters import trunk_of, turn_off_dropout
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO, PPOConfig
from alpacafarm_env.agents.reward_modeling import RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.rollouts import ragged_split, scoring_batch
from alpacafarm_env.agents.value_model import ValueModel, make_value_model
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.oracles.reward_model import RewardModel, load_scorer


def test_values_start_at_zero_and_read_the_state_before_their_token(language_model):
    value_model = ValueModel.from_policy(language_model)
    rollouts = language_model.generate(INSTRUCTIONS, generator=generator(), num_samples=2)
    values = value_model.values(rollouts)
    assert values.shape == rollouts.tokens.shape
    assert values.dtype == torch.float32
    assert not values.any()
    nn.init.normal_(value_model.head.weight, generator=generator(1))
    for row, found in enumerate(ragged_split(value_model.values(rollouts), rollouts.lengths)):
        one = rollouts[[row]]
        ids = torch.cat([one.prompt_tokens, one.tokens])
        hidden = value_model.trunk(input_ids=ids[None]).last_hidden_state[0]
        expected = value_model.head(hidden)[len(one.prompt_tokens) - 1 : -1, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    policy = {parameter.data_ptr() for parameter in language_model.model.parameters()}
    assert policy.isdisjoint(parameter.data_ptr() for parameter in value_model.parameters())


def test_trunk_comes_from_the_reward_model(llama, reward_model_folder):
    value_model = ValueModel.from_pretrained(reward_model_folder, policy=llama)
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_model_folder).model.state_dict()
    ours = value_model.trunk.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not value_model.values(llama.as_rollouts(["Hi"], ["abc"])).any()
    assert all(parameter.requires_grad for parameter in value_model.parameters())


def test_from_a_policy_with_adapters(tokenizer):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    policy = LanguageModel(peft.get_peft_model(build_llama(len(tokenizer)), config), tokenizer, TEMPLATE)
    value_model = ValueModel.from_policy(policy)
    ids = torch.tensor([policy.encode_prompts(["Hi"])[0]])
    expected = policy.model.get_base_model().model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(value_model.trunk(input_ids=ids).last_hidden_state, expected, atol=1e-5, rtol=0)
    assert not any("lora" in name for name, _ in value_model.named_parameters())
    assert all(parameter.requires_grad for parameter in value_model.parameters())
    assert any("lora" in name for name, _ in policy.model.named_parameters())


def test_other_vocabulary_or_no_folder_is_refused(llama, reward_model_folder, tokenizer, tmp_path):
    text = tokenizer.backend_tokenizer.to_str().replace('"!": ', '"@@": ').replace('"!":', '"@@":')
    other = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(text), eos_token="</s>", pad_token="<pad>"
    )
    other.save_pretrained(reward_model_folder)
    with pytest.raises(ValueError, match=rf"2 tokens differ: '!' is id {tokenizer.get_vocab()['!']} .* None"):
        ValueModel.from_pretrained(reward_model_folder, policy=llama)
    with pytest.raises(CheckpointError, match="none"):
        ValueModel.from_pretrained(tmp_path / "none", policy=llama)


def test_a_padding_token_that_only_the_policy_has_is_no_other_vocabulary(llama, reward_model_folder):
    llama.tokenizer = copy.deepcopy(llama.tokenizer)
    llama.tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    ValueModel.from_pretrained(reward_model_folder, policy=llama)
    llama.tokenizer.add_tokens(["<word>"])
    with pytest.raises(ValueError, match="1 tokens differ: '<word>'"):
        ValueModel.from_pretrained(reward_model_folder, policy=llama)


# Roles on the trunk of a LoRA policy ----------------------------------------------------------------------------------


def adapted(policy_folder: Path, **changes: Any) -> LanguageModel:
    """A policy whose adapter is not the identity, as after some training."""
    lora = replace(LORA, init_lora_weights=False, **changes)
    return LanguageModel.from_pretrained(policy_folder, lora=lora, max_response_tokens=16)


def storages(*modules: nn.Module) -> dict[int, int]:
    """Bytes by address of everything that modules hold."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def test_an_adapter_of_its_own_starts_as_the_identity_on_the_very_weights_of_the_policy(policy_folder):
    policy = adapted(policy_folder)
    value_model = ValueModel.on_trunk(policy)
    frozen = {p.data_ptr() for p in value_model.parameters() if not p.requires_grad}
    assert frozen
    assert frozen <= {p.data_ptr() for p in policy.model.parameters()}
    trained = {name for name, p in value_model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in value_model.named_parameters() if "lora_" in name or "head" in name}
    assert {p.data_ptr() for p in value_model.parameters() if p.requires_grad}.isdisjoint(
        p.data_ptr() for p in policy.model.parameters()
    )
    ids = torch.tensor([policy.encode_prompts(["Hi"])[0]])
    base = load_policy(policy_folder).model.model
    expected = base(input_ids=ids).last_hidden_state
    torch.testing.assert_close(value_model.trunk(input_ids=ids).last_hidden_state, expected, rtol=0, atol=0)
    assert not torch.allclose(trunk_of(policy.model)(input_ids=ids).last_hidden_state, expected, atol=1e-3)


def test_gradients_on_the_shared_trunk_are_those_of_a_copied_model(policy_folder):
    """And no other role gets any."""
    policy = adapted(policy_folder)
    value_model = ValueModel.on_trunk(policy)
    with torch.no_grad():
        for parameter in value_model._trained().values():
            parameter.normal_(0, 0.1, generator=generator(2))
    rollouts = policy.generate(INSTRUCTIONS, generator=generator())
    copied = copy.deepcopy(value_model)
    assert storages(copied).keys().isdisjoint(storages(value_model))
    policy.logprobs(rollouts).sum().backward()
    of_policy = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    for model in (value_model, copied):
        model.values(rollouts).square().sum().backward()
    found, expected = ({n: p.grad for n, p in model._trained().items()} for model in (value_model, copied))
    assert_near(found, expected, atol=1e-6)
    assert min(float(gradient.abs().max()) for gradient in expected.values()) > 0
    assert_near({n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}, of_policy, atol=0)
    assert all(p.grad is None for p in value_model.parameters() if not p.requires_grad)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # of an older peft
def test_a_trunk_that_the_policy_changes_is_not_shared(policy_folder, llama):
    with pytest.raises(ValueError, match="LoRA"):
        ValueModel.on_trunk(llama)
    for changes in ({"bias": "all"}, {"modules_to_save": ["norm"]}):
        with pytest.raises(ValueError, match=r"bias='all'|norm"):
            ValueModel.on_trunk(load_policy(policy_folder, lora=replace(LORA, **changes)))


# In PPO ---------------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(policy_folder: Path, out: Path, steps: int = 2) -> PPO:
    """A run of two steps, saved each; `steps` of it are made."""
    config = small_ppo(total_steps=2, save_every=1)
    agent = PPO(make_env(), load_policy(policy_folder, lora=LORA), config=config, seed=3, out=out)
    for _ in itertools.islice(agent.updates(), steps):
        pass
    return agent


def test_ppo_trains_an_adapter_and_resumes_it_to_the_same_bytes(policy_folder, tmp_path):
    agent = train(policy_folder, tmp_path / "whole")
    fresh = {name: p for name, p in agent.value_model.state_dict().items() if "lora_B" in name or "head" in name}
    assert all(p.any() for p in fresh.values())  # all of them were 0
    train(policy_folder, tmp_path / "parts", steps=1)
    train(policy_folder, tmp_path / "parts")
    whole, parts = (files(tmp_path / out / "checkpoint-2") for out in ("whole", "parts"))
    assert whole == parts
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
    saved = load_file(tmp_path / "whole/checkpoint-2/value.safetensors")
    assert saved.keys() == agent.value_model._trained().keys()
    policy = load_file(tmp_path / "whole/checkpoint-2/policy/adapter_model.safetensors")
    assert len(policy) == sum(p.requires_grad for p in agent.policy.model.parameters())


def test_layers_that_are_computed_again_are_those_of_their_role(policy_folder):
    """An adapter that is switched for the other role's would be read in the backward pass, too."""
    found = []
    for again in (False, True):
        config = small_ppo(gradient_checkpointing=again, total_steps=1)
        agent = PPO(make_env(), adapted(policy_folder), config=config)
        agent.learn()
        found.append({name: p.detach() for name, p in agent._loop.parameters.items()})
    assert_near(*found, atol=1e-6)


def test_the_kind_is_named_and_none_takes_what_the_policy_has(policy_folder, llama):
    with pytest.raises(ValueError, match=r"PPOConfig\.value.*'adapter'.*'heed'"):
        PPOConfig(value="heed")
    assert PPO(make_env(), llama, config=small_ppo()).config.value == "model"
    assert PPO(make_env(), load_policy(policy_folder, lora=LORA), config=small_ppo()).config.value == "adapter"
    with pytest.raises(ValueError, match="LoRA"):
        PPO(make_env(), llama, config=small_ppo(value="adapter"))


def test_what_cannot_start_from_a_reward_model_says_so(policy_folder, reward_model_folder):
    with pytest.warns(UserWarning, match=f"not from {reward_model_folder}"):
        make_value_model(load_policy(policy_folder, lora=LORA), "adapter", init=reward_model_folder)


# Beside a reward adapter ----------------------------------------------------------------------------------------------


@pytest.fixture
def reward_adapter(policy_folder, tmp_path):
    """A reward model's LoRA adapter over the policy's base, of other layers and another rank than the policy's."""
    lora = replace(LORA, r=2, target_modules=["q_proj", "up_proj"])
    config = RewardModelingConfig(epochs=2, batch_size=5, learning_rate=1e-2)
    agent = RewardModeling(policy_folder, TinyDataset().preferences(), config=config, lora=lora)
    agent.learn()
    agent.save(tmp_path / "reward_adapter")
    return tmp_path / "reward_adapter"


def test_the_value_starts_from_the_reward_models_adapter(policy_folder, reward_adapter):
    rollouts = load_policy(policy_folder).as_rollouts(INSTRUCTIONS, INSTRUCTIONS)
    ids, _ = scoring_batch(rollouts, fill_token_id=1)
    scorer = turn_off_dropout(load_scorer(reward_adapter, dtype=torch.float32))
    expected = scorer.get_base_model().model(input_ids=ids).last_hidden_state
    policy = adapted(policy_folder)
    agent = PPO(make_env(), policy, value_init=reward_adapter, config=small_ppo(total_steps=1))
    found = agent.value_model.trunk(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not agent.value_model.values(rollouts).any()
    frozen = {p.data_ptr() for p in agent.value_model.parameters() if not p.requires_grad}
    assert frozen <= {p.data_ptr() for p in policy.model.parameters()}
    agent.learn()
    assert all(p.any() for p in agent.value_model._trained().values())
    # A trunk of its own can start there too: the adapter is merged into it.
    merged = make_value_model(policy, "model", init=reward_adapter)
    torch.testing.assert_close(merged.trunk(input_ids=ids).last_hidden_state, expected, rtol=0, atol=1e-5)
    assert all(p.requires_grad for p in merged.parameters())


def test_scores_on_the_trunk_do_not_follow_the_policy(policy_folder, reward_adapter):
    policy = load_policy(policy_folder, lora=LORA)
    oracle = policy.reward_oracle(reward_adapter)
    before = oracle.score(INSTRUCTIONS, INSTRUCTIONS)
    np.testing.assert_allclose(before, RewardModel(reward_adapter).score(INSTRUCTIONS, INSTRUCTIONS), rtol=0, atol=1e-5)
    first = policy.logprobs(policy.as_rollouts(INSTRUCTIONS, INSTRUCTIONS))
    agent = PPO(make_env(oracle=oracle), policy, config=small_ppo(learning_rate=1e-2))
    agent.learn()
    assert not torch.allclose(policy.logprobs(policy.as_rollouts(INSTRUCTIONS, INSTRUCTIONS)), first, atol=1e-2)
    np.testing.assert_array_equal(oracle.score(INSTRUCTIONS, INSTRUCTIONS), before)
