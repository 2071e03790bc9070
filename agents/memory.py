"""A step within the memory: activations computed again, as many samples and tokens as fit.

How many tokens go through a model at once is measured before the first step, so that no run is killed for memory. A
CPU's memory is shared with the system, which ends a process that takes too much without a word. So there nothing is
tried that a smaller pass does not promise: a short row promises what the longest row takes, and that one what a whole
micro-batch takes. A GPU answers what is too large with an error, and loses nothing by it.
"""

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import NotEnoughMemoryError, warn_caller
from ..pretrained import USABLE, free_host_memory
from .rollouts import micro_batches

FIRST_TRIED: Final = {"cpu": 1024, "cuda": 16384}
"""Tokens of a micro-batch if they fit. On a CPU few: a layer's activations stay in the cache, and what comes and goes
leaves fewer pages to be had from the system (SFT of 135 M parameters is twice as fast as with 16,384)."""
GB: Final = 1e9
_CLEAR_PEAK: Final = Path("/proc/self/clear_refs")
RECOMPUTE = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # dropout is off: nothing is drawn

CPU_ROWS, CPU_BYTES = 256, 2e9
"""Most responses sampled at once on a CPU, and most memory for them: fixed, as rounding depends on the rows."""
MARGIN = 0.2
"""The share of the free memory that sampling leaves to what is not counted."""


def checkpointed_layers(modules: Iterable[nn.Module]) -> list[GradientCheckpointingLayer]:
    """The layers of models by transformers that can compute their activations again; ValueError if there are none."""
    layers = [
        layer for module in modules for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError("gradient_checkpointing: expected a model that transformers can checkpoint; set it to False")
    return layers


@contextmanager
def gradient_checkpointing(layers: Iterable[GradientCheckpointingLayer]) -> Iterator[None]:
    """Forward passes inside keep each layer's input alone for the backward pass, which computes the rest again.

    transformers checkpoints a layer in train mode only, in which a sampler would lose its cache. So the layers are put
    into it for as long as gradients are wanted, and nothing within them or around them: whatever else a model does
    in train mode (dropped layers, noisy routing) stays off. Without gradients nothing changes. The backward pass may
    run outside.
    """
    chosen: list[Any] = list(layers)
    before = [(layer.training, layer.gradient_checkpointing) for layer in chosen]
    for layer in chosen:
        layer._gradient_checkpointing_func = RECOMPUTE
        layer.training = layer.gradient_checkpointing = True
    try:
        yield
    finally:
        for layer, (training, enabled) in zip(chosen, before, strict=True):
            layer.training, layer.gradient_checkpointing = training, enabled


def kv_bytes_a_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes that a decoder keeps of a token for those after it: keys and values, layers x heads x head size of each."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * dtype.itemsize)


def rows_that_fit(free_bytes: float, config: Any, dtype: torch.dtype, *, prompt: int, response: int) -> int:
    """How many responses can be sampled at once in `free_bytes`, at least 1; `prompt` and `response` are in tokens.

    A row takes its keys and values; while its prompt is read, four hidden states and three of the feed-forward layer a
    token; and four tables of the vocabulary in float32 to draw from. `MARGIN` of the memory stays free.
    """
    shape = config.get_text_config()
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    reading = prompt * (4 * shape.hidden_size + 3 * inner) * dtype.itemsize
    row = (prompt + response) * kv_bytes_a_token(config, dtype) + reading + 4 * 4 * shape.vocab_size
    return max(1, int((1 - MARGIN) * free_bytes / row))


def sampling_rows(model: PreTrainedModel, *, prompt: int, response: int) -> int:
    """How many responses to sample at once: what fits into the memory that is free now, of a CPU a little of it."""
    on_gpu, free = model.device.type == "cuda", free_memory(model.device)
    rows = rows_that_fit(
        free if on_gpu else min(free, CPU_BYTES), model.config, model.dtype, prompt=prompt, response=response
    )
    return rows if on_gpu else min(rows, CPU_ROWS)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take: of a GPU, also what torch holds unused."""
    if device.type != "cuda":
        return free_host_memory()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + held)


def first_tried(device: torch.device) -> int:
    """Tokens of a micro-batch before anything is measured."""
    return FIRST_TRIED.get(device.type, FIRST_TRIED["cuda"])


def keep_freed_memory() -> None:
    """Lets glibc keep what tensors of up to 32 MB free, instead of giving it back and paging it in again.

    Of a step on a CPU that takes 2 to 3 %; up to 1 GB stays with the process. Nothing where the environment sets
    malloc's own variables, or malloc is another.
    """
    chosen = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & set(os.environ)
    if sys.platform == "linux" and not chosen and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        libc.mallopt(m_mmap_threshold, 32 << 20)  # the most it takes itself to; setting the other fixes it
        libc.mallopt(m_trim_threshold, 1 << 30)


class DeviceMemory:
    """Memory of a device, in bytes: of a GPU torch's tensors, of a CPU the whole process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def used(self) -> int:
        """In use now."""
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else int(psutil.Process().memory_info().rss)

    def free(self) -> int:
        """That this process can still take."""
        return free_memory(self.device)

    def peak(self) -> int:
        """The most in use since `clear_peak`, or since the start where the system cannot clear it."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        if _CLEAR_PEAK.exists():
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        import resource  # not on every system

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def clear_peak(self, *, trim: bool = True) -> None:
        """Begins a new peak, from what is in use; `trim`: once a CPU's freed memory has gone back to the system."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        if trim and sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        with suppress(OSError):  # not there, or a container's that cannot be written: the peak is that since the start
            _CLEAR_PEAK.write_text("5", encoding="ascii")

    @contextmanager
    def measured(self, peaks: dict[str, int], name: str) -> Iterator[None]:
        """Notes the block's peak in `peaks`, as that of `name` if it is the highest so far."""
        self.clear_peak(trim=False)  # a run's steps are not trimmed either, and a trimmed heap gets other gaps
        yield
        peaks[name] = max(peaks.get(name, 0), self.peak())


class Probe:
    """Finds the micro-batch that a run's largest update fits into memory with, by doing its passes without the update.

    Args:
        sizes: Tokens of each row of that update in a micro-batch, padding included.
        differentiate: Forward and backward pass of some rows (their numbers), which adds to the gradients.
        clear: Drops the gradients.
        gradients: Bytes of all gradients.
        moments: Bytes that the optimizer has yet to make.
        worst: The largest of all processes' numbers.
        careful: Whether each pass must be promised to fit by a smaller one, as an error would be too late.
        who: Trains, for messages.

    Attributes:
        peak: Bytes in use at the most during an update, the optimizer's moments included.
        allowed: Bytes that may be in use.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        sizes: Sequence[int],
        differentiate: Callable[[Tensor], object],
        clear: Callable[[], None],
        *,
        gradients: float = 0.0,
        moments: float = 0.0,
        worst: Callable[[float], float] = float,
        careful: bool,
        who: str,
    ) -> None:
        self._memory, self._sizes, self._careful, self._who = memory, sizes, careful, who
        self._differentiate, self._clear, self._worst = differentiate, clear, worst
        self._gradients, self._moments = gradients, moments
        self._base = memory.used()
        self.allowed = self._base + USABLE * memory.free()
        self.peak = float(self._base)
        self._a_token = 0.0

    def tokens(self, wanted: int) -> int:
        """`wanted` tokens or, if they take too much, a half, a quarter ... of them, at least those of the longest row.

        Raises:
            NotEnoughMemoryError: Not even the longest row fits.
        """
        order = sorted(range(len(self._sizes)), key=self._sizes.__getitem__)
        least = self._sizes[order[-1]]
        number = max(wanted, least)
        try:
            if self._careful:
                # The first pass makes what all others find (weights in bfloat16): it would count as the row's own.
                self._run(order[:1])
                self._clear()
                self._memory.clear_peak()
                self._base = self._memory.used()
            for row in (order[0], order[-1]) if self._careful else ():
                if not self._fits([row]):
                    self._refuse(least)
            while not self._fits_in(number):
                if number == least:
                    self._refuse(least)
                number = max(number // 2, least)
        finally:
            self._clear()
        if number < wanted:
            warn_caller(
                f"{self._who}: micro-batches of {number} tokens, as {wanted} would take more than {USABLE:.0%} of the "
                "free memory. Results differ by rounding."
            )
        return number

    def _fits_in(self, number: int) -> bool:
        """Whether the widest of the update's micro-batches of so many tokens fits."""
        cut = [rows.tolist() for rows in micro_batches(self._sizes, number)]
        if len(cut) == 1:  # then gradients are made as activations are freed
            self._clear()
        return self._fits(max(cut, key=self._tokens_of))

    def _fits(self, rows: list[int]) -> bool:
        """Does the pass of some rows if there is room for it by the pass before; whether there was."""
        size = self._tokens_of(rows)
        self.peak = self._base + self._gradients + self._moments + self._a_token * size
        if self._careful and not self._allows(self.peak):
            return False
        self.peak = self._run(rows) + self._moments
        activations = self.peak - self._moments - self._gradients - self._base
        self._a_token = max(0.0, activations) / size
        return self._allows(self.peak)

    def _run(self, rows: list[int]) -> float:
        self._memory.clear_peak()
        try:
            self._differentiate(torch.tensor(rows))
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            clear_device_cache(garbage_collection=True)
            return math.inf
        return self._memory.peak()

    def _tokens_of(self, rows: list[int]) -> int:
        return len(rows) * max(self._sizes[row] for row in rows)

    def _allows(self, peak: float) -> bool:
        return self._worst(peak / self.allowed) <= 1

    def _refuse(self, least: int) -> NoReturn:
        raise NotEnoughMemoryError(
            f"{self._who}: the longest row, of {least} tokens, takes {self.peak / GB:.1f} GB in all, and "
            f"{self.allowed / GB:.1f} GB may be used ({USABLE:.0%} of what is free). Set gradient_checkpointing, train "
            "LoRA adapters (--lora 8), load the weights in bfloat16, or take shorter prompts and responses."
        )
