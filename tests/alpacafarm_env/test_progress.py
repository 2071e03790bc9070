"""Where progress is shown: on a terminal, in a notebook, in a log file."""

import io

import pytest

from alpacafarm_env import progress
from alpacafarm_env.progress import make_bar


def test_a_log_gets_lines_now_and_then_and_the_end_or_nothing(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with make_bar(2, "SFT", show=False) as bar:
        bar.update()
    assert file.getvalue() == ""
    with make_bar(1000, "SFT", unit="step") as bar:
        for _ in range(1000):
            bar.update()
    assert "\r" not in file.getvalue()
    first, last = filter(None, file.getvalue().split("\n"))
    assert first.startswith("SFT")
    assert "1000/1000" in last
    monkeypatch.setattr(progress, "SECONDS_IN_A_LOG", 0)
    with make_bar(3, "SFT") as bar:
        for _ in range(3):
            bar.update()
    assert len([line for line in file.getvalue().split("\n") if "/3 " in line]) >= 4


CELL = """
from alpacafarm_env.progress import make_bar
with make_bar(6, "SFT") as bar:
    for _ in range(6):
        bar.update()
"""


@pytest.mark.filterwarnings("ignore")  # of the notebook's own libraries
def test_a_bar_is_seen_in_a_notebook():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbclient.NotebookClient(notebook, timeout=120).execute()
    shown = "".join(str(each.get("text", "")) + str(each.get("data", "")) for each in notebook.cells[0].outputs)
    assert "6/6" in shown
