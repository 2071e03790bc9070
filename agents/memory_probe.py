"""How many tokens go through a model at once: measured before the first step, so that no run is killed for memory.

A CPU's memory is shared with the system, which ends a process that takes too much without a word. So there nothing is
tried that a smaller pass does not promise: a short row promises what the longest row takes, and that one what a whole
micro-batch takes. A GPU answers what is too large with an error, and loses nothing by it.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from ..errors import NotEnoughMemoryError
from ..host_memory import USABLE
from .memory import free_memory
from .prompts import warn_caller
from .rollouts import micro_batches

FIRST_TRIED: Final = {"cpu": 1024, "cuda": 16384}
"""Tokens of a micro-batch if they fit. On a CPU few: a layer's activations stay in the cache, and what comes and goes
leaves fewer pages to be had from the system (SFT of 135 M parameters is twice as fast as with 16,384)."""
M_MMAP_THRESHOLD: Final = -3
LARGE_TENSOR: Final = 1_000_000
GB: Final = 1e9
_CLEAR_PEAK: Final = Path("/proc/self/clear_refs")


def first_tried(device: torch.device) -> int:
    """Tokens of a micro-batch before anything is measured."""
    return FIRST_TRIED.get(device.type, FIRST_TRIED["cuda"])


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
        if trim and (libc := _glibc()) is not None:
            libc.malloc_trim(0)
        with suppress(OSError):  # not there, or a container's that cannot be written: the peak is that since the start
            _CLEAR_PEAK.write_text("5", encoding="ascii")

    @contextmanager
    def measured(self, peaks: dict[str, int], name: str) -> Iterator[None]:
        """Notes the block's peak in `peaks`, as that of `name` if it is the highest so far."""
        self.clear_peak(trim=False)  # a run's steps are not trimmed either, and a trimmed heap gets other gaps
        yield
        peaks[name] = max(peaks.get(name, 0), self.peak())


def map_large_tensors() -> bool:
    """Has glibc give each large tensor pages of its own, which go back to the system with it; False without glibc.

    In glibc's heap the gaps that freed tensors leave between kept ones fit no other: a pass that keeps 1.7 GB takes
    3.4. Pages of their own take what is kept, but every tensor's are made anew: a pass takes 1.4 times as long. So this
    is for where memory is short. It holds for the rest of the process.
    """
    return (libc := _glibc()) is not None and libc.mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR) == 1


def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "gnu_get_libc_version") else None
    except (OSError, TypeError):
        return None


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
        self._a_token, self._last, self._may_map = 0.0, list[int](), careful

    def tokens(self, wanted: int) -> int:
        """`wanted` tokens or, if they take too much, a half, a quarter ... of them, at least those of the longest row.

        Raises:
            NotEnoughMemoryError: Not even the longest row fits.
        """
        order = sorted(range(len(self._sizes)), key=self._sizes.__getitem__)
        least = self._sizes[order[-1]]
        number = max(wanted, least)
        try:
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
        promised = self._base + self._gradients + self._moments + self._a_token * size
        if not self._careful or self._allows(promised):
            self.peak = self._run(rows) + self._moments
            activations = self.peak - self._moments - self._gradients - self._base
            self._a_token, self._last = max(0.0, activations) / size, rows
            if self._allows(self.peak):
                return True
        else:
            self.peak = promised
        if not self._may_map or not map_large_tensors():
            return False
        self._may_map, self._a_token = False, 0.0
        return (not self._last or self._last == rows or self._fits(self._last)) and self._fits(rows)

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
