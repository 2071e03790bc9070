"""Commands in processes that torchrun starts: the results of one process, written once; or a refusal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torchrun_jobs
from safetensors.torch import load_file
from written import rows_of

from alpacafarm_env.benchmarks.harness.study import Study, run_command

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """Start two processes."""
    script = Path(torchrun_jobs.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *TORCHRUN, str(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def rows(file: Path) -> list[dict[str, str]]:
    return [
        {name: value for name, value in row.items() if name != "seconds"} for row in rows_of(file.parent, file.name)
    ]


def written(out: Path) -> list[Path]:
    """All files of a run."""
    return sorted(file.relative_to(out) for file in out.rglob("*") if file.is_file())


def test_two_processes_do_a_command_as_one(own_data, own_models, tmp_path, capsys):
    answers = {"input": "", "output_1": "Yes.", "output_2": "No!", "preference": 1}
    pairs = [{"instruction": f"Say pair {i}.", **answers} for i in range(6)]
    data = tmp_path / "data"
    data.mkdir()
    for file in own_data.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    (data / "preference.json").write_text(json.dumps(pairs))
    given = list(map(str, (data, *own_models)))
    with start("commands", *given, tmp_path / "2") as run:
        torchrun_jobs.run_commands(*given, str(tmp_path / "1"))
        said = [capsys.readouterr().out, run.communicate(timeout=300)[0].decode()]
    assert run.returncode == 0
    assert [text.count("dpo on ") for text in said] == [1, 1]
    one, two = tmp_path / "1", tmp_path / "2"
    for table in ("curve/table.csv", "curve/val.csv", "dpo/table.csv", "best_of_16/table.csv"):
        for first, second in zip(rows(one / table), rows(two / table), strict=True):
            numbers = [name for name in first if name not in ("method", "feedback") and first[name]]
            assert {name: float(second[name]) for name in numbers} == pytest.approx(
                {name: float(first[name]) for name in numbers}, abs=1e-4, nan_ok=True
            )
    files = written(one)
    assert files == written(two)
    for file in files:
        if file.name == "metrics.jsonl":
            steps = [[json.loads(line)["step"] for line in (out / file).read_text().splitlines()] for out in (one, two)]
            assert steps[0] == steps[1] == list(range(1, len(steps[0]) + 1))
        if "evaluations" in file.parts:
            first, second = (json.loads((out / file).read_text()) for out in (one, two))
            texts = [[part["responses"] for part in each["splits"].values()] for each in (first, second)]
            assert texts[0] == texts[1] != []


def test_a_command_for_one_process_refuses_several(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(lambda: 0) == 2
    assert "WORLD_SIZE" in capsys.readouterr().err
    assert run_command(lambda: 0, joins=True) == 0


@pytest.mark.parametrize("joins", [True, False])
def test_a_number_of_processes_that_is_none_is_told_in_a_sentence(monkeypatch, capsys, tmp_path, joins):
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert run_command(lambda: Study(tmp_path / "out", "demo", {}).exit_status, joins=joins) == 2
    assert "WORLD_SIZE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_dry_run_of_two_processes_is_told_once():
    root = str(Path(torchrun_jobs.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    given = ["-m", "alpacafarm_env.benchmarks.train", "dpo", "--quick", "--dry-run"]
    printed = subprocess.check_output([sys.executable, *TORCHRUN, *given], env=environment, text=True)
    assert printed.count("Micro-batches") == 1


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The value model starts from 0:UserWarning")
def test_two_processes_train_every_method_as_one(arguments: list[str], tmp_path: Path) -> None:
    with start("methods", *arguments, tmp_path / "2") as run:
        torchrun_jobs.run_methods(*arguments, str(tmp_path / "1"))
    assert run.returncode == 0
    for name in torchrun_jobs.RUNS:
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
    with start("methods", *arguments, tmp_path, "endless") as run:
        while not (steps := list(tmp_path.rglob("metrics.jsonl"))) or not steps[0].stat().st_size:
            assert run.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[-1]), signal.SIGKILL)
        run.wait(60)
    assert run.returncode != 0
    assert not any(Path("/proc", child).exists() for child in children)
