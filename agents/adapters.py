"""LoRA adapters, and roles that share one frozen trunk.

A role on the policy's trunk is a set of modules of its own over the very same parameters (`bare`), with an adapter of
its own: a few MB beside the weights. No adapter is ever switched. So it does not matter which role ran last when the
policy is saved, sampled from or differentiated, and what a backward pass computes again is its own role's.

Sampling reads merged weights: each adapter adds two products of matrices and a sum to those of its layer, which doubles
the kernels of a decode step, and with them its time on a GPU. It is a copy that is merged, since weights of low
precision, to which changes are added and from which they are taken again, drift away from where they were.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from ..bases import adapter_base, is_adapter
from ..folders import hash_model
from ..oracles.reward_model import RewardModel, float32_head
from ..pretrained import loading_adapters
from .fused import fuse
from .memory import free_memory

HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base's weights as they are; PiSSA, for one, takes its start off them."""


def with_adapter(model: PreTrainedModel, config: peft.LoraConfig, *, seed: int = 0) -> peft.PeftModel:
    """The model with a fresh adapter, the only part that trains; `seed` is that of its random half."""
    with (
        torch.random.fork_rng(devices=()),
        loading_adapters(),
    ):  # peft initialises from the global generator, on the CPU
        torch.default_generator.manual_seed(seed)
        # A copy: peft writes the base model's name into a config.
        return peft.get_peft_model(model, copy.deepcopy(config))


def with_tokens(model: peft.PeftModel, tokens: Sequence[int]) -> peft.PeftModel:
    """The adapter anew, over the same base, with trained input embeddings of some tokens in it."""
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    config = copy.deepcopy(model.active_peft_config)
    base: Any = model.unload()
    vars(base).pop("peft_config", None)  # what peft below 0.20 leaves; it would warn of a second adapter
    table = next(name for name, module in base.named_modules() if module is base.get_input_embeddings())
    config.trainable_token_indices = {table.rpartition(".")[2]: list(tokens)}
    wider = with_adapter(base, config)
    peft.set_peft_model_state_dict(
        wider, {**peft.get_peft_model_state_dict(wider, save_embedding_layers=False), **state}
    )
    return wider


def turn_off_dropout(model: Any) -> Any:
    """Sets every dropout probability of a model to 0 and the model to eval mode, and fuses its layers; returns it.

    Eval mode alone would not do: gradient checkpointing needs train mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return fuse(model.eval())


def has_lora(model: nn.Module) -> bool:
    """Whether a LoRA adapter is what trains of a model."""
    return isinstance(model, peft.PeftModel) and isinstance(model.active_peft_config, peft.LoraConfig)


def trunk_of(model: Any) -> PreTrainedModel:
    """The decoder below a causal language model's output layer, with its adapter if it has one."""
    return cast(PreTrainedModel, (model.get_base_model() if isinstance(model, peft.PeftModel) else model).base_model)


def bare(model: peft.PeftModel) -> PreTrainedModel:
    """A second set of modules over the base model's parameters, not copied, without the adapter.

    Raises:
        ValueError: The adapter trains, or has changed, the base's own weights, which others would then read.
    """
    if not _spares_base(model.active_peft_config):
        raise ValueError(
            f"Only a LoRA adapter that leaves its base as it is can share it with another role, got "
            f"{model.active_peft_config!r}. Expected bias='none' and init_lora_weights one of {HARMLESS_STARTS}."
        )
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin: Any = copy.deepcopy(model, shared).unload()
    if trained := [name for name, parameter in twin.named_parameters() if parameter.requires_grad]:
        raise ValueError(f"The base must be frozen for several roles to share it, but the policy trains {trained[:3]}.")
    vars(twin).pop("peft_config", None)  # what peft below 0.20 leaves; it would warn of a second adapter
    return cast(PreTrainedModel, twin)


def as_scorer(model: PreTrainedModel, *, pad_token_id: int) -> PreTrainedModel:
    """A sequence-classification model with one label over a causal language model's own trunk; its head is 0."""
    config = copy.deepcopy(model.config)
    config.num_labels, config.get_text_config().pad_token_id = 1, pad_token_id
    with torch.device("meta"):
        scorer: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    if type(scorer.base_model) is not type(model.base_model):
        raise ValueError(
            f"{type(scorer).__name__} reads with a {type(scorer.base_model).__name__}, but the policy with a "
            f"{type(model.base_model).__name__}: load the reward model separately."
        )
    setattr(scorer, scorer.base_model_prefix, model.base_model)
    scorer.score.to_empty(device=model.device).requires_grad_(False).weight.zero_()
    return cast(PreTrainedModel, float32_head(scorer.eval()))


def reward_oracle(policy: Any, folder: str | Path, *, pad_token_id: int, **options: Any) -> RewardModel:
    """A reward model's LoRA adapter on the trunk of a LoRA policy: no second copy of the base is loaded.

    It reads the frozen base in the policy's dtype and place, whatever the policy learns; scores are those of
    `RewardModel(folder)` in that dtype. `options` are those of `RewardModel` but device, dtype and base.

    Raises:
        ValueError: The policy has no LoRA adapter, or the folder holds none over the same base.
    """
    if not builds_on(folder, policy):
        raise ValueError(
            f"{folder}: expected a LoRA reward adapter over the base of a LoRA policy, to share its weights. Give the "
            "environment {'reward_model': folder} instead, which loads a model of its own."
        )
    return RewardModel(folder, base=lambda: as_scorer(bare(policy), pad_token_id=pad_token_id), **options)


def builds_on(folder: str | Path, model: Any) -> bool:
    """Whether a folder holds a LoRA adapter over the base of `model`, by its path or else the content of its files."""
    return has_lora(model) and is_over(folder, str(model.active_peft_config.base_model_name_or_path or ""))


def is_over(folder: str | Path, ours: str) -> bool:
    """Whether a folder holds a LoRA adapter over the model in folder `ours`, or of that hub name ("": of none)."""
    if not (is_adapter(folder) and _spares_base(peft.PeftConfig.from_pretrained(str(folder)))):
        return False
    theirs = adapter_base(folder)
    if not ours or not theirs:
        return False
    if Path(ours).resolve() == Path(theirs).resolve():
        return True
    return Path(ours).is_dir() and Path(theirs).is_dir() and _weights(ours) == _weights(theirs)


def _weights(folder: str) -> dict[str, str]:
    return {file: digest for file, digest in hash_model(folder).items() if file.endswith(".safetensors")}


def _spares_base(config: Any) -> bool:
    return isinstance(config, peft.LoraConfig) and config.bias == "none" and config.init_lora_weights in HARMLESS_STARTS


@contextmanager
def sampling_weights(model: Any, *, merged: bool, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Passes inside read copies: of weights that have adapters with these added, if `merged`, and of all in `dtype`."""
    layers: list[Any] = [layer for _, layer in lora_layers(model) if not layer.merged] if merged else []
    owners = [layer.get_base_layer() for layer in layers]
    if dtype is not None:
        inner = {id(part) for layer in layers for part in layer.modules()} - {id(owner) for owner in owners}
        owners = [module for module in model.modules() if id(module) not in inner]
    own = [(owner, dict(owner.named_parameters(recurse=False))) for owner in owners]
    adapted = {id(layer.get_base_layer()) for layer in layers}
    copies: dict[int, nn.Parameter] = {}

    def copied(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in copies:  # one of a table that is tied
            value = parameter.detach()
            value = value.to(dtype) if value.is_floating_point() else value
            copies[id(parameter)] = nn.Parameter(value, requires_grad=False)
        return copies[id(parameter)]

    try:
        for owner, parameters in own:
            for name, parameter in parameters.items():  # a bias too, which an adapter may change
                alone = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                setattr(owner, name, alone if id(owner) in adapted else copied(parameter))
        for layer in layers:
            layer.merge()
            if dtype is not None:
                layer.get_base_layer().to(dtype)
        yield
    finally:
        for owner, parameters in own:
            for name, parameter in parameters.items():
                setattr(owner, name, parameter)
        for layer in layers:
            layer.merged_adapters.clear()


def merging_pays(model: Any) -> bool:
    """Whether to sample with merged adapters: if copies of the weights take half of the free memory at most.

    Not if weights are quantized: they are no numbers that an adapter could be added to.
    """
    weights = [parameter for _, layer in lora_layers(model) for parameter in layer.get_base_layer().parameters()]
    if not weights or not all(each.is_floating_point() for each in weights):
        return False
    return sum(each.nbytes for each in weights) <= free_memory(weights[0].device) / 2


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


def lora_layers(model: Any) -> list[tuple[str, LoraLayer]]:
    """The layers with LoRA adapters by their names in the base model; none of a model without LoRA."""
    if not isinstance(model, peft.PeftModel):
        return []
    base: Any = model.get_base_model()
    return [(name, layer) for name, layer in base.named_modules() if isinstance(layer, LoraLayer)]
