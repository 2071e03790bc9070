"""Reading contexts, token ids [B, L] with their lengths, for whoever asks for the state of each context's last token.

Reinforcement learning token by token asks this for every token of a response: of contexts that begin with one another.
Read one by one they cost as much as their whole prompt each. Without gradient `GrowingContexts` keeps keys and values
from call to call; with gradient `last_states` reads each context once for all that it begins with.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ..last_layer import last_mlp_at
from ..pretrained import cache_keyword


def last_states(trunk: PreTrainedModel, ids: Tensor, lengths: Tensor) -> Tensor:
    """The last hidden state [B, d] of each context, right padded; those that others begin with are not read again."""
    whole, part_of = _whole_contexts(ids, lengths)
    rows = torch.tensor(whole, device=ids.device)
    ids = ids[rows, : int(lengths.max())]
    row, last = torch.tensor(part_of, device=ids.device), lengths - 1
    positions = torch.zeros_like(ids, dtype=torch.bool)
    positions[row, last] = True
    with last_mlp_at(trunk, positions):
        # Without a mask: a causal model does not see the padding on the right.
        hidden: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[row, last]


def _whole_contexts(ids: Tensor, lengths: Tensor) -> tuple[list[int], list[int]]:
    """The rows that no other begins with, and for each row the number among these of one that begins with it."""
    table = ids.cpu().numpy().astype(">i4")  # big-endian: bytes have the order of the tokens
    contexts = [row[:length].tobytes() for row, length in zip(table, lengths.tolist(), strict=True)]
    whole: list[int] = []
    part_of = [0] * len(contexts)
    # In this order a context stands right before those that begin with it.
    for row in sorted(range(len(contexts)), key=contexts.__getitem__, reverse=True):
        if not whole or not contexts[whole[-1]].startswith(contexts[row]):
            whole.append(row)
        part_of[row] = len(whole) - 1
    return whole, part_of


class GrowingContexts:
    """`last_states` without gradient of contexts most of which are those of the call before and a token more.

    Row b is compared with row b of that call, token by token: what it begins with alike is not read again. So any
    contexts may come, in any order; a change of the weights, the number of rows or the device begins anew.
    """

    def __init__(self, trunk: PreTrainedModel) -> None:
        self._trunk, self._cache_keyword = trunk, cache_keyword(trunk)
        self._num_layers = int(trunk.config.get_text_config().num_hidden_layers)
        self._state: tuple[Any, ...] = ()

    @torch.no_grad()
    def last_states(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden state [B, d] of each context: ids [B, L] int64, right padded, lengths [B] at least 1."""
        num_cached = self._num_cached(ids, lengths)
        rows = (num_cached < lengths - 1).nonzero()[:, 0]
        if len(rows):
            self._read(ids, rows, num_cached[rows], lengths[rows] - 1)
        # All rows at once, in place, those too that have just been read up to here.
        states = self._read(ids, None, lengths - 1, lengths)
        self._ids, self._lengths = ids.clone(), lengths.clone()
        return states[:, 0]

    def _num_cached(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """How many tokens of each row [B] the cache holds, of all but the last one."""
        state = (ids.shape, ids.device, *((p.data_ptr(), p._version) for p in self._trunk.parameters()))
        if state != self._state:
            self._state = state
            self._ids, self._lengths = torch.zeros_like(ids), torch.zeros_like(lengths)
            self._cache = _SlotCache(self._num_layers, *ids.shape)
        number = torch.arange(ids.shape[1], device=ids.device)
        same = (ids == self._ids) & (number < torch.minimum(self._lengths, lengths - 1)[:, None])
        return same.long().cumprod(1).sum(1)

    def _read(self, ids: Tensor, rows: Tensor | None, start: Tensor, end: Tensor) -> Tensor:
        """Reads the tokens from `start` [n] to before `end` [n] of some rows (None: all); states [n, width, d]."""
        positions = start[:, None] + torch.arange(int((end - start).max()), device=ids.device)
        # A row that has fewer reads on, into what is masked and written again later; the last slot is for nothing else.
        positions = positions.clamp(max=ids.shape[1])
        tokens = (ids if rows is None else ids[rows]).gather(1, positions.clamp(max=ids.shape[1] - 1))
        width = int(end.max())
        hidden = torch.arange(width, device=ids.device) > positions[..., None]
        dtype = self._trunk.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=ids.device).masked_fill_(hidden, torch.finfo(dtype).min)
        self._cache.read_at(rows, positions, width)
        states: Tensor = self._trunk(
            input_ids=tokens,
            attention_mask=mask[:, None],
            position_ids=positions.clamp(max=ids.shape[1] - 1),
            use_cache=True,
            **{self._cache_keyword: self._cache},
        ).last_hidden_state
        return states


class _SlotCache(Cache):
    """Keys and values of B rows of at most L tokens, each row with a length of its own."""

    def __init__(self, num_layers: int, num_rows: int, length: int) -> None:
        self._own_layers: Sequence[_SlotLayer] = [_SlotLayer(num_rows, length + 1) for _ in range(num_layers)]
        super().__init__(layers=list(self._own_layers))

    def read_at(self, rows: Tensor | None, positions: Tensor, width: int) -> None:
        """The next `update` writes at positions [n, w] of some rows (None: all) and gives their first `width` slots."""
        for layer in self._own_layers:
            layer.place = rows, positions, width


class _SlotLayer(CacheLayerMixin):
    """One layer's buffers [B, heads, slots, head size]."""

    place: tuple[Tensor | None, Tensor, int]

    def __init__(self, num_rows: int, slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows, self._slots = num_rows, slots
        self._buffers: tuple[Tensor, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros: what is hidden is still multiplied, by 0, so it must be finite.
        self._buffers = tuple(
            states.new_zeros(self._num_rows, states.shape[1], self._slots, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions, width = self.place
        index = torch.arange(self._num_rows, device=positions.device) if rows is None else rows
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[index[:, None], :, positions] = states.transpose(1, 2)
        keys, values = (buffer[:, :, :width] if rows is None else buffer[rows, :, :width] for buffer in self._buffers)
        return keys, values

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.place[2], 0

    def get_seq_length(self) -> int:
        return self.place[2] if hasattr(self, "place") else 0

    def get_max_length(self) -> int:
        return self._slots

    get_max_cache_shape = get_max_length  # what older versions of transformers 5 call it
