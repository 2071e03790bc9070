"""A study spread over calls that share a folder: the same results, nothing lost, no cell done by two at once."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

import alpacafarm_env
from alpacafarm_env.benchmarks.harness import runner
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.stored import cell_file
from alpacafarm_env.benchmarks.harness.study import StudyOptions, run_command

NUM = 4
COMMAND = "from tests.benchmarks.test_shards import main; main()"


def in_two_stages(out: Path, shard: str | None, *, hold: str = "", bad: str = "", start_s: float = 0.0) -> int:
    """A study with NUM cells and NUM more that need them all; `hold` is a cell that lasts, `bad` one that fails."""

    def work(key: str, needed: list[str]) -> list[dict[str, object]]:
        with (out.parent / f"{out.name}.begun").open("a") as file:
            file.write(f"{key}\n")
        if key == hold:
            time.sleep(60)
        if key == bad:
            raise RuntimeError("no luck")
        values = [json.loads(cell_file(out, name).read_text())["rows"][0]["value"] for name in needed]
        return [{"key": key, "value": sum(values) + len(key)}]

    def command() -> int:
        with StudyOptions(out=out, shard=shard).study("demo", {}) as study:
            models, methods = ([f"{what}{number}" for number in range(NUM)] for what in ("model ", "method "))
            run_cells(study, [Cell.silent(key, lambda key=key: work(key, [])) for key in models], last=False)
            rows = run_cells(study, [Cell.silent(key, lambda key=key: work(key, models)) for key in methods])
            study.write_table(rows)
            study.note(findings=len(rows))
            return study.finish()

    with patch.object(runner, "START_S", start_s):
        return run_command(command)


def main() -> None:
    out, shard, hold, bad = sys.argv[1:]
    sys.exit(in_two_stages(Path(out), shard, hold=hold, bad=bad, start_s=60.0))


@contextmanager
def begun(out, shard, *, hold="", bad=""):
    """A call in a process of its own."""
    paths = [Path(alpacafarm_env.__file__).parents[1], Path(__file__).parents[2]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", COMMAND, str(out), shard, hold, bad]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(out, key):
    deadline = time.monotonic() + 60
    while key not in lines(out):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lines(out):
    file = out.parent / f"{out.name}.begun"
    return file.read_text().splitlines() if file.exists() else []


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture
def one(tmp_path):
    """The table of one call."""
    assert in_two_stages(tmp_path / "one", None) == 0
    return (tmp_path / "one" / "table.csv").read_bytes()


def test_two_at_once_do_what_one_does(tmp_path, one):
    out = tmp_path / "out"
    with begun(out, "0/2") as first, begun(out, "1/2") as second:
        told = [process.communicate(timeout=60)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], told
    assert (out / "table.csv").read_bytes() == one
    assert sorted(lines(out)) == sorted(lines(tmp_path / "one"))
    assert manifest(out)["complete"] is True
    assert manifest(out)["cells"] == {"done": manifest(tmp_path / "one")["cells"]["done"], "failed": {}}
    assert manifest(out)["facts"] == {"findings": NUM}


def test_a_shard_that_was_killed_goes_on(tmp_path, one):
    out = tmp_path / "out"
    with begun(out, "0/2", hold="method 2") as killed, begun(out, "1/2") as other:
        wait_for(out, "method 2")
        killed.send_signal(signal.SIGKILL)
        assert other.wait(timeout=60) == 0
    assert not (out / "table.csv").exists()
    assert in_two_stages(out, "0/2") == 0
    assert (out / "table.csv").read_bytes() == one
    assert sorted(lines(out)) == sorted([*lines(tmp_path / "one"), "method 2"])  # only what was under way is run again


def test_cells_that_others_need_come_first(tmp_path, capsys, one):
    out = tmp_path / "out"
    assert in_two_stages(out, "0/3") == 1
    told = capsys.readouterr().err
    assert "1 of shard 1/3" in told
    assert "1 of shard 2/3" in told
    assert lines(out) == ["model 0", "model 3"]
    with begun(out, "1/3", hold="model 1") as other:  # this one is worth waiting for, the third is not
        wait_for(out, "model 1")
        assert in_two_stages(out, "0/3") == 1
        other.kill()
    for shard, status in (("1/3", 1), ("2/3", 0), ("0/3", 0), ("1/3", 0)):
        assert in_two_stages(out, shard) == status
    assert (out / "table.csv").read_bytes() == one


def test_a_failure_is_told_until_its_cell_is_done(tmp_path, one):
    out = tmp_path / "out"
    with begun(out, "0/2", bad="model 2") as first:
        assert first.wait(timeout=60) == 1  # it does not wait for the other: nobody waits for a cell that has failed
    assert in_two_stages(out, "1/2") == 1
    assert manifest(out)["cells"]["failed"] == {"model 2": "RuntimeError: no luck"}
    assert in_two_stages(out, "1/2", bad="method 1") == 1
    assert in_two_stages(out, "0/2") == 0
    assert in_two_stages(out, "1/2", bad="method 1") == 1
    assert in_two_stages(out, "0/2") == 0
    stored = manifest(out)
    assert stored["cells"]["failed"] == {"method 1": "RuntimeError: no luck"}
    assert stored["complete"] is False
    assert len(stored["cells"]["done"]) == 2 * NUM - 1
    assert in_two_stages(out, "1/2") == 0
    assert manifest(out)["cells"]["failed"] == {}
    assert (out / "table.csv").read_bytes() == one


def test_who_would_do_the_same_cells_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    with begun(out, "0/2", hold="model 0") as first:
        wait_for(out, "model 0")
        for second in ("0/2", None, "0/3", "2/3"):
            assert in_two_stages(out, second) == 2
            assert f"process {first.pid}" in capsys.readouterr().err
    assert lines(out) == ["model 0"]


def test_a_shard_beside_a_whole_study_is_refused(tmp_path):
    with StudyOptions(out=tmp_path / "out").study("demo", {}):
        assert in_two_stages(tmp_path / "out", "0/2") == 2


def test_shards_of_other_settings_are_not_mixed(tmp_path, capsys):
    with StudyOptions(out=tmp_path, shard="0/2").study("demo", {"steps": 1}):
        other = StudyOptions(out=tmp_path, shard="1/2")
        assert run_command(lambda: other.study("demo", {"steps": 2}).exit_status) == 2
        assert "steps was 1, is 2" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2/2", "-1/2", "0/0", "1", "0/2/3", "a/b", "", "0.5/2", "²/3"])
def test_a_shard_that_is_none(text):
    with pytest.raises(ValueError, match="--shard: expected i/n"):
        StudyOptions(shard=text)
