"""Settings of agents: frozen dataclasses that refuse a bad value by the name of its field."""

import math
from dataclasses import dataclass, fields
from types import NoneType
from typing import Literal, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every int, float, bool and Literal is checked against its type; floats must be finite."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))  # a field's own type is a text under `from __future__ import annotations`
        for field in fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            kinds = get_args(hint) or (hint,)
            if value is None and NoneType in kinds:
                continue
            for choices in (get_args(kind) for kind in (hint, *kinds) if get_origin(kind) is Literal):
                self.require(value in choices, field.name, f"one of {choices}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self.require(int not in kinds or (number and isinstance(value, int)), field.name, "an integer")
            self.require(float not in kinds or (number and math.isfinite(value)), field.name, "a finite number")
            self.require(bool not in kinds or isinstance(value, bool), field.name, "True or False")

    @classmethod
    def paper(cls) -> Self:
        """The settings of the paper that the class names; usually its defaults."""
        return cls()

    def require(self, holds: bool, field: str, expected: str) -> None:
        """Raise a ValueError that names the field, what it may be and what it is."""
        if not holds:
            raise ValueError(f"{type(self).__name__}.{field} must be {expected}, got {getattr(self, field)!r}")

    def at_least(self, least: int, *names: str) -> None:
        """Require fields, where they are not None, to be `least` or more."""
        for name in names:
            self.require(getattr(self, name) is None or getattr(self, name) >= least, name, f"{least} or more")

    def above_0(self, *names: str) -> None:
        """Require fields, where they are not None, to be above 0."""
        for name in names:
            self.require(getattr(self, name) is None or getattr(self, name) > 0, name, "above 0")


Schedule = Literal["linear", "cosine", "constant"]
"""How the learning rate falls after the warm-up: to 0 at the end of all configured steps, or not at all."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """Settings of every algorithm: optimizer, schedule, micro-batches, checkpoints."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Schedule = "linear"
    """How the rate goes from its peak to 0 over all configured steps, wherever training is stopped."""
    warmup_steps: float = 0.0
    """Steps of linear warm-up; below 1, a share of all steps. The first step's rate is not 0 (AlpacaFarm's is)."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_eps: float = 1e-8
    """AdamW's epsilon, added after the bias correction."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; the norm before that is logged. None: never."""
    micro_batch_tokens: int | None = None
    """Most padded tokens that go through a model at once: memory and speed only, results differ by rounding. None:
    1,024 on a CPU, 16,384 on a GPU. Halved before the first step if that does not fit into memory: see `memory`."""
    gradient_checkpointing: bool = False
    """Keep one tensor a layer of a forward pass and compute the rest again for its gradient: a tenth of the memory for
    a third more arithmetic. The results are the same."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Autocast of forward passes. Weights and optimizer keep their own precision."""
    tf32: bool = True
    """Multiply float32 matrices in TF32 on a CUDA device, in a step: ten bits of mantissa, several times the speed, as
    AlpacaFarm's scripts do. False: as torch is set, which is to float32. Nothing changes on a CPU."""
    save_every: int = 20
    """Steps between checkpoints, 0 for the last step only. The last step is always saved."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep, at least 1."""
    sharding: Literal["none", "full"] = "none"
    """"full" splits weights, gradients and moments of all models over the processes (FSDP2); "none": each has all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.above_0("learning_rate", "max_grad_norm")
        self.at_least(0, "warmup_steps", "save_every")
        self.at_least(1, "micro_batch_tokens", "keep_checkpoints")


FREE_TO_CHANGE = frozenset(
    {"save_every", "keep_checkpoints", "num_processes", "num_envs", "sharding"}
    | {"micro_batch_tokens", "sampling_batch_size", "gradient_checkpointing", "tf32"}
)
"""Settings that a resumed run may change: what is kept, what fits into memory and how fast, not what is learned."""


def schedule_factor(completed: int, total: int, *, warmup: float, kind: str) -> float:
    """The share of the peak learning rate in the step after `completed` of `total` steps, in (0, 1]."""
    num_warmup = math.ceil(warmup * total) if warmup < 1 else int(warmup)
    if completed < num_warmup:
        return (completed + 1) / (num_warmup + 1)
    progress = (completed - num_warmup) / max(1, total - num_warmup)
    return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}[kind]
