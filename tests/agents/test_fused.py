"""Fused layers: the numbers of peft's and transformers' own, and only where these are what is computed."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_worlds import build_llama
from torch import Tensor, nn

from alpacafarm_env.agents.fused import fuse, rounded, unfuse

ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
IDS = torch.arange(24).view(2, 12) + 3


def adapted(**settings: Any) -> PeftModel:
    torch.manual_seed(0)
    model = get_peft_model(build_llama(100), LoraConfig(**{**ALL, **settings}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()  # type: ignore[no-any-return]


def passed(model: nn.Module, *, autocast: bool = False) -> Tensor:
    """The logits of a pass, and the gradients of what trains."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        logits = model(input_ids=IDS, use_cache=False).logits.float()
    logits.square().mean().backward()
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat([logits.detach().flatten(), *gradients])


def is_fused(model: nn.Module) -> bool:
    return any("forward" in vars(module) for module in model.modules())


def test_float32_passes_are_the_same() -> None:
    model = adapted()
    plain = passed(model)
    fused = passed(fuse(model))
    assert is_fused(model)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-4)
    unfuse(model)
    assert not is_fused(model)
    assert torch.equal(passed(model), plain)


def test_bfloat16_passes_are_as_close_as_unfused_ones() -> None:
    model = adapted()
    exact, plain = passed(model), passed(model, autocast=True)
    fused = passed(fuse(model), autocast=True)
    assert (fused - exact).norm() < 1.2 * (plain - exact).norm()


CHANGES: dict[str, Callable[[PeftModel], object]] = {
    "merged": lambda model: (model.merge_adapter(), model.enable_input_require_grads()),
    "second adapter": lambda model: model.add_adapter("other", LoraConfig(**ALL)) or model.set_adapter("other"),
    "bfloat16 base": lambda model: [
        module.to(torch.float32 if "lora_" in name else torch.bfloat16)
        for name, module in model.named_modules()
        if not list(module.children())
    ],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"bias": "all"}])
def test_other_adapters_keep_pefts_passes(change: str, settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    CHANGES[change](model)
    plain = passed(model)
    torch.testing.assert_close(passed(fuse(model)), plain, atol=1e-5, rtol=1e-4)


def test_a_model_without_adapters_stays_as_it_is() -> None:
    assert not is_fused(fuse(build_llama(100)))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = fuse(adapted())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(passed(twin), passed(model))


def test_a_frozen_weight_is_rounded_once_until_it_changes() -> None:
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    first = rounded(weight, torch.bfloat16)
    assert rounded(weight, torch.bfloat16) is first
    weight.mul_(2)
    assert torch.equal(rounded(weight, torch.bfloat16), weight.bfloat16())
    trained = nn.Parameter(torch.randn(4, 4))
    assert rounded(trained, torch.bfloat16) is not rounded(trained, torch.bfloat16)
