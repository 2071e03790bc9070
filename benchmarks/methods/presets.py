"""Settings by name: for the sandbox, for AlpacaFarm's LLaMA 7B, and for real models on a CPU or GPUs of a given memory.

Learning rates, and where a preset says nothing else batch sizes and numbers of steps, are those of an agent's
`sandbox()` or `paper()`. An option that is given wins over its preset: options set fields of an agent's config.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar

from ...errors import AlpacaFarmError, DataError
from ...folders import check_model
from ...pretrained import num_parameters

Config = TypeVar("Config")
Dtype = Literal["float32", "bfloat16"]
PresetName = Literal["sandbox", "paper", "llama_7b_lora", "llama_7b_full", "small_chat", "small_cpu"]
TINY, SMALL, LARGE_GPU = 10e6, 3.5e9, 70e9
"""Parameters below which a model is trained as the sandbox's is, and up to which it fits a GPU of 24 GB; bytes of a GPU
that LLaMA 7B's preset is made for, one of 80 GB less what its driver keeps."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A run's options where they are not given."""

    config: Literal["sandbox", "paper"] = "paper"
    """Which preset of each agent's config."""
    max_response_tokens: int = 300
    lora: int = 0
    """Rank of the adapters; 0 trains all weights."""
    dtype: Dtype = "float32"
    """Type of the policy's weights."""
    reward_dtype: Dtype | None = None
    """Type of the reward model's weights where it only scores; None: the oracle's default."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the agents' configs that differ, for those that have them."""


PRESETS: Final[Mapping[PresetName, Preset]] = {
    # Two CPU cores and the shipped models of 0.4 M parameters.
    "sandbox": Preset(config="sandbox", max_response_tokens=64),
    # AlpacaFarm's settings, float32, whatever the machine.
    "paper": Preset(fields={"precision": "float32"}),
    # LLaMA 7B on one GPU of 80 GB: 512 responses a step, prompts of 192 and responses of 300 tokens.
    "llama_7b_lora": Preset(
        lora=8,  # of all linear layers, with alpha 64: AlpacaFarm's own LoRA runs
        dtype="bfloat16",  # of the frozen base, 13.5 GB of it; adapters and their moments are float32
        reward_dtype="bfloat16",  # another 13.2 GB, in float32 26.4
        fields={
            "value": "adapter",  # on the policy's trunk: a value model of its own would be another 13.2 GB
            "gradient_checkpointing": True,  # without it 8.8 MB a token, 144 GB at 16,384 tokens
        },
    ),
    # LLaMA 7B on eight GPUs of 80 GB, all weights: 16 bytes a parameter, of two models, lie on eight.
    "llama_7b_full": Preset(
        dtype="bfloat16",  # what is computed with and gathered; the optimizer moves float32 masters
        reward_dtype="bfloat16",
        fields={
            "value": "model",  # AlpacaFarm's: it starts from the reward model and all of it is trained
            "sharding": "full",
            "gradient_checkpointing": True,
        },
    ),
    # A chat model of 0.5 to 3 B parameters on one GPU of 24 GB.
    "small_chat": Preset(
        lora=8,
        dtype="bfloat16",  # 6.2 GB of 3.1 B parameters
        reward_dtype="bfloat16",
        fields={
            "value": "adapter",
            "gradient_checkpointing": True,
        },
    ),
    # A chat model on a CPU: AlpacaFarm's batches of 512 responses would take it hours a step.
    "small_cpu": Preset(
        lora=8,
        fields={
            "value": "adapter",
            "batch_size": 16,  # a few dozen rows of one's own are several updates
            "num_samples": 16,  # of best-of-n, whose 1,024 would take days
            "sample_batch_size": 64,
            "num_generations": 8,
            "rollout_batch_size": 32,  # minutes a step for 135 M parameters on two cores
            "minibatch_size": 16,
            "total_steps": 20,
        },
    ),
}


def choose_preset(policy: str) -> tuple[PresetName, str]:
    """The preset for a policy's size and this process's device, and why, in words; no weights are read.

    Raises:
        CheckpointError: There is no such policy, or its configuration cannot be used.
    """
    import torch

    from ...agents.processes import default_device

    if policy == "sandbox":
        return "sandbox", "the sandbox's policy"
    check_model(policy)
    size, device = num_parameters(policy), default_device()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    name: PresetName = "small_chat" if memory else "small_cpu"
    if size < TINY:
        name = "sandbox"
    elif size > SMALL and memory >= LARGE_GPU:
        name = "llama_7b_lora"
    return name, f"{size / 1e6:,.1f} M parameters, {f'GPU of {memory / 1e9:.0f} GB' if memory else device.type.upper()}"


OPTIONS = {"steps": "total_steps", "sampling_batch": "sampling_batch_size"} | {
    name: name
    for name in (
        *("epochs", "learning_rate", "num_instructions", "rollout_batch_size", "minibatch_size", "batch_size"),
        *("sample_batch_size", "micro_batch_tokens", "precision", "gradient_checkpointing", "sharding", "value"),
        "keep_rollouts",
    )
}
"""Option -> the field of a config that it sets."""


def option_of(field: str) -> str:
    """The option that sets a field."""
    name = next((option for option, set_field in OPTIONS.items() if set_field == field), field)
    return f"--{name.replace('_', '-')}"


def with_options(config: Config, changed: tuple[tuple[str, Any], ...]) -> Config:
    """The config with other values of some fields, or of those of a config within it that has them.

    Raises:
        DataError: There is no such field, or it cannot have that value.
    """
    places = _places(config)
    if foreign := [option_of(name) for name, _ in changed if name not in places]:
        able = ", ".join(option_of(name) for name in OPTIONS.values() if name in places)
        raise DataError(f"{', '.join(foreign)}: no setting of {type(config).__name__}, which has {able}.")
    with naming(", ".join(f"{option_of(name)} {value}" for name, value in changed)):
        result: Config = _replaced(config, dict(changed))
    return result


def with_defaults(config: Config, defaults: Mapping[str, Any]) -> Config:
    """The config with other values of those fields that it, or a config within it, has."""
    places = _places(config)
    result: Config = _replaced(config, {name: value for name, value in defaults.items() if name in places})
    return result


def _places(config: Any) -> dict[str, str]:
    """Field -> the field of the config within which it is set; "" for one of the config itself."""
    inner = {each.name: getattr(config, each.name) for each in fields(config)}
    own = {name: "" for name, value in inner.items() if not is_dataclass(value)}
    return own | {each.name: name for name, value in inner.items() if is_dataclass(value) for each in fields(value)}


def _replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    places = _places(config)
    changed = {name: value for name, value in changes.items() if not places[name]}
    for outer in {places[name] for name in changes} - {""}:
        inner = {name: value for name, value in changes.items() if places[name] == outer}
        changed[outer] = replace(getattr(config, outer), **inner)
    return replace(config, **changed)


@contextmanager
def naming(options: str) -> Iterator[None]:
    """Turns a refused value into a DataError that names the options it came from."""
    try:
        yield
    except AlpacaFarmError:
        raise
    except ValueError as error:
        raise DataError(f"{options}: {error}") from error
