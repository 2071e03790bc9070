"""A study's folder is its own alone, and everything in it is from the same models and data."""

import json
import shutil
import subprocess
import sys
import textwrap
from functools import partial

import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, run_command
from alpacafarm_env.benchmarks.reward_model_accuracy import command as reward_model_accuracy
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.folders import hash_folder, hash_model


def run(study, works):
    return run_cells(study, [Cell.silent(key, work) for key, work in works.items()])


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
    with Study(out, "demo", {}, seeds=[0], sources=sources) as study:
        run(study, {"seed 0": lambda: [{"x": 1}]})
    before = content_of(out)
    edit(tmp_path / name)
    folder, _, file = name.partition("/")
    option = {"policy": "--policy", "data": "--dataset"}[folder]
    with pytest.raises(CheckpointError, match=f"{file} of {option}"):
        Study(out, "demo", {}, seeds=[0, 1], sources=sources)
    assert content_of(out) == before


def test_the_same_content_elsewhere_goes_on(tmp_path, sources):
    with Study(tmp_path / "out", "demo", {}, sources=sources) as study:
        run(study, {"seed 0": lambda: [{"x": 1}]})
    (tmp_path / "policy").rename(tmp_path / "moved")
    moved = {**sources, "--policy": partial(hash_model, tmp_path / "moved")}
    with Study(tmp_path / "out", "demo", {}, sources=moved) as study:
        assert run(study, {"seed 0": pytest.fail}) == [{"x": 1}]


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
    with Study(tmp_path / "out", "demo", {}) as study:
        study.cell("first", lambda: [{"x": 1}])
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
    script = """
        import sys, time
        from alpacafarm_env.benchmarks.harness.study import Study
        with Study(sys.argv[1], "demo", {}):
            print("begun", flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "begun\n"
        before = content_of(tmp_path / "out")
        assert run_command(lambda: Study(tmp_path / "out", "demo", {}).exit_status) == 2
        assert f"process {first.pid}" in capsys.readouterr().err
        assert content_of(tmp_path / "out") == before
        first.kill()
    with Study(tmp_path / "out", "demo", {}) as second:
        run(second, {"a": lambda: [{"x": 1}]})


def test_a_study_that_did_nothing_yet_does_not_hold_its_folder(tmp_path):
    with Study(tmp_path / "out", "a study", {"steps": 1}):
        pass
    with Study(tmp_path / "out", "a study", {"steps": 2}) as study:
        study.cell("first", lambda: [{"x": 1}])
    with pytest.raises(CheckpointError, match="steps"):
        Study(tmp_path / "out", "a study", {"steps": 3})


def test_cells_of_another_version_of_the_package_are_not_mixed_in(tmp_path, monkeypatch):
    found = {"alpacafarm-env": "1.0", "torch": "2.12"}
    monkeypatch.setattr("alpacafarm_env.benchmarks.harness.study.versions", lambda: dict(found))
    for _ in range(2):
        with Study(tmp_path / "out", "a study", {}) as study:
            study.cell("first", lambda: [{"x": 1}])
    found["torch"] = "2.13"
    with pytest.warns(UserWarning, match="torch"), Study(tmp_path / "out", "a study", {}):
        pass
    found["alpacafarm-env"] = "2.0"
    with pytest.raises(CheckpointError, match="alpacafarm-env"):
        Study(tmp_path / "out", "a study", {})
