"""Studies: cells are run once and survive an interruption, files are whole or absent, the status tells the truth."""

import csv
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import alpacafarm_env
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, StudyOptions, run_command, versions, write_csv
from alpacafarm_env.benchmarks.leaderboard import LeaderboardOptions
from alpacafarm_env.benchmarks.recorded_surrogate.command import SurrogateOptions
from alpacafarm_env.errors import CheckpointError, DataError

CONFIG = {"learning_rate": 0.1, "steps": 3}


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


def run(study, works):
    return run_cells(study, [Cell.silent(key, work) for key, work in works.items()])


def test_finished_cells_are_not_run_again(tmp_path):
    calls = []

    def work(seed):
        calls.append(seed)
        return [{"seed": seed, "gold": np.float64(seed) / 3, "kl": math.nan, "note": None, "n": np.int64(2)}]

    with Study(tmp_path, "demo", CONFIG, seeds=[0, 1]) as first:
        rows = run(first, {f"seed={seed}": lambda seed=seed: work(seed) for seed in range(2)})
    with Study(tmp_path, "demo", CONFIG, seeds=[0, 1, 2]) as more:
        again = run(more, {f"seed={seed}": lambda seed=seed: work(seed) for seed in range(3)})
    assert calls == [0, 1, 2]
    assert [list(row) for row in again[:2]] == [list(row) for row in rows]
    assert (again[1]["gold"], again[1]["n"], again[1]["note"]) == (1 / 3, 2, None)
    assert type(rows[1]["n"]) is type(again[1]["n"]) is int
    assert math.isnan(again[0]["kl"])
    assert manifest(tmp_path)["seeds"] == [0, 1, 2]


def test_the_status_is_0_only_when_all_was_done(tmp_path):
    study = Study(tmp_path, "demo", CONFIG)
    run(study, {"a": lambda: [{"x": 1}]})
    assert study.exit_status == 1
    assert manifest(tmp_path)["complete"] is False
    study.note(judge="j")
    assert study.finish() == 0
    stored = manifest(tmp_path)
    assert stored["complete"] is True
    assert stored["facts"] == {"judge": "j"}
    assert stored["config"] == CONFIG
    assert stored["versions"]["numpy"] == np.__version__


def test_a_failing_cell_is_named_and_the_others_still_run(tmp_path, capsys):
    def fail():
        raise ZeroDivisionError("a reason")

    study = Study(tmp_path, "demo", CONFIG)
    assert run(study, {"bad": fail, "good": lambda: [{"x": 1}]}) == [{"x": 1}]
    assert study.finish() == 1
    assert manifest(tmp_path)["cells"] == {"done": ["good"], "failed": {"bad": "ZeroDivisionError: a reason"}}
    assert "'bad' failed: ZeroDivisionError: a reason" in capsys.readouterr().err
    study.close()
    retry = Study(tmp_path, "demo", CONFIG)
    assert run(retry, {"bad": lambda: [{"x": 0}], "good": fail}) == [{"x": 0}, {"x": 1}]
    assert retry.finish() == 0


def begin(folder, config):
    """A study with one finished cell."""
    with Study(folder, "demo", config) as study:
        study.cell("first", lambda: [{"x": 1}])


def test_another_config_or_name_is_refused(tmp_path):
    begin(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.1, is 0\.2.*Choose another --out"):
        Study(tmp_path, "demo", {**CONFIG, "learning_rate": 0.2})
    with pytest.raises(CheckpointError, match="of other, got .* of 'demo'"):
        Study(tmp_path, "other", CONFIG)
    Study(tmp_path, "demo", dict(CONFIG)).close()


def test_of_nested_settings_only_the_fields_that_differ_are_told(tmp_path):
    begin(tmp_path, {"seeds": 2, "ppo": {"kl_coef": 0.1, "inner": {"a": 1, "b": 2}}})
    with pytest.raises(CheckpointError, match=r"other settings: ppo\.inner\.b was 2, is 3\. Choose another"):
        Study(tmp_path, "demo", {"seeds": 2, "ppo": {"kl_coef": 0.1, "inner": {"a": 1, "b": 3}}})


@pytest.mark.parametrize("below", ["", "deeper"])
def test_an_output_folder_that_is_a_file_is_refused(tmp_path, capsys, below):
    file = tmp_path / "taken"
    file.write_text("mine", encoding="utf-8")
    assert run_command(lambda: Study(file / below, "demo", CONFIG).exit_status) == 2
    assert "--out: expected a folder to write into, got" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "mine"


def test_a_full_disk_ends_in_a_sentence(tmp_path):
    """A limit on the size of files, as a full disk: in a cell's file, where the manifest still fits."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import resource, sys
from pathlib import Path
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, run_command

def command():
    with Study(Path(sys.argv[1]), "demo", {}) as study:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        works = {"a": lambda: [{"x": 1}], "b": lambda: [{"x": "y" * 30_000}], "c": lambda: [{"x": 2}]}
        run_cells(study, [Cell.silent(key, work) for key, work in works.items()])
        return study.finish()

sys.exit(run_command(command))
""",
        encoding="utf-8",
    )
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert [path.stem for path in (tmp_path / "out" / "cells").iterdir()] == ["a"]


def test_damaged_files_are_named(tmp_path):
    study = Study(tmp_path, "demo", CONFIG)
    run(study, {"a": lambda: [{"x": 1}]})
    (cell,) = (tmp_path / "cells").iterdir()
    cell.write_text("{")
    study.close()
    with Study(tmp_path, "demo", CONFIG) as again, pytest.raises(CheckpointError, match="a.json"):
        run(again, {"a": lambda: [{"x": 1}]})
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Study(tmp_path, "demo", CONFIG)


@pytest.mark.parametrize("rows", ["1", "[1]", "[]", '[{"a": 1}]', '[{"x": 2}]'])
def test_stored_rows_that_are_not_what_was_stored_are_named(tmp_path, rows):
    with Study(tmp_path, "demo", CONFIG) as study:
        run(study, {"a": lambda: [{"x": 1}]})
    (cell,) = (tmp_path / "cells").iterdir()
    cell.write_text(json.dumps(json.loads(cell.read_text()) | {"rows": json.loads(rows)}))
    with Study(tmp_path, "demo", CONFIG) as again, pytest.raises(CheckpointError, match="a.json"):
        again.cell("a", list)


@pytest.mark.parametrize("field", ["config", "contents", "versions"])
def test_a_manifest_of_another_shape_is_named(tmp_path, field):
    with Study(tmp_path, "demo", CONFIG) as study:
        run(study, {"a": lambda: [{"x": 1}]})
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest(tmp_path), field: None}))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Study(tmp_path, "demo", CONFIG)


def test_keys_with_any_character_get_files_of_their_own(tmp_path):
    study = Study(tmp_path, "demo", CONFIG)
    keys = ["a/b", "../a", "a_b", "a%2Fb", "ü", ".."]
    rows = run(study, {key: lambda key=key: [{"key": key}] for key in keys})
    assert [row["key"] for row in rows] == keys
    assert len(list((tmp_path / "cells").iterdir())) == len(keys)


def test_an_interrupted_command_continues(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from functools import partial
        from pathlib import Path
        from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
        from alpacafarm_env.benchmarks.harness.study import Study, run_command
        out, interrupt = Path(sys.argv[1]), sys.argv[2] == "yes"

        def work(seed):
            with open(out.parent / "calls.txt", "a") as file:
                file.write(f"{seed} ")
            if seed == 2 and interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            return [{"seed": seed}]

        def command():
            study = Study(out, "demo", {})
            rows = run_cells(study, [Cell.silent(str(seed), partial(work, seed)) for seed in range(4)])
            study.write_table(rows)
            return study.finish()

        sys.exit(run_command(command))
    """)
    (tmp_path / "run.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(alpacafarm_env.__file__).parent.parent)}
    runs = [
        subprocess.run(
            [sys.executable, tmp_path / "run.py", tmp_path / "out", interrupt],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        for interrupt in ("yes", "no")
    ]
    assert [run.returncode for run in runs] == [130, 0], runs[0].stderr
    assert "the same command continues" in runs[0].stderr
    assert (tmp_path / "calls.txt").read_text() == "0 1 2 2 3 "
    assert (tmp_path / "out" / "table.csv").read_text() == "seed\n0\n1\n2\n3\n"


def test_tables_keep_every_digit(tmp_path):
    rows = [
        {"name": 'a,"b"\n', "x": 0.1 + 0.2, "y": None, "n": np.int64(3)},
        {"name": "é", "x": math.nan, "y": 1, "n": 4},
    ]
    path = write_csv(tmp_path / "t.csv", rows)
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first == {"name": 'a,"b"\n', "x": "0.30000000000000004", "y": "", "n": "3"}
    assert second["x"] == "nan"
    assert float(first["x"]) == 0.1 + 0.2
    write_csv(path, rows, ["n", "name"])
    assert path.read_text().startswith("n,name\n3,")
    with pytest.raises(ValueError, match="row 1: expected the columns"):
        write_csv(path, [{"a": 1}, {"b": 2}])
    assert write_csv(path, [], ["a"]).read_text() == "a\n"


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1+1", "-1+cmd|x", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_of_a_table_is_a_formula(tmp_path, name):
    path = write_csv(tmp_path / "t.csv", [{"generator": name, "x": -0.5, "n": np.int64(-3), "y": "a-b=c"}])
    with path.open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row == {"generator": f"'{name}", "x": "-0.5", "n": "-3", "y": "a-b=c"}


def test_run_command_turns_our_errors_into_a_sentence(capsys):
    def faulty():
        raise DataError("x.json: expected y")

    assert run_command(lambda: 0) == 0
    assert run_command(faulty) == 2
    assert capsys.readouterr().err == "error: x.json: expected y\n"
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        run_command(lambda: 1 // 0)


def test_options(tmp_path):
    assert str(StudyOptions().folder("demo")) == "results/demo"
    assert str(StudyOptions(quick=True).folder("demo")) == "results/demo-quick"
    assert (
        StudyOptions(out=tmp_path).folder("demo") == StudyOptions(out=tmp_path, quick=True).folder("demo") == tmp_path
    )
    with pytest.raises(ValueError, match="--seeds: expected 1 or more, got 0"):
        StudyOptions(seeds=0)
    for options in (LeaderboardOptions, SurrogateOptions):
        assert options().seeds == 1
        with pytest.raises(ValueError, match="--seeds: expected 1, got 3: whatever is drawn here is always the same"):
            options(seeds=3)
    assert {"python", "platform", "numpy"} <= versions().keys()
