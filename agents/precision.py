"""What matrices are multiplied in: float32, or bfloat16 where a device gains by it.

Processors differ: one multiplies bfloat16 several times as fast as float32 (AVX512-BF16, AMX, GPUs), another emulates
it and is slower. So the two are raced, once a process. Weights, norms, losses and log-probabilities stay float32.
"""

import sys
from functools import cache, partial
from time import perf_counter
from typing import Any, Final, Literal

import torch
from torch import nn

Precision = Literal["float32", "bfloat16"]
SMALL: Final = 10e6
"""Parameters of a model below which casts and calls take as long as the products."""
GAIN: Final = 1.5
"""How much faster bfloat16 must be, as casting costs time too."""
LOST: Final = 4.0
"""How much slower it is at least where it is emulated: a further turn takes long there, and tells nothing."""
_SHAPES: Final = {"cpu": (512, 576, 1536), "cuda": (4096, 4096, 4096)}


def resolve_precision(name: Literal["auto"] | Precision, model: nn.Module) -> Precision:
    """The precision that `name` means for a model on its device; of "auto" one line is printed if it was measured.

    "auto" is bfloat16 where its products are at least `GAIN` times as fast as float32's, and for weights in bfloat16;
    else float32, and always for a model of fewer than 10 M parameters.
    """
    if name != "auto":
        return name
    weights = list(model.parameters())
    if sum(each.numel() for each in weights) < SMALL:
        return "float32"
    common = max(weights, key=torch.Tensor.numel)
    if common.dtype != torch.float32:
        return "bfloat16" if common.dtype == torch.bfloat16 else "float32"
    return _raced(common.device.type)


@cache
def _raced(device: str) -> Precision:
    seconds = race(device)
    ratio = seconds["bfloat16"] / seconds["float32"]
    chosen: Precision = "bfloat16" if ratio * GAIN <= 1 else "float32"
    sys.stderr.write(f"Precision {chosen}: products in bfloat16 take {ratio:.1f} times as long as in float32 here.\n")
    return chosen


def race(device: str) -> dict[Precision, float]:
    """Seconds of a product of matrices in each precision on a device: the best of up to five, taking turns."""
    rows, inner, columns = _SHAPES.get(device, _SHAPES["cuda"])
    wait: Any = torch.cuda.synchronize if device == "cuda" else lambda: None
    best: dict[Precision, float] = {"float32": float("inf"), "bfloat16": float("inf")}
    before = torch.get_float32_matmul_precision()
    try:
        if device == "cuda":
            torch.set_float32_matmul_precision("high")  # float32 at its fastest
        factors: dict[Precision, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in best:
            new = partial(torch.ones, dtype=getattr(torch, name), device=device)
            factors[name] = new(rows, inner), new(inner, columns)
        for turn in range(6):
            products = 4 if turn else 1  # the first turn pays for what is set up once
            for name, (x, weight) in factors.items():
                wait()
                began = perf_counter()
                for _ in range(products):
                    x @ weight
                wait()
                if turn:
                    best[name] = min(best[name], (perf_counter() - began) / products)
            if turn and best["bfloat16"] > LOST * best["float32"]:
                break
    finally:
        torch.set_float32_matmul_precision(before)
    return best
