"""The one training loop: processes, optimizer, schedule, clipping, metrics, checkpoints, resume. It knows no algorithm.

Three laws make a run a function of its config and seed:

- **Sums over a global count.** An agent gives *sums* over the real items (tokens, pairs) of a micro-batch; the loop
  divides them by the number of items of the whole batch on all processes and adds gradients up. So gradients depend
  neither on padding, nor on how a batch is cut into micro-batches, nor on the number of processes.
- **Keyed randomness.** Each draw is keyed on (seed, purpose, step) and made for all processes' rows. No random state
  needs saving, and a resumed run, or one on another number of processes, makes the same draws.
- **No clocks in metrics.jsonl.** Times go to timing.jsonl. A resumed run cuts metrics.jsonl back to its checkpoint, and
  rewrites the bytes that an uninterrupted run would have written.

Gradients are added up after the last micro-batch, without DistributedDataParallel: the modules stay bare, so
generation, exchanged adapters and parameters unused in a step need no special care. What is too large for each process
to have is sharded: see `sharding`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import __version__
from ..errors import CheckpointError
from ..folders import Claim
from ..monitors.runs import ROLLOUTS
from ..pretrained import reading
from ..seeding import keyed_rng
from . import checkpoints
from .attention import packs
from .fused import unfuse
from .memory import GB, DeviceMemory, Probe, checkpointed_layers, first_tried, gradient_checkpointing, keep_freed_memory
from .optimizer import Optimizer
from .precision import Precision
from .processes import Processes, float32_matmuls, settled
from .rollouts import Groups, group_batches, micro_batches
from .settings import FREE_TO_CHANGE, TrainingConfig, schedule_factor
from .sharding import full, local, make_shards
from .tracking import RunLog

Sums = Callable[[Tensor], dict[str, Tensor] | Iterator[dict[str, Tensor]]]
"""Row numbers of a micro-batch -> sums over its real items; "loss" is differentiated, all are reported as means.

They come at once, or in parts that add up: see `Loop.accumulate`.
"""

Resume = Literal["auto", "never"]
"""How a folder that has checkpoints is treated: the newest complete one is continued, or it is refused."""


def epoch_batch(step: int, *, num_items: int, batch_size: int, seed: int) -> NDArray[np.int64]:
    """The items of batch `step` (from 1) when every epoch goes through all of them once, in an order of its own."""
    epoch, position = divmod(step - 1, math.ceil(num_items / batch_size))
    order = keyed_rng(seed, "order", epoch).permutation(num_items)
    return order[position * batch_size : (position + 1) * batch_size]


def keyed_generator(seed: int, *content: str | int) -> torch.Generator:
    """A fresh CPU generator for (seed, content), independent of all others."""
    # On the CPU wherever the model is: a GPU's generator draws other numbers, and others on another kind of GPU.
    return torch.Generator().manual_seed(int(keyed_rng(seed, *content).integers(2**62)))


def trained(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by role and name."""
    named = ((role, *each) for role, module in modules.items() for each in module.named_parameters())
    return {f"{role}.{name}": parameter for role, name, parameter in named if parameter.requires_grad}


class Loop:
    """Trains `modules` step by step and keeps the run's folder: an algorithm goes through its remaining steps.

        for step in loop:                                # from the checkpoint's on
            means = loop.update(micro_batches, sums, count=count)
            yield loop.log(means)                        # ends the step

    Attributes:
        step: Completed steps.
        parameters: By name, what the optimizer moves: trained parameters, or their masters if they are below float32.
        micro_batch_tokens: Those of the config, or fewer once it is measured that they do not fit.
        seconds: Those of each part of the last step.
        rollouts: Responses of the step that are to be kept, JSON-able; `log` writes them.
        peaks: Where a caller puts a dict here, the highest memory in use by each part of a step, in bytes.
        probe: By which `micro_batch_tokens` was fitted to the memory before the first step.
        state: JSON-able floats of the agent that change while training (e.g. a KL coefficient); checkpointed.

    Args:
        modules: By name, what is trained: every parameter that requires a gradient. The first is the main one.
        frozen: What else is sharded, such as a reference.
        total: Steps of the whole run, the horizon of the schedule.
        out: The run's folder; None keeps nothing.
        inputs: What else decides the result (data, environment), JSON-able, compared on resume.
        write: Writes the model's weights into a folder; `read` reads them back in place.
        largest: Gives this process's largest update: tokens of each row in a micro-batch, padding included, and sums
            over some of these rows. Its passes are tried before the first step. None: nothing is tried.
        label: Who trains, for messages.

    Raises:
        CheckpointError: The checkpoint to resume is damaged or belongs to another run.
        WorldError: Processes differ in settings, folder or what they find there, or one has failed.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        config: TrainingConfig,
        total: int,
        seed: int,
        out: Path | None,
        inputs: Mapping[str, Any],
        write: Callable[[Path], None],
        read: Callable[[Path], None],
        largest: Callable[[], tuple[Sequence[int], Sums]] | None = None,
        label: str = "training",
        resume: Resume = "auto",
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        parameters = trained(modules)
        if not parameters:
            raise ValueError(f"Nothing to train: no parameter of {', '.join(modules)} requires a gradient.")
        device = next(iter(parameters.values())).device
        config = settled(config, next(iter(modules.values())))
        self.processes = Processes(device, precision=cast(Precision, config.precision))
        self.config, self.total, self.seed, self.out = config, total, seed, out
        self.step, self.state = 0, dict[str, float]()
        self.micro_batch_tokens = config.micro_batch_tokens or first_tried(device)
        self.memory = DeviceMemory(device)
        if device.type == "cpu":
            keep_freed_memory()
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] | None = None
        self.rollouts: Sequence[Mapping[str, Any]] = ()
        self.probe: Probe | None = None
        self._kept = 0  # the step of the newest checkpoint
        self._write, self._read, self._largest, self.label = write, read, largest, label
        self._stepping, self._began = ExitStack(), 0.0
        self._identity = {**asdict(config), "seed": seed, "num_processes": self.processes.count, "total_steps": total}
        self._identity = json.loads(json.dumps({**self._identity, **inputs}))  # as it will read back from a file
        self._log: RunLog | None = None  # of the main process
        size = f"{len(parameters)} tensors, {sum(each.numel() for each in parameters.values())} numbers"
        self.processes.agree({**self._identity, "out": out and str(out.resolve()), "trained parameters": size})
        for parameter in parameters.values():  # fresh adapters and heads are drawn by each process for itself
            self.processes.copy_from_main(parameter)
        folder = None if out is None else self._open(out, resume)
        self._layers = checkpointed_layers(modules.values()) if config.gradient_checkpointing else ()
        for module in (*modules.values(), *frozen) if config.sharding == "full" else ():
            unfuse(module)
        self._shards = make_shards(modules, frozen, sharding=config.sharding, count=self.processes.count)
        self._packed = all(map(packs, modules.values()))
        with self._split():
            self._optimizer = Optimizer(trained(modules), config)
        self.parameters = self._optimizer.parameters
        if out is not None:
            lengths = (0, 0) if folder is None else self.processes.together(lambda: self._restore(folder))
            self.processes.together(lambda: self._continue(out, *lengths))

    def cut(self, total_lengths: Sequence[int] | Tensor, groups: Groups | None = None) -> list[Tensor]:
        """Micro-batches of rows of so many tokens each; rows of a group that are neighbours read its prompt once."""
        if groups is not None:
            return group_batches(torch.as_tensor(total_lengths), groups, self.micro_batch_tokens)
        return micro_batches(total_lengths, self.micro_batch_tokens, packed=self._packed)

    def update(self, micro_batches: Sequence[Tensor], sums: Sums, *, count: float) -> dict[str, float]:
        """One optimizer update on this process's micro-batches (row numbers; maybe none) of `count` real items.

        Returns:
            Means of the sums over the real items of all processes, and "grad_norm" before clipping.

        Raises:
            FloatingPointError: The loss or the gradient is no longer finite.
        """
        with self.timed("update"), self._split():
            means = self.accumulate(micro_batches, sums, count=count)
            limit = math.inf if self.config.max_grad_norm is None else self.config.max_grad_norm
            norm = float(full(nn.utils.clip_grad_norm_(self.parameters.values(), limit)))
            if finite := math.isfinite(norm) and math.isfinite(means["loss"]):
                self._optimizer.step(self.learning_rate)
        if not finite:
            saved = "no checkpoint yet" if self.out is None else f"checkpoints are in {self.out}"
            raise FloatingPointError(
                f"Training diverged in step {self.step + 1}: loss {means['loss']!r}, gradient norm {norm!r} ({saved}). "
                f"Lower learning_rate (now {self.config.learning_rate!r}) or look at the rewards."
            )
        return {**means, "grad_norm": norm}

    def whole(self) -> AbstractContextManager[None]:
        """All models whole on each process, for passes without gradients; entered by all together. See `sharding`."""
        return nullcontext() if self._shards is None else self._shards.whole()

    def _split(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shards is None else self._shards.split()

    def accumulate(self, micro_batches: Sequence[Tensor], sums: Sums, *, count: float) -> dict[str, float]:
        """Add up the gradients of mean(loss) over all micro-batches and processes; the means of all sums.

        Where `sums` yields parts, the "loss" of each is differentiated before the next one is asked for: what a role
        keeps for its backward pass is freed before another role runs. Sums of one name add up.
        """
        num_items = torch.tensor([count, len(micro_batches)], dtype=torch.float64)
        counts, numbers = self.processes.gather_numbers(num_items).T.tolist()
        if (total := math.fsum(counts)) == 0:
            raise ValueError("Expected at least one real item in the batch of all processes, got none.")
        # A pass without rows gives gradients of 0 and the names of the sums. Sharded, all make equal numbers of passes.
        least = 1 if self._shards is None else int(max(numbers))
        without = [torch.zeros(0, dtype=torch.int64, device=self.processes.device)] * (least - len(micro_batches))
        totals: dict[str, Tensor] = {}
        for rows in chain(micro_batches, without):
            if self._shards is not None:
                self._shards.before_pass()
            for name, value in self._differentiate(sums, rows, total).items():
                totals[name] = totals.get(name, 0.0) + value.double()
        if self._shards is None:
            self.processes.add_gradients(self.parameters.values())
        # One collective and one wait for the device an update; added up exactly, so in no order.
        columns = self.processes.gather_numbers(torch.stack(list(totals.values()))).T.tolist()
        return {name: math.fsum(column) / total for name, column in zip(totals, columns, strict=True)}

    def _differentiate(self, sums: Sums, rows: Tensor, total: float) -> dict[str, Tensor]:
        """Add the gradients of loss / total of one micro-batch to the parameters'; its sums."""
        values: dict[str, Tensor] = {}
        parts: Iterator[dict[str, Tensor]] | None = None
        while True:
            with self.processes.autocast(), gradient_checkpointing(self._layers):
                if parts is None:
                    given = sums(rows)
                    parts = iter([given]) if isinstance(given, dict) else given
                part = next(parts, {})
            if not part:
                return values
            (part["loss"] / total).backward()  # type: ignore[no-untyped-call]
            self._optimizer.take_gradients()
            for name, value in part.items():
                values[name] = values[name] + value.detach() if name in values else value.detach()

    @property
    def learning_rate(self) -> float:
        """The rate of the current step."""
        config = self.config
        factor = schedule_factor(self.step, self.total, warmup=config.warmup_steps, kind=config.schedule)
        return config.learning_rate * factor

    def __iter__(self) -> Iterator[int]:
        """The numbers of the remaining steps, from 1; whoever makes a step ends it by `log`.

        From the first step to the end (or `close`) nobody else may write into `out`; CheckpointError if somebody has.
        """
        if self.step < self.total and self._largest is not None:
            self._fit(*self._largest())
        place = self.out if self.processes.is_main else None
        length = self._log.length if self._log else 0
        claimed = self.processes.together(lambda: checkpoints.claim_metrics(place, length))
        with claimed:
            while (step := self.step + 1) <= self.total:
                self._began, self.seconds = perf_counter(), {}
                with ExitStack() as self._stepping:
                    self._stepping.enter_context(float32_matmuls(self.processes.device, tf32=self.config.tf32))
                    yield step
                if self.step != step:
                    raise RuntimeError(
                        f"{self.label}: step {step} must be ended by Loop.log(metrics), which counts it."
                    )

    def log(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """End a step; its metrics, which are on disk then, and a checkpoint when due."""
        self._stepping.close()  # before the caller goes on, who may compute in another precision
        metrics = {"step": self.step + 1, **metrics, "learning_rate": self.learning_rate}
        self.step += 1
        if self._log is not None:
            seconds = {"seconds": perf_counter() - self._began, **self.seconds}
            self._log.write(metrics, {**seconds, "peak_gb": self.memory.peak() / GB}, self.rollouts)
        due = self.config.save_every and self.step % self.config.save_every == 0
        if due or self.step == self.total:
            self.save()
        return metrics

    def _fit(self, sizes: Sequence[int], sums: Sums) -> None:
        """Fit `micro_batch_tokens` to the memory by passes of the largest update, on all processes together.

        Raises:
            NotEnoughMemoryError: Not even the longest row fits.
        """
        count = float(sum(sizes))

        def differentiate(rows: Tensor) -> None:
            with self._split(), float32_matmuls(self.processes.device, tf32=self.config.tf32):
                if self._shards is not None:
                    self._shards.before_pass()
                self._differentiate(sums, rows.to(self.processes.device), count)

        numbers = sum(local(parameter).numel() for parameter in self.parameters.values())
        self.probe = Probe(
            self.memory,
            sizes,
            differentiate,
            self._optimizer.zero_grad,
            gradients=4.0 * numbers,
            moments=0.0 if self._optimizer.has_moments else 8.0 * numbers,
            worst=lambda number: max(self.processes.gather(number)),
            careful=not self.memory.on_gpu or self._shards is not None,
            who=self.label,
        )
        self.micro_batch_tokens = self.probe.tokens(self.micro_batch_tokens)
        self.memory.clear_peak()  # what the probe has freed goes back, and the peak is that of the steps

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the seconds of the block as `part` of the step in timing.jsonl."""
        began = perf_counter()
        with nullcontext() if self.peaks is None else self.memory.measured(self.peaks, part):
            yield
        self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - began

    def keep(self) -> None:
        """Save, unless the last step has been saved."""
        if self._kept != self.step:
            self.save()

    def save(self) -> None:
        """Write `out/checkpoint-<completed steps>`, then remove older ones beyond `keep_checkpoints`."""
        if self.out is not None:
            folder = self.out / f"checkpoint-{self.step}"
            with self.whole():
                checkpoints.publish(folder, self._fill, self.processes)
            prune = partial(checkpoints.prune, self.out, keep=self.config.keep_checkpoints)
            self.processes.together(lambda: prune() if self.processes.is_main else None)
        self._kept = self.step

    def _fill(self, folder: Path) -> None:
        """Write a checkpoint; of sharded tensors, a file by each process."""
        if self.processes.is_main:
            self._write(folder)
        if self.processes.is_main or self._shards is not None:
            self._optimizer.save(folder, is_main=self.processes.is_main)
        if not self.processes.is_main:
            return
        checkpoints.write_json(folder / "config.json", self._identity)
        assert self.out is not None
        length, kept = (checkpoints.flushed_length(self.out / name) for name in ("metrics.jsonl", ROLLOUTS))
        state = {"step": self.step, "metrics_bytes": length, "rollouts_bytes": kept, "agent": self.state}
        checkpoints.write_json(folder / "state.json", {**state, "version": __version__})

    def _open(self, out: Path, resume: Resume) -> Path | None:
        """The checkpoint to continue, whose weights are read; None to begin."""
        folder = self.processes.together(lambda: self._newest(out, resume))
        self.processes.agree({"newest checkpoint in out": folder and folder.name})
        if folder is not None:
            self.processes.together(lambda: self._read_weights(folder))
        return folder

    @staticmethod
    def _newest(out: Path, resume: Resume) -> Path | None:
        """The checkpoint to continue, None to begin."""
        with checkpoints.writing(out):
            out.mkdir(parents=True, exist_ok=True)
        folder = checkpoints.newest(out) if resume == "auto" else None
        if folder is None and checkpoints.steps(out):
            why = "and resume='never' would overwrite them" if resume == "never" else "but none is complete"
            raise CheckpointError(f"{out} holds checkpoints, {why}. Take another folder, or remove them to start over.")
        return folder

    def _continue(self, out: Path, metrics_bytes: int, rollouts_bytes: int) -> None:
        """Put the run's files back to where the checkpoint left them."""
        if not self.processes.is_main:
            return
        with Claim(out, "a training run"):
            checkpoints.cut_metrics(out / "metrics.jsonl", metrics_bytes)
            if (rollouts := out / ROLLOUTS).exists():  # a sample for readers, and nothing that a run needs
                checkpoints.cut_metrics(rollouts, min(rollouts_bytes, rollouts.stat().st_size))
            checkpoints.remove_leftovers(out, step=self.step)
        self._log = RunLog(out, length=metrics_bytes)

    def _read_weights(self, folder: Path) -> None:
        checkpoints.compare(folder / "config.json", self._identity, free=FREE_TO_CHANGE)
        self._read(folder)

    def _restore(self, folder: Path) -> tuple[int, int]:
        """Read the rest of a checkpoint; returns how long metrics.jsonl and the kept rollouts were."""
        state = checkpoints.read_json(folder / "state.json")
        self._optimizer.load(folder)
        with reading(folder, "the state of a run in state.json"):
            self.step = self._kept = int(state["step"])
            self.state = dict(state["agent"])
            return int(state["metrics_bytes"]), int(state["rollouts_bytes"])
