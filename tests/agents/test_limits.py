"""The longest prompt and response: AlpacaFarm's where they fit, and what was asked for or an error."""

import pytest
from tiny_models import TEMPLATE, build_llama, build_tokenizer

from alpacafarm_env.agents import BinaryRewardConditioning, LanguageModel, PolicyActor, RewardConditioningConfig
from alpacafarm_env.agents.language_model import fit_limits
from alpacafarm_env.instructions import Preference


@pytest.mark.parametrize("positions", [4, 100, 256, 257, 400, 491, 492, 4096, float("inf")])
def test_defaults_fit_and_are_alpacafarms_from_492_positions(positions):
    prompt, response = fit_limits(None, None, positions)
    assert min(prompt, response) >= 1
    assert prompt + response == min(positions, 192 + 300)
    assert response >= min(int(min(positions, 1200) / 4), 300)
    # What is asked for is kept, and the other gives way.
    assert fit_limits(2, None, positions) == (2, min(300, positions - 2))
    assert fit_limits(None, 2, positions) == (min(192, positions - 2), 2)


@pytest.mark.parametrize("asked", [(200, 57), (256, None), (None, 256), (0, None), (None, 0), (-1, 5)])
def test_what_does_not_fit_is_an_error_at_once(tokenizer, asked):
    model = build_llama(len(tokenizer))  # 256 positions
    with pytest.raises(ValueError, match="max_prompt_tokens and max_response_tokens"):
        LanguageModel(model, tokenizer, TEMPLATE, max_prompt_tokens=asked[0], max_response_tokens=asked[1])


def test_a_control_token_has_a_position_beside_the_longest_prompt_and_response(tmp_path):
    tokenizer = build_tokenizer()
    policy = LanguageModel(build_llama(len(tokenizer)), tokenizer, TEMPLATE)  # 256 positions
    assert (policy.max_prompt_tokens, policy.max_response_tokens) == (192, 64)
    num_around = len(policy.encode_prompts(["a"])[0]) - 1
    texts = ["a" * (length - num_around) for length in (191, 192)]
    pairs = [Preference(text, ("b" * 80, "c"), 1) for text in texts]
    config = RewardConditioningConfig(epochs=1, batch_size=4)
    with pytest.warns(UserWarning, match=r"2 of 4 prompts|are cut to max_response_tokens"):
        agent = BinaryRewardConditioning(policy, pairs, config=config)
    assert agent.num_left_out == 2  # a pair is read twice
    assert agent.learn()["step"] == 1
    agent.save(tmp_path)
    for conditioned in (policy, LanguageModel.from_pretrained(tmp_path)):
        assert (conditioned.max_prompt_tokens, conditioned.max_response_tokens) == (191, 64)
        assert len(PolicyActor(conditioned).act(texts[:1])) == 1
        with pytest.raises(ValueError, match="1 to 191 tokens, got 192"):
            PolicyActor(conditioned).act(texts)
    with pytest.raises(ValueError, match="control token"):
        LanguageModel.from_pretrained(tmp_path, max_prompt_tokens=192, max_response_tokens=64)
