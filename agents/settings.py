"""Settings of agents: frozen dataclasses that refuse a bad value by the name of its field."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every field is checked against its type, strictly; floats must be finite. ValueError if one fails.

    Values stay as they are given: an integer for a float is kept.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        try:
            _model(kind).model_validate(vars(self))
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise ValueError(f"{kind.__name__}.{name}: {first['msg']}, got {getattr(self, name)!r}") from None

    @classmethod
    def paper(cls) -> Self:
        """The settings of the paper that the class names; usually its defaults."""
        return cls()

    def require(self, holds: bool, field: str, expected: str) -> None:
        """Raise a ValueError that names the field, what it may be and what it is."""
        if not holds:
            raise ValueError(f"{type(self).__name__}.{field} must be {expected}, got {getattr(self, field)!r}")


@cache
def _model(settings: type) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(settings, include_extras=True).items()}
    return create_model(settings.__name__, __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


Schedule = Literal["linear", "cosine", "constant"]
"""How the learning rate falls after the warm-up: to 0 at the end of all configured steps, or not at all."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """Settings of every algorithm: optimizer, schedule, micro-batches, checkpoints."""

    learning_rate: Positive = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Schedule = "linear"
    """How the rate goes from its peak to 0 over all configured steps, wherever training is stopped."""
    warmup_steps: NonNegative = 0.0
    """Steps of linear warm-up; below 1, a share of all steps. The first step's rate is not 0 (AlpacaFarm's is)."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_eps: float = 1e-8
    """AdamW's epsilon, added after the bias correction."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this global norm; the norm before that is logged. None: never."""
    micro_batch_tokens: Count | None = None
    """Most padded tokens that go through a model at once: memory and speed only, results differ by rounding. None:
    1,024 on a CPU, 16,384 on a GPU. Halved before the first step if that does not fit into memory: see `memory`."""
    gradient_checkpointing: bool = False
    """Keep one tensor a layer of a forward pass and compute the rest again for its gradient: a tenth of the memory for
    a third more arithmetic. The results are the same."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What matrices are multiplied in; weights, norms, losses and log-probabilities stay float32. "auto": bfloat16 for
    a model of 10 M parameters or more where that is measured to be faster, else float32. Resumed
    where the other one is faster, a run is refused until it is told which it began with."""
    tf32: bool = True
    """Multiply float32 matrices in TF32 on a CUDA device, in a step: ten bits of mantissa, several times the speed, as
    AlpacaFarm's scripts do. False: as torch is set, which is to float32. Nothing changes on a CPU."""
    save_every: Natural = 20
    """Steps between checkpoints, 0 for the last step only. The last step is always saved."""
    keep_checkpoints: Count = 2
    """How many checkpoints to keep, at least 1."""
    sharding: Literal["none", "full"] = "none"
    """"full" splits weights, gradients and moments of all models over the processes (FSDP2); "none": each has all."""


FREE_TO_CHANGE = frozenset(
    {"save_every", "keep_checkpoints", "keep_rollouts", "num_processes", "num_envs", "sharding"}
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
