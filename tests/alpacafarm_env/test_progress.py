"""Where progress is shown: on a terminal, in a notebook, in a log file."""

import io

import pytest

from alpacafarm_env import progress
from alpacafarm_env.progress import make_bar


def test_a_log_gets_lines_now_and_then_and_the_end(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with make_bar(1000, "SFT", unit="step") as bar:
        for _ in range(1000):
            bar.update()
    lines = file.getvalue().split("\n")
    assert "\r" not in file.getvalue()
    told = [line for line in lines if line]
    assert len(told) == 2
    assert all(line.startswith("SFT") for line in told)
    assert "1000/1000" in told[-1]
    monkeypatch.setattr(progress, "SECONDS_IN_A_LOG", 0)
    with make_bar(3, "SFT") as bar:
        for _ in range(3):
            bar.update()
    assert [line.count("/3 ") for line in file.getvalue().split("\n") if "/3" in line].count(1) >= 4


def test_a_bar_that_shall_not_be_shown_is_not(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with make_bar(2, "SFT", show=False) as bar:
        bar.update()
    assert file.getvalue() == ""


CELL = """
import sys, torch
from alpacafarm_env import sandbox
from alpacafarm_env.agents import SFT, LanguageModel, SFTConfig
from alpacafarm_env.data import load_dataset

policy = LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=8)
SFT(policy, load_dataset("sandbox").demonstrations()[:4], config=SFTConfig(epochs=3, batch_size=2)).learn()
"""


@pytest.mark.filterwarnings("ignore")  # of the notebook's own libraries
def test_learning_is_seen_in_a_notebook():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbclient.NotebookClient(notebook, timeout=120).execute()
    outputs = notebook.cells[0].outputs
    shown = "".join(str(output.get("text", "")) + str(output.get("data", "")) for output in outputs)
    assert "6/6" in shown
