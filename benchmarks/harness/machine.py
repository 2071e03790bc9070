"""The machine at hand: its memory, its rates of multiplying matrices and copying, and the peak of a block of code."""

import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

GEMM_SIZES: Final = {"cuda": 8192, "cpu": 1536}
COPY_BYTES: Final = {"cuda": 2**31, "cpu": 2**27}
_CLEAR_PEAK: Final = Path("/proc/self/clear_refs")


def device_name(device: torch.device) -> str:
    """What a reader calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} of {os.cpu_count()} cores"


def total_memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of large square matrices; median of five."""
    size = GEMM_SIZES.get(device.type, GEMM_SIZES["cpu"])
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: a @ b, device)


def copy_rate(device: torch.device) -> float:
    """Bytes a second that are read and written by a copy; median of five."""
    source = torch.zeros(COPY_BYTES.get(device.type, COPY_BYTES["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _median_seconds(lambda: target.copy_(source), device)


def _median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(6):
        began = perf_counter()
        work()
        wait(device)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds[1:])


def wait(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process on a CPU; the most since `clear_peak`, where that can be set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if _CLEAR_PEAK.exists() else ():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def clear_peak(device: torch.device) -> None:
    """Begins a new peak, from what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_PEAK.exists():
        _CLEAR_PEAK.write_text("5", encoding="ascii")


@dataclass
class PeakMeter:
    """The highest memory in use during each named block."""

    device: torch.device
    peaks: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Counts the block's peak as that of `name`."""
        clear_peak(self.device)
        yield
        self.peaks[name] = max(self.peaks.get(name, 0), peak_memory(self.device))
