"""Control tokens: new tokens in front of a prompt that say how good the response to come shall be.

Used by binary reward conditioning (Dubois et al. 2023, sec. 4) and by Quark's all-quantile mode (Lu et al. 2022,
arXiv:2205.13636). No text encodes to one, and no model ever says one: their logits count as -inf everywhere. Which ids
they are, and which of them the model's own prompts begin with, travels with the model in its config.json, as
`alpacafarm_control_tokens` and `alpacafarm_control_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .rollouts import Rollouts, ragged, ragged_split


def control_tokens(model: Any) -> tuple[int, ...]:
    """Ids of a model's control tokens."""
    return tuple(getattr(model.config, "alpacafarm_control_tokens", None) or ())


def own_control_token(model: Any) -> int | None:
    """The control token that the model's own prompts begin with, None for none."""
    return getattr(model.config, "alpacafarm_control_token", None)


def silence(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits [..., V] with -inf for `tokens`; gradients pass through the others."""
    if not tokens:
        return logits
    columns = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    columns[list(tokens)] = True
    return logits.masked_fill(columns, -torch.inf)


def insert(prompt: Sequence[int], token: int | None, bos: int | None) -> list[int]:
    """A prompt's ids with `token` in front, behind BOS if the prompt begins with it; None changes nothing."""
    start = 1 if bos is not None and list(prompt[:1]) == [bos] else 0
    return [*prompt[:start], *([] if token is None else [token]), *prompt[start:]]


def conditioned(rollouts: Rollouts, tokens: Sequence[int], *, bos: int | None) -> Rollouts:
    """The rollouts with a control token in front of each prompt (which must have none yet).

    Args:
        rollouts: B rows.
        tokens: [B], the control token of each row.
        bos: The tokenizer's beginning-of-sequence token, which stays first.
    """
    if len(tokens) != len(rollouts):
        raise ValueError(f"conditioned: expected a token for each of {len(rollouts)} rows, got {len(tokens)}")
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    rows = [insert(prompt.tolist(), token, bos) for prompt, token in zip(prompts, tokens, strict=True)]
    return _with_prompts(rollouts, rows)


def unconditioned(rollouts: Rollouts, tokens: Sequence[int]) -> Rollouts:
    """The rollouts without `tokens` in their prompts. Only control tokens, which no text encodes to, may be taken."""
    if not tokens:
        return rollouts
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    rows = [[token for token in prompt.tolist() if token not in tokens] for prompt in prompts]
    return _with_prompts(rollouts, rows)


def _with_prompts(rollouts: Rollouts, prompts: Sequence[Sequence[int]]) -> Rollouts:
    prompt_tokens, prompt_lengths = ragged(prompts, rollouts.tokens.device)
    return replace(rollouts, prompt_tokens=prompt_tokens, prompt_lengths=prompt_lengths)
