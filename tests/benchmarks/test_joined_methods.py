"""Every method by `train` in two processes of torchrun is that of one: by full weights, LoRA, in shards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torchrun_methods
from safetensors.torch import load_file

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ATOL = 1e-6
"""Largest difference of a weight."""


@pytest.fixture(scope="module")
def arguments(own_data: Path, own_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Data with preferences and demonstrations, and models."""
    data = tmp_path_factory.mktemp("data")
    for file in own_data.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    answers = {"input": "", "output_1": "Yes.", "output_2": "No!", "preference": 1}
    pairs = [{"instruction": f"Say pair {i}.", **answers} for i in range(7)]
    (data / "preference.json").write_text(json.dumps(pairs))
    shown = [{"instruction": f"Say it {i}.", "input": "", "output": f"Yes, {i}!"} for i in range(7)]
    (data / "sft.json").write_text(json.dumps(shown))
    return list(map(str, (data, *own_models)))


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """Start two processes."""
    script = Path(torchrun_methods.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, *TORCHRUN, str(script), *map(str, arguments)], env=environment)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The value model starts from 0:UserWarning")
def test_two_processes_train_every_method_as_one(arguments: list[str], tmp_path: Path) -> None:
    with start(*arguments, tmp_path / "2") as run:
        torchrun_methods.main(*arguments, str(tmp_path / "1"))
    assert run.returncode == 0
    for name in torchrun_methods.RUNS:
        one, two = tmp_path / "1" / name, tmp_path / "2" / name
        check_same_weights(one, two)
        check_same_metrics(one, two)
        for answers in one.glob("outputs.json"):
            assert answers.read_bytes() == (two / answers.name).read_bytes()


def check_same_weights(one: Path, two: Path) -> None:
    for file in one.rglob("*.safetensors"):
        if file.name != "optimizer.safetensors":  # of shards there are several
            expected, found = load_file(file), load_file(two / file.relative_to(one))
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert (found[name] - tensor).abs().max() <= ATOL, f"{file}: {name}"


def check_same_metrics(one: Path, two: Path) -> None:
    """One line a step."""
    for file in one.rglob("metrics.jsonl"):
        runs = [
            [json.loads(line) for line in path.read_text().splitlines()] for path in (file, two / file.relative_to(one))
        ]
        for expected, found in zip(*runs, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-3), file
        assert [line["step"] for line in runs[1]] == list(range(1, len(runs[1]) + 1))


@pytest.mark.slow
def test_a_killed_process_ends_the_others(arguments: list[str], tmp_path: Path) -> None:
    with start(*arguments, tmp_path, "endless") as run:
        while not (steps := list(tmp_path.rglob("metrics.jsonl"))) or not steps[0].stat().st_size:
            assert run.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[-1]), signal.SIGKILL)
        run.wait(60)
    assert run.returncode != 0
    assert not any(Path("/proc", child).exists() for child in children)
