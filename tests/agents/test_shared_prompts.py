"""Groups that read their prompt once: the log-probabilities and gradients of each row by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_worlds import HEADS, LORA, SPECIAL_IDS, TEMPLATE, build_gpt2, build_llama, generator, load_policy, make_env
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from alpacafarm_env.agents import shared_prompts
from alpacafarm_env.agents.group_policy import GroupPolicy, GRPOConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.memory import checkpointed_layers, gradient_checkpointing
from alpacafarm_env.agents.rollouts import Groups, Rollouts, group_batches, ragged_split
from alpacafarm_env.agents.shared_prompts import shares_prompts

GROUPS = ((9, (5, 3, 7)), (4, (6,)), (1, (2, 4)), (12, (0, 8, 0, 1)), (9, (3, 3)), (7, (0,)), (5, (1, 1)))
"""Tokens of a prompt and of each of its responses. The first and the fifth prompt are equal."""


def ragged_groups(groups: Any = GROUPS) -> Rollouts:
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    for length, sizes in groups:
        prompt = rng.integers(3, 250, length).tolist()
        prompts += [prompts[0] if prompts and length == len(prompts[0]) else prompt] * len(sizes)
        responses += [rng.integers(3, 250, size).tolist() for size in sizes]
    texts = [""] * len(prompts)
    return Rollouts.given(texts, texts, prompts, responses, [True] * len(texts), torch.device("cpu"))


def scatter(policy: LanguageModel) -> None:
    """Move what is trained, an adapter's zeros too."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator()), alpha=0.1)


def results(policy: LanguageModel, rollouts: Rollouts, *, layers: Any = (), **options: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of a sum of them of random weights."""
    policy.model.zero_grad()
    with gradient_checkpointing(layers):
        logprobs = policy.logprobs(rollouts, temperature=0.7, **options)
    if not logprobs.requires_grad:
        return logprobs, torch.zeros(1)
    weights = torch.randn(len(logprobs), generator=generator(1))
    (logprobs * weights).sum().backward()
    grads = [each.grad.flatten() for each in policy.model.parameters() if each.grad is not None]
    return logprobs.detach(), torch.cat(grads)


def assert_same(policy: LanguageModel, rollouts: Rollouts, *, close: float = 2e-6, **options: Any) -> None:
    alone = results(policy, rollouts, **options)
    together = results(policy, rollouts, **options, share_prompts=True)
    assert alone[0].std() > 0.1
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=close * max(1.0, float(expected.abs().max())))


@contextmanager
def reading(policy: LanguageModel) -> Iterator[list[int]]:
    """The tokens of each pass inside."""
    seen: list[int] = []
    embedded = policy.model.get_input_embeddings()
    handle = embedded.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    yield seen
    handle.remove()


@pytest.mark.parametrize("role", ["policy", "reference"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_group_has_the_numbers_of_its_rows(role: str, lora: Any, checkpointing: bool, policy_folder: Path) -> None:
    policy = load_policy(policy_folder, lora=lora)
    scatter(policy)
    policy.add_reference()
    scatter(policy)
    layers = checkpointed_layers([policy.model]) if checkpointing else ()
    assert_same(policy, ragged_groups(), role=role, layers=layers)
    both = [policy.logprobs(ragged_groups(), role=each, share_prompts=True) for each in ("policy", "reference")]
    assert (both[0] - both[1]).abs().max() > 0.1


def test_in_float64_they_are_equal_to_ten_digits(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # logits and norms are float32 otherwise
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda norm, x: nn.functional.rms_norm(x, x.shape[-1:], norm.weight))
    policy = LanguageModel(build_llama(len(tokenizer)).double(), tokenizer, TEMPLATE)
    assert_same(policy, ragged_groups(), close=1e-10)


@pytest.mark.parametrize("lora", [None, LORA])
def test_in_bfloat16_they_are_as_near_as_its_rounding(lora: Any, policy_folder: Path) -> None:
    policy = load_policy(policy_folder, lora=lora)
    scatter(policy)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(policy, ragged_groups(), close=0.05)


@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3", "Mistral"])
def test_other_architectures(architecture: str, tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    settings = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "sliding_window": None}
    config = getattr(transformers, f"{architecture}Config")(**sizes, **settings, **SPECIAL_IDS, **HEADS)
    policy = LanguageModel(getattr(transformers, f"{architecture}ForCausalLM")(config), tokenizer, TEMPLATE)
    assert shares_prompts(policy.model)
    assert_same(policy, ragged_groups())


def test_models_that_cannot_read_each_row_by_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    config = transformers.MistralConfig(vocab_size=len(tokenizer), sliding_window=8, **sizes, **SPECIAL_IDS, **HEADS)
    for model in (build_gpt2(len(tokenizer)), transformers.MistralForCausalLM(config)):
        policy = LanguageModel(model, tokenizer, TEMPLATE)
        assert not shares_prompts(model)
        torch.testing.assert_close(
            policy.logprobs(ragged_groups(), share_prompts=True), policy.logprobs(ragged_groups()), rtol=0, atol=0
        )


def test_a_prompt_is_read_once_and_a_last_token_not_at_all(policy_folder: Path) -> None:
    policy, rollouts = load_policy(policy_folder), ragged_groups()
    before = policy.logprobs(rollouts)
    with reading(policy) as seen:
        policy.logprobs(rollouts, share_prompts=True)
        assert seen == [sum(prompt + sum(max(0, size - 1) for size in sizes) for prompt, sizes in GROUPS)]
    assert torch.equal(policy.logprobs(rollouts), before)  # other passes stay as they were


def test_long_rows_in_bfloat16_and_no_rows(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(policy_folder, lora=LORA)
    assert policy.logprobs(ragged_groups()[:0], share_prompts=True).shape == (0,)
    monkeypatch.setattr(shared_prompts, "LONGEST", 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(policy, ragged_groups(), close=0.05)


def test_micro_batches_count_a_groups_prompt_once_and_keep_it_together() -> None:
    prompts, lengths = torch.tensor([40, 40, 40, 20, 20, 90, 10, 10]), torch.tensor([10, 5, 20, 30, 30, 50, 45, 60])
    groups = Groups(torch.tensor([0, 0, 0, 1, 1, 2, 3, 3]), prompts)
    cut = group_batches(prompts + lengths, groups, 100)
    assert sorted(torch.cat(cut).tolist()) == list(range(8))
    assert [rows.tolist() for rows in cut] == [[5], [3, 4], [0, 1, 2], [7], [6]]
    assert group_batches(lengths[:0], groups.of(lengths[:0]), 100) == []


def test_minibatches_hold_whole_groups_and_read_prompts_once(policy_folder: Path) -> None:
    """Some groups are left out, and the last minibatch is of one group less."""
    config = GRPOConfig.sandbox(
        total_steps=1, num_generations=4, rollout_batch_size=16, minibatch_size=8, max_response_tokens=8, num_epochs=2
    )
    policy = load_policy(policy_folder, max_response_tokens=8)
    agent = GroupPolicy(make_env(16), policy, config=replace(config, leave_out_equal=True))
    loop, updated = agent._loop, list[list[int]]()
    update = loop.update

    def noting(micro: Any, sums: Any, *, count: float) -> dict[str, float]:
        updated.append(sorted(torch.cat(micro).tolist()))
        rows = sums.args[0][0][torch.cat(micro)]
        prompts = {tuple(each.tolist()) for each in ragged_split(rows.prompt_tokens, rows.prompt_lengths)}
        with reading(policy) as seen:
            means = update(micro, sums, count=count)
        assert len(micro) == 1
        assert seen == [sum(map(len, prompts)) + int((rows.lengths - 1).clamp(min=0).sum())]
        return means

    loop.update = noting  # type: ignore[method-assign]
    agent.learn()
    for rows in updated:
        groups = {row // 4 for row in rows}
        assert rows == sorted(4 * group + place for group in groups for place in range(4))
    assert len(updated) == 4


def test_the_fullest_pass_has_the_tokens_it_stands_for(policy_folder: Path) -> None:
    config = GRPOConfig.sandbox(num_generations=8, rollout_batch_size=32, minibatch_size=32, max_response_tokens=8)
    policy = load_policy(policy_folder, max_response_tokens=8)
    agent = GroupPolicy(make_env(32), policy, config=config)
    sizes, sums = agent._largest()
    longest, shortest = sizes[0], sizes[-1]
    prompt = longest - 8
    for items in (1, 2, 4):
        with reading(policy) as seen:
            sums(torch.arange(items))
        assert items * longest - 8 <= seen[0] + (seen[0] - prompt) // 7 <= items * longest
    with reading(policy) as seen:
        sums(torch.tensor([len(sizes) - 1]))
    assert seen[0] < shortest
