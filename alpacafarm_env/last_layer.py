"""Less work in a decoder's last layer, where only some positions are read afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification


@contextmanager
def last_mlp_at(model: Any, positions: Tensor) -> Iterator[None]:
    """Forward passes inside compute the last layer's MLP at some positions ([B, L] mask) only; it adds 0 at the others.

    For whoever reads the last hidden states of these positions alone: no attention comes after that MLP, so they stay
    the same but for rounding. A response is often a third of its row, and of a text to score one position counts.
    """
    layer = last_layer(model)
    if layer is None:
        yield
        return
    checkpointed = layer.training and getattr(layer, "gradient_checkpointing", False)
    plain = getattr(layer, "_gradient_checkpointing_func", None)
    if checkpointed and plain is not None:  # what the backward pass computes again, it must compute at these positions
        again = partial(_picking, layer.mlp, positions)
        layer._gradient_checkpointing_func = partial(plain, context_fn=lambda: (nullcontext(), again()))
    try:
        with _picking(layer.mlp, positions):
            yield
    finally:
        if checkpointed:
            layer._gradient_checkpointing_func = plain


def last_mlp_for_scores(model: Any, ids: Tensor) -> AbstractContextManager[None]:
    """`last_mlp_at` where a sequence classifier reads its score: at each row's last token that is no pad.

    For those of transformers' decoders that have this rule in common; for others nothing changes.
    """
    if (pad := pad_before_score(model)) is None:
        return nullcontext()
    numbers = torch.arange(ids.shape[1], device=ids.device)
    last = (numbers * (ids != pad)).argmax(-1)
    return last_mlp_at(without_adapters(model), numbers == last[:, None])


def pad_before_score(model: Any) -> int | None:
    """The pad after whose last other token a decoder of transformers reads its score; None: its rule is another one.

    Right of its texts such a model needs no attention mask: no token sees a pad.
    """
    bare = without_adapters(model)
    shares_rule = isinstance(bare, GenericForSequenceClassification)
    pad: int | None = bare.config.get_text_config().pad_token_id if shares_rule else None
    return pad


def last_layer(model: Any) -> Any:
    """A decoder's last layer; None where it cannot be told which that is, or its `mlp` may look at other positions."""
    trunk = without_adapters(model).base_model
    depth = getattr(trunk.config.get_text_config(), "num_hidden_layers", 0)
    stacks = [each for each in trunk.children() if isinstance(each, nn.ModuleList) and len(each) == depth]
    if len(stacks) != 1:
        return None
    mlps = [getattr(layer, "mlp", None) for layer in stacks[0]]
    if not isinstance(mlps[-1], nn.Module) or sum(mlp is mlps[-1] for mlp in mlps) > 1:
        return None
    # More than one input, or experts that report on their tokens: not a function of each position alone.
    plain = len(inspect.signature(mlps[-1].forward).parameters) == 1
    routed = any("expert" in name or "router" in name for name, _ in mlps[-1].named_modules())
    return stacks[0][-1] if plain and not routed else None


def without_adapters(model: Any) -> Any:
    """The model below a `PeftModel`'s adapters; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _picking(mlp: nn.Module, positions: Tensor) -> Iterator[None]:
    rows = positions.flatten().nonzero()[:, 0]

    def pick(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].flatten(0, 1).index_select(0, rows)[None],)

    def spread(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        nothing = output.new_zeros(positions.numel(), output.shape[-1])
        return nothing.index_copy(0, rows, output[0]).view(*positions.shape, -1)

    handles = [mlp.register_forward_pre_hook(pick), mlp.register_forward_hook(spread)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
