"""Things of one's own, named on the command line, are known by their source and by what they are called in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import alpacafarm_env
from alpacafarm_env.benchmarks.experiment.engine import Experiment, run
from alpacafarm_env.benchmarks.experiment.own_judge import judge_content, judge_settings, make_own_judge
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.plugins import source_hash, source_mark

SOURCE = """from alpacafarm_env.benchmarks.methods.methods import Method
import numpy as np
A = Method("mine", "A", make=None, needs="nothing")
B = Method("mine", "B", make=None, needs="nothing")
class Fair:
    name = "fair"
    def compare(self, instructions, a, b):
        return np.full(len(a), 0.5)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "marked_methods", raising=False)  # of another test's folder
    path = tmp_path / "marked_methods.py"
    path.write_text(SOURCE)
    return path


def test_a_hash_is_of_the_source_and_of_the_attribute(file, monkeypatch):
    names = [f"marked_methods:{name}" for name in "AB"]
    before = [source_hash(name) for name in names]
    assert [source_hash(name) for name in names] == before
    file.write_text(SOURCE + "# edited\n")
    assert [source_hash(name) for name in names] == before  # of what this process has loaded
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert len({*before, *map(source_hash, names)}) == 4
    assert source_hash("sys:path") == source_hash("sys:path")  # no file
    assert source_mark("ppo") == ""


def test_a_hash_is_of_the_script_that_is_run(tmp_path):
    script = tmp_path / "script.py"
    lines = ["from alpacafarm_env.plugins import source_hash", 'print(source_hash("__main__:source_hash"))']

    def printed(*more):
        script.write_text("\n".join([*lines, *more]))
        given = {**os.environ, "PYTHONPATH": str(Path(alpacafarm_env.__file__).parents[1])}
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=given).stdout

    assert printed() == printed() != printed("# edited")


def test_a_method_edited_after_its_plan_was_made_is_refused(file, tmp_path, monkeypatch):
    plan = Experiment(cell="mine", agent="marked_methods:A", seed=0, out=tmp_path, quick=True)
    assert "mark" not in plan.settings()
    file.write_text(SOURCE + "# edited\n")
    monkeypatch.delitem(sys.modules, "marked_methods")  # as in a process that is started now
    with pytest.raises(CheckpointError, match="edited"):
        run(plan, print)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("judge", ["%s", '{"judge": "%s"}', '{"judge": {"name": "%s"}, "flip": 0}'])
def test_a_judges_source_is_content_of_the_study(file, monkeypatch, judge):
    judge, data = judge.replace("%s", "marked_methods:Fair"), load_dataset("sandbox")
    assert make_own_judge(judge, data).score(data.instructions("eval")[:2], ["", "Sure!"]).tolist() == [0.5, 0.5]
    before = judge_content(judge), judge_settings(judge)
    assert list(before[0]) == ["marked_methods:Fair"]
    json.dumps(before)
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert (judge_content(judge), judge_settings(judge)) == before
    file.write_text(SOURCE + "# edited\n")
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert judge_content(judge) != before[0]
    assert judge_settings(judge) == before[1]
