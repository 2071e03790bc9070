"""Causal attention of training on a CPU: of rows one behind the other, without pads; and in bfloat16.

A pad takes as long as a token. So rows of several lengths are one row of tokens, of which attention alone knows where
each begins. In bfloat16 torch's own attention is slow in its backward pass. Here heads that share a key are rows of one
product: keys and values are not repeated.
"""

import math
from collections.abc import Sequence
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from .precision import SMALL

LONGEST: Final = 512
"""Tokens of a row from which the share of each token in each other is too much to keep."""


def packs(model: nn.Module) -> bool:
    """Whether a model takes `packed_lengths`: a large one on a CPU, all of whose attention is this module's.

    A small model pays for each row's own call; and its numbers stay.
    """
    weights = list(model.parameters())
    if weights[0].device.type != "cpu" or sum(each.numel() for each in weights) < SMALL:
        return False
    kinds = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    return bool(kinds) and all(is_plain(module) and "forward" in vars(module) for module in kinds)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is attention as LLaMA's."""
    return type(module) is LlamaAttention


def fused_attention(attention: Any) -> Any:
    """The forward pass to put into a module of LLaMA's attention."""
    return MethodType(_forward, attention)


def _forward(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    packed_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`packed_lengths` are those of the rows that the one row of `hidden_states` consists of; it needs no mask."""
    lengths = packed_lengths or [hidden_states.shape[1]]
    own = hidden_states.dtype == torch.bfloat16 and torch.is_autocast_enabled("cpu") and max(lengths) <= LONGEST
    # A cache, by either of its names, or another's layout of rows is for the attention that the model is set to.
    others = any(kwargs.get(name) is not None for name in ("cache", "past_key_values", "layout"))
    if packed_lengths is None and (not own or attention_mask is not None or others):
        result: tuple[Tensor, Tensor | None] = type(attention).forward(
            attention, hidden_states, position_embeddings, attention_mask, **kwargs
        )
        return result
    shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    rows = zip(*(each.to(hidden_states.dtype).split(lengths, 2) for each in (query, key, value)), strict=True)
    mixed = torch.cat([attend(q, k, v, attention.scaling, own=own) for q, k, v in rows], 2)
    return attention.o_proj(mixed.transpose(1, 2).reshape(*shape[:2], -1)), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, own: bool, hidden: Tensor | None = None
) -> Tensor:
    """Queries [B, H, L, D], keys and values [B, K, S, D] with K | H -> [B, H, L, D].

    `hidden` [B, 1, L, S] is added to the scores; None: each token sees itself and those before it, L = S. `own`: by
    this module, on a CPU.
    """
    if own:
        if hidden is None:
            hidden = torch.full((query.shape[2], key.shape[2]), -math.inf).triu_(1)
        return _Attention.apply(query, key, value, scale, hidden)  # type: ignore[no-any-return, no-untyped-call]
    given = {"is_causal": True} if hidden is None else {"attn_mask": hidden.to(query.dtype)}
    return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True, **given)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor) -> Tensor:
        (batch, heads, length, size), (shared, seen) = query.shape, key.shape[1:3]
        rows = query.reshape(batch * shared, -1, size)
        key, value = (each.reshape(batch * shared, seen, size) for each in (key, value))
        scores = rows.bmm(key.transpose(1, 2)).float().view(batch, heads, length, seen)
        shares = torch.softmax(scores.mul_(scale).add_(hidden), -1).to(query.dtype).view(len(rows), -1, seen)
        mixed = shares.bmm(value)
        ctx.save_for_backward(rows, key, value, shares, mixed)
        ctx.scale, ctx.shape = scale, (batch, heads, length, size)
        return mixed.view(batch, heads, length, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, key, value, shares, mixed = ctx.saved_tensors
        batch, size = ctx.shape[0], ctx.shape[-1]
        grad = grad.reshape(rows.shape)
        own = (grad * mixed).sum(-1, keepdim=True, dtype=torch.float32).to(grad.dtype)
        d_scores = grad.bmm(value.transpose(1, 2)).sub_(own).mul_(shares).mul_(ctx.scale)
        d_query = d_scores.bmm(key).view(ctx.shape)
        d_key, d_value = (
            weights.transpose(1, 2).bmm(given).view(batch, -1, key.shape[1], size)
            for weights, given in ((d_scores, rows), (shares, grad))
        )
        return d_query, d_key, d_value, None, None
