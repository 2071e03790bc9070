"""The value model: zero at the start, causal, over the policy's tokens."""

import peft
import pytest
import torch
from tiny_models import INSTRUCTIONS, TEMPLATE, build_llama, generator
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import ValueModel
from alpacafarm_env.agents.rollouts import ragged_split
from alpacafarm_env.errors import CheckpointError


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
