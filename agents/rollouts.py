"""Instructions with their sampled responses, stored ragged: every mean over tokens is a mean over real tokens.

Responses of lengths T_0 ... T_{B-1} are one flat vector of sum(T) tokens and a vector of lengths. Pads exist only where
a forward pass or a scan over time needs a rectangle (`pad_rows`, `unpad`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..last_layer import last_mlp_at
from .attention import packs


@dataclass(frozen=True)
class Rollouts:
    """B instructions and responses; all tensors share one device.

    Attributes:
        instructions: B instructions as the environment gave them.
        texts: B responses as text, without the end-of-sequence token.
        prompt_tokens: [sum P] int64, the templated instructions, row after row.
        prompt_lengths: [B] int64, each at least 1.
        tokens: [sum T] int64, the responses; the end-of-sequence token is kept where it was emitted.
        lengths: [B] int64, tokens of each response (0 is legal).
        logprobs: [sum T] float32, the sampler's log-probability of each token at the sampling temperature; a served
            sampler's are at temperature 1.
        finished: [B] bool, whether the response ended with the end-of-sequence token.
    """

    instructions: tuple[str, ...]
    texts: tuple[str, ...]
    prompt_tokens: Tensor
    prompt_lengths: Tensor
    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor
    finished: Tensor

    def __post_init__(self) -> None:
        rows = {len(self.instructions), len(self.texts), len(self.prompt_lengths), len(self.lengths)}
        if len(rows | {len(self.finished)}) != 1:
            raise ValueError(f"Rollouts: fields differ in their number of rows: {sorted(rows | {len(self.finished)})}")
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"Rollouts: {len(self.tokens)} tokens but {len(self.logprobs)} log-probabilities")

    def __len__(self) -> int:
        """Number of rows B."""
        return len(self.instructions)

    def __getitem__(self, index: Tensor | Sequence[int] | slice) -> Rollouts:
        """The chosen rows in the order given: numbers (repeated, negative ones too), a [B] bool mask or a slice."""
        rows = torch.arange(len(self), device=self.lengths.device)[index]
        numbers = rows.tolist()
        tokens = _positions(self.lengths, rows)
        return Rollouts(
            instructions=tuple(self.instructions[i] for i in numbers),
            texts=tuple(self.texts[i] for i in numbers),
            prompt_tokens=self.prompt_tokens[_positions(self.prompt_lengths, rows)],
            prompt_lengths=self.prompt_lengths[rows],
            tokens=self.tokens[tokens],
            lengths=self.lengths[rows],
            logprobs=self.logprobs[tokens],
            finished=self.finished[rows],
        )

    @staticmethod
    def cat(parts: Sequence[Rollouts]) -> Rollouts:
        """Joins rollouts row-wise, in order; ValueError if there are none."""
        if not parts:
            raise ValueError("Rollouts.cat: expected at least one part, got none")
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Rollouts)}
        joined: dict[str, Any] = {
            name: torch.cat(column) if isinstance(column[0], Tensor) else tuple(chain.from_iterable(column))
            for name, column in columns.items()
        }
        return Rollouts(**joined)

    @staticmethod
    def given(
        instructions: Sequence[str],
        texts: Sequence[str],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        finished: Sequence[bool],
        device: torch.device,
    ) -> Rollouts:
        """Responses that were not sampled, as token ids like their prompts; log-probabilities are 0."""
        prompt_tokens, prompt_lengths = ragged(prompts, device)
        tokens, lengths = ragged(responses, device)
        return Rollouts(
            instructions=tuple(instructions),
            texts=tuple(texts),
            prompt_tokens=prompt_tokens,
            prompt_lengths=prompt_lengths,
            tokens=tokens,
            lengths=lengths,
            logprobs=torch.zeros(len(tokens), device=device),
            finished=torch.tensor(finished, dtype=torch.bool, device=device),
        )

    @property
    def total_lengths(self) -> Tensor:
        """[B] int64: prompt plus response tokens of each row, what a forward pass reads."""
        return self.prompt_lengths + self.lengths

    def to(self, device: torch.device | str) -> Rollouts:
        """The same rollouts on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


class Groups(NamedTuple):
    """Rows that read their prompt together.

    Attributes:
        numbers: [B] int64, the group that each row is of.
        prompts: [B] int64, the tokens of its prompt.
    """

    numbers: Tensor
    prompts: Tensor

    def of(self, rows: Tensor) -> Groups:
        """Those of some rows."""
        return Groups(self.numbers[rows], self.prompts[rows])


def ragged_split(flat: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Cuts a flat [sum T] tensor into B views of lengths [B]."""
    return torch.split(flat, lengths.tolist())


def length_mask(lengths: Tensor, width: int | None = None) -> Tensor:
    """[B, width] bool, True on the first `lengths` slots of each row; width defaults to the longest."""
    size = width if width is not None else int(lengths.max()) if len(lengths) else 0
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def pad_rows(flat: Tensor, lengths: Tensor, value: float = 0.0, *, width: int | None = None) -> Tensor:
    """Lays a flat [sum T] tensor out as [B, width], filled with `value` on the right. Gradients pass through."""
    mask = length_mask(lengths, width)
    return flat.new_full(mask.shape, value).masked_scatter(mask, flat)


def unpad(padded: Tensor, lengths: Tensor) -> Tensor:
    """Takes the real slots of a right-padded [B, width] tensor back as a flat [sum T] one."""
    return padded[length_mask(lengths, padded.shape[1])]


def segment_sum(flat: Tensor, lengths: Tensor) -> Tensor:
    """Sums each row of a flat [sum T] tensor: [B]; 0 for an empty row.

    Not by scattering: along a padded row the order of additions, hence the last bit, is the same on every run on a GPU.
    """
    return pad_rows(flat, lengths).sum(dim=1)


def scoring_batch(rollouts: Rollouts, *, fill_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [B, L] of prompts and responses, and the mask [B, L] of the positions that predict a response token.

    For one forward pass without a mask: the fill is on the right, where a causal model cannot see it. Fill with EOS:
    some
    models warn of a padding token without a mask. Row by row, the True slots are in the order of flat [sum T] tensors.
    Of no rows one token is made, after which nothing is predicted: its pass gives gradients of 0.
    """
    if not len(rollouts):
        ids = torch.full((1, 1), fill_token_id, dtype=torch.int64, device=rollouts.tokens.device)
        return ids, torch.zeros_like(ids, dtype=torch.bool)
    real = length_mask(rollouts.total_lengths)
    is_response = real & ~length_mask(rollouts.prompt_lengths, real.shape[1])
    ids = torch.full(real.shape, fill_token_id, dtype=torch.int64, device=real.device)
    ids[real & ~is_response] = rollouts.prompt_tokens
    ids[is_response] = rollouts.tokens
    # Token t is predicted one position before it. A prompt has a token at least, so nothing rolls around the end.
    return ids, is_response.roll(-1, dims=1)


def scoring_inputs(model: nn.Module, rollouts: Rollouts, fill_token_id: int) -> tuple[dict[str, Any], Tensor]:
    """A model's keywords for one pass over prompts and responses, and the mask of `scoring_batch`.

    For a model that can, rows are one behind the other, [1, sum L], instead of filled to one length, [B, L].
    """
    ids, predicts = scoring_batch(rollouts, fill_token_id=fill_token_id)
    if len(rollouts) < 2 or not packs(model):
        return {"input_ids": ids, "use_cache": False}, predicts
    real = length_mask(rollouts.total_lengths)
    return packed_inputs(ids[real], rollouts.total_lengths.tolist()), predicts[real][None]


def packed_inputs(tokens: Tensor, lengths: list[int]) -> dict[str, Any]:
    """The keywords for rows of some lengths that are one behind the other in `tokens`, flat [sum L]."""
    places = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])[None]
    return {"input_ids": tokens[None], "position_ids": places, "packed_lengths": lengths, "use_cache": False}


@contextmanager
def output_layer_at(model: Any, positions: Tensor, order: Tensor | None = None) -> Iterator[None]:
    """Forward passes inside compute the logits of some positions ([B, L] mask) only: flat [n, V] instead of [B, L, V].

    `order`: of which of these n, in what order and how often. The last layer's MLP is computed there only, too. Hidden
    states are picked in front of the output layer, so whatever the model does to its logits (a scale, a soft cap) still
    happens. Works under a LoRA wrapper (`model` is the one below it) and `functional_call`, and with versions of
    transformers whose `logits_to_keep` takes no mask (before 5.21).
    """

    def pick(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        picked = inputs[0][positions]
        return (picked if order is None else embedding(order, picked),)

    handle = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        with last_mlp_at(model, positions):
            yield
    finally:
        handle.remove()


def ragged(rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Joins rows of ids into a flat [sum T] int64 tensor and their lengths [B]."""
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.int64, device=device)
    return flat, torch.tensor([len(row) for row in rows], dtype=torch.int64, device=device)


def micro_batches(total_lengths: Sequence[int] | Tensor, max_tokens: int, *, packed: bool = False) -> list[Tensor]:
    """Index tensors [b] that hold each row once, grouped so that rows x longest row, in tokens, is within `max_tokens`.

    Longest first: little padding. A row that is longer than that has a micro-batch of its own. `packed`: rows are not
    padded, and their sum is within it.
    """
    lengths = torch.as_tensor(total_lengths, dtype=torch.int64, device="cpu")
    order = torch.argsort(lengths, descending=True, stable=True)
    batches = []
    start = 0
    while start < len(order):
        if packed:
            fit = int((lengths[order[start:]].cumsum(0) <= max_tokens).sum())
        else:  # the first row of a group is its longest, so it fixes how many fit
            fit = max_tokens // max(1, int(lengths[order[start]]))
        count = max(1, fit)
        batches.append(order[start : start + count])
        start += count
    return batches


def group_batches(total_lengths: Tensor, groups: Groups, max_tokens: int) -> list[Tensor]:
    """`micro_batches` of rows without pads in which neighbours of one group read their prompt once.

    A group stays together if it fits.
    """
    parts: list[list[int]] = []
    sizes: list[int] = []
    before = None
    rows: list[list[int]] = torch.stack([total_lengths.cpu(), groups.numbers.cpu(), groups.prompts.cpu()], 1).tolist()
    for row, (total, group, prompt) in enumerate(rows):
        if group == before and sizes[-1] + total - prompt <= max_tokens:
            parts[-1].append(row)
            sizes[-1] += total - prompt
        else:
            parts.append([row])
            sizes.append(total)
        before = group
    batches = micro_batches(sizes, max_tokens, packed=True)
    return [torch.tensor([row for part in batch.tolist() for row in parts[part]]) for batch in batches]


def fullest(rollouts: Rollouts, rows: Tensor) -> Tensor:
    """Rows that are as many tokens as some longest `rows` with a prompt for each, but have one prompt in common.

    No micro-batch of that many tokens has more response tokens. The last of `rollouts` is not one of the longest.
    """
    if len(rows) < 2:
        return rows
    room = int(rollouts.total_lengths[rows].sum() - rollouts.prompt_lengths[0]) // int(rollouts.lengths[0])
    return torch.arange(min(room, len(rollouts) - 1), device=rows.device)


def _positions(lengths: Tensor, rows: Tensor) -> Tensor:
    """Flat positions of the tokens of the chosen rows."""
    starts = lengths.cumsum(0) - lengths
    chosen = lengths[rows]
    firsts = torch.repeat_interleave(starts[rows] - (chosen.cumsum(0) - chosen), chosen)
    return firsts + torch.arange(len(firsts), device=lengths.device)
