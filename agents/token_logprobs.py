"""Log-probabilities of tokens from hidden states, without keeping a number for each word of the vocabulary.

With a frozen output layer W the gradient of log p(t) with respect to the hidden state h is one vector, W[t] − pᵀ W with
p = softmax(W h). So it is computed with log p(t) itself, some hundred tokens at a time. Of a vocabulary of 49,152 a
thousand tokens have 200 MB of logits, which otherwise come and go several times.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from .fused import computed_in, rounded
from .sharding import mesh_of

AT_ONCE: Final = {"cpu": 50e6, "cuda": 500e6}
"""Bytes of float32 logits that there are at a time."""


def plain_output_layer(model: Any) -> nn.Linear | None:
    """A model's output layer if its logits are products with a matrix that is not trained now; else None."""
    layer: Any = model.get_output_embeddings()
    weight: Any = getattr(layer, "weight", None)
    if type(layer) is not nn.Linear or getattr(layer, "bias", None) is not None or mesh_of(weight) is not None:
        return None
    return None if weight.requires_grad and torch.is_grad_enabled() else layer


def states_instead_of_logits(layer: nn.Linear, call: Callable[[], Tensor]) -> Tensor | None:
    """What `call` gives to the output layer; None if it does not return just what that layer gives, such as a share.

    A model may scale its logits or cap them: then these are not the layer's products.
    """
    given: list[Tensor] = []

    def keep(states: Tensor) -> Tensor:
        given.append(states)
        return states

    vars(layer)["forward"] = keep
    try:
        returned = call()
    finally:
        del layer.forward
    return returned if len(given) == 1 and returned is given[0] else None


def without_logits(model: Any, read: Callable[[], Tensor], tokens: Tensor, **options: Any) -> Tensor | None:
    """`token_logprobs` of what `read` gives to a model's output layer; None where logits are needed."""
    layer = plain_output_layer(model)
    states = None if layer is None else states_instead_of_logits(layer, read)
    return None if layer is None or states is None else token_logprobs(states, layer.weight, tokens, **options)


def token_logprobs(
    states: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0, silent: Sequence[int] = ()
) -> Tensor:
    """Returns log softmax(W h / temperature)[t] of states h [n, d], a frozen W [V, d] and tokens t [n]: [n] float32.

    `silent` tokens have probability 0. Gradients flow to the states.
    """
    keep = states.requires_grad and torch.is_grad_enabled()
    given = states.to(computed_in(states)), weight, tokens, temperature or 1.0, tuple(silent), keep
    return _TokenLogprobs.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: float,
        silent: tuple[int, ...],
        keep: bool,
    ) -> Tensor:
        matrix, dtype = rounded(weight, states.dtype), states.dtype
        rows = int(AT_ONCE.get(states.device.type, AT_ONCE["cuda"]) // (4 * len(matrix)))
        rows = max(1, min(rows, len(states)))
        room = states.new_empty(rows, len(matrix))
        wide = room if dtype == torch.float32 else torch.empty_like(room, dtype=torch.float32)
        result = states.new_empty(len(states), dtype=torch.float32)
        directions = torch.empty_like(states) if keep else None
        for start in range(0, len(states), rows):
            part, chosen = states[start : start + rows], tokens[start : start + rows]
            products, logits = room[: len(part)], wide[: len(part)]
            torch.mm(part, matrix.t(), out=products)
            if logits is not products:
                logits.copy_(products)
            if temperature != 1:
                logits /= temperature
            for token in silent:
                logits[:, token] = -torch.inf
            picked, top = logits.gather(1, chosen[:, None])[:, 0], logits.amax(1, keepdim=True)
            total = logits.sub_(top).exp_().sum(1)
            torch.sub(picked - top[:, 0], total.log(), out=result[start : start + rows])
            if directions is not None:
                if logits is not products:
                    products.copy_(logits)
                expected = products.mm(matrix).div_(total[:, None])
                torch.sub(matrix[chosen], expected, out=directions[start : start + rows])
        ctx.temperature = temperature
        if directions is not None:
            ctx.save_for_backward(directions)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (directions,) = ctx.saved_tensors
        return directions * (grad / ctx.temperature)[:, None].to(directions.dtype), None, None, None, None, None
