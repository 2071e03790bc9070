"""Studies: cells run once and survive an interruption, a folder is one study's alone, the status tells the truth."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import alpacafarm_env
from alpacafarm_env import sandbox
from alpacafarm_env.benchmarks import reward_model_accuracy, train
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, StudyOptions, run_command, write_csv
from alpacafarm_env.benchmarks.leaderboard import LeaderboardOptions
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.folders import hash_folder, hash_model

CONFIG = {"learning_rate": 0.1, "ppo": {"kl_coef": 0.1, "inner": {"a": 1, "b": 2}}}


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


def run(study, works):
    return run_cells(study, [Cell.silent(key, work) for key, work in works.items()])


def begin(folder, config, sources=None):
    """A study with one finished cell."""
    with Study(folder, "demo", config, sources=sources) as study:
        study.cell("first", lambda: [{"x": 1}])


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_finished_cells_are_not_run_again(tmp_path):
    calls = []

    def work(seed):
        calls.append(seed)
        return [{"seed": seed, "gold": np.float64(seed) / 3, "kl": math.nan, "note": None, "n": np.int64(2)}]

    for num in (2, 3):
        with Study(tmp_path, "demo", CONFIG, seeds=range(num)) as study:
            rows = run(study, {f"seed={seed}": partial(work, seed) for seed in range(num)})
    assert calls == [0, 1, 2]
    assert (rows[1]["gold"], rows[1]["n"], rows[1]["note"]) == (1 / 3, 2, None)
    assert type(rows[1]["n"]) is int
    assert math.isnan(rows[0]["kl"])
    assert manifest(tmp_path)["seeds"] == [0, 1, 2]


def test_a_failing_cell_leaves_the_others(tmp_path, capsys):
    def fail():
        raise ZeroDivisionError("a reason")

    for works, failed in (
        ({"bad": fail, "good": lambda: [{"x": 1}]}, {"bad": "ZeroDivisionError: a reason"}),
        ({"bad": lambda: [{"x": 0}], "good": fail}, {}),
    ):
        with Study(tmp_path, "demo", CONFIG) as study:
            rows = run(study, works)
            assert (study.exit_status, manifest(tmp_path)["complete"]) == (1, False)
            study.note(judge="j")
            assert study.finish() == len(failed)
        stored = manifest(tmp_path)
        assert (stored["cells"]["failed"], stored["complete"]) == (failed, not failed)
        assert (stored["facts"], stored["config"], stored["versions"]["numpy"]) == (
            {"judge": "j"},
            CONFIG,
            np.__version__,
        )
    assert rows == [{"x": 0}, {"x": 1}]
    assert "ZeroDivisionError: a reason" in capsys.readouterr().err


def test_another_config_or_name_is_refused(tmp_path):
    begin(tmp_path, CONFIG)
    changed = {**CONFIG, "ppo": {"kl_coef": 0.1, "inner": {"a": 1, "b": 3}}}
    for name, config, expected in (("demo", changed, r"ppo\.inner\.b was 2, is 3"), ("other", CONFIG, "'demo'")):
        with pytest.raises(CheckpointError, match=expected):
            Study(tmp_path, name, config)
    Study(tmp_path, "demo", dict(CONFIG)).close()
    file = tmp_path / "taken"
    file.write_text("mine")
    for out in (file, file / "deeper"):
        assert run_command(lambda out=out: Study(out, "demo", CONFIG).exit_status) == 2
    assert file.read_text() == "mine"


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
    environment = {**os.environ, "PYTHONPATH": str(Path(alpacafarm_env.__file__).parents[1])}
    command = [sys.executable, "-c", script, tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert [path.stem for path in (tmp_path / "out" / "cells").iterdir()] == ["a"]


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": 1}', '{"rows": []}', '{"rows": [{"x": 2}]}'])
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


def test_keys_of_any_characters_get_plain_files(tmp_path):
    keys = ["a/b", "../a", "a_b", "a%2Fb", "ü", "..", "mine (0.5), seed 0"]
    with Study(tmp_path, "demo", CONFIG) as study:
        rows = run(study, {key: lambda key=key: [{"key": key}] for key in keys})
        assert [row["key"] for row in rows] == keys
        files = [path.name for path in (tmp_path / "cells").iterdir()]
        assert len(files) == len(keys)
        assert all(re.fullmatch(r"[\w.=+-]+", name) for name in files)
        with pytest.raises(CheckpointError, match="mine"):  # the same file
            study.cell("mine 0.5, seed 0", lambda: [{"x": 2}])


@pytest.mark.parametrize("name", ['a,"b"\n', "=cmd|' /C calc'!A0", "+1+1", "-1", "@A1", "\t=1", "\r=1"])
def test_tables_keep_every_digit_and_no_formula(tmp_path, name):
    rows = [
        {"name": name, "x": 0.1 + 0.2, "y": None, "n": np.int64(-3)},
        {"name": "é", "x": math.nan, "y": "a-b=c", "n": 4},
    ]
    path = write_csv(tmp_path / "t.csv", rows)
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    shown = name if name.startswith("a") else f"'{name}"
    assert first == {"name": shown, "x": "0.30000000000000004", "y": "", "n": "-3"}
    assert second == {"name": "é", "x": "nan", "y": "a-b=c", "n": "4"}
    assert write_csv(path, rows, ["n", "name"]).read_text().startswith("n,name\n-3,")
    assert write_csv(path, [], ["a"]).read_text() == "a\n"
    with pytest.raises(ValueError, match="row 1: expected the columns"):
        write_csv(path, [{"a": 1}, {"b": 2}])


def test_our_errors_become_a_sentence_and_bugs_stay(capsys):
    def faulty():
        raise DataError("x.json: expected y")

    assert [run_command(lambda: 0), run_command(faulty)] == [0, 2]
    assert capsys.readouterr().err == "error: x.json: expected y\n"
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_options(tmp_path):
    assert str(StudyOptions().folder("demo")) == "results/demo"
    assert str(StudyOptions(quick=True).folder("demo")) == "results/demo-quick"
    assert StudyOptions(out=tmp_path, quick=True).folder("demo") == tmp_path
    assert LeaderboardOptions().seeds == 1
    for options, seeds in ((StudyOptions, 0), (LeaderboardOptions, 3)):
        with pytest.raises(ValueError, match="--seeds: expected"):
            options(seeds=seeds)


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("policy/model.safetensors", "model.safetensors of --policy"),
        ("policy/prompt_template.json", "prompt_template.json of --policy"),
        ("data/eval.jsonl", "eval.jsonl of --dataset"),
    ],
)
def test_other_content_in_the_same_folders_is_refused(tmp_path, sources, name, expected):
    out = tmp_path / "out"
    begin(out, {}, sources)
    before = content_of(out)
    edit(tmp_path / name)
    with pytest.raises(CheckpointError, match=expected):
        Study(out, "demo", {}, seeds=[0, 1], sources=sources)
    assert content_of(out) == before


def test_the_same_content_elsewhere_goes_on(tmp_path, sources):
    begin(tmp_path / "out", {}, sources)
    (tmp_path / "policy").rename(tmp_path / "moved")
    moved = {**sources, "--policy": partial(hash_model, tmp_path / "moved")}
    with Study(tmp_path / "out", "demo", {}, sources=moved) as study:
        assert run(study, {"first": pytest.fail}) == [{"x": 1}]


def test_a_cell_whose_sources_change_is_not_kept(tmp_path, sources):
    def work():
        edit(tmp_path / "policy" / "model.safetensors")
        return [{"x": 2}]

    with Study(tmp_path / "out", "demo", {}, sources=sources) as study:
        with pytest.raises(CheckpointError, match=r"model\.safetensors of --policy"):
            run(study, {"a": lambda: [{"x": 1}], "b": work, "c": lambda: pytest.fail("started")})
        assert study.done == ["a"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (reward_model_accuracy.main, ["--num", "8"]),
        (lambda arguments: run_command(lambda: train.run(train.parse(arguments))), ["sft", "--quick"]),
    ],
)
@pytest.mark.parametrize("theirs", ["table.csv", "manifest.json"])
def test_somebody_elses_folder_is_refused(tmp_path, monkeypatch, command, arguments, theirs):
    (tmp_path / theirs).write_text(json.dumps({"name": "an app"}))
    monkeypatch.chdir(tmp_path)
    before = content_of(tmp_path)
    for out in (str(tmp_path), ""):  # an empty one is the working directory
        assert command([*arguments, "--out", out]) == 2
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("name", [".gitignore", "ledger.sqlite"])
def test_a_folder_with_hidden_files_is_empty(tmp_path, name):
    (tmp_path / name).touch()
    Study(tmp_path, "demo", {}).close()


def test_of_two_studies_at_once_one_is_refused(tmp_path, capsys):
    with Study(tmp_path, "demo", {}):
        before = content_of(tmp_path)
        assert run_command(lambda: Study(tmp_path, "demo", {}).exit_status) == 2
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert content_of(tmp_path) == before
    begin(tmp_path, {})


def test_a_study_that_did_nothing_holds_no_folder(tmp_path):
    Study(tmp_path, "demo", {"steps": 1}).close()
    begin(tmp_path, {"steps": 2})
    with pytest.raises(CheckpointError, match="steps"):
        Study(tmp_path, "demo", {"steps": 3})


def test_cells_of_another_version_are_not_mixed_in(tmp_path, monkeypatch):
    installed = {"alpacafarm-env": "1.0", "torch": "2.12"}
    monkeypatch.setattr("alpacafarm_env.benchmarks.harness.study.versions", lambda: dict(installed))
    for _ in range(2):
        begin(tmp_path, {})
    installed["torch"] = "2.13"
    with pytest.warns(UserWarning, match="torch"):
        Study(tmp_path, "demo", {}).close()
    installed["alpacafarm-env"] = "2.0"
    with pytest.raises(CheckpointError, match="alpacafarm-env"):
        Study(tmp_path, "demo", {})
