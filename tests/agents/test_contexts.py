"""Contexts that begin with one another: states equal to those of one pass each, and nothing read twice."""

import pytest
import torch
from tiny_models import BUILDERS, build_tokenizer

from alpacafarm_env.agents.adapters import turn_off_dropout
from alpacafarm_env.agents.contexts import GrowingContexts, last_states

LENGTH = 24
VOCABULARY = len(build_tokenizer())


@pytest.fixture(params=sorted(BUILDERS))
def trunk(request):
    return turn_off_dropout(BUILDERS[request.param](VOCABULARY)).base_model


def table(contexts):
    """Right padded with 2, a token that contexts have too, [B, LENGTH]; and lengths."""
    rows = [[*context, *[2] * (LENGTH - len(context))] for context in contexts]
    return torch.tensor(rows), torch.tensor([len(context) for context in contexts])


def one_by_one(trunk, contexts):
    return torch.cat([trunk(input_ids=torch.tensor([context])).last_hidden_state[:, -1] for context in contexts])


def count_tokens(trunk):
    """What each call of the trunk has read."""
    counts = []
    trunk.register_forward_pre_hook(lambda _, args, named: counts.append(named["input_ids"].numel()), with_kwargs=True)
    return counts


def test_states_and_gradients_are_those_of_one_pass_each(trunk):
    a, b = [5, 6, 7, 8, 9, 10, 2, 2], [5, 6, 7, 3]
    contexts = [a[:3], b, a, a[:6], a[:7], a[:1], [9], a]
    expected = one_by_one(trunk, contexts)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((expected * weights).sum(), trunk.parameters())
    counts = count_tokens(trunk)
    found = last_states(trunk, *table(contexts))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert counts == [3 * len(a)]  # a, b and [9], padded to the longest
    for mine, theirs in zip(torch.autograd.grad((found * weights).sum(), trunk.parameters()), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_contexts_may_grow_end_shrink_and_change(trunk):
    rng = torch.Generator().manual_seed(0)

    def draw(size):
        return torch.randint(VOCABULARY, (size,), generator=rng).tolist()

    cache, contexts = GrowingContexts(trunk), [draw(3), draw(9), draw(1), draw(LENGTH)]
    for step in range(30):
        states = cache.last_states(*table(contexts))
        torch.testing.assert_close(states, one_by_one(trunk, contexts).detach(), rtol=1e-4, atol=1e-5)
        assert not states.requires_grad
        for row, context in enumerate(contexts):
            kind = (step * 7 + row * 3) % 11
            if len(context) == LENGTH or kind == 0:
                contexts[row] = draw(1 + kind)  # another episode
            elif kind == 1:
                contexts[row] = context[: max(1, len(context) // 2)]
            elif kind == 2:
                contexts[row] = [*context[:-1], *draw(2)]
            elif kind > 3:
                contexts[row] = context + draw(1)
        if step == 20:
            contexts = contexts[:2]


def test_a_token_is_read_once(trunk):
    counts, cache = count_tokens(trunk), GrowingContexts(trunk)
    prompts = [list(range(5, 15)), list(range(20, 26))]
    for length in range(5):
        cache.last_states(*table([[*prompt, *[7] * length] for prompt in prompts]))
    assert counts == [2 * 9, 2, 2, 2, 2, 2]  # all but the last tokens of the prompts, padded; then one a row


def test_other_weights_are_noticed(trunk):
    cache, contexts = GrowingContexts(trunk), [[5, 6, 7], [8, 9]]
    before = cache.last_states(*table(contexts))
    optimizer = torch.optim.Adam(trunk.parameters(), lr=0.1)
    last_states(trunk, *table(contexts)).sum().backward()
    optimizer.step()
    after = cache.last_states(*table(contexts))
    torch.testing.assert_close(after, one_by_one(trunk, contexts).detach(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, after)
    with torch.no_grad():
        state = {name: value.clone() for name, value in trunk.state_dict().items()}
        trunk.load_state_dict({name: value * 1.5 for name, value in state.items()})
    torch.testing.assert_close(
        cache.last_states(*table(contexts)), one_by_one(trunk, contexts).detach(), rtol=1e-4, atol=1e-5
    )
