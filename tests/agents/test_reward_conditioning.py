from pathlib import Path

import pytest
import torch
from tiny_models import BUILDERS, TEMPLATE, build_tokenizer
from tiny_worlds import TEXTS, load_policy

from alpacafarm_env.agents.control_tokens import control_tokens, own_control_token
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.sft import NEGATIVE, POSITIVE, BinaryRewardConditioning, RewardConditioningConfig
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
    expected = float(agent._sums(half)["loss"].detach()) / len(half.tokens)
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
