"""Cells in several processes: rows, resume, failures, and a progress report with an honest time left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

import alpacafarm_env
from alpacafarm_env.benchmarks.harness.runner import Cell, Progress, ProgressUpdate, run_cells
from alpacafarm_env.benchmarks.harness.study import Study


def count(cell, length, tell):
    """A cell's work: as many rows as units."""
    for done in range(length + 1):
        tell(ProgressUpdate(cell, done, f"{cell} at {done}" if done == length else ""))
    return [{"cell": cell, "value": value / 3} for value in range(length)]


class StubbornError(Exception):
    """Cannot be unpickled: its constructor takes more than it keeps."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def refuse(tell):
    raise StubbornError("one", "two")


def die(tell):
    tell(ProgressUpdate("bad", 0))
    os.kill(os.getpid(), signal.SIGKILL)


def work(**lengths):
    return [Cell(cell, partial(count, cell, length), length) for cell, length in lengths.items()]


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_of_all_cells_in_their_order(tmp_path, capsys, processes):
    lengths = {"a": 3, "c": 2, "b": 1}  # the longest first
    rows = run_cells(Study(tmp_path, "s", {}), reversed(work(**lengths)), processes=processes)
    assert rows == [{"cell": cell, "value": value / 3} for cell, length in lengths.items() for value in range(length)]
    printed = capsys.readouterr().err
    assert all(f"{cell} at {length}" in printed for cell, length in lengths.items())
    assert "[100%" in printed


def test_a_killed_cell_silences_no_other(tmp_path, capsys):
    study = Study(tmp_path, "s", {})
    rows = run_cells(study, [Cell("bad", die), Cell("worse", refuse), *work(good=200)], processes=2)
    assert len(rows) == 200
    killed = "its process died without an answer, exit status -9"
    assert study.failed == {"bad": killed, "worse": "StubbornError: one and two"}
    assert study.finish() == 1
    printed = capsys.readouterr().err
    assert all(f"failed: {reason}" in printed for reason in study.failed.values())


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_ends_the_command_at_once(tmp_path, processes):
    script = tmp_path / "command.py"
    script.write_text(
        textwrap.dedent("""
            import sys, time
            from functools import partial
            from alpacafarm_env.benchmarks.harness.runner import Cell, ProgressUpdate, run_cells
            from alpacafarm_env.benchmarks.harness.study import Study, run_command

            def wait(cell, tell):
                tell(ProgressUpdate(cell, 0, f"{cell} runs"))
                for _ in range(600):
                    time.sleep(0.1)
                return []

            def command():
                study = Study(sys.argv[1], "demo", {})
                cells = [Cell(cell, partial(wait, cell)) for cell in ("a", "b", "c")]
                run_cells(study, cells, processes=int(sys.argv[2]))
                return study.finish()

            if __name__ == "__main__":
                sys.exit(run_command(command))
        """),
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(alpacafarm_env.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, script, tmp_path / "out", str(processes)], stderr=subprocess.PIPE, text=True, env=environment
    ) as command:
        for _ in range(processes):  # until every process is at work
            while "runs" not in command.stderr.readline():
                assert command.poll() is None
        start = time.monotonic()
        command.send_signal(signal.SIGINT)
        try:
            command.wait(timeout=20)
            took = time.monotonic() - start
            _, printed = command.communicate(timeout=20)  # until helpers that share its stderr have ended too
        finally:
            command.kill()
    assert command.returncode == 130
    assert "the same command continues" in printed
    assert took < 2


def test_earlier_calls_do_not_count_as_speed(capsys, monkeypatch):
    now = [100.0]
    for name in ("time.time", "tqdm.std.time"):
        monkeypatch.setattr(name, lambda: now[0])
    progress = Progress({"a": 10, "b": 5})
    progress.update(ProgressUpdate("b", 5))  # stored
    now[0] += 30.0  # loading
    progress.update(ProgressUpdate("a", 8))
    now[0] += 4.0
    progress.update(ProgressUpdate("a", 9, "almost"))
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert "[ 93%, 00:04 passed, 00:04 left] almost" in lines
    assert not any("\r" in line for line in lines)  # no terminal
