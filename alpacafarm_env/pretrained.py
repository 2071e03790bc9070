"""Hugging Face folders and hub names: no code or pickle of theirs is read, and every fault is a CheckpointError."""

import inspect
import math
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from .arguments import environment_number
from .bases import adapter_base as adapter_base
from .bases import read_json
from .errors import AlpacaFarmError, CheckpointError, NotEnoughMemoryError

Kind = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]

COMPUTED: Final = ("inv_freq", "attention.bias", "attn.bias", "masked_bias")
"""Tables that some store with the weights and all compute."""
PICKLED: Final = "Pickled weights are not read: load them with their own library, and save them with save_pretrained."
USABLE: Final = 0.8
"""The share of the free memory that we may take: the rest is for what the system and other processes will want."""
_CGROUP = Path("/sys/fs/cgroup")
MAX_GROWTH: Final = 1000
MAX_PROMPT_TOKENS: Final = 192
MAX_RESPONSE_TOKENS: Final = 300
"""AlpacaFarm's limits."""


def load_tokenizer(path: str | PathLike[str], **options: Any) -> Any:
    """The tokenizer of a folder or hub name; `options` go to transformers."""
    from transformers import AutoTokenizer

    with reading(path, "a tokenizer (tokenizer.json ...)"):
        _check_growth(Path(path) / "tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
        tokenizer("a")  # some faults show only once it is used
        return tokenizer


def load_config(path: str | PathLike[str]) -> Any:
    """A model's configuration."""
    from transformers import AutoConfig

    with reading(path, "a model's config.json"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def num_parameters(path: str | PathLike[str]) -> int:
    """Number of a language model's parameters, by its configuration alone; of an adapter, those of its base."""
    return int(without_weights(path).num_parameters())


def without_weights(path: str | PathLike[str]) -> Any:
    """A language model, of an adapter its base, on torch's "meta" device: shapes, by its configuration alone."""
    import torch
    from transformers import AutoModelForCausalLM

    base = adapter_base(path) if (Path(path) / "adapter_config.json").is_file() else path
    config = load_config(base)
    with reading(base, "a language model's config.json"), torch.device("meta"):
        _check_size(base)
        make: Any = AutoModelForCausalLM.from_config
        return make(config)


def cache_keyword(model: Any) -> str:
    """By which name a model's forward pass takes keys and values read before: since transformers 5.24 another one."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def token_limits(max_prompt_tokens: int | None, max_response_tokens: int | None, positions: float) -> tuple[int, int]:
    """Returns the longest prompt and the longest response, in tokens; ValueError unless both are positive.

    None becomes what fits, AlpacaFarm's limit at most: the rest of the `positions` beside a number that is given, and
    without any three quarters of them for the prompt. `positions` is infinity if not known.
    """
    prompt, response = max_prompt_tokens, max_response_tokens
    if prompt is None:
        room = positions * 3 / 4 if response is None else positions - response
        prompt = int(min(MAX_PROMPT_TOKENS, room))
    if response is None:
        response = int(min(MAX_RESPONSE_TOKENS, positions - prompt))
    if prompt < 1 or response < 1:
        raise ValueError(
            "Expected max_prompt_tokens and max_response_tokens of at least 1, that fit together into the model's "
            f"positions ({positions}), got {max_prompt_tokens!r} and {max_response_tokens!r}."
        )
    return prompt, response


def load_model(
    kind: Kind, path: str | PathLike[str], *, new: Collection[str] = (), **options: Any
) -> tuple[Any, set[str]]:
    """Returns a model and the names of the parameters that the folder lacks, which transformers has drawn at random.

    `new` are parameters that may be lacking, such as the head of a classifier made of a language model.

    Raises:
        CheckpointError: The folder is missing, damaged, or of another kind.
        NotEnoughMemoryError: The weights would take more than `USABLE` of the free memory.
    """
    import transformers

    with reading(path, "a model (config.json and safetensors)"):
        _check_size(path)
        _check_room(path, options.get("dtype"))
        load = getattr(transformers, kind).from_pretrained
        options |= {"trust_remote_code": False, "use_safetensors": True}
        model, info = load(path, output_loading_info=True, **options)
    if kind == "AutoModelForCausalLM" and "score.weight" in info["unexpected_keys"]:
        raise CheckpointError(f"{path}: expected a language model, found a reward model or another classifier.")
    if beyond := _untaken(model, info["unexpected_keys"]):
        reason = f"by it the layers leave {len(beyond)} out, such as {beyond[:3]}. Restore the one saved with them."
        raise CheckpointError(f"{path}: expected a config.json that fits the weights, but {reason}")
    lacking = set(info["missing_keys"])
    if unexpected := sorted(lacking - set(new)):
        raise CheckpointError(
            f"{path}: expected all weights of a {type(model).__name__}, but {len(unexpected)} are not there, such as "
            f"{unexpected[:3]}. The weights are damaged, or those of another kind of model."
        )
    return model, lacking


def _untaken(model: Any, names: Collection[str]) -> list[str]:
    """The weights of a model's own layers among those that it has not taken.

    What stands beside the layers may be left over: the output of a tied model, a head, an encoder of images.
    """
    stacks = [f".{name}." for name, module in model.named_modules() if type(module).__name__ == "ModuleList"]
    numbered = ((re.match(r"(.*?\.)??(\w+\.)(?=\d+\.)", name), name) for name in names)
    own = [name for match, name in numbered if match and any(stack.endswith(f".{match[0]}") for stack in stacks)]
    return sorted(name for name in own if not name.endswith(COMPUTED))


def _check_size(path: str | PathLike[str]) -> None:
    """Raises CheckpointError for a folder whose config.json asks for more than its weights can be, before it is built.

    A layer has at least one square matrix of the hidden size, and a weight at least a bit.
    """
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    config = load_config(path).get_text_config() if size else None
    layers, width = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "hidden_size"))
    if layers * width**2 > 8 * size:
        shape = f"{layers:,} layers of width {width:,} (config.json)"
        raise CheckpointError(f"{path}: expected weights of {shape}, found {size:,} bytes, which cannot hold them.")


def free_host_memory() -> int:
    """Bytes that this process can still take.

    Processes of a launcher share a machine's memory, and a container may have a limit of its own.
    """
    free, limit = psutil.virtual_memory().available, _CGROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        rows = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = sum(int(size) for name, size in rows if name in ("active_file", "inactive_file"))
        free = min(free, int(most) - int((_CGROUP / "memory.current").read_text()) + cached)
    return int(free // environment_number("LOCAL_WORLD_SIZE", 1))


def _check_room(path: str | PathLike[str], dtype: Any) -> None:
    """Raises NotEnoughMemoryError for a folder whose weights do not fit: the system would end the process."""
    from safetensors import safe_open

    numbers = size = 0
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in list(weights.keys())]
            numbers += sum(map(math.prod, shapes))
        size += file.stat().st_size
    size, free = numbers * getattr(dtype, "itemsize", 0) or size, free_host_memory()
    if size > USABLE * free:
        raise NotEnoughMemoryError(
            f"{path}: {numbers:,} parameters{f' in {dtype}' if dtype else ''} take {size / 1e9:.1f} GB, and "
            f"{USABLE * free / 1e9:.1f} GB may be used ({USABLE:.0%} of what is free). Load them in bfloat16, or "
            "take a smaller model or a larger machine."
        )


def _check_growth(file: Path) -> None:
    """Raises CheckpointError for a tokenizer.json whose normalizer may make a text `MAX_GROWTH` times as long."""
    growth = _growth(read_json(file).get("normalizer")) if file.is_file() else 1
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"{file}: expected texts to grow {MAX_GROWTH} times at most, its normalizer: {growth:.3g}."
        )


def _growth(step: Any) -> float:
    """How many times as long a normalizer may make a text, without a few letters more."""
    if step is None or step.get("type") != "Replace":
        return math.prod(map(_growth, (step or {}).get("normalizers", [])))
    pattern = step["pattern"].get("String", "")  # a regular expression may match between any two letters
    return max(1.0, len(step["content"]) / len(pattern) if pattern else 1 + len(step["content"]))


def load_adapter(base: Any, folder: str | PathLike[str], *, trains: bool) -> Any:
    """Returns `base` as a `PeftModel` with a folder's LoRA adapter; `trains` says whether that will be trained."""
    import peft
    import safetensors

    if not (file := Path(folder) / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{file}: expected an adapter's weights, found none. {PICKLED}")
    with loading_adapters():
        model = peft.PeftModel.from_pretrained(base, str(folder), is_trainable=trains)
    with safetensors.safe_open(file, framework="pt") as weights:
        others = set(weights.keys()) - set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    if unexpected := sorted(name for name in others if "lora_" in name):
        raise CheckpointError(f"{file}: the base has no place for {len(unexpected)} matrices, such as {unexpected[0]}.")
    config = model.active_peft_config  # the base may have been moved since the adapter was saved
    config.base_model_name_or_path = base.name_or_path or config.base_model_name_or_path
    return model


def file_states(folder: str | PathLike[str]) -> list[tuple[str, int, int, int]]:
    """Each file of a folder, or the one file, with inode, time of last change and size: cheap, unlike a hash.

    The time is ctime, which no copying tool sets back. [] if there is no such folder or file.
    """
    root = Path(folder).expanduser()
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    states = ((path.relative_to(root).as_posix(), path.stat()) for path in files)
    return [(name, state.st_ino, state.st_ctime_ns, state.st_size) for name, state in states]


@contextmanager
def loading_adapters() -> Iterator[None]:
    """Within, peft's warning of missing weights is an error, and one that is no user's doing is not shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        # peft asks transformers for an attribute by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


@contextmanager
def reading(path: str | PathLike[str], expected: str) -> Iterator[None]:
    """Turns whatever a library raises over a file into one CheckpointError that names the folder and the reason.

    tokenizers raises bare Exceptions, and damaged JSON ends in almost any type, so all are caught.
    """
    try:
        yield
    except (AlpacaFarmError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's: the machine is full, the folder is well
            raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own (auto_map), which is never run"
        raise CheckpointError(f"{path}: expected {expected}, got none that can be used: {reason}") from error
