"""Commands in processes that torchrun starts: the results of one process, written once; or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchrun_commands
from written import rows_of

from alpacafarm_env.benchmarks.harness.study import Study, run_command

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """Start two processes."""
    script = Path(torchrun_commands.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *TORCHRUN, str(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def rows(file: Path) -> list[dict[str, str]]:
    return [
        {name: value for name, value in row.items() if name != "seconds"} for row in rows_of(file.parent, file.name)
    ]


def written(out: Path) -> list[Path]:
    """All files of a run but TensorBoard's, whose names hold the time."""
    files = (file.relative_to(out) for file in out.rglob("*") if file.is_file())
    return sorted(file for file in files if "tensorboard" not in file.parts)


def test_two_processes_do_a_command_as_one(own_data, own_models, tmp_path, capsys):
    answers = {"input": "", "output_1": "Yes.", "output_2": "No!", "preference": 1}
    pairs = [{"instruction": f"Say pair {i}.", **answers} for i in range(6)]
    data = tmp_path / "data"
    data.mkdir()
    for file in own_data.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    (data / "preference.json").write_text(json.dumps(pairs))
    given = list(map(str, (data, *own_models)))
    with start(*given, tmp_path / "2") as run:
        torchrun_commands.main(*given, str(tmp_path / "1"))
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


def test_a_dry_run_of_two_processes_is_told_once():
    root = str(Path(torchrun_commands.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    given = ["-m", "alpacafarm_env.benchmarks.train", "dpo", "--quick", "--dry-run"]
    printed = subprocess.check_output([sys.executable, *TORCHRUN, *given], env=environment, text=True)
    assert printed.count("Micro-batches") == 1
