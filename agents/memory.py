"""A step within the memory: activations computed again, logits in chunks, as many samples as fit."""

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

from ..host_memory import free_host_memory

RECOMPUTE = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # dropout is off: nothing is drawn

LOGITS_AT_ONCE = 2**26
"""How many logits are alive at once where only log-probabilities are wanted: 268 MB in float32, of which a softmax and
its gradient take a few. 16,384 tokens of the sandbox's vocabulary of 933 stay in one piece, with the numbers that a
piece has; of LLaMA's 32,000 a chunk has 2,097 tokens."""

CPU_ROWS, CPU_BYTES = 256, 2e9
"""Most responses sampled at once on a CPU, and most memory for them: fixed, as rounding depends on the rows."""
MARGIN = 0.2
"""The share of the free memory that sampling leaves to what is not counted."""


def checkpointed_layers(modules: Iterable[nn.Module]) -> list[GradientCheckpointingLayer]:
    """The layers of models by transformers that can compute their activations again; ValueError if there are none."""
    layers = [
        layer for module in modules for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError("gradient_checkpointing: expected a model that transformers can checkpoint; set it to False")
    return layers


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


def logit_rows(vocabulary: int) -> int:
    """How many tokens have their logits alive at once."""
    return max(1, LOGITS_AT_ONCE // vocabulary)


def by_chunks(compute: Callable[..., Tensor], *columns: Tensor, rows: int) -> Tensor:
    """`compute` of columns [n, ...], `rows` rows at a time; the backward pass computes each chunk again."""
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


def kv_bytes_a_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that a decoder keeps of a token for those after it: keys and values, layers x heads x head size of each."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * dtype.itemsize)


def rows_that_fit(free_bytes: float, config: Any, dtype: torch.dtype, *, prompt: int, response: int) -> int:
    """How many responses can be sampled at once in `free_bytes`, at least 1; `prompt` and `response` are in tokens.

    A row takes its keys and values; while its prompt is read, four hidden states and three of the feed-forward layer a
    token; and four tables of the vocabulary in float32 to draw from. `MARGIN` of the memory stays free.
    """
    shape = config.get_text_config()
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    reading = prompt * (4 * shape.hidden_size + 3 * inner) * dtype.itemsize
    row = (prompt + response) * kv_bytes_a_token(config, dtype) + reading + 4 * 4 * shape.vocab_size
    return max(1, int((1 - MARGIN) * free_bytes / row))


def sampling_rows(model: PreTrainedModel, *, prompt: int, response: int) -> int:
    """How many responses to sample at once: what fits into the memory that is free now, of a CPU a little of it."""
    on_gpu, free = model.device.type == "cuda", free_memory(model.device)
    rows = rows_that_fit(
        free if on_gpu else min(free, CPU_BYTES), model.config, model.dtype, prompt=prompt, response=response
    )
    return rows if on_gpu else min(rows, CPU_ROWS)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take: of a GPU, also what torch holds unused."""
    if device.type != "cuda":
        return free_host_memory()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + held)


class _TrunkOutput(tuple[Tensor]):
    """Hidden states, and None under whatever other name a kind of model asks for."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
