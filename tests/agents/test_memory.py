"""Less memory for the same numbers: activations computed again, logits in chunks."""

import copy
from functools import partial

import peft
import pytest
import torch
from agent_worlds import PREFERENCES, RUNS
from tiny_models import ENDS, INSTRUCTIONS, TEMPLATE, build_ending, build_llama, generator
from tiny_worlds import assert_near
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, LlamaConfig, Qwen2Config

from alpacafarm_env.agents import RewardModeling, RewardModelingConfig, language_model, memory
from alpacafarm_env.agents.evaluation import answer
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.memory import checkpointed_layers, gradient_checkpointing, kv_bytes_a_token, rows_that_fit

BUILT_IN_MEMORY = pytest.mark.filterwarnings("ignore:Could not find a config file in  -:UserWarning")


def reward_modeling(policy, **changes):
    return RewardModeling(policy, PREFERENCES, config=RewardModelingConfig(batch_size=2, **changes))


def state(agent):
    trained = agent.model if isinstance(agent, RewardModeling) else agent.policy.model
    return {name: value.detach().clone() for name, value in trained.named_parameters()}


@pytest.mark.parametrize("name", ["sft", "dpo", "ppo", "quark", "reward_modeling"])
def test_agents_learn_the_same_with_checkpointing(name, policy_folder):
    make = {**RUNS, "reward_modeling": reward_modeling}[name]
    found = []
    for setting in (False, True):
        agent = make(policy_folder, gradient_checkpointing=setting)
        layer = checkpointed_layers([agent.model if name == "reward_modeling" else agent.policy.model])[0]
        passes = []  # of a part: the layer's own hooks are called outside of the checkpoint or inside, as versions go
        layer.self_attn.register_forward_hook(lambda module, *_, seen=passes: seen.append(torch.is_grad_enabled()))
        updates = agent.updates()
        metrics = [next(updates), next(updates)]
        assert not any(module.training for module in agent._loop._layers)
        found.append((metrics, state(agent), sum(passes)))
    (expected, weights, num), (metrics, others, num_again) = found
    assert metrics == expected
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    assert num_again == 2 * num  # each pass with gradients is made again


def deep(tokenizer, *, lora):
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 12}
    model = build_llama(len(tokenizer))
    config = copy.deepcopy(model.config)
    for name, size in sizes.items():
        setattr(config, name, size)
    torch.manual_seed(0)
    model = type(model)(config)
    if lora:
        everywhere = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, everywhere)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=generator(3))
    return LanguageModel(model, tokenizer, TEMPLATE, max_response_tokens=16)


def saved_bytes(model, loss):
    """What the graph keeps for its backward pass, beside the weights, and the loss."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, or its place would be used again
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = loss()
    return sum(size for size, _ in storages.values()), result


@BUILT_IN_MEMORY
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_the_same_and_an_eighth_is_kept(lora, tokenizer):
    lm = deep(tokenizer, lora=lora)
    rollouts = lm.generate(INSTRUCTIONS, generator=generator())
    found = []
    for layers in ([], checkpointed_layers([lm.model])):
        with gradient_checkpointing(layers):
            size, loss = saved_bytes(lm.model, lambda: lm.logprobs(rollouts).sum())
        loss.backward()  # outside, as the loop does it
        trained = {name: p.grad for name, p in lm.model.named_parameters() if p.requires_grad}
        found.append((size, trained))
        lm.model.zero_grad()
    (whole, expected), (kept, gradients) = found
    assert kept <= whole / 8
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name
    first = [gradient for name, gradient in gradients.items() if ".layers.0." in name]
    assert len(first) >= 9
    assert all(gradient.any() for gradient in first)


def scored(lm, rollouts, role="policy"):
    """Log-probabilities, gradients of a weighted sum of them, bytes kept for it, and what the output layer made."""
    shapes = []
    layer = lm._base_model.get_output_embeddings()
    watch = layer.register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape)))
    weights = torch.rand(len(rollouts.tokens), generator=generator(2))
    size, found = saved_bytes(lm.model, lambda: lm.logprobs(rollouts, role=role, temperature=0.7))
    num_forward = len(shapes)
    gradients = {}
    if found.requires_grad:
        (found * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in lm.model.named_parameters() if p.requires_grad}
        lm.model.zero_grad()
    watch.remove()
    return found.detach(), gradients, size, shapes[:num_forward], shapes[num_forward:]


@pytest.mark.parametrize("architecture", ENDS)
def test_log_probabilities_in_chunks_are_those_in_one_piece(architecture, tokenizer, monkeypatch):
    lm = build_ending(architecture, tokenizer)
    rollouts = lm.generate(INSTRUCTIONS, generator=generator(), num_samples=2)
    num, vocabulary = len(rollouts.tokens), len(tokenizer)
    expected, gradients, whole, *_ = scored(lm, rollouts)
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", 5 * vocabulary + 1)
    found, others, kept, shapes, again = scored(lm, rollouts)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert_near(others, gradients, atol=2e-5)
    if architecture in ("Gemma2", "Cohere", "Granite"):  # they scale or cap what the output layer gives
        assert shapes == [(num, vocabulary)]
        return
    sizes = [min(5, num - start) for start in range(0, num, 5)]
    assert sorted(shapes) == sorted([(1, vocabulary), *((size, vocabulary) for size in sizes)])
    assert sorted(again) == sorted((size, vocabulary) for size in sizes)  # the backward pass needs them once more
    assert kept <= whole - 4 * num * vocabulary
    assert lm.logits(rollouts).shape == (num, vocabulary)


LLAMA_7B = LlamaConfig()  # 32 layers of 32 heads of 128, 11008 wide within; 32000 tokens
QWEN_HALF = Qwen2Config(  # two heads of keys and values
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
)


def test_rows_that_fit_into_the_memory():
    assert kv_bytes_a_token(LLAMA_7B, torch.bfloat16) == 524_288
    assert kv_bytes_a_token(LLAMA_7B, torch.float32) == 1_048_576
    assert kv_bytes_a_token(QWEN_HALF, torch.bfloat16) == 24 * 2 * 64 * 2 * 2
    assert kv_bytes_a_token(GPT2Config(), torch.float32) == 12 * 12 * 64 * 2 * 4
    rows = partial(rows_that_fit, prompt=192, response=300)
    # 257.9 MB of keys and values, 19.0 to read the prompt, 0.5 to draw
    assert rows(0.2775e9 * 1.25 * 96 + 1e7, LLAMA_7B, torch.bfloat16) == 96
    assert rows(50e9, LLAMA_7B, torch.bfloat16) == 144
    assert rows(50e9, LLAMA_7B, torch.float32) == 72
    # 6.05 MB, 6.98 and 2.43: the prompts take more than what is kept of them
    assert rows(10e9, QWEN_HALF, torch.bfloat16) == int(8e9 / 15.46e6)
    assert rows(0, LLAMA_7B, torch.bfloat16) == 1


@pytest.mark.parametrize(("given", "most"), [(3, 3), (None, 8)])
def test_rows_sampled_at_once_change_no_sample(given, most, policy_folder, monkeypatch):
    """A number that is set, or what the memory's formula says, for training and evaluation."""
    whole = RUNS["ppo"](policy_folder)
    expected = next(whole.updates()), answer(whole.policy, INSTRUCTIONS * 4, seed=0, split="val", temperature=1.0).texts
    monkeypatch.setattr(language_model, "sampling_rows", lambda model, prompt, response: 8)
    agent = RUNS["ppo"](policy_folder, sampling_batch_size=given)
    shapes = []
    agent.policy.model.register_forward_pre_hook(
        lambda _, __, options: shapes.append(options["input_ids"].shape) if options["use_cache"] else None,
        with_kwargs=True,
    )
    metrics = next(agent.updates())
    assert metrics == pytest.approx(expected[0], abs=1e-5)
    again = answer(agent.policy, INSTRUCTIONS * 4, seed=0, split="val", temperature=1.0, batch_size=given)
    assert again.texts == expected[1]
    assert max(rows for rows, width in shapes if width == 1) == most
