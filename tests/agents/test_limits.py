"""The longest prompt and response: AlpacaFarm's where they fit, and what was asked for or an error."""

import pytest
from tiny_models import TEMPLATE, build_llama, generator

from alpacafarm_env import sandbox
from alpacafarm_env.agents import LanguageModel, PolicyActor
from alpacafarm_env.agents.text import fit_limits


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


def test_the_shipped_policy_answers_with_the_defaults():
    policy = LanguageModel.from_pretrained(sandbox.POLICY)
    texts = policy.generate(["List three traits of a lion."], generator=generator()).texts
    explicit = LanguageModel.from_pretrained(sandbox.POLICY, max_prompt_tokens=192, max_response_tokens=64)
    assert explicit.generate(["List three traits of a lion."], generator=generator()).texts == texts
    assert len(PolicyActor(sandbox.POLICY).act(["List three traits of a lion."])) == 1
