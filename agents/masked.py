"""Statistics over the real tokens of all processes, and normalisation by them.

A `mask` is True where an entry counts. What stands outside it, NaN included, never reaches a result; results there
are 0. Statistics take `reduce`, which adds a tensor up over all processes (an all-reduce of sums; None: one process).
"""

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Takes this process's sums, returns the sums over all processes, e.g. `lambda x: accelerator.reduce(x, "sum")`."""


def masked_moments(x: Tensor, mask: Tensor | None = None, *, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the entries of `x` where `mask` is True, over all processes.

    Two passes (sums, then squared deviations) in float64, so that splitting the rows over processes or padding them
    further moves the result by rounding only. With nothing to count, both are 0.

    Args:
        x: Any shape.
        mask: Bool, shaped as `x`; None counts every entry (pads too, as AlpacaFarm's released code does).
        reduce: Adds sums up over processes.

    Returns:
        Two float64 scalars (float32 on devices without float64).
    """
    real = zero_outside(_wide(x), mask)
    entries = real.new_tensor(x.numel()) if mask is None else mask.sum()
    sums = torch.stack((real.sum(), entries.to(real.dtype)))
    total, count = (reduce(sums) if reduce else sums).unbind()
    mean = total / count.clamp(min=1)
    squares = zero_outside((real - mean).square(), mask).sum()
    return mean, (reduce(squares) if reduce else squares) / count.clamp(min=1)


def masked_mean(x: Tensor, mask: Tensor | None = None, *, reduce: Reduce | None = None) -> Tensor:
    """Mean of `x` (numbers or bools) where `mask` is True, over all processes: a metric, without gradient. Scalar."""
    return masked_moments(x.detach(), mask, reduce=reduce)[0]


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    reduce: Reduce | None = None,
) -> Tensor:
    """(x − μ) / (σ + eps), plus μ again if not `shift_mean`; μ, σ (biased) over the masked entries of all processes.

    `shift_mean=False` on *rewards* is AlpacaFarm's reward whitening: it turns every zero into μ(1 − 1/σ). Summed over
    real tokens only, that constant rewards or punishes length, so under a mask use `scale_to_unit_std` instead.
    Source: Ziegler et al. 2019 (arXiv:1909.08593), released code; AlpacaFarm (arXiv:2305.14387), released code.

    Args:
        x: Any shape, usually advantages [B, T] of a whole rollout.
        mask: Bool, shaped as `x`; None counts every entry.
        shift_mean: False puts the mean back.
        eps: Added to σ.
        reduce: Adds sums up over processes.

    Returns:
        Shape and dtype of `x`; 0 where `mask` is False.
    """
    mean, variance = masked_moments(x, mask, reduce=reduce)
    whitened = (_wide(x) - mean) / (variance.sqrt() + eps)
    return zero_outside(whitened if shift_mean else whitened + mean, mask).to(x.dtype)


def scale_to_unit_std(
    x: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8, reduce: Reduce | None = None
) -> Tensor:
    """Returns x / σ, with σ (biased) over the masked entries of all processes; zeros stay zeros.

    Reward scaling under which equal scores give equal returns at any length. Without spread (σ ≤ eps) there is no
    scale, and `x` comes back as it is.

    Returns:
        Shape and dtype of `x`; 0 where `mask` is False.
    """
    std = masked_moments(x, mask, reduce=reduce)[1].sqrt()
    return zero_outside(_wide(x) / torch.where(std > eps, std, 1.0), mask).to(x.dtype)


def zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x`, with 0 where `mask` is False; unlike a product with the mask, this stops NaN. No mask, no change."""
    if mask is None:
        return x
    check_shapes(x=x, mask=mask)
    return x.masked_fill(~mask, 0)


def check_shapes(**tensors: Tensor) -> None:
    """Raises ValueError, naming each tensor and its shape, unless all shapes are equal."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"expected tensors of one shape, got {', '.join(f'{k} {v}' for k, v in shapes.items())}")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)  # Apple's GPUs have no float64
