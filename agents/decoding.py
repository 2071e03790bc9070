"""What decoding keeps of tokens read before, and how a CPU attends to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

GROUPED = "alpacafarm_grouped"
"""The name of `attend_grouped` in transformers' interface."""


class PreallocatedCache(Cache):
    """Keys and values of all layers, in buffers allocated once.

    Of B rows, each with a prompt of at most `width` tokens that ends before slot `width`, and what follows from there.
    """

    def __init__(self, num_layers: int, num_rows: int, width: int, max_new_tokens: int) -> None:
        self._own_layers = [_PreallocatedLayer(num_rows, width, max_new_tokens) for _ in range(num_layers)]
        super().__init__(layers=list(self._own_layers))

    def store(self, read: Any, rows: Tensor, places: Tensor, lengths: Tensor) -> None:
        """Puts the prompts of a pass, right padded, into rows: into `rows[i]` the one at `places[i]` of `lengths`."""
        for layer, source in zip(self._own_layers, read.layers, strict=True):
            layer.store((source.keys, source.values), rows, places, lengths)

    def close_up(self, places: Tensor, movers: Tensor, num_rows: int) -> None:
        """Copies rows `movers` over rows `places` and keeps the first `num_rows`."""
        for layer in self._own_layers:
            layer.close_up(places, movers, num_rows)


class _PreallocatedLayer(CacheLayerMixin):
    """One layer's two buffers [B, heads, slots, head size]; `update` writes in place and returns views."""

    def __init__(self, num_rows: int, width: int, max_new_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows, self._width, self._max_length = num_rows, width, width + max_new_tokens
        self._length = width
        self._buffers: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros: hidden slots count with weight 0, and 0 times what was there may be NaN.
        self._buffers = tuple(
            states.new_zeros(self._num_rows, states.shape[1], self._max_length, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def store(self, states: tuple[Tensor, Tensor], rows: Tensor, places: Tensor, lengths: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*states)
        read = states[0].shape[2]
        slots = (torch.arange(read, device=lengths.device) - read + lengths[:, None]).clamp_(min=0)
        for buffer, part in zip(self._buffers, states, strict=True):
            moved = part.gather(2, slots[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
            buffer[rows, :, self._width - read : self._width] = moved[places]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self._length + key_states.shape[2]
        keys, values = self._buffers
        keys[:, :, self._length : end] = key_states
        values[:, :, self._length : end] = value_states
        self._length = end
        return keys[:, :, :end], values[:, :, :end]

    def close_up(self, places: Tensor, movers: Tensor, num_rows: int) -> None:
        for buffer in self._buffers:
            buffer[places, :, : self._length] = buffer[movers, :, : self._length]
        self._buffers = tuple(buffer[:num_rows] for buffer in self._buffers)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Older versions of transformers 5 give the positions of the queries instead of their number.
        return self._length + (len(query_length) if isinstance(query_length, Tensor) else query_length), 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._max_length

    get_max_cache_shape = get_max_length  # what older versions of transformers 5 call it


def attend_grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token a row, as transformers' interface asks for it: [B, 1, heads, head size].

    Queries [B, heads, 1, size] whose heads share keys [B, fewer heads, S, size] are the rows of one matrix: a CPU's
    attention kernels, made for many queries, take twice as long.
    """
    heads, size = key.shape[1], query.shape[-1]
    grouped = query.reshape(len(query), heads, -1, size) * (size**-0.5 if scaling is None else scaling)
    scores = (grouped @ key.transpose(2, 3)).float()
    if attention_mask is not None:
        scores += attention_mask
    return (scores.softmax(dim=-1).to(value.dtype) @ value).flatten(1, 2)[:, None], None


AttentionInterface.register(GROUPED, attend_grouped)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Passes inside, of one token a row, attend by `attend_grouped`, on a CPU and where nothing else is asked for."""
    config = model.config.get_text_config()
    plain = not getattr(config, "attn_logit_softcapping", None) and model._supports_attention_backend
    before = config._attn_implementation
    if model.device.type != "cpu" or before != "sdpa" or not plain:
        yield
        return
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before
