"""The output layer of a causal language model, run where it is needed only."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def output_layer_at(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """Forward passes inside compute the logits of some positions only: flat [n, V] instead of [B, L, V].

    The hidden states are picked in front of the output layer, and the model goes on by itself: what it does to its
    logits (a scale, a soft cap) is not missed. Works under a LoRA wrapper and `functional_call`, and with versions of
    transformers whose `logits_to_keep` takes no [B, L] mask (those before 5.21).

    Args:
        model: The model whose output layer is meant, below any LoRA wrapper.
        positions: [B, L] bool, of the batch that will go through the model.
    """
    layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    handle = layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][positions],))
    try:
        yield
    finally:
        handle.remove()
