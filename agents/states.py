"""Hidden states of given texts, for features and heads on them: no gradient, no output layer, equal prompts once."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..pretrained import cache_keyword
from .rollouts import Rollouts, length_mask, micro_batches, pad_rows, ragged_split, scoring_batch


@torch.no_grad()
def pooled_states(
    trunk: PreTrainedModel, rollouts: Rollouts, *, pool: Literal["mean", "last"], fill_token_id: int, max_tokens: int
) -> Tensor:
    """See `LanguageModel.states`; `trunk` is a causal decoder, and passes are of `max_tokens` or one row."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, tokens in enumerate(ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)):
        alike.setdefault(tuple(tokens.tolist()), []).append(row)
    alone = [numbers[0] for numbers in alike.values() if len(numbers) == 1]
    states = torch.full((len(rollouts), trunk.config.get_text_config().hidden_size), math.nan, device=trunk.device)
    for chosen in micro_batches(rollouts.total_lengths[alone], max_tokens):
        rows = torch.tensor(alone)[chosen]
        ids, predicts = scoring_batch(part := rollouts[rows], fill_token_id=fill_token_id)
        hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
        states[rows] = _pooled(_at_front(hidden, predicts.roll(1, dims=1), part.lengths), part.lengths, pool)
    keyword = cache_keyword(trunk)
    for prompt, numbers in alike.items():
        if len(numbers) == 1:
            continue
        read: Any = DynamicCache()
        trunk(input_ids=torch.tensor([prompt], device=trunk.device), use_cache=True, **{keyword: read})
        for chosen in micro_batches(rollouts.lengths[numbers], max_tokens):
            rows = torch.tensor(numbers)[chosen]
            part, cache = rollouts[rows], DynamicCache()
            if not part.lengths.any():
                continue
            for number, layer in enumerate(read.layers):
                keys, values = (each.expand(len(rows), -1, -1, -1) for each in (layer.keys, layer.values))
                cache.update(keys, values, number)
            ids = pad_rows(part.tokens, part.lengths, fill_token_id)
            hidden = trunk(input_ids=ids, use_cache=True, **{keyword: cache}).last_hidden_state
            states[rows] = _pooled(hidden, part.lengths, pool)
    return states


def _at_front(hidden: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
    """The chosen positions ([B, L] mask) of hidden states [B, L, H] at the front of each row: [B, T, H]."""
    mask = length_mask(lengths)
    return hidden.new_zeros(*mask.shape, hidden.shape[-1]).masked_scatter(mask[..., None], hidden[chosen])


def _pooled(hidden: Tensor, lengths: Tensor, pool: str) -> Tensor:
    """[B, H] float32 of the first `lengths` states of each row [B, T, H]; NaN of none."""
    if pool == "last":
        last = hidden[torch.arange(len(hidden), device=hidden.device), (lengths - 1).clamp(min=0)].float()
        return last.masked_fill((lengths == 0)[:, None], math.nan)
    mask = length_mask(lengths, hidden.shape[1])[..., None]
    return (hidden.float() * mask).sum(dim=1) / lengths[:, None]
