"""The value model: zero at the start, causal, over the policy's tokens."""

import peft
import pytest
import torch
from tiny_models import INSTRUCTIONS, TEMPLATE, build_llama, generator
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import Rollouts, ragged_split
from alpacafarm_env.agents.value_model import ValueModel
from alpacafarm_env.errors import CheckpointError


def rollouts_of(policy) -> Rollouts:
    return policy.generate(INSTRUCTIONS, generator=generator(), num_samples=2)


def with_head(value_model: ValueModel) -> ValueModel:
    nn.init.normal_(value_model.head.weight, generator=generator(1))
    return value_model


def test_values_start_at_zero_and_shape_follows_tokens(language_model):
    rollouts = rollouts_of(language_model)
    values = ValueModel.from_policy(language_model).values(rollouts)
    assert values.shape == rollouts.tokens.shape
    assert values.dtype == torch.float32
    assert not values.any()


def test_value_reads_the_state_before_its_token(language_model):
    value_model = with_head(ValueModel.from_policy(language_model))
    rollouts = rollouts_of(language_model)
    together = value_model.values(rollouts)
    for row, values in enumerate(ragged_split(together, rollouts.lengths)):
        one = rollouts[[row]]
        ids = torch.cat([one.prompt_tokens, one.tokens])
        hidden = value_model.trunk(input_ids=ids[None]).last_hidden_state[0]
        expected = value_model.head(hidden)[len(one.prompt_tokens) - 1 : -1, 0]
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_value_does_not_see_its_own_token(llama):
    value_model = with_head(ValueModel.from_policy(llama))
    one, two = (value_model.values(llama.as_rollouts(["Hi"], [text])) for text in ("abc", "abX"))
    torch.testing.assert_close(one[:3], two[:3], atol=1e-6, rtol=0)
    assert abs(float(one[3] - two[3])) > 1e-3


def test_trunk_comes_from_the_reward_model(llama, reward_model_folder):
    value_model = ValueModel.from_pretrained(reward_model_folder, policy=llama)
    reward_model = AutoModelForSequenceClassification.from_pretrained(reward_model_folder)
    theirs, ours = reward_model.model.state_dict(), value_model.trunk.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not value_model.values(rollouts_of(llama)).any()
    assert all(parameter.requires_grad for parameter in value_model.parameters())


def test_nothing_is_shared_with_the_policy(language_model):
    value_model = ValueModel.from_policy(language_model)
    policy = {parameter.data_ptr() for parameter in language_model.model.parameters()}
    assert policy.isdisjoint(parameter.data_ptr() for parameter in value_model.parameters())


def test_learns(llama):
    torch.manual_seed(0)
    value_model = ValueModel.from_policy(llama)
    rollouts = rollouts_of(llama)
    target = torch.randn(len(rollouts.tokens))
    optimizer = torch.optim.Adam(value_model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = (value_model.values(rollouts) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21, transformers 5
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


def test_other_vocabulary_is_refused(llama, reward_model_folder, tokenizer):
    vocabulary = tokenizer.get_vocab()
    backend = type(tokenizer.backend_tokenizer).from_str(
        tokenizer.backend_tokenizer.to_str().replace('"!": ', '"@@": ').replace('"!":', '"@@":')
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>").save_pretrained(
        reward_model_folder
    )
    with pytest.raises(
        ValueError, match=rf"2 tokens differ: '!' is id {vocabulary['!']} for the policy and None there"
    ):
        ValueModel.from_pretrained(reward_model_folder, policy=llama)


def test_missing_folder(llama, tmp_path):
    with pytest.raises(CheckpointError, match="none"):
        ValueModel.from_pretrained(tmp_path / "none", policy=llama)
