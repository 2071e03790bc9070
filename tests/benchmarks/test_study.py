"""Studies: cells run once and survive an interruption, a folder is one study's alone, the status tells the truth."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import alpacafarm_env
from alpacafarm_env import sandbox
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, StudyOptions, run_command, versions, write_csv
from alpacafarm_env.benchmarks.leaderboard import LeaderboardOptions
from alpacafarm_env.benchmarks.reward_model_accuracy import command as reward_model_accuracy
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.folders import hash_folder, hash_model

CONFIG = {"learning_rate": 0.1, "ppo": {"kl_coef": 0.1, "inner": {"a": 1, "b": 2}}}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(alpacafarm_env.__file__).parents[1])}


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

    for works, failed in (
        ({"bad": fail, "good": lambda: [{"x": 1}]}, {"bad": "ZeroDivisionError: a reason"}),
        ({"bad": lambda: [{"x": 0}], "good": fail}, {}),
    ):
        with Study(tmp_path, "demo", CONFIG) as study:
            rows = run(study, works)
            assert study.finish() == len(failed)
        assert manifest(tmp_path)["cells"]["failed"] == failed
    assert rows == [{"x": 0}, {"x": 1}]
    assert "'bad' failed: ZeroDivisionError: a reason" in capsys.readouterr().err


def begin(folder, config, sources=None):
    """A study with one finished cell."""
    with Study(folder, "demo", config, sources=sources) as study:
        study.cell("first", lambda: [{"x": 1}])


def test_another_config_or_name_is_refused(tmp_path):
    begin(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match=r"learning_rate was 0\.1, is 0\.2.*Choose another --out"):
        Study(tmp_path, "demo", {**CONFIG, "learning_rate": 0.2})
    with pytest.raises(CheckpointError, match=r"other settings: ppo\.inner\.b was 2, is 3\. Choose another"):
        Study(tmp_path, "demo", {**CONFIG, "ppo": {"kl_coef": 0.1, "inner": {"a": 1, "b": 3}}})
    with pytest.raises(CheckpointError, match="of 'other', got .* of 'demo'"):
        Study(tmp_path, "other", CONFIG)
    Study(tmp_path, "demo", dict(CONFIG)).close()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_an_output_folder_that_is_a_file_is_refused(tmp_path, capsys, below):
    file = tmp_path / "taken"
    file.write_text("mine", encoding="utf-8")
    assert run_command(lambda: Study(file / below, "demo", CONFIG).exit_status) == 2
    assert "--out: expected a folder to write into, got" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "mine"


def test_a_full_disk_ends_in_a_sentence(tmp_path):
    """A limit on the size of files, as a full disk: in a cell's file, where the manifest still fits."""
    script = """
import resource, sys
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, run_command

def command():
    with Study(sys.argv[1], "demo", {}) as study:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        works = {"a": lambda: [{"x": 1}], "b": lambda: [{"x": "y" * 30_000}], "c": lambda: [{"x": 2}]}
        run_cells(study, [Cell.silent(key, work) for key, work in works.items()])
        return study.finish()

sys.exit(run_command(command))
"""
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "out"], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert [path.stem for path in (tmp_path / "out" / "cells").iterdir()] == ["a"]


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"rows": 1}', '{"rows": [1]}', '{"rows": []}', '{"rows": [{"x": 2}]}']
)
def test_a_damaged_cell_is_named(tmp_path, content):
    begin(tmp_path, CONFIG)
    (cell,) = (tmp_path / "cells").iterdir()
    whole = json.loads(cell.read_text())
    cell.write_text(json.dumps(whole | json.loads(content)) if "rows" in content else content)
    with Study(tmp_path, "demo", CONFIG) as again, pytest.raises(CheckpointError, match=r"first\.json"):
        run(again, {"first": list})


@pytest.mark.parametrize("change", [{"config": None}, {"contents": None}, {"versions": None}, None])
def test_a_damaged_manifest_is_named(tmp_path, change):
    begin(tmp_path, CONFIG)
    (tmp_path / "manifest.json").write_text(json.dumps(change and manifest(tmp_path) | change))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Study(tmp_path, "demo", CONFIG)


def test_keys_with_any_character_get_files_of_their_own(tmp_path):
    keys = ["a/b", "../a", "a_b", "a%2Fb", "ü", ".."]
    rows = run(Study(tmp_path, "demo", CONFIG), {key: lambda key=key: [{"key": key}] for key in keys})
    assert [row["key"] for row in rows] == keys
    assert len(list((tmp_path / "cells").iterdir())) == len(keys)


def test_names_of_files_need_no_quotes_and_never_mix_two_cells(tmp_path):
    with Study(tmp_path, "demo", CONFIG) as study:
        study.cell("mine (0.5), seed 0", lambda: [{"x": 1}])
        (cell,) = (tmp_path / "cells").iterdir()
        assert re.fullmatch(r"[\w.=+-]+", cell.name)
        with pytest.raises(CheckpointError, match="mine"):
            study.cell("mine 0.5, seed 0", lambda: [{"x": 2}])


def test_a_folder_with_names_of_older_versions_is_refused(tmp_path):
    begin(tmp_path, CONFIG)
    (tmp_path / "cells" / "dpo, human, seed 0.json").write_text("{}")
    before = content_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"0\.2\.0"):
        Study(tmp_path, "demo", CONFIG)
    assert content_of(tmp_path) == before


def test_an_interrupted_command_continues(tmp_path, capsys):
    calls = []

    def command(interrupt):
        def work(seed):
            calls.append(seed)
            if seed == 2 and interrupt:
                signal.raise_signal(signal.SIGINT)
            return [{"seed": seed}]

        with Study(tmp_path, "demo", {}) as study:
            study.write_table(run(study, {str(seed): partial(work, seed) for seed in range(4)}))
            return study.finish()

    assert [run_command(partial(command, interrupt)) for interrupt in (True, False)] == [130, 0]
    assert "the same command continues" in capsys.readouterr().err
    assert calls == [0, 1, 2, 2, 3]
    assert (tmp_path / "table.csv").read_text() == "seed\n0\n1\n2\n3\n"


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
    assert LeaderboardOptions().seeds == 1
    with pytest.raises(ValueError, match="--seeds: expected 1, got 3: whatever is drawn here is always the same"):
        LeaderboardOptions(seeds=3)
    assert {"python", "platform", "numpy"} <= versions().keys()


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(sandbox.POLICY, tmp_path / "policy")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "eval.jsonl").write_text('{"instruction": "a"}\n')
    return {
        "--policy": partial(hash_model, tmp_path / "policy"),
        "--dataset": partial(hash_folder, tmp_path / "data"),
    }


def edit(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["policy/model.safetensors", "policy/prompt_template.json", "data/eval.jsonl"])
def test_other_content_in_the_same_folders_is_refused_by_name(tmp_path, sources, name):
    out = tmp_path / "out"
    begin(out, {}, sources)
    before = content_of(out)
    edit(tmp_path / name)
    folder, _, file = name.partition("/")
    option = {"policy": "--policy", "data": "--dataset"}[folder]
    with pytest.raises(CheckpointError, match=f"{file} of {option}"):
        Study(out, "demo", {}, seeds=[0, 1], sources=sources)
    assert content_of(out) == before


def test_the_same_content_elsewhere_goes_on(tmp_path, sources):
    begin(tmp_path / "out", {}, sources)
    (tmp_path / "policy").rename(tmp_path / "moved")
    moved = {**sources, "--policy": partial(hash_model, tmp_path / "moved")}
    with Study(tmp_path / "out", "demo", {}, sources=moved) as study:
        assert run(study, {"first": pytest.fail}) == [{"x": 1}]


def test_a_cell_during_which_its_sources_change_is_not_kept(tmp_path, sources):
    weights = tmp_path / "policy" / "model.safetensors"
    content = weights.read_bytes()

    def work():
        edit(weights)
        return [{"x": 2}]

    with Study(tmp_path / "out", "demo", {}, sources=sources) as study:
        with pytest.raises(CheckpointError, match=r"model\.safetensors of --policy"):
            run(study, {"a": lambda: [{"x": 1}], "b": work, "c": lambda: pytest.fail("started")})
        assert study.done == ["a"]
    weights.write_bytes(content)
    with Study(tmp_path / "out", "demo", {}, sources=sources) as study:
        assert run(study, {"b": lambda: [{"x": 3}]}) == [{"x": 3}]


def test_a_study_that_does_not_say_what_it_was_made_from_is_refused(tmp_path, sources):
    begin(tmp_path / "out", {})
    with pytest.raises(CheckpointError, match="model.safetensors of --policy is new"):
        Study(tmp_path / "out", "demo", {}, sources=sources)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (reward_model_accuracy.main, ["--num", "8"]),
        (lambda arguments: run_command(lambda: train.run(train.parse(arguments))), ["sft", "--quick"]),
    ],
)
@pytest.mark.parametrize("theirs", ["table.csv", "config.json", "manifest.json"])
def test_somebody_else_s_folder_is_refused(tmp_path, capsys, command, arguments, theirs):
    (tmp_path / theirs).write_text(json.dumps({"name": "an app"}))
    before = content_of(tmp_path)
    assert command([*arguments, "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert content_of(tmp_path) == before


def test_an_empty_out_is_no_way_into_the_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert reward_model_accuracy.main(["--num", "8", "--out", ""]) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", [".gitignore", "ledger.sqlite"])
def test_a_folder_with_hidden_files_or_a_ledger_alone_is_empty(tmp_path, name):
    (tmp_path / name).touch()
    Study(tmp_path, "demo", {}).close()


def test_of_two_studies_at_once_the_second_is_refused_and_told_of_the_first(tmp_path, capsys):
    with Study(tmp_path, "demo", {}):
        before = content_of(tmp_path)
        assert run_command(lambda: Study(tmp_path, "demo", {}).exit_status) == 2
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert content_of(tmp_path) == before
    begin(tmp_path, {})


def test_a_study_that_did_nothing_yet_does_not_hold_its_folder(tmp_path):
    Study(tmp_path, "demo", {"steps": 1}).close()
    begin(tmp_path, {"steps": 2})
    with pytest.raises(CheckpointError, match="steps"):
        Study(tmp_path, "demo", {"steps": 3})


def test_cells_of_another_version_of_the_package_are_not_mixed_in(tmp_path, monkeypatch):
    found = {"alpacafarm-env": "1.0", "torch": "2.12"}
    monkeypatch.setattr("alpacafarm_env.benchmarks.harness.study.versions", lambda: dict(found))
    for _ in range(2):
        begin(tmp_path, {})
    found["torch"] = "2.13"
    with pytest.warns(UserWarning, match="torch"):
        Study(tmp_path, "demo", {}).close()
    found["alpacafarm-env"] = "2.0"
    with pytest.raises(CheckpointError, match="alpacafarm-env"):
        Study(tmp_path, "demo", {})
