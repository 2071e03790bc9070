"""Fewer passes over memory in a trained model's layers: LoRA products added in place, norms in one step.

A linear layer with an adapter is y = x Wᵀ + s (x Aᵀ) Bᵀ. As peft writes it, each of its terms is a tensor of its own in
both directions; here they are added up in place. Parameters stay peft's, and so does what is saved. Under autocast a
frozen weight is rounded once, and not again in every pass.
"""

import inspect
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .attention import fused_attention, is_plain

_ROUNDED: Any = WeakIdKeyDictionary()
"""Frozen weight -> (its version, the dtype's copy)."""


def computed_in(x: Tensor) -> torch.dtype:
    """What products of `x` are computed in: autocast's dtype, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`; the copy of a frozen one is kept for as long as the weight lives unchanged."""
    if weight.dtype == dtype:
        return weight.detach()
    if weight.requires_grad or not isinstance(weight, nn.Parameter):
        return weight.detach().to(dtype)
    version, copied = _ROUNDED.get(weight, (None, None))
    if version != weight._version or copied.dtype != dtype or copied.device != weight.device:
        copied = weight.detach().to(dtype)
        _ROUNDED[weight] = (weight._version, copied)
    return copied  # type: ignore[no-any-return]


def fuse(model: nn.Module) -> nn.Module:
    """Puts the fused passes into those layers of a model with LoRA that have one; the model."""
    modules = list(model.modules())
    for module in modules if any(type(module) is LoraLinear for module in modules) else ():
        if type(module) is LoraLinear:
            vars(module)["forward"] = MethodType(_lora_forward, module)
        elif is_plain(module):
            vars(module)["forward"] = fused_attention(module)
        if isinstance(module, GradientCheckpointingLayer):  # the last norm stays as it is: a float32 head may read it
            for norm in filter(_is_rms_norm, module.children()):
                vars(norm)["forward"] = MethodType(_norm_forward, norm)
    return model


def unfuse(model: nn.Module) -> None:
    """Takes them out again: a sharded weight is whole in its own layer's pass only."""
    for module in model.modules():
        function = getattr(vars(module).get("forward"), "__func__", None)
        if function is not None and function.__module__.startswith(__package__):
            del module.forward


def _lora_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dtype = computed_in(x)
    if not args and not kwargs and (adapter := _plain_adapter(layer, dtype)) is not None:
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        given = x.to(dtype).flatten(0, -2), layer.base_layer.weight, layer.base_layer.bias, down, up
        product: Tensor = _LoraProduct.apply(*given, layer.scaling[adapter])  # type: ignore[no-untyped-call]
        return product.view(*x.shape[:-1], -1)
    return type(layer).forward(layer, x, *args, **kwargs)  # type: ignore[no-any-return]


def _plain_adapter(layer: Any, dtype: torch.dtype) -> str | None:
    """The name of a layer's one adapter, if y is x Wᵀ + s (x Aᵀ) Bᵀ and all of it is computed in `dtype`."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    base = layer.base_layer
    if len(names) != 1 or layer.disable_adapters or layer.merged or type(base) is not nn.Linear:
        return None
    name: str = names[0]
    down, up = layer.lora_A[name], layer.lora_B[name]
    plain = name not in getattr(layer, "lora_variant", ()) and down.bias is None and up.bias is None
    dropout = getattr(layer.lora_dropout[name], "p", 0.0) if layer.training else 0.0
    frozen = not any(each.requires_grad for each in base.parameters())
    same = dtype in (base.weight.dtype, torch.bfloat16) and down.weight.dtype in (dtype, torch.float32)
    autocast = torch.is_autocast_enabled(base.weight.device.type)
    exact = autocast or base.weight.dtype == down.weight.dtype == dtype
    return name if plain and not dropout and frozen and same and exact else None


class _LoraProduct(torch.autograd.Function):
    """x [n, i], W [o, i], bias, A [r, i], B [o, r], s -> x Wᵀ + bias + s (x Aᵀ) Bᵀ in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, s: float) -> Tensor:
        weight, down, up = (rounded(each, x.dtype) for each in (weight, down, up))
        hidden = x.mm(down.t())
        y = x.mm(weight.t()) if bias is None else torch.addmm(rounded(bias, x.dtype), x, weight.t())
        ctx.save_for_backward(x, hidden, weight, down, up)
        ctx.s = s
        return y.addmm_(hidden, up.t(), alpha=s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, weight, down, up = ctx.saved_tensors
        inner = grad.mm(up)
        needs = ctx.needs_input_grad
        dx = grad.mm(weight).addmm_(inner, down, alpha=ctx.s) if needs[0] else None
        d_down = inner.t().mm(x).float().mul_(ctx.s) if needs[3] else None
        d_up = hidden.t().mm(grad).t().float().mul_(ctx.s) if needs[4] else None  # the faster order
        return dx, None, None, d_down, d_up, None


def _is_rms_norm(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__.endswith("RMSNorm") and _source(kind.forward) == _source(LlamaRMSNorm.forward)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # code without a file
        return ""


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or norm.weight.dtype != torch.float32:
        plain: Tensor = type(norm).forward(norm, x)
        return plain
    normed: Tensor = _RMSNorm.apply(x, norm.weight, norm.variance_epsilon, computed_in(x))  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """x [..., d], w [d] -> w x / √(mean(x²) + ε), computed in float32, given in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide = grad.float()
        d_weight = (wide * x).mul_(scale).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        dx = None
        if ctx.needs_input_grad[0]:
            scaled = wide * weight
            share = (scaled * x).mean(-1, keepdim=True).mul_(scale.square())
            dx = scaled.addcmul_(x, share, value=-1).mul_(scale)
        return dx, d_weight, None, None
