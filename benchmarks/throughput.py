"""Seconds, memory and share of the machine's rate of each phase of PPO, for a model's shape with random weights.

    python -m alpacafarm_env.benchmarks.throughput [--hidden-size N --num-layers N --vocab-size N ...] [--out DIR]

Runs the real agent in a vector environment whose reward is a model of the same shape: responses are sampled, scored,
prepared (log-probabilities of policy and reference, values) and learned from. Prints a table and writes
throughput.json. Weights are random and the output layer is 0, so all tokens are equally likely: a response ends at any
of as many tokens as give --eos-probability, and its mean length is known. Nothing is downloaded.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ..data.files import write_atomic
from .harness.report import Table, text_table
from .harness.stored import make_folder
from .harness.study import run_command, versions
from .methods.job import check_positive, lora_settings
from .methods.memory import PHASES, Run, Shape, phases, resident, step_flops
from .methods.presets import Dtype

if TYPE_CHECKING:
    import torch

    from ..agents import PPO, LanguageModel

NAME = "throughput"


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """The shape to measure; the defaults take a minute on two cores."""

    hidden_size: int = 256
    """Width of the model; heads have 64 numbers, the feed-forward layer 8/3 of the width."""
    num_layers: int = 4
    vocab_size: int = 8000
    rollouts: int = 32
    """Responses of a step."""
    prompt_tokens: int = 32
    response_tokens: int = 48
    """Of the longest response."""
    eos_probability: float = 0.0
    """That a token ends its response; at least 1 in --vocab-size, of which it is a multiple."""
    value: Literal["adapter", "head", "model"] = "model"
    """As of `train`; an adapter needs --lora."""
    lora: int = 0
    """Rank of the adapters; 0 trains all weights."""
    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    micro_batch_tokens: int = 4096
    sampling_batch: int | None = None
    """Responses decoded at once. Default: as `train` has it."""
    threads: int = 1
    """Of torch, on a CPU."""
    steps: int = 3
    """Measured, after one that is not."""
    seed: int = 0
    out: Path = Path("results") / NAME
    """Folder of throughput.json."""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "vocab_size", "rollouts", "prompt_tokens", "response_tokens", "threads")
        check_positive(self, (*sizes, "steps", "micro_batch_tokens", "sampling_batch"))
        if self.hidden_size % 64 or self.vocab_size < 16 or self.prompt_tokens < 2:
            raise ValueError(
                "--hidden-size, --vocab-size, --prompt-tokens: expected a multiple of 64, 16 or more and 2 or more, "
                f"got {self.hidden_size}, {self.vocab_size} and {self.prompt_tokens}"
            )
        if self.value == "adapter" and not self.lora:
            raise ValueError("--value adapter: expected --lora with it, a rank of 1 or more, got none")
        if not 0 <= self.eos_probability < 1 or self.lora < 0:
            raise ValueError(
                "--eos-probability, --lora: expected a probability below 1 and a rank of 0 or more, got "
                f"{self.eos_probability} and {self.lora}"
            )

    @property
    def num_ends(self) -> int:
        """Tokens that end a response."""
        return max(1, round(self.eos_probability * self.vocab_size))


def mean_length(options: ThroughputOptions) -> float:
    """Expected tokens of a response: 1 + (1 - p) + ... for as many tokens as it may have."""
    p = options.num_ends / options.vocab_size
    return float((1 - (1 - p) ** options.response_tokens) / p)


def run(options: ThroughputOptions) -> int:
    """Measures, writes, prints; returns the exit status."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ..agents.processes import default_device
    from .harness.machine import PeakMeter, device_name, gemm_rate, total_memory

    make_folder(options.out)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    device = default_device()
    with tempfile.TemporaryDirectory() as folder:
        agent = make_agent(options, Path(folder), device)
        meter = PeakMeter(device)
        seconds, tokens = measure(agent, options, meter, Path(folder) / "run")
    rate = gemm_rate(device, getattr(torch, options.dtype))
    shape, settings = Shape.of(model_config(options)), run_of(options, agent)
    operations = step_flops(shape, settings, shape)
    used = statistics.median(tokens) / (options.prompt_tokens + options.response_tokens) / options.rollouts
    spread = {name: spread_of(each) for name, each in seconds.items()}
    shares = {name: operations[name] * used / spread[name]["median"] / rate for name in PHASES}
    found = {
        "shape": {name: value for name, value in asdict(options).items() if name not in ("out", "steps")},
        "parameters": shape.parameters,
        "steps": options.steps,
        "tokens_a_step": statistics.median(tokens),
        "seconds": spread,
        "peak_memory_bytes": meter.peaks,
        "expected_memory_bytes": expected_memory(shape, settings),
        "gemm_flops_a_second": rate,
        "share_of_gemm_rate": shares,
        "device": device_name(device),
        "device_memory_bytes": total_memory(device),
        "versions": versions(),
    }
    write_atomic(options.out / f"{NAME}.json", json.dumps(found, indent=1, default=str) + "\n")
    show(found)
    print(f"Written to {options.out / f'{NAME}.json'}.")
    return 0


def spread_of(seconds: Sequence[float]) -> dict[str, float]:
    """Smallest, middle and largest."""
    return {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}


def model_config(options: ThroughputOptions) -> Any:
    """The models' configuration."""
    from .harness.random_models import make_config

    positions = options.prompt_tokens + options.response_tokens + 1  # a reward model reads an end of its own
    return make_config(
        width=options.hidden_size, layers=options.num_layers, vocab=options.vocab_size, positions=positions
    )


def make_agent(options: ThroughputOptions, folder: Path, device: torch.device) -> PPO:
    """PPO of the shape; `folder` is for the reward model and the run's metrics."""
    import gymnasium as gym
    import torch
    from gymnasium.vector import AutoresetMode

    from .. import agents
    from .harness import random_models as made

    config, dtype = model_config(options), getattr(torch, options.dtype)
    tokenizer = made.make_tokenizer(options.vocab_size)
    same: dict[str, Any] = {"dtype": dtype, "device": device, "seed": options.seed}
    made.save_reward_model(config, folder / "reward", tokenizer=tokenizer, **same)
    data = made.make_dataset(config, num=2 * options.rollouts, tokens=options.prompt_tokens, seed=options.seed)
    env = gym.make_vec(
        "AlpacaFarm-PPO-v0",
        num_envs=options.rollouts,
        dataset=data,
        oracle={"reward_model": str(folder / "reward"), "device": str(device), "dtype": options.dtype},
        autoreset_mode=AutoresetMode.DISABLED,
    )
    return agents.PPO(
        env, _policy(options, tokenizer, **same), config=ppo_config(options), seed=options.seed, out=folder / "run"
    )


def _policy(options: ThroughputOptions, tokenizer: Any, **same: Any) -> LanguageModel:
    import peft

    from ..agents import LanguageModel
    from ..agents.adapters import with_adapter
    from .harness import random_models as made

    model = made.make_policy(model_config(options), num_ends=options.num_ends, **same)
    if options.lora:
        adapters = peft.LoraConfig(**lora_settings(options.lora), task_type="CAUSAL_LM")
        model = with_adapter(model, adapters, seed=options.seed)
    limits: dict[str, Any] = {
        "max_prompt_tokens": options.prompt_tokens,
        "max_response_tokens": options.response_tokens,
    }
    return LanguageModel(model, tokenizer, made.TEMPLATE, **limits)


def ppo_config(options: ThroughputOptions) -> Any:
    """AlpacaFarm's settings with the shape's sizes, and no checkpoint on the way."""
    from ..agents import PPOConfig

    return replace(
        PPOConfig.paper(),
        total_steps=options.steps + 2,  # one before what is measured; one never made, with which a checkpoint would be
        rollout_batch_size=options.rollouts,
        minibatch_size=max(1, options.rollouts // 2) if options.rollouts % 2 == 0 else options.rollouts,
        max_response_tokens=options.response_tokens,
        micro_batch_tokens=max(options.micro_batch_tokens, options.prompt_tokens + options.response_tokens),
        gradient_checkpointing=options.gradient_checkpointing,
        sampling_batch_size=options.sampling_batch,
        value=options.value,
        save_every=0,
    )


def measure(
    agent: PPO, options: ThroughputOptions, meter: Any, out: Path
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each phase in each step but the first, and tokens of prompts and responses of each."""
    loop: Any = agent._loop
    timed = loop.timed

    @contextmanager
    def both(part: str) -> Iterator[None]:
        with meter.measured(part), timed(part):
            yield

    loop.timed = both
    updates = agent.updates()
    tokens = []
    for _ in range(options.steps + 1):
        metrics = next(updates)
        tokens.append(metrics["tokens"] + options.rollouts * options.prompt_tokens)
    updates.close()  # type: ignore[attr-defined]
    rows = [json.loads(line) for line in (out / "timing.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    seconds = {"seconds" if name == "step" else name: name for name in (*PHASES, "step")}
    return {name: [float(row[key]) for row in rows] for key, name in seconds.items()}, tokens[1:]


def run_of(options: ThroughputOptions, agent: PPO) -> Run:
    """What the formula of memory and arithmetic needs to know."""
    config = agent.config
    return Run(
        roles=frozenset(("sample", "reference", "value", "reward")),
        rows=options.rollouts,
        update_rows=config.minibatch_size,
        passes=config.num_epochs,
        prompt=options.prompt_tokens,
        response=options.response_tokens,
        micro_batch_tokens=config.micro_batch_tokens,
        sampling_rows=options.sampling_batch,
        lora=options.lora,
        dtype=options.dtype,
        reward_dtype=options.dtype,
        autocast=False,
        checkpointing=options.gradient_checkpointing,
        value=options.value,
        sharded=False,
        processes=1,
        merged=not agent.policy.samples_exactly,
    )


def expected_memory(shape: Shape, settings: Run) -> dict[str, float]:
    """What the formula says of each phase, in bytes."""
    always = sum(resident(shape, settings, shape).values())
    return {name: always + sum(parts.values()) for name, parts in phases(shape, settings, shape).items()}


def show(found: dict[str, Any]) -> None:
    """Prints the table."""
    rows = []
    for name, seconds in found["seconds"].items():
        peak, share = found["peak_memory_bytes"].get(name), found["share_of_gemm_rate"].get(name)
        numbers = [f"{seconds[key]:.3f}" for key in ("min", "median", "max")]
        memory = "" if peak is None else f"{peak / 1e9:.2f}"
        rows.append([name, *numbers, memory, "" if share is None else f"{100 * share:.0f}"])
    header = ("phase", "min, s", "median", "max", "peak memory, GB", "% of GEMM rate")
    print(f"PPO of {found['parameters'] / 1e6:.1f} M parameters, {found['tokens_a_step']:.0f} tokens a step")
    print(f"{found['device']}, {found['gemm_flops_a_second'] / 1e9:.0f} GFLOP/s")
    print(text_table(Table(header, rows)))


def parse(args: Sequence[str] | None = None) -> ThroughputOptions:
    """Options from the command line."""
    return tyro.cli(
        ThroughputOptions, prog=f"python -m alpacafarm_env.benchmarks.{NAME}", args=args, description=__doc__
    )


def main() -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: run(parse()))


if __name__ == "__main__":
    sys.exit(main())
