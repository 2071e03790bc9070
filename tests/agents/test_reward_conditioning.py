from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import BUILDERS, LORA, TEMPLATE, build_tokenizer, generator
from tiny_worlds import TEXTS, load_policy

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.sft import NEGATIVE, POSITIVE, BinaryRewardConditioning, RewardConditioningConfig
from alpacafarm_env.agents.special_tokens import control_tokens, own_control_token
from alpacafarm_env.instructions import Demonstration, Instruction, Preference

PREFERENCES = tuple(
    Preference(
        Instruction(text, id=i, split="preference"),
        ("a" * (2 + i), "b" * (6 - i))[:: 1 if i % 2 else -1],
        1 + (i + 1) % 2,
    )
    for i, text in enumerate(TEXTS)
)
SMALL = RewardConditioningConfig(epochs=2, batch_size=3, learning_rate=1e-3, save_every=2)


@pytest.fixture(params=sorted(BUILDERS))
def policy(request: pytest.FixtureRequest) -> LanguageModel:
    """With a tokenizer of its own, which the agent changes; GPT-2's embeddings are tied, LLaMA's are not."""
    tokenizer = build_tokenizer()
    return LanguageModel(BUILDERS[request.param](len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16)


def test_each_pair_is_read_twice_after_a_token_of_its_own(policy: LanguageModel) -> None:
    assert all(set(p.chosen) == {"a"} and set(p.rejected) == {"b"} for p in PREFERENCES)
    bare = policy.encode_prompts(TEXTS)
    agent = BinaryRewardConditioning(policy, PREFERENCES)
    data = agent._data
    ids = policy.tokenizer.convert_tokens_to_ids([POSITIVE, NEGATIVE])
    assert len(data) == 2 * len(PREFERENCES)
    assert data.instructions == TEXTS * 2
    prompts = [row.tolist() for row in torch.split(data.prompt_tokens, data.prompt_lengths.tolist())]
    assert prompts == [[prompt[0], token, *prompt[1:]] for token in ids for prompt in bare]
    responses = [p.chosen for p in PREFERENCES] + [p.rejected for p in PREFERENCES]
    assert data.texts == tuple(responses)
    assert data.tokens.tolist() == [token for row in policy.encode_responses(responses) for token in row]
    half = data[:5]  # evaluation is after the positive token
    expected = float(agent._sums(half, torch.arange(5))["loss"].detach()) / len(half.tokens)
    chosen = [Demonstration(p.instruction, p.chosen) for p in PREFERENCES]
    assert agent.evaluate(chosen) == pytest.approx(expected, abs=1e-5)


def test_the_token_decides_which_kind_is_said(policy: LanguageModel, tmp_path: Path) -> None:
    config = RewardConditioningConfig(epochs=40, batch_size=10, learning_rate=1e-2, schedule="linear")
    agent = BinaryRewardConditioning(policy, PREFERENCES, config=config)
    agent.learn()
    assert set("".join(agent.act(TEXTS))) == {"a"}
    agent.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", max_response_tokens=16)
    again = BinaryRewardConditioning(loaded, PREFERENCES, config=config)  # trains on: nothing is added or changed
    assert again.act(TEXTS) == agent.act(TEXTS)
    assert torch.equal(again._data.prompt_tokens, agent._data.prompt_tokens)
    positive, negative = control_tokens(loaded.model)
    assert own_control_token(loaded.model) == positive
    loaded.model.config.alpacafarm_control_token = negative
    assert set("".join(again.act(TEXTS))) == {"b"}


def test_control_tokens_learn_and_are_never_targets(policy: LanguageModel) -> None:
    agent = BinaryRewardConditioning(policy, PREFERENCES, config=SMALL)
    ids = list(control_tokens(policy.model))
    before = policy.model.get_input_embeddings().weight[ids].detach().clone()
    assert not set(ids) & set(agent._data.tokens.tolist())
    metrics = agent.learn()
    assert 0 < metrics["loss"] < float("inf")
    assert bool((policy.model.get_input_embeddings().weight[ids] != before).any(1).all())
    samples = policy.generate(TEXTS, generator=torch.Generator().manual_seed(0), num_samples=20)
    assert not set(ids) & set(samples.tokens.tolist())


@pytest.mark.parametrize("architecture", sorted(BUILDERS))
def test_with_lora_the_tokens_are_part_of_the_adapter(architecture: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    LanguageModel(BUILDERS[architecture](len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16).save(tmp_path)
    layers = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}[architecture]
    lora = replace(LORA, target_modules=layers, fan_in_fan_out=architecture == "gpt2", init_lora_weights=False)

    def agent(out: str) -> BinaryRewardConditioning:
        policy = load_policy(tmp_path, lora=lora, max_response_tokens=16)
        config = replace(SMALL, learning_rate=1e-2, save_every=1)
        return BinaryRewardConditioning(policy, PREFERENCES, config=config, out=tmp_path / out)

    first = load_policy(tmp_path, lora=lora).model.state_dict()
    trained = agent("whole")
    policy = trained.policy
    start = {name: value.clone() for name, value in policy.model.state_dict().items()}
    names = [name for name in start if "lora_" in name]
    assert all(torch.equal(start[name], first[name]) for name in names)  # what the adapter was before
    trained.learn()
    changed = {name for name, value in policy.model.state_dict().items() if not torch.equal(value, start[name])}
    assert changed >= set(names)
    assert {name for name in changed if "lora_" not in name} == {n for n in start if "trainable_tokens_delta" in n}
    parts = agent("parts").updates()
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    agent("parts").learn()
    places = [tmp_path / out / "checkpoint-8/policy" for out in ("whole", "parts")]
    whole, resumed = ((place / "adapter_model.safetensors").read_bytes() for place in places)
    assert whole == resumed
    assert len(whole) < (tmp_path / "model.safetensors").stat().st_size / 2
    loaded = load_policy(places[0], max_response_tokens=16)
    assert control_tokens(loaded._base_model) == control_tokens(policy._base_model) != ()
    rollouts = policy.as_rollouts(TEXTS, TEXTS)
    torch.testing.assert_close(loaded.logprobs(rollouts), policy.logprobs(rollouts), rtol=0, atol=0)
    assert loaded.encode_prompts(TEXTS) == policy.encode_prompts(TEXTS)
    assert torch.equal(*(each.generate(TEXTS, generator=generator()).tokens for each in (loaded, policy)))
