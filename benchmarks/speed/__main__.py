"""How fast training on a real model is beside others on the same rows: TRL, transformers with peft, a bare pass.

    python -m alpacafarm_env.benchmarks.speed --model <folder> --rows <file> [--trl-python <python>]

Each contender is a process of its own, and they take turns, a step each: whatever else the machine does, it does to all
of them. What counts are the ratios within a round. All train LoRA adapters of rank 8 on all linear layers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ...cli.options import Options, parse
from ...data.files import read_records
from ...data.schema import TEXT, Field, check_rows, is_text
from ...errors import DataError
from ...terminal import format_table
from ..harness.study import run_command

Task = Literal["sft", "dpo", "reward", "sample"]
CONTENDERS = Path(__file__).with_name("contenders.py")
COLUMNS = ("task", "contender", "rounds", "tokens/s", "ours/its", "lowest", "highest", "peak GB", "ours/its GB")


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(Options):
    """Measures the speed and memory of training beside TRL, transformers with peft, and a bare pass."""

    model: str
    """Folder of a causal language model with a chat template."""
    rows: Path
    """JSON Lines with instruction, chosen and rejected; SFT reads the chosen ones, sampling the instructions."""
    trl_python: str | None = None
    """The python of an environment with TRL. Without it TRL is left out."""
    beside: tuple[Literal["trl", "peft", "bare"], ...] = ("trl", "peft", "bare")
    """Who takes turns with us. TRL takes 18 GB for 16 rows of 135 M parameters, so it may need a call to itself."""
    tasks: tuple[Task, ...] = ("sft", "dpo", "reward", "sample")
    """What is trained; "sample" draws 96 tokens to each of 64 instructions, beside transformers' `generate` (peft)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Ours; that of peft and the bare pass is float32, and so is TRL's, unless bfloat16 is asked for."""
    rounds: int = 3
    """Steps of each contender, after one that is not counted."""
    batch: int = 16
    """Rows of a step; of pairs twice as many texts."""
    threads: int = 2
    """CPU threads of each contender, which alone works in its turn."""
    out: Path | None = None
    """A file for the table and the single steps, as JSON."""


class Contender:
    """A process that makes a step when it is told to."""

    def __init__(self, name: str, task: str, options: SpeedOptions) -> None:
        precision = options.precision if name == "ours" else options.precision.replace("auto", "float32")
        python = options.trl_python if name == "trl" and options.trl_python else sys.executable
        given = (name, task, options.rows, options.model, precision, options.batch, options.threads, options.rounds)
        paths = os.pathsep.join(path for path in sys.path if path)
        more = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        more |= {} if name == "trl" else {"PYTHONPATH": paths}
        self.name, self.steps = name, list[dict[str, Any]]()
        self.process = subprocess.Popen(  # noqa: S603 - this file, by a python that the user names
            [python, str(CONTENDERS), *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | more,
            text=True,
        )
        self._read()  # its first step, alone

    def step(self) -> None:
        """Its turn."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self._read())

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):  # others may print too
                step: dict[str, Any] = json.loads(line)
                return step
        self.process.communicate()
        raise DataError(f"{self.name} ended with status {self.process.returncode}; what it says is above.")


def measure(task: str, options: SpeedOptions) -> dict[str, list[dict[str, Any]]]:
    """The steps of each contender, which take turns."""
    others = [name for name in options.beside if name == "peft" or task != "sample"]
    names = ("ours", *(name for name in others if name != "trl" or options.trl_python))
    with ExitStack() as ends:
        contenders = []
        for name in names:
            contenders.append(Contender(name, task, options))
            ends.callback(contenders[-1].end)
        for _ in range(options.rounds):
            for each in contenders:
                each.step()
    return {each.name: each.steps for each in contenders}


def compare(task: str, steps: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """A row for each contender: medians over the rounds, and its ratios to ours within a round."""
    rows = []
    speeds = {name: [step["tokens"] / step["seconds"] for step in made] for name, made in steps.items()}
    for name, speed in speeds.items():
        ratios = [ours / its for ours, its in zip(speeds["ours"], speed, strict=True)]
        gb = steps[name][-1]["gb"]
        values = (task, name, len(speed), median(speed), median(ratios), min(ratios), max(ratios), gb)
        rows.append(dict(zip(COLUMNS, (*values, steps["ours"][-1]["gb"] / gb), strict=True)))
    return rows


def check_rows_of(options: SpeedOptions) -> None:
    """Before a model is loaded; DataError where the rows are faulty or too few."""
    fields = [Field(name, TEXT, is_text) for name in ("instruction", "chosen", "rejected")]
    num = len(check_rows(read_records(options.rows), fields, str(options.rows)))
    least = options.batch * (options.rounds + 1) if set(options.tasks) != {"sample"} else 1
    if num < least:
        text = f"expected {least} or more rows, a batch for each round and one before, got {num}"
        raise DataError(f"{options.rows}: {text}. Give more rows, a smaller --batch or fewer --rounds.")


def main(args: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes it; returns the exit status."""
    options = parse(SpeedOptions, args, prog="python -m alpacafarm_env.benchmarks.speed")
    check_rows_of(options)
    rows, made = [], {}
    for task in options.tasks:
        made[task] = measure(task, options)
        rows += compare(task, made[task])
        print(format_table(COLUMNS, rows, left=2), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"table": rows, "steps": made}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
