"""Pooled hidden states of given texts are those of one plain pass a row."""

import pytest
import torch
from tiny_worlds import INSTRUCTIONS

CASES = [(INSTRUCTIONS[0], text) for text in ("A crow.", "", "Two gulls and a wren", "A")] + [
    (INSTRUCTIONS[1], "Hello"),
    (INSTRUCTIONS[3], "4"),
    (INSTRUCTIONS[3], "Four, I think."),
]


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_states_are_those_of_a_plain_pass(language_model, pool):
    language_model.max_response_tokens = 64
    rollouts = language_model.as_rollouts(*zip(*CASES, strict=True))
    rollouts = rollouts[[6, 2, 0, 4, 1, 3, 5]]
    states = language_model.states(rollouts, pool=pool)
    assert not states.requires_grad
    for row in range(len(rollouts)):
        part = rollouts[[row]]
        ids = torch.cat([part.prompt_tokens, part.tokens])[None]
        with torch.no_grad():
            hidden = language_model.model.base_model(input_ids=ids).last_hidden_state[0, len(part.prompt_tokens) :]
        expected = hidden.mean(0) if pool == "mean" else hidden[-1]
        torch.testing.assert_close(states[row], expected, atol=1e-5, rtol=1e-5)


def test_shared_prompts_are_read_once(language_model):
    rollouts = language_model.as_rollouts([INSTRUCTIONS[0]] * 4, ["a", "bc", "def", "g"])
    shapes = []
    trunk = language_model.model.base_model
    trunk.register_forward_pre_hook(lambda m, a, k: shapes.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    language_model.states(rollouts)
    assert shapes == [(1, int(rollouts.prompt_lengths[0])), (4, int(rollouts.lengths.max()))]


def test_no_response_has_no_states(language_model):
    rollouts = language_model.as_rollouts(["Hi", "Hi", "Name a tree"], ["a", "b", "c"])
    empty = type(rollouts).given("abc", "abc", [[5], [5], [6]], [[], [7], []], [False] * 3, language_model.device)
    assert language_model.states(empty).isnan().all(1).tolist() == [True, False, True]


def test_an_unknown_pool_is_refused(language_model):
    with pytest.raises(ValueError, match="'mean' or 'last', got 'max'"):
        language_model.states(language_model.as_rollouts(["Hi"], ["a"]), pool="max")
