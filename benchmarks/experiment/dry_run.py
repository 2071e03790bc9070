"""`train --dry-run`: makes the first steps of the run and prints memory, seconds by phase, hours and the micro-batch.

The models are loaded and the steps are real ones; nothing of them is kept. Where a policy has no weights at hand, a
table of sizes is all there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

from ... import pretrained
from ...errors import DataError
from ...pretrained import USABLE
from ..harness.report import Table, text_table
from ..methods.job import Job
from ..methods.methods import LATER_METHODS, REWARD_MODELING, find_method, hold_out

GB: Final = 1e9
STEPS: Final = 3
"""Steps after which a CPU's heap has most of its gaps: the peak of the first alone was .71 to .92 of the last one's,
that of three .84 to 1.00 (eight runs of 135 M parameters by LoRA: SFT, DPO, reward models)."""
MAX_S: Final = 60.0
"""Seconds after which no other step is begun: a step of PPO has many updates by itself."""
BATCHES: Final[Mapping[str, Any]] = {
    "fine_tuning": Job.demonstrations,
    "dpo": Job.preferences,
    "binary_feedme": Job.preferences,
    REWARD_MODELING: lambda job: hold_out(job.preferences())[0],
    "ppo": None,
    "quark": None,
    "kto": Job.preferences,
    **dict.fromkeys(method.name for method in LATER_METHODS if method.needs == "reward"),
}
"""Method -> the examples of a job that it goes through; None: it samples them, as many in each step."""


@dataclass(frozen=True)
class Rehearsal:
    """The first steps of a run as they were measured."""

    seconds: Mapping[str, float]
    """By phase, of a step; "load" is all that comes before the first one."""
    peaks: Mapping[str, float]
    """Bytes in use at the most, by phase."""
    allowed: float
    """Bytes that may be in use."""
    micro_batch_tokens: int
    steps: int
    """Steps of the whole run."""

    @property
    def hours(self) -> float:
        """Hours of the whole run, if all steps take as long."""
        step = sum(seconds for phase, seconds in self.seconds.items() if phase != "load")
        return (self.seconds["load"] + self.steps * step) / 3600

    @property
    def fits(self) -> bool:
        """Whether no phase takes more than it may."""
        return max(self.peaks.values()) <= self.allowed


def rehearse(job: Job, method: str) -> Rehearsal:
    """Makes a method's first steps, `STEPS` unless they take more than `MAX_S`, on the longest rows.

    Raises:
        DataError: The method makes no steps of its own that could stand for all.
        NotEnoughMemoryError: The longest row does not fit.
    """
    from ...agents.memory import DeviceMemory
    from ...agents.processes import Processes, default_device

    if method not in BATCHES:
        names = ", ".join(find_method(each).name for each in BATCHES)
        raise DataError(f"--dry-run: expected one of {names}, got {method}.")
    examples, memory = BATCHES[method], DeviceMemory(default_device())
    allowed = memory.used() + USABLE * memory.free()
    seconds, peaks = dict[str, float](), dict[str, int]()
    with TemporaryDirectory() as folder:
        job = replace(job, folder=Path(Processes().from_main(folder)))  # of all processes
        began = perf_counter()
        with memory.measured(peaks, "load"):
            agent = find_method(method).make(replace(job, one_batch=examples is not None))
        seconds["load"] = perf_counter() - began
        loop, steps = agent._loop, agent.num_steps
        if examples is not None:
            config: Any = loop.config
            steps = config.epochs * ceil(len(examples(job)) / config.batch_size)
        loop.peaks = peaks
        made, began = list[dict[str, float]](), perf_counter()
        for _ in islice(agent.updates(), STEPS):
            made.append(dict(loop.seconds))
            if perf_counter() - began > MAX_S:
                break
        seconds |= {phase: fmean(step[phase] for step in made) for phase in made[0]}
    assert loop.probe is not None  # made by `updates`
    # The probe's has the moments of AdamW's first step.
    peaks["update"] = max(peaks["update"], int(loop.probe.peak))
    return Rehearsal(seconds, peaks, allowed, loop.micro_batch_tokens, steps)


def report(job: Job, made: Rehearsal) -> str:
    """The table of phases, and what follows from it."""
    from ...agents.processes import Processes

    rows = [[phase, f"{made.seconds[phase]:.3g}", f"{made.peaks[phase] / GB:.2f}"] for phase in made.seconds]
    per_step = sum(made.seconds.values()) - made.seconds["load"]
    peak, adapters = max(made.peaks.values()), f" and LoRA adapters of rank {job.lora}" if job.lora else ""
    return "\n".join(
        [
            f"{job.policy_folder}: {job.dtype} weights{adapters}, {Processes().count} process(es)",
            text_table(Table(("phase", "seconds", "GB at the peak"), rows)),
            f"Micro-batches: {made.micro_batch_tokens:,} tokens. Peak: {peak / GB:.2f} GB a process, of "
            f"{made.allowed / GB:.2f} GB that may be used: {'it fits' if made.fits else 'it does not fit'}.",
            f"Hours: {made.hours:.2g}, for {made.steps} steps of {per_step:.3g} s; answers to eval are not counted.",
        ]
    )


def has_weights(job: Job) -> bool:
    """Whether the policy's weights are on this machine, or can be fetched."""
    folder = Path(job.policy_folder)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def sizes(job: Job) -> str:
    """A table of what the policy's numbers take: weights, gradients, and AdamW's moments with float32 masters."""
    numbers, adapters = count(job.policy_folder, job.lora or 8)
    ways = {
        "all weights, float32": (4 * numbers, 4 * numbers, 8 * numbers),
        "all weights, bfloat16": (2 * numbers, 4 * numbers, 12 * numbers),
        f"LoRA of rank {job.lora or 8} on bfloat16": (2 * numbers + 4 * adapters, 4 * adapters, 8 * adapters),
    }
    rows = [[way, *(f"{size / GB:.3g}" for size in (*each, sum(each)))] for way, each in ways.items()]
    return "\n".join(
        [
            f"{job.policy_folder}: {numbers:,} parameters. It has no weights, so nothing is measured; activations, "
            "keys and values, and other models come on top.",
            text_table(Table(("GB", "weights", "gradients", "optimizer", "in all"), rows)),
        ]
    )


def count(folder: Path | str, rank: int) -> tuple[int, int]:
    """Numbers of a model, and of adapters of this rank on all its linear layers, by its configuration alone."""
    import torch
    from transformers.pytorch_utils import Conv1D

    model = pretrained.without_weights(folder)
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    return model.num_parameters(), rank * sum(sum(weight.shape) for weight in linear)
