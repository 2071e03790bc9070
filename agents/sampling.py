"""Sampling: our own decode loop over any Hugging Face causal language model.

Faster than a general `generate` at equal results: keys and values go into a buffer allocated once, tokens are drawn by
inverse CDF, ended rows leave the batch. Equal prompts of a batch are read once, what all begin with too (a chat
template's system text), and those of like length together, so that hardly a pad is read. On a CPU the heads that share
keys attend to them as one product of matrices.
The uniforms are an argument, one for each row and step, so a row's sample does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..oracles.reward_model import tokens_at_once
from ..oracles.shared_prompts import shared_start
from ..pretrained import cache_keyword
from .decoding import PreallocatedCache, grouped_attention
from .prompts import silence
from .rollouts import micro_batches, output_layer_at

BLOCK = 512
"""Tokens of a block: where there are many, the block is drawn before the token."""
WORTH_SHARING = 8
"""Tokens that all prompts begin with, from which on these are read once."""


class Samples(NamedTuple):
    """Sampled responses of B rows, right padded.

    Attributes:
        tokens: [B, T] int64; slots past a row's length hold no meaning.
        logprobs: [B, T] float32, at the sampling temperature.
        lengths: [B] int64, up to and including the end-of-sequence token, at most T.
        finished: [B] bool, whether the end-of-sequence token was emitted.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    finished: Tensor


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    uniforms: Tensor | None,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Sequence[int],
    batch_size: int = 256,
    compact_below: float = 0.9,
    silent: Sequence[int] = (),
) -> Samples:
    """Samples a response for each of B prompts (ids, none empty), without gradient.

    Rows come back in the order of the prompts, on the model's device. `uniforms` are [B, `max_new_tokens` or more] in
    [0, 1); None if and only if temperature is 0, which takes the likeliest tokens, with log-probabilities at
    temperature 1. Each of `eos_token_ids` ends a row. Ended rows leave their batch, of `batch_size` at most, once less
    than a share of `compact_below` is alive (0 never, 1 at once). Log-probabilities are those of the distribution
    without `silent` tokens, which are never drawn.

    Raises:
        ValueError: `uniforms` and temperature do not fit, or attention is not full ("sdpa" or "eager", no window).
    """
    if (uniforms is None) != (temperature == 0):
        raise ValueError("sample: give uniforms with a temperature above 0, and none for greedy decoding (0)")
    check_attention(model, max(map(len, prompts), default=0) + max_new_tokens)
    device, shape = model.device, (len(prompts), max_new_tokens)
    # Slots past a row's end stay EOS, so a row's first EOS is its end however long its batch ran.
    tokens = torch.full(shape, eos_token_ids[0], dtype=torch.int64, device=device)
    logprobs = torch.zeros(shape, device=device)
    order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), prompts[row]))
    for rows in _even_batches(order, batch_size):
        batch = _Batch(model, [tuple(prompts[row]) for row in rows], max_new_tokens, silent)
        steps = None if uniforms is None else uniforms[rows].to(device).T.contiguous()
        drawn, drawn_logprobs = _decode(batch, steps, max_new_tokens, temperature, eos_token_ids, compact_below)
        tokens[rows, : len(drawn)] = drawn.T
        logprobs[rows, : len(drawn)] = drawn_logprobs.T
    ended = (tokens[..., None] == torch.tensor(eos_token_ids, device=device)).any(-1)
    finished = ended.any(dim=1)
    lengths = torch.where(finished, ended.int().argmax(dim=1) + 1, max_new_tokens)
    return Samples(tokens, logprobs, lengths, finished)


def draw_uniforms(
    source: torch.Generator | Sequence[torch.Generator] | Tensor, num: int, num_samples: int, width: int
) -> Tensor:
    """The random numbers of `LanguageModel.generate`, [num x num_samples, width or more] in [0, 1)."""
    if isinstance(source, Tensor):
        if source.shape[:-1] != (num * num_samples,) or source.shape[-1] < width:
            raise ValueError(
                f"generate: expected uniforms of shape [{num * num_samples}, {width}], a row a response, got "
                f"{list(source.shape)}"
            )
        return source
    sources = [source] if isinstance(source, torch.Generator) else source
    if len(sources) not in (1, num):
        raise ValueError(f"generate: expected 1 or {num} generators, got {len(sources)}")
    rows = num * num_samples // max(1, len(sources))  # [] where there is no instruction to draw for
    parts = [torch.rand(rows, width, generator=each, device=each.device) for each in sources]
    return torch.cat(parts) if parts else torch.rand(0, width)


def pick(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Draws a token [B] int64 for each row of logits [B, V] by inverse CDF, and its log-probability [B] float32.

    `uniform` [B] is in [0, 1), or None for the likeliest token. The first token whose cumulative probability exceeds u
    is taken, so one of probability 0 never is.
    """
    logits = logits.float()
    if uniform is None:
        token = logits.argmax(dim=-1, keepdim=True)
        return token[:, 0], (logits.gather(-1, token) - logits.logsumexp(dim=-1, keepdim=True))[:, 0]
    if temperature != 1:
        logits = logits / temperature
    # One uniform a row decides it, unlike a multinomial, which draws as many as it likes from a generator of the
    # device: so a row's tokens are the same in any batch and on any device, but for rounding.
    if logits.shape[-1] % BLOCK or logits.shape[-1] < 16 * BLOCK:
        cdf = logits.softmax(dim=-1).cumsum(dim=-1)
        token = _first_above(cdf, uniform[:, None] * cdf[:, -1:])
        logprob = logits.gather(-1, token) - logits.logsumexp(dim=-1, keepdim=True)
        return token[:, 0], logprob[:, 0]
    # Of a large vocabulary each pass over the table counts: sums of blocks first, then within the block drawn.
    top = logits.amax(dim=-1, keepdim=True)
    weights = (logits - top).exp_().view(len(logits), -1, BLOCK)
    cdf = weights.sum(dim=-1).cumsum(dim=-1)
    target = uniform[:, None] * cdf[:, -1:]
    block = _first_above(cdf, target)
    before = torch.where(block > 0, cdf.gather(-1, (block - 1).clamp_(min=0)), 0)
    within = weights.take_along_dim(block[..., None], dim=1)[:, 0].cumsum(dim=-1)
    token = block * BLOCK + _first_above(within, target - before)
    return token[:, 0], (logits.gather(-1, token) - top - cdf[:, -1:].log())[:, 0]


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """The first place [B, 1] of each row's cumulative weights [B, n] that exceeds the target [B, 1].

    One that rounding has put at or beyond the row's total counts as just below it: the place has weight.
    """
    below = torch.nextafter(cdf.amax(dim=-1, keepdim=True), cdf.new_zeros(()))
    return torch.searchsorted(cdf, torch.minimum(target, below), right=True)


def _decode(
    batch: _Batch,
    steps: Tensor | None,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Sequence[int],
    compact_below: float,
) -> tuple[Tensor, Tensor]:
    """Decodes one batch until all rows have ended; tokens and log-probabilities [T, B], meaningless past an EOS."""
    shape = (max_new_tokens, len(batch.rows))
    ends = torch.tensor(eos_token_ids, device=batch.rows.device)
    tokens = torch.full(shape, eos_token_ids[0], dtype=torch.int64, device=batch.rows.device)
    logprobs = torch.zeros(shape, device=batch.rows.device)
    logits = batch.read_prompts()
    for step in range(max_new_tokens):
        uniform = None if steps is None else steps[step][batch.rows]
        token, logprob = pick(logits, uniform, temperature)
        tokens[step, batch.rows] = token
        logprobs[step, batch.rows] = logprob
        batch.token = token
        batch.alive &= (token[:, None] != ends).all(-1)
        num_alive = int(batch.alive.sum())
        if num_alive == 0 or step + 1 == max_new_tokens:
            break
        if num_alive < compact_below * len(batch.rows):
            batch.compact(num_alive)
        logits = batch.read_token()
    return tokens, logprobs


class _Batch:
    """The rows still being decoded, and what is kept for each; equal prompts are read once.

    Attributes:
        rows: [n] int64, each row's number at the start.
        alive: [n] bool, False once it has ended.
        token: [n] int64, what was sampled last.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[tuple[int, ...]],
        max_new_tokens: int,
        silent: Sequence[int],
    ) -> None:
        device = model.device
        distinct = list(dict.fromkeys(prompts))
        number = {prompt: i for i, prompt in enumerate(distinct)}
        width = max(map(len, distinct))
        self._model, self._cache_keyword = model, cache_keyword(model)
        self._silent = silent
        self.rows = torch.arange(len(prompts), device=device)
        self.alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self.token = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self._prompts = distinct
        # Which distinct prompt each row continues.
        self._source = torch.tensor([number[prompt] for prompt in prompts], device=device)
        num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._cache = PreallocatedCache(num_layers, len(prompts), width, max_new_tokens)
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=device)[self._source]
        self._positions = lengths[:, None] - 1
        # All rows write their next token into the same slot: prompts end there, and shorter ones have pads before them.
        padded = any(len(prompt) < width for prompt in distinct)
        pads = width - lengths[:, None]
        self._mask = _pad_mask(pads, width + max_new_tokens, model.dtype) if padded else None

    def read_prompts(self) -> Tensor:
        """Fills the cache; [rows, V] logits of the first token."""
        device, keyword = self._source.device, self._cache_keyword
        common = shared_start(self._prompts) if len(self._prompts) > 1 else 0  # what is left predicts the first token
        common = common if common >= WORTH_SHARING else 0
        shared: Any = DynamicCache()
        if common:
            ids = torch.tensor([self._prompts[0][:common]], device=device)
            self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{keyword: shared})
        logits = torch.empty(0)
        for chosen in micro_batches([len(prompt) - common for prompt in self._prompts], tokens_at_once(device)):
            prompts = [self._prompts[number][common:] for number in chosen.tolist()]
            width = max(map(len, prompts))
            # Right padded, where no token sees the pads: any id would do.
            ids = torch.tensor([[*prompt, *prompt[-1:] * (width - len(prompt))] for prompt in prompts], device=device)
            lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
            cache = DynamicCache()
            for number, layer in enumerate(shared.layers):
                keys, values = (part.expand(len(ids), -1, -1, -1) for part in (layer.keys, layer.values))
                cache.update(keys, values, number)
            with output_layer_at(self._model, torch.arange(width, device=device) == lengths[:, None] - 1):
                part = self._model(input_ids=ids, use_cache=True, **{keyword: cache}).logits
            logits = part.new_empty(len(self._prompts), part.shape[-1]) if not len(logits) else logits
            logits[chosen.to(device)] = part
            rows = (self._source[:, None] == chosen.to(device)).nonzero()  # row, and its prompt's place in this pass
            self._cache.store(cache, rows[:, 0], rows[:, 1], lengths + common)
        return silence(logits[self._source], self._silent)

    def read_token(self) -> Tensor:
        """Reads each row's sampled token; [rows, V] logits of the next one."""
        self._positions = self._positions + 1
        with grouped_attention(self._model):
            output = self._model(
                input_ids=self.token[:, None],
                # The mask comes prepared, so the model builds none at each step.
                attention_mask=None if self._mask is None else self._mask[..., : self._cache.get_seq_length() + 1],
                position_ids=self._positions,
                use_cache=True,
                **{self._cache_keyword: self._cache},
            )
        return silence(output.logits[:, -1], self._silent)

    def compact(self, num_alive: int) -> None:
        """Moves live rows from the tail into the places of ended ones, and cuts the tail off."""
        places = (~self.alive[:num_alive]).nonzero()[:, 0]
        movers = self.alive[num_alive:].nonzero()[:, 0] + num_alive

        def close_up(kept: Tensor) -> Tensor:
            kept[places] = kept[movers]
            return kept[:num_alive]

        self._cache.close_up(places, movers, num_alive)
        self.rows, self.alive, self.token = close_up(self.rows), close_up(self.alive), close_up(self.token)
        self._positions = close_up(self._positions)
        self._mask = None if self._mask is None else close_up(self._mask)


def _pad_mask(pads: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive [U, 1, 1, width] that hides the left pads.

    The smallest finite number, not -inf: a pad's own query sees no key, its softmax over -inf would be NaN, and NaN
    reaches real rows as 0 * NaN.
    """
    hidden = torch.arange(width, device=pads.device) < pads
    mask = torch.zeros(hidden.shape, dtype=dtype, device=pads.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]


def check_attention(model: PreTrainedModel, length: int) -> None:
    """Raises ValueError if the prepared mask would mean something else to this model."""
    config = model.config.get_text_config()
    kind = model.config._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise ValueError(f"Sampling needs a model with attn_implementation 'sdpa' or 'eager', got {kind!r}")
    window = getattr(config, "sliding_window", None)
    if window is not None and length > window:
        raise ValueError(f"Prompt and response take {length} tokens, more than the model's sliding window of {window}")


def _even_batches(order: list[int], batch_size: int) -> list[list[int]]:
    """Cuts the order into as few batches as `batch_size` allows, of equal size up to one."""
    count = -(-len(order) // batch_size)
    return [order[len(order) * i // count : len(order) * (i + 1) // count] for i in range(count)]
