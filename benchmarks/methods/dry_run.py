"""`train --dry-run`: memory by role and phase, and hours, for the machine at hand. No weights are loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Final

from ... import agents, pretrained
from ...data import Dataset
from ...errors import DataError
from ...oracles.reward_model import is_adapter
from ..harness.agent_options import naming
from ..harness.report import Table, text_table
from .job import Job
from .memory import PHASES, Run, Shape, decode_bytes, phases, resident, step_flops
from .own_reward_model import hold_out

GB: Final = 1e9
USABLE: Final = 0.95
"""Of a device's memory: the rest is for its own library and for gaps between tensors."""
SHARES: Final = (0.3, 0.7)
"""Of the measured rates, that matrix products and reading reach in a training step: what well-kept trainers report for
GPUs, and more than what small models reach. `benchmarks.throughput` measures it for a shape."""

KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "ppo": frozenset({"sample", "reference", "value", "reward"}),
    "dpo": frozenset({"reference"}),
    "fine_tuning": frozenset(),
    "binary_feedme": frozenset(),
    "reward_modeling": frozenset(),
}
"""Method -> what there is beside the policy."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a process has."""

    name: str
    gpu: bool
    memory: float
    """Bytes of each process."""
    processes: int
    gemm: float
    """Operations a second, and bytes a second of a copy, of one process."""
    copy: float

    @classmethod
    def at_hand(cls, dtype: str) -> "Machine":
        """This machine, measured in a few seconds."""
        import torch

        from ...agents.processes import Processes, default_device
        from ..harness.machine import copy_rate, device_name, gemm_rate, total_memory

        device, count = default_device(), Processes().count
        local = count if device.type == "cpu" else 1  # processes share the memory of a machine, and have a GPU each
        return cls(
            name=device_name(device),
            gpu=device.type == "cuda",
            memory=total_memory(device) / local,
            processes=count,
            gemm=gemm_rate(device, getattr(torch, dtype)),
            copy=copy_rate(device),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's sizes."""

    shape: Shape
    run: Run
    reward: Shape | None
    steps: int

    @property
    def always(self) -> dict[str, float]:
        """Role -> bytes all the time."""
        return resident(self.shape, self.run, self.reward)

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        """Phase -> role -> bytes in that phase."""
        return {name: dict(parts) for name, parts in phases(self.shape, self.run, self.reward).items()}

    @property
    def peaks(self) -> dict[str, float]:
        """Phase -> bytes in all."""
        always = sum(self.always.values())
        return {name: always + sum(parts.values()) for name, parts in self.phases.items()}

    def seconds(self, machine: Machine) -> dict[str, float]:
        """Phase -> seconds of a step at the machine's full rates. Sampling reads all weights for each token."""
        flops = step_flops(self.shape, self.run, self.reward)
        found = {name: flops[name] / machine.gemm / self.run.processes for name in PHASES if name in flops}
        if "sample" in found:
            found["sample"] = max(found["sample"], decode_bytes(self.shape, self.run) / machine.copy)
        return {str(name): value for name, value in found.items()}


def make_plan(job: Job, method: str, machine: Machine) -> Plan:
    """The plan of a run, with as many responses sampled at once as the agent would take.

    Raises:
        DataError: What the method takes is not known.
    """
    if method not in KNOWN:
        raise DataError(f"--dry-run: expected one of {', '.join(KNOWN)}, got {method}.")
    roles, config = KNOWN[method], config_for(job, method)
    if "reward" in roles and job.reward == "sandbox" and job.dataset != "sandbox":
        raise DataError(f"{method}: expected --reward-model with --dataset {job.dataset}, got none.")
    model = config_of(job.policy_folder)
    shape = Shape.of(model)
    positions = getattr(model.get_text_config(), "max_position_embeddings", None) or float("inf")
    with naming(f"--policy {job.sft}, {job.limit_options}"):
        prompt, response = pretrained.token_limits(job.max_prompt_tokens, job.max_response_tokens, positions)
    rows, steps = (config.rollout_batch_size, config.total_steps) if "sample" in roles else _fixed(job, method, config)
    if method == "reward_modeling":
        shape = replace(shape, parameters=shape.trunk + shape.width, vocab=0)
    run = Run(
        roles=roles,
        rows=rows,
        update_rows=config.minibatch_size if "sample" in roles else rows,
        passes=config.num_epochs if "sample" in roles else 1,
        prompt=prompt,
        response=response,
        micro_batch_tokens=config.micro_batch_tokens,
        sampling_rows=getattr(config, "sampling_batch_size", None),
        lora=lora_of(job),
        dtype=job.dtype or "float32",
        reward_dtype=job.reward_dtype or ("bfloat16" if machine.gpu else "float32"),  # the oracle's own choice
        autocast=config.mixed_precision == "bf16",
        checkpointing=config.gradient_checkpointing,
        value=getattr(config, "value", None) or ("adapter" if lora_of(job) else "model"),
        sharded=getattr(config, "sharding", "none") == "full",
        processes=machine.processes,
    )
    reward = Shape.of(config_of(job.reward_model)) if "reward" in roles else None
    if reward is not None and job.reward_shares_base:
        run = replace(run, reward_lora=rank_of(job.reward_model))
    plan = Plan(shape=shape, run=run, reward=reward, steps=steps)
    if "sample" in roles and samples_merged(plan, machine):
        plan = replace(plan, run=replace(plan.run, merged=True))
    if "sample" in roles and run.sampling_rows is None:
        plan = replace(plan, run=replace(plan.run, sampling_rows=_sampled_at_once(plan, model, machine)))
    return plan


def config_for(job: Job, method: str) -> Any:
    """The settings that the method's agent gets."""
    from ...agents.sft import FineTuningConfig

    known: dict[str, tuple[type[Any], dict[str, int]]] = {
        "ppo": (agents.PPOConfig, {"total_steps": 6}),
        "dpo": (agents.DPOConfig, {}),
        "fine_tuning": (FineTuningConfig, {"epochs": 1}),
        "binary_feedme": (agents.BinaryFeedMEConfig, {"epochs": 1}),
        "reward_modeling": (agents.RewardModelingConfig, {"epochs": 1}),
    }
    preset, quick = known[method]
    return job.config(preset, **quick)


def samples_merged(plan: Plan, machine: Machine) -> bool:
    """Whether a policy with adapters makes a copy to sample from, at its first responses: before any is scored."""
    if not machine.gpu or not plan.run.lora:
        return False
    later = ("merged copy", "policy moments", "value moments", "reward model")
    free = machine.memory - sum(size for role, size in plan.always.items() if role not in later)
    return plan.shape.linear * plan.run.size <= free / 2


def _sampled_at_once(plan: Plan, model: Any, machine: Machine) -> int:
    """What the agent takes by itself: what fits into a GPU's free memory."""
    import torch

    from ...agents.memory import CPU_ROWS, rows_that_fit

    if not machine.gpu:
        return CPU_ROWS
    run = plan.run
    free = USABLE * machine.memory - sum(plan.always.values()) - plan.phases["sample"].get("whole policy", 0.0)
    return rows_that_fit(free, model, getattr(torch, run.dtype), prompt=run.prompt, response=run.response)


def _fixed(job: Job, method: str, config: Any) -> tuple[int, int]:
    """Rows of an update and number of updates of a method that learns from a fixed set."""
    data: Dataset = job.data
    if method == "fine_tuning":
        examples = len(data.demonstrations("sft")[: 2000 if job.quick else None])
    else:
        pairs = job.preferences()
        examples = len(hold_out(pairs)[0] if method == "reward_modeling" else pairs)
    rows = config.batch_size * (2 if method in ("dpo", "reward_modeling") else 1)
    return rows, config.epochs * ceil(examples / config.batch_size)


def config_of(folder: Path | str) -> Any:
    """A model's configuration; of an adapter its base's."""
    return pretrained.load_config(pretrained.adapter_base(folder) if is_adapter(folder) else folder)


def lora_of(job: Job) -> int:
    """The rank that is trained: the job's, or that of a policy that is an adapter."""
    return rank_of(job.policy_folder) if is_adapter(job.policy_folder) else job.lora or 0


def rank_of(folder: Path | str) -> int:
    """The rank of the adapters in a folder."""
    return int(json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))["r"])


def gigabytes(size: float) -> str:
    """Two decimals, or two digits of what is less."""
    return f"{size / GB:.2f}" if size >= GB else f"{size / GB:.2g}"


def memory_table(plan: Plan) -> Table:
    """Roles down, phases across, in GB; the last row is what a phase takes in all."""
    found = plan.phases
    names = dict.fromkeys(name for parts in found.values() for name in parts)
    rows = [[role, gigabytes(size), *("" for _ in found)] for role, size in plan.always.items()]
    rows += [[role, "", *(gigabytes(p[role]) if role in p else "" for p in found.values())] for role in names]
    rows.append(["in all", *map(gigabytes, (sum(plan.always.values()), *plan.peaks.values()))])
    return Table(("GB a process", "always", *found), rows)


def report(plan: Plan, machine: Machine) -> tuple[str, bool]:
    """What --dry-run prints, and whether the run fits."""
    run, peaks, seconds = plan.run, plan.peaks, plan.seconds(machine)
    phase, peak = max(peaks.items(), key=lambda each: each[1])
    fits = peak <= USABLE * machine.memory
    verdict = "it fits" if fits else f"it does not fit ({USABLE:.0%} can be used)"
    low, high = (plan.steps * sum(seconds.values()) / share / 3600 for share in reversed(SHARES))
    what = f"{plan.shape.parameters:,} parameters, {run.dtype}" + (f", LoRA of rank {run.lora}" if run.lora else "")
    row = run.prompt + run.response
    each = ", ".join(f"{name} {value:.3g}" for name, value in seconds.items())
    lines = [
        f"{what}; {machine.processes} x {machine.name}, {machine.memory / GB:.1f} GB each",
        text_table(memory_table(plan)),
        f"Peak: {gigabytes(peak)} GB in {phase}, of {machine.memory / GB:.1f} GB: {verdict}.",
        f"{run.rows * row:,} tokens a step at most: {run.rows} x ({run.prompt} + {run.response}); {plan.steps} steps.",
        f"Seconds a step at the full rates: {each}.",
        f"Hours: {low:.2g} to {high:.2g}, at {SHARES[1]:.0%} to {SHARES[0]:.0%} of the rates measured here "
        f"({machine.gemm / 1e12:.3g} TFLOP/s, {machine.copy / GB:.3g} GB/s); answers to eval are not counted.",
    ]
    return "\n".join(lines), fits
