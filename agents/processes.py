"""One process or many: who this one is, numbers added up over all of them, oracles asked together.

Alone, everything here is free. A paid oracle of a batched environment is asked by the main process, once for the rows
of all. Processes are started by `accelerate launch` or `torchrun` and joined through accelerate.
"""

import atexit
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed
from accelerate import PartialState
from numpy.typing import NDArray
from torch import Tensor

from ..arguments import environment_number
from ..errors import WorldError
from ..oracles.base import RewardOracle, Verdicts, is_paid, judge
from .precision import Precision, resolve_precision
from .settings import TrainingConfig

Part = TypeVar("Part")
Result = TypeVar("Result")
PATIENCE = timedelta(days=1)
"""How long processes wait for each other: one may be asking judges. One that dies ends the others at once where a
launcher has started them, and on CPUs; on GPUs without a launcher they wait for it.
"""


def join(*, cpu: bool = False) -> PartialState:
    """The world of processes that this one was started in, joined by the first call; on the CPU if `cpu`.

    The package always asks here: accelerate would not join processes without GPUs unless it is made to use the CPU, and
    keeps to what it hears first. WorldError if fewer processes were joined than WORLD_SIZE says.
    """
    num_expected = environment_number("WORLD_SIZE", 1)
    on_gpu = torch.cuda.is_available() or torch.xpu.is_available()
    state = PartialState(cpu=num_expected > 1 and (cpu or not on_gpu), timeout=PATIENCE)
    if state.num_processes < num_expected:
        raise WorldError(
            f"Expected to join {num_expected} processes (WORLD_SIZE), but got {state.num_processes}: each would train "
            "for itself. Start them with torchrun, and do not call PartialState() or Accelerator() of accelerate "
            "before this package; or unset WORLD_SIZE to run one process."
        )
    return state


@atexit.register
def _leave() -> None:
    """Ends gloo's threads first: the interpreter's end would abort a process in which one still runs."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def default_device() -> torch.device:
    """This process's accelerator if there is one, else the CPU."""
    device: torch.device = join().device
    return device


@contextmanager
def float32_matmuls(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Products of float32 matrices inside are computed in TF32 if that is wanted and the device is a CUDA one."""
    if not tf32 or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Processes:
    """The processes that train one model together; this one is `rank`, 0 to `count` - 1.

    Args:
        device: Where this process's model is; None: its default device.
        precision: What matrices are multiplied in within `autocast`.

    Raises:
        WorldError: Not all processes were joined, or they were joined on devices of another kind.
    """

    def __init__(self, device: torch.device | None = None, *, precision: Precision = "float32") -> None:
        state = join(cpu=device is not None and device.type == "cpu")
        self.rank: int = state.process_index
        self.count: int = state.num_processes
        self.device: torch.device = state.device if device is None else device
        self.precision = precision
        if self.count > 1 and self.device.type != state.device.type:
            raise WorldError(
                f"Expected the model on a device of the kind on which the processes are joined ({state.device.type}), "
                f"got {self.device}. Load it with device=default_device() of alpacafarm_env.agents.processes."
            )

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        join().wait_for_everyone()

    def autocast(self) -> AbstractContextManager[Any]:
        """Multiplies matrices of the forward passes inside, and of their backward passes, in the precision."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def share(self, rows: NDArray[np.int64]) -> Tensor:
        """This process's rows of a batch that all processes know: every `count`-th, from its rank on."""
        return torch.from_numpy(rows[self.rank :: self.count].copy())

    def reduce(self, sums: Tensor) -> Tensor:
        """Add a tensor up over all processes; the `reduce` of `losses`."""
        if self.count == 1:
            return sums
        moved = sums.to(self.device, copy=True)
        torch.distributed.all_reduce(moved)
        return moved.to(sums.device)

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add named numbers up over all processes; a missing name counts as 0."""
        parts = self.gather(dict(sums))
        names = dict.fromkeys(chain.from_iterable(parts))
        return {name: math.fsum(part[name] for part in parts if name in part) for name in names}

    def means(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """The mean of each column over its entries of all processes without NaN; NaN if none is left."""
        real = {name: column.double()[~column.isnan()] for name, column in columns.items()}
        sums = self.add_up({name: float(column.sum()) for name, column in real.items()})
        counts = self.add_up({name: column.numel() for name, column in real.items()})
        return {name: total / counts[name] if counts[name] else math.nan for name, total in sums.items()}

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Each process's numbers, float64 [k], in the order of ranks: [count, k] on the CPU."""
        if self.count == 1:
            return numbers.cpu()[None]
        own = numbers.to(self.device)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(parts, own)
        return torch.stack(parts).cpu()

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add gradients up over all processes; a missing one counts as zeros, so that all take part.

        Not used by sharded parameters, whose gradients are added up in the backward pass.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.count > 1:
                torch.distributed.all_reduce(parameter.grad)

    def copy_from_main(self, parameter: torch.nn.Parameter) -> None:
        """Overwrite a parameter with the main process's."""
        if self.count > 1:
            torch.distributed.broadcast(parameter.data, src=0)

    def gather(self, part: Part) -> list[Part]:
        """Each process's (picklable) part, in the order of ranks."""
        parts: list[Any] = [part] * self.count
        if self.count > 1:
            torch.distributed.all_gather_object(parts, part)
        return parts

    def from_main(self, content: Part) -> Part:
        """The main process's content; the others' is ignored."""
        contents = [content]
        if self.count > 1:
            torch.distributed.broadcast_object_list(contents, src=0)
        return contents[0]

    def together(self, work: Callable[[], Result]) -> Result:
        """Do `work` on all processes; if it fails on one it fails on all (WorldError): none waits for another."""
        if self.count == 1:
            return work()
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - raised below, once the others know
            error = caught
        causes = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, cause in enumerate(causes):
            if cause is not None:
                raise WorldError(f"Process {rank} has failed: {cause}")
        final: Result = result
        return final

    def spread(
        self,
        parts: Sequence[Part],
        work: Callable[[Part], Result],
    ) -> list[Result]:
        """`work` of each part, each done by one process; all get all results, in order. Errors as of `together`."""
        mine = range(len(parts))[self.rank :: self.count]
        own = self.together(lambda: [(number, work(parts[number])) for number in mine])
        results = dict(chain.from_iterable(self.gather(own)))
        return [results[number] for number in range(len(parts))]

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Compare what must be the same on all processes; a WorldError on all of them names what differs and how."""
        parts = self.gather(dict(settings))
        differing = []
        for name in dict.fromkeys(chain.from_iterable(parts)):
            first = parts[0].get(name)
            other = next((rank for rank, part in enumerate(parts) if part.get(name) != first), None)
            if other is not None:
                differing.append(f"{name}: {first!r} on process 0, {parts[other].get(name)!r} on process {other}")
        if differing:
            raise WorldError(
                f"The processes of a run must have the same settings and see the same folder, but differ in "
                f"{'; '.join(differing)}. Start all with one command, and keep the folder on a disk that all share."
            )


Config = TypeVar("Config", bound=TrainingConfig)


def settled(config: Config, model: torch.nn.Module) -> Config:
    """The config with the precision that the main process has found for all."""
    device = next(model.parameters()).device
    return replace(config, precision=Processes(device).from_main(resolve_precision(config.precision, model)))


def judge_together(
    processes: Processes, oracle: RewardOracle, instructions: Sequence[str], responses: Sequence[str]
) -> Verdicts:
    """As `oracles.base.judge`, for processes that ask equally often: a paid oracle is asked once, for the rows of all.

    An error of the main process, which asks, is one of all.
    """
    if processes.count == 1 or not is_paid(oracle):
        return judge(oracle, instructions, responses)
    parts = processes.gather((tuple(instructions), tuple(responses)))
    batch = [[text for part in parts for text in part[side]] for side in (0, 1)]
    judged = processes.together(lambda: judge(oracle, *batch) if processes.is_main else None)
    verdicts = processes.from_main(judged)
    assert verdicts is not None
    first = sum(len(part[0]) for part in parts[: processes.rank])
    own = slice(first, first + len(instructions))
    return Verdicts(verdicts.scores[own], {name: values[own] for name, values in verdicts.details.items()})
