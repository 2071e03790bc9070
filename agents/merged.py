"""Sampling from merged weights: with LoRA, each adapter adds two products of matrices and a sum to those of its layer.

That doubles the kernels of a decode step, and with them its time on a GPU. So a copy of the weights that have adapters,
with these added, samples for the policy, as fast as a model without any. It is a copy, since weights of low precision
to which changes are added in place, and from which they are taken again, drift away from where they were.
"""

import copy
from itertools import chain
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from .memory import free_memory


class MergedCopy:
    """A LoRA model without adapters: what they change is copied with them added, all else is the model's own."""

    def __init__(self, model: peft.PeftModel) -> None:
        base: Any = model.get_base_model()
        self._model: PreTrainedModel = copy.deepcopy(
            base, {id(tensor): tensor for tensor in chain(base.parameters(), base.buffers())}
        )
        self._layers: list[tuple[LoraLayer, nn.Module]] = []
        for name, layer in lora_layers(model):
            plain = copy.deepcopy(layer.get_base_layer()).requires_grad_(False)
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, plain)
            self._layers.append((layer, plain))
        self._added: list[Tensor] = []

    @torch.no_grad()
    def follow(self) -> PreTrainedModel:
        """The model to sample from, with the adapters added as they are now."""
        now = [tensor for layer, _ in self._layers for tensor in _adapters(layer)]
        if self._added and all(map(torch.equal, self._added, now)):
            return self._model
        for layer, plain in self._layers:
            merged: Any = copy.deepcopy(layer)  # one layer at a time: peft adds to the weights in place
            merged.merge(adapter_names=layer.active_adapters)
            for mine, new in zip(plain.parameters(), merged.get_base_layer().parameters(), strict=True):
                mine.copy_(new)
        self._added = [tensor.clone() for tensor in now]
        return self._model


def merge(model: peft.PeftModel) -> PreTrainedModel:
    """A whole model on the CPU, with the adapters added: in float32, rounded once to the type of the weights.

    A copy, as a GPU may not hold two; `model` stays as it is.
    """
    copies: dict[int, Any] = {id(each): each.detach().to("cpu", copy=True) for each in model.buffers()}
    for each in model.parameters():
        copies[id(each)] = nn.Parameter(each.detach().to("cpu", copy=True), requires_grad=False)
    whole = copy.deepcopy(model, copies)
    for name, layer in lora_layers(whole):
        plain: Any = layer.get_base_layer()
        dtype = plain.weight.dtype
        cast(nn.Module, layer).float()
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(whole.get_base_model().get_submodule(parent), child, plain.to(dtype))
    return cast(PreTrainedModel, whole.merge_and_unload())  # the rest: a head, embeddings of new tokens


def make_copy(model: Any, wanted: bool | None) -> MergedCopy | None:
    """The copy to sample from if it is `wanted`; None: on a GPU of which it takes half of the free memory at most.

    ValueError if it is wanted of a model without LoRA adapters, or of one whose weights are quantized.
    """
    layers = [layer.get_base_layer() for _, layer in lora_layers(model)]
    plain = all(parameter.is_floating_point() for layer in layers for parameter in layer.parameters())
    if wanted and not (layers and plain):
        raise ValueError("sample_merged: expected a model with LoRA adapters on weights that are not quantized")
    if wanted is None:
        size = sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
        device = next(model.parameters()).device
        wanted = bool(layers) and plain and device.type == "cuda" and size <= free_memory(device) / 2
    return MergedCopy(model) if wanted else None


def lora_layers(model: Any) -> list[tuple[str, LoraLayer]]:
    """The layers with LoRA adapters by their names in the base model; none of a model without LoRA."""
    if not isinstance(model, peft.PeftModel):
        return []
    base: Any = model.get_base_model()
    return [(name, layer) for name, layer in base.named_modules() if isinstance(layer, LoraLayer)]


def _adapters(layer: Any) -> list[Tensor]:
    return [parameter.detach() for name, parameter in layer.named_parameters() if not name.startswith("base_layer.")]
