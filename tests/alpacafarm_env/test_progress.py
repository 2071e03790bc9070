"""Where progress is shown: on a terminal, in a notebook, in a log file."""

import io
import sys

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


def test_a_notebook_is_redrawn_in_place(monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr("sys.stderr", stream())
    with make_bar(6, "SFT") as bar:
        bar.update(6)
    assert "\r" in sys.stderr.getvalue()
    assert "6/6" in sys.stderr.getvalue()
