"""Keys and values of a batch that is being decoded, in buffers allocated once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class PreallocatedCache(Cache):
    """Keys and values of all layers, in buffers allocated once for rows of at most `max_length` tokens.

    The first `update` brings the states of U prompts: row b takes those of prompt `source[b]` ([B] int64). `known` are
    each layer's keys and values [heads, P, head size] of a prompt read already: it is prompt 0, `update` brings the
    others.
    """

    def __init__(
        self, num_layers: int, source: Tensor, max_length: int, *, known: Sequence[tuple[Tensor, ...]] | None = None
    ) -> None:
        states = known or [()] * num_layers
        self._own_layers = [_PreallocatedLayer(source, max_length, states[i]) for i in range(num_layers)]
        super().__init__(layers=list(self._own_layers))

    def fill_with_known(self) -> None:
        """Replaces the first `update` where the known prompt is the only one."""
        for layer in self._own_layers:
            layer.fill(*layer.known)

    def states(self, row: int, length: int) -> list[tuple[Tensor, ...]]:
        """Copies of a row's newest `length` keys and values, each [heads, length, head size], layer by layer."""
        return [layer.states(row, length) for layer in self._own_layers]

    def close_up(self, places: Tensor, movers: Tensor, num_rows: int) -> None:
        """Copies rows `movers` over rows `places` and keeps the first `num_rows`."""
        for layer in self._own_layers:
            layer.close_up(places, movers, num_rows)


class _PreallocatedLayer(CacheLayerMixin):
    """One layer's two buffers [B, heads, max_length, head size]; `update` writes in place and returns views."""

    def __init__(self, source: Tensor, max_length: int, known: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = tuple(states[None] for states in known)
        self._source = source
        self._max_length = max_length
        self._length = 0
        self._buffers: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._buffers = tuple(
            states.new_empty(len(self._source), states.shape[1], self._max_length, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Gives each row the keys and values of its prompt, from [U, heads, width, head size]."""
        self.lazy_initialization(keys, values)
        self._length = keys.shape[2]
        for buffer, part in zip(self._buffers, (keys, values), strict=True):
            # One prompt is spread out by the assignment itself, without a second copy of all rows.
            buffer[:, :, : self._length] = part if len(part) == 1 else part[self._source]
        self.known = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.fill(*map(self._beside_known, (key_states, value_states), self.known or (None, None)))
            return key_states, value_states
        end = self._length + key_states.shape[2]
        keys, values = self._buffers
        keys[:, :, self._length : end] = key_states
        values[:, :, self._length : end] = value_states
        self._length = end
        return keys[:, :, :end], values[:, :, :end]

    @staticmethod
    def _beside_known(states: Tensor, known: Tensor | None) -> Tensor:
        if known is None:
            return states
        return torch.cat([functional.pad(known, (0, 0, states.shape[2] - known.shape[2], 0)), states])

    def states(self, row: int, length: int) -> tuple[Tensor, ...]:
        return tuple(buffer[row, :, self._length - length : self._length].clone() for buffer in self._buffers)

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
