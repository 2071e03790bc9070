"""Causal attention of training in bfloat16 on a CPU, where torch's own is slow in its backward pass.

Heads that share a key are rows of one product: keys and values are not repeated.
"""

import math
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

LONGEST: Final = 512
"""Tokens of a row from which the share of each token in each other is too much to keep."""


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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if (
        attention_mask is not None
        or any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))  # the older name
        or hidden_states.dtype != torch.bfloat16
        or not torch.is_autocast_enabled("cpu")
        or hidden_states.shape[1] > LONGEST
    ):
        result: tuple[Tensor, Tensor | None] = type(attention).forward(
            attention, hidden_states, position_embeddings, attention_mask, **kwargs
        )
        return result
    shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    given = (each.to(hidden_states.dtype) for each in (query, key, value))
    mixed = _CausalAttention.apply(*given, attention.scaling)  # type: ignore[no-untyped-call]
    return attention.o_proj(mixed.transpose(1, 2).reshape(*shape[:2], -1)), None


class _CausalAttention(torch.autograd.Function):
    """Queries [B, H, L, D], keys and values [B, K, L, D] with K | H -> [B, H, L, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        (batch, heads, length, size), shared = query.shape, key.shape[1]
        rows = query.reshape(batch * shared, -1, size)
        key, value = (each.reshape(batch * shared, length, size) for each in (key, value))
        scores = rows.bmm(key.transpose(1, 2)).float().view(-1, length, length)
        later = torch.full((length, length), -math.inf).triu_(1)
        shares = torch.softmax(scores.mul_(scale).add_(later), -1).to(query.dtype).view(len(rows), -1, length)
        mixed = shares.bmm(value)
        ctx.save_for_backward(rows, key, value, shares, mixed)
        ctx.scale, ctx.shape = scale, (batch, heads, length, size)
        return mixed.view(batch, heads, length, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, key, value, shares, mixed = ctx.saved_tensors
        batch, _, length, size = ctx.shape
        grad = grad.reshape(rows.shape)
        own = (grad * mixed).sum(-1, keepdim=True, dtype=torch.float32).to(grad.dtype)
        d_scores = grad.bmm(value.transpose(1, 2)).sub_(own).mul_(shares).mul_(ctx.scale)
        d_query = d_scores.bmm(key).view(ctx.shape)
        d_key, d_value = (
            weights.transpose(1, 2).bmm(given).view(batch, -1, length, size)
            for weights, given in ((d_scores, rows), (shares, grad))
        )
        return d_query, d_key, d_value, None
