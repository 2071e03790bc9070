"""Things of one's own, named on the command line, are known by their source and by what they are called in it."""

import importlib
import subprocess
import sys

import pytest

from alpacafarm_env.benchmarks.harness.plugins import check_unchanged, source_hash
from alpacafarm_env.benchmarks.methods.runs import MethodPlan
from alpacafarm_env.errors import CheckpointError

SOURCE = """from alpacafarm_env.benchmarks.methods.methods import Method
A = Method("mine", "A", make=None, needs="nothing")
B = Method("mine", "B", make=None, needs="nothing")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "marked_methods", raising=False)  # of another test's folder
    path = tmp_path / "marked_methods.py"
    path.write_text(SOURCE)
    return path


def test_a_mark_is_of_the_loaded_source_and_of_the_attribute(file, monkeypatch):
    before = [source_hash(f"marked_methods:{name}") for name in "AB"]
    file.write_text(SOURCE + "# edited\n")
    assert before == [source_hash(f"marked_methods:{name}") for name in "AB"]  # what was loaded is what is run
    monkeypatch.delitem(sys.modules, "marked_methods")
    assert len({*before, *(source_hash(f"marked_methods:{name}") for name in "AB")}) == 4
    assert source_hash("ppo") == ""
    assert source_hash("sys:path") == source_hash("sys:path") != ""  # no file


def test_a_mark_follows_a_reload(file):
    """As in a notebook."""
    before = source_hash("marked_methods:A")
    file.write_text(SOURCE.replace('"A"', '"another"'))
    assert source_hash("marked_methods:A") == before
    importlib.reload(sys.modules["marked_methods"])
    assert source_hash("marked_methods:A") != before


def test_a_mark_is_of_the_script_that_is_run(tmp_path):
    script = tmp_path / "script.py"
    lines = [
        "from alpacafarm_env.benchmarks.harness.plugins import source_hash",
        'print(source_hash("__main__:source_hash"))',
    ]

    def printed(*more):
        script.write_text("\n".join([*lines, *more]))
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout

    assert printed() == printed() != printed("# edited")


def test_what_is_edited_after_a_plan_was_made_is_refused_elsewhere(file, tmp_path, monkeypatch):
    plan = MethodPlan(method="marked_methods:A", seed=0, out=tmp_path, num_eval=5)
    cell = plan.cell
    check_unchanged(plan.method, plan.mark)
    file.write_text(SOURCE + "# edited\n")
    assert plan.cell == cell
    assert "mark" not in plan.settings()
    check_unchanged(plan.method, plan.mark)
    monkeypatch.delitem(sys.modules, "marked_methods")  # as a process that is started now
    with pytest.raises(CheckpointError, match="marked_methods:A was edited after the study began"):
        check_unchanged(plan.method, plan.mark)
