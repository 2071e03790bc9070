"""What keeps a step within the memory: activations computed again, and logits a chunk at a time."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

RECOMPUTE = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # dropout is off: nothing is drawn

LOGITS_AT_ONCE = 2**26
"""How many logits are alive at once where only log-probabilities are wanted: 268 MB in float32, of which a softmax and
its gradient take a few. 16,384 tokens of the sandbox's vocabulary of 933 stay in one piece, with the numbers that a
piece has; of LLaMA's 32,000 a chunk has 2,097 tokens."""


def checkpointed_layers(modules: Iterable[nn.Module]) -> list[GradientCheckpointingLayer]:
    """The layers of models by transformers that can compute their activations again."""
    return [layer for module in modules for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


@contextmanager
def gradient_checkpointing(layers: Iterable[GradientCheckpointingLayer]) -> Iterator[None]:
    """Forward passes inside keep each layer's input alone for the backward pass, which computes the rest again.

    transformers checkpoints a layer in train mode only, in which a sampler would lose its cache. So the layers are put
    into it for as long as gradients are wanted, and nothing within them or around them: whatever else a model does
    in train mode (dropped layers, noisy routing) stays off. Without gradients nothing changes. The backward pass may
    run outside.
    """
    chosen: list[Any] = list(layers)
    before = [(layer.training, layer.gradient_checkpointing) for layer in chosen]
    for layer in chosen:
        layer._gradient_checkpointing_func = RECOMPUTE
        layer.training = layer.gradient_checkpointing = True
    try:
        yield
    finally:
        for layer, (training, enabled) in zip(chosen, before, strict=True):
            layer.training, layer.gradient_checkpointing = training, enabled


def by_chunks(compute: Callable[..., Tensor], *columns: Tensor, rows: int) -> Tensor:
    """What `compute` gives for columns [n, ...], `rows` rows at a time; the backward pass computes each chunk again."""
    if len(columns[0]) <= rows:
        return compute(*columns)
    chunks = zip(*(torch.split(column, rows) for column in columns), strict=True)
    return torch.cat([RECOMPUTE(compute, *chunk) for chunk in chunks])


@torch.no_grad()
def gives_plain_logits(model: PreTrainedModel) -> bool:
    """Whether a model's logits are what its output layer gives, without a scale or a soft cap after it.

    Tried on the outer part of a model of the same kind without weights: it costs no memory, and processes that have
    sharded the model need not do it together.
    """
    with torch.device("meta"):
        shape: Any = type(model)(copy.deepcopy(model.config))
        layer, seen = shape.get_output_embeddings(), list[Tensor]()
        layer.register_forward_hook(lambda *call: seen.append(call[2]))
        hidden = _TrunkOutput([torch.zeros(1, 1, layer.weight.shape[1])])
        shape.base_model.forward = lambda *args, **kwargs: hidden
        logits = shape.eval()(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    return len(seen) == 1 and logits is seen[0]


class _TrunkOutput(tuple[Tensor]):
    """Hidden states, and None under whatever other name a kind of model asks for."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
