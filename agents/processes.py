"""One process or many: who this one is, and numbers added up over all of them.

Processes are started by `accelerate launch` or `torchrun` and joined through accelerate; alone, everything here is
free.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
from accelerate import Accelerator, PartialState
from numpy.typing import NDArray
from torch import Tensor


def default_device() -> torch.device:
    """This process's accelerator if there is one, else the CPU."""
    device: torch.device = PartialState().device
    return device


class Processes:
    """The processes that train one model together.

    Attributes:
        rank: This process, 0 to count - 1.
        count: How many there are.

    Args:
        device: Where this process's model is.
        mixed_precision: What `autocast` computes in.
    """

    def __init__(self, device: torch.device, *, mixed_precision: Literal["no", "bf16"] = "no") -> None:
        self._accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed_precision)
        self.rank: int = self._accelerator.process_index
        self.count: int = self._accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes are here."""
        self._accelerator.wait_for_everyone()

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes inside run in the mixed precision."""
        context: AbstractContextManager[Any] = self._accelerator.autocast()
        return context

    def share(self, rows: NDArray[np.int64]) -> Tensor:
        """This process's rows of a batch that all processes know: every `count`-th, from its rank on."""
        return torch.from_numpy(rows[self.rank :: self.count].copy())

    def reduce(self, sums: Tensor) -> Tensor:
        """Add a tensor up over all processes; each gets the result. The hook that `losses` and `masked` take."""
        if self.count == 1:
            return sums
        moved = sums.to(self._accelerator.device, copy=True)
        torch.distributed.all_reduce(moved)
        return moved.to(sums.device)

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add named numbers up over all processes; a name that a process lacks counts as 0 there."""
        return {name: math.fsum(parts) for name, parts in self._gather(sums).items()}

    def largest(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The largest of each named number over all processes."""
        return {name: max(parts) for name, parts in self._gather(numbers).items()}

    def means(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean of each column over its entries of all processes, NaN entries left out; NaN if none is left."""
        known = {name: column.double()[~column.isnan()] for name, column in columns.items()}
        sums = self.add_up({name: float(column.sum()) for name, column in known.items()})
        counts = self.add_up({name: column.numel() for name, column in known.items()})
        return {name: total / counts[name] if counts[name] else math.nan for name, total in sums.items()}

    def add_gradients(self, parameter: torch.nn.Parameter) -> None:
        """Add a parameter's gradient up over all processes; none counts as zeros, so that all take part."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if self.count > 1:
            torch.distributed.all_reduce(parameter.grad)

    def copy_from_main(self, parameter: torch.nn.Parameter) -> None:
        """Overwrite a parameter with the main process's."""
        if self.count > 1:
            torch.distributed.broadcast(parameter.data, src=0)

    def _gather(self, numbers: Mapping[str, float]) -> dict[str, list[float]]:
        """Each process's number by name, in the order of ranks, where it has one."""
        gathered: list[Any] = [dict(numbers)] * self.count
        if self.count > 1:
            torch.distributed.all_gather_object(gathered, dict(numbers))
        names = dict.fromkeys(chain.from_iterable(gathered))
        return {name: [part[name] for part in gathered if name in part] for name in names}
