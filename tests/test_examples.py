"""The examples run as they are: notebooks in full, scripts in a short form and (slow) in full with what they show."""

import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SHORT = {
    "gym_grpo": "--steps 2 --batch-size 16",
    "live_judge": "--num 30",
    "own_data": "--num-demonstrations 64 --num-preferences 16 --num-eval 8 --epochs 1",
    "ratings": "--num 64 --num-test 40",
    "reinforce": "--steps 2 --batch-size 8 --evaluate-every 2 --num-eval 8",
    "sb3_ppo": "--tokens 1024 --num-envs 16 --num-eval 8",
    "self_rewarding": "--rounds 1 --num-instructions 6 --num-ratings 640 --num-demonstrations 4 --num-eval 8",
    "swap_rewards": "--steps 2 --batch-size 8",
    "trl_grpo": "--steps 2 --batch-size 8 --num-eval 8",
}
WRITTEN = {
    "own_data": {
        *(f"own_data/data/{split}.json" for split in ("sft", "preference", "eval")),
        *(f"own_data/{when}.json" for when in ("before", "sft", "dpo")),
        "own_data/policy/model.safetensors",
    },
    "reinforce": {"reinforce.png"},
    "sb3_ppo": {"sb3_ppo.monitor.csv"},
    "swap_rewards": {"swap_rewards.png"},
}
each_example = pytest.mark.parametrize("name", SHORT)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """A function that runs an example as a script in an empty folder; it returns the printed lines of numbers."""

    def run(name, options=""):
        if name == "trl_grpo":
            pytest.importorskip("trl", reason="TRL is not installed")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options.split()])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        print(printed)
        rows = [[float(number) for number in re.findall(r"-?\d+\.\d+", line)] for line in printed.splitlines()]
        return [row for row in rows if row]

    return run


def test_every_example_is_run_and_in_the_table():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(SHORT)
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert set(re.findall(r"^\| \[(\S+)\]", table, re.MULTILINE)) == files


@each_example
@pytest.mark.filterwarnings("default::FutureWarning:transformers")  # that TRL causes
def test_in_short(name, run, tmp_path):
    assert len(run(name, SHORT[name])) >= 2
    results = tmp_path / "results"
    found = {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file()}
    assert found >= WRITTEN.get(name, set())
    assert {path.name for path in tmp_path.iterdir()} <= {"results"}


NOTEBOOKS = [
    pytest.param(EXAMPLES / "quickstart.ipynb", id="quickstart"),
    pytest.param(EXAMPLES / "overoptimization.ipynb", id="overoptimization", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("path", NOTEBOOKS)
@pytest.mark.filterwarnings("default")  # of other libraries'
def test_a_notebook_is_stored_without_outputs_and_ends_in_a_figure(path, monkeypatch, tmp_path):
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    NotebookClient(notebook, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert "image/png" in code[-1].outputs[-1].data


@pytest.mark.slow
class TestInFull:
    """Over-optimization, learning and cost are what the examples say."""

    def test_reinforce_raises_the_proxy_to_the_end_and_gold_to_a_peak(self, run):
        proxies, golds = zip(*((row[0], row[2]) for row in run("reinforce") if len(row) == 4), strict=True)
        assert proxies[-1] == max(proxies) > proxies[0] + 1
        assert max(golds) > max(golds[0], golds[-1]) + 0.3

    def test_gym_grpo_raises_the_proxy(self, run):
        proxies = [row[0] for row in run("gym_grpo") if len(row) == 3]
        assert len(proxies) == 40
        assert sum(proxies[-5:]) / 5 > sum(proxies[:5]) / 5 + 1

    def test_the_surrogate_s_policy_has_more_of_the_proxy_and_less_gold(self, run):
        rows = [row for row in run("swap_rewards") if len(row) == 3]
        by_surrogate, by_gold = rows[11], rows[23]
        assert by_surrogate[0] > by_gold[0] + 0.3
        assert by_surrogate[1] < by_gold[1] - 0.5

    @pytest.mark.parametrize("name", ["sb3_ppo", "trl_grpo"])
    @pytest.mark.filterwarnings("default::FutureWarning:transformers")
    def test_other_trainers_raise_both(self, run, name):
        before, after = (row for row in run(name) if len(row) == 4)
        assert after[0] > before[0] + 0.5
        assert after[2] > before[2] + 0.2
