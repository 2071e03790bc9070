"""Passes with gradients over responses; where they are of groups, a group's prompt is read once.

All prompts, then all responses, are one row of tokens, without pads. Attention alone is of rows: a prompt attends to
itself, a response to its prompt and itself. The rest of a layer does not know whose token it computes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import LONGEST, attend
from .rollouts import Rollouts, length_mask, output_layer_at, pad_rows, scoring_inputs, unpad

SHARED: Final = "alpacafarm_shared"
"""The name of `attend_shared` in transformers' interface."""
PLAIN: Final = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
"""Attention to all tokens before, in models whose other layers look at one token at a time."""


class Layout(NamedTuple):
    """Which of a row's tokens, those of G prompts and then of B responses, attention sees where; pads are token 0.

    Attributes:
        prompts: [G, P] int64, the tokens of each prompt.
        responses: [B, T] int64, those of each response.
        keys: [B, P + T] int64, its prompt's and its own.
        hidden: [B, 1, T, P + T], what is added to its scores: -inf where it does not see a key.
        back: [tokens] int64, each token's place among G x P prompt and then B x T response slots.
    """

    prompts: Tensor
    responses: Tensor
    keys: Tensor
    hidden: Tensor
    back: Tensor


def shares_prompts(model: Any) -> bool:
    """Whether a model can make such a pass."""
    config = model.config.get_text_config()
    kinds = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    plain = all(type(module).__name__ in PLAIN and getattr(module, "sliding_window", None) is None for module in kinds)
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    return bool(kinds) and plain and not windowed and config._attn_implementation == "sdpa"


@contextmanager
def scoring_pass(model: Any, rollouts: Rollouts, fill_token_id: int, *, share: bool) -> Iterator[dict[str, Any]]:
    """A model's keywords for one pass inside, whose logits are those of each response token, [sum T, V].

    `share`: rows with one prompt that are neighbours read it once, if the model can.
    """
    if not (share and len(rollouts) and shares_prompts(model)):
        inputs, predicts = scoring_inputs(model, rollouts, fill_token_id)
        with output_layer_at(model, predicts):
            yield inputs
        return
    inputs, index = shared_inputs(rollouts)
    predicts = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    predicts[0, index] = True
    order = (predicts[0].cumsum(0) - 1)[index]  # a prompt's last token predicts the first one of each response
    with _attention_of(model), output_layer_at(model, predicts, order):
        yield inputs


def shared_inputs(rollouts: Rollouts) -> tuple[dict[str, Any], Tensor]:
    """The keywords, and the place of the token that predicts each response token, [sum T].

    A response's last token predicts nothing, so it is not read.
    """
    padded = pad_rows(rollouts.prompt_tokens, rollouts.prompt_lengths, -1)
    differs = (padded[1:] != padded[:-1]).any(1)
    first = torch.cat([differs.new_ones(1), differs])
    group, ends, own = first.cumsum(0) - 1, rollouts.prompt_lengths[first], (rollouts.lengths - 1).clamp(min=0)
    prompts, prompt_at = _table(ends, 0)
    responses, response_at = _table(own, int(ends.sum()))
    tokens = unpad(padded[first], ends), unpad(pad_rows(rollouts.tokens, rollouts.lengths), own)
    width = responses.shape[1]
    later = torch.ones(width, width, dtype=torch.bool, device=own.device).triu_(1)
    hidden = torch.cat([~prompt_at[group][:, None].expand(-1, width, -1), later.expand(len(own), -1, -1)], 2)[:, None]
    layout = Layout(
        prompts=prompts,
        responses=responses,
        keys=torch.cat([prompts[group], responses], 1),
        hidden=torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf),
        back=torch.cat([prompt_at.flatten(), response_at.flatten()]).nonzero()[:, 0],
    )
    places = [at.cumsum(1) - 1 for at in (prompt_at, response_at)]
    position_ids = torch.cat([places[0][prompt_at], (places[1] + ends[group, None])[response_at]])
    predicting = torch.cat([prompts[group].gather(1, ends[group, None] - 1), responses], 1)
    inputs = {"input_ids": torch.cat(tokens)[None], "position_ids": position_ids[None], "layout": layout}
    return {**inputs, "use_cache": False}, unpad(predicting, rollouts.lengths)


def _table(lengths: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The places [B, L] from `start` on of rows one behind the other, 0 at pads; and where there is none, [B, L]."""
    real = length_mask(lengths, max(1, int(lengths.max())))
    return torch.where(real, real.flatten().cumsum(0).view_as(real) - 1 + start, 0), real


def attend_shared(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    layout: Layout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' interface asks for it: [1, heads, tokens, head size] -> [1, tokens, heads, size]."""
    size = query.shape[-1]
    queries, keys, values = (each.to(value.dtype).transpose(1, 2)[0].flatten(1) for each in (query, key, value))

    def rows(states: Tensor, places: Tensor) -> Tensor:
        # Its backward pass adds up what comes back to a token several times faster than that of an index.
        return embedding(places, states).view(*places.shape, -1, size).transpose(1, 2)

    small = value.device.type == "cpu" and value.dtype == torch.bfloat16 and layout.keys.shape[1] <= LONGEST
    scaled = partial(attend, scale=size**-0.5 if scaling is None else scaling, own=small)
    prompts = scaled(*(rows(states, layout.prompts) for states in (queries, keys, values)))
    seen = [rows(states, layout.keys) for states in (keys, values)]
    responses = scaled(rows(queries, layout.responses), *seen, hidden=layout.hidden)
    mixed = torch.cat([each.transpose(1, 2).flatten(0, 1).flatten(1) for each in (prompts, responses)])
    return embedding(layout.back, mixed).view(1, len(layout.back), -1, size), None


AttentionInterface.register(SHARED, attend_shared)


@contextmanager
def _attending_shared(config: Any) -> Iterator[None]:
    before, config._attn_implementation = config._attn_implementation, SHARED
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _attention_of(model: Any) -> Iterator[None]:
    """Passes inside attend by `attend_shared`, also where the backward pass computes a checkpointed layer again."""
    config = model.config.get_text_config()
    layers: list[Any] = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    checkpointed = [layer for layer in layers if layer.training and layer.gradient_checkpointing]
    before = [layer._gradient_checkpointing_func for layer in checkpointed]

    def within(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, *args, **kwargs: plain(_attending_shared(config)(function), *args, **kwargs)

    for layer, plain in zip(checkpointed, before, strict=True):
        layer._gradient_checkpointing_func = within(plain)
    try:
        with _attending_shared(config):
            yield
    finally:
        for layer, plain in zip(checkpointed, before, strict=True):
            layer._gradient_checkpointing_func = plain
