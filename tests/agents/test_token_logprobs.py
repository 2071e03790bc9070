"""Log-probabilities from hidden states: as through all logits, both ways, whatever a model does to these."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_worlds import LORA, TEMPLATE, build_llama
from torch import Tensor, nn

from alpacafarm_env.agents import token_logprobs as fast
from alpacafarm_env.agents.adapters import with_adapter
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.token_logprobs import plain_output_layer, states_instead_of_logits, token_logprobs


def both(compute: Callable[[], Tensor], states: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    values = compute()
    return values.detach(), torch.autograd.grad(values, states, weights)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("silent", [(), (3, 5)])
@pytest.mark.parametrize("at_once", [1, 4 * 50 * 3, 1e9])
def test_values_and_gradients_are_those_of_logits(monkeypatch, temperature, silent, at_once) -> None:
    monkeypatch.setitem(fast.AT_ONCE, "cpu", at_once)
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(8, 16, generator=draw).requires_grad_()
    matrix, tokens = torch.randn(50, 16, generator=draw), torch.arange(10, 18)
    weights = torch.randn(8, generator=draw)

    def through_logits() -> Tensor:
        logits = (states @ matrix.T).index_fill(1, torch.tensor(silent, dtype=torch.int64), -torch.inf)
        return -nn.functional.cross_entropy(logits / temperature, tokens, reduction="none")

    options: dict[str, Any] = {"temperature": temperature, "silent": silent}
    found = both(lambda: token_logprobs(states, matrix, tokens, **options), states, weights)
    torch.testing.assert_close(found, both(through_logits, states, weights), atol=1e-5, rtol=1e-5)


def test_in_autocast_products_alone_are_rounded() -> None:
    draw = torch.Generator().manual_seed(0)
    states, matrix = torch.randn(40, 64, generator=draw).requires_grad_(), torch.randn(500, 64, generator=draw) / 8
    tokens, weights = torch.arange(40), torch.randn(40, generator=draw)
    exact = both(lambda: token_logprobs(states, matrix, tokens), states, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both(lambda: token_logprobs(states, matrix, tokens), states, weights)
    assert found[0].dtype == torch.float32
    assert (found[0] - exact[0]).abs().max() < 0.03
    assert (found[1] - exact[1]).norm() < 0.01 * exact[1].norm()


def test_a_trained_output_layer_keeps_its_gradient(llama: LanguageModel) -> None:
    assert plain_output_layer(llama.model) is None
    with torch.no_grad():
        assert plain_output_layer(llama.model) is llama.model.lm_head
    llama.logprobs(llama.as_rollouts(["Hi"], ["Hello"])).sum().backward()  # type: ignore[no-untyped-call]
    assert llama.model.lm_head.weight.grad is not None


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_scaled_logits_are_not_taken_for_products(tokenizer: Any, scale: float) -> None:
    model = with_adapter(build_llama(len(tokenizer)), LORA)
    lm = LanguageModel(model, tokenizer, TEMPLATE)
    rollouts, base = lm.as_rollouts(["Hi", "Name a tree"], ["Hello", "Oak"]), lm.model.get_base_model()
    whole, tokens = type(base).forward, rollouts.tokens

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = whole(self, *args, **kwargs)
        output.logits = output.logits if scale == 1 else output.logits * scale
        return output

    base.forward = scaled.__get__(base)
    layer = plain_output_layer(base)
    assert layer is not None
    read = states_instead_of_logits(layer, lambda: lm._read(rollouts, "policy"))
    assert (read is not None) == (scale == 1)
    expected = lm.logits(rollouts).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(lm.logprobs(rollouts), expected, atol=1e-5, rtol=1e-5)
