"""The progress bar: pairs, time left and cost so far, kept up to date on a terminal and short in a log."""

import io
import math
import re

import pytest

from alpacafarm_env.annotators.batch import Progress
from alpacafarm_env.cli.progress import progress_bar

TOTAL, STORED = 60, 48
COSTS = [0.25 * n for n in range(1, 13)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch):
    """What is shown of a call that finds 48 answers in its ledger and waits for 12 more, 0.11 s each."""
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)

    def show_all(file, costs):
        nonlocal now
        monkeypatch.setattr("sys.stderr", file)
        with progress_bar("eval") as show:
            for done in range(1, STORED + 1):
                show(Progress(done, TOTAL, 0.0, 0.0))
            for done, cost in enumerate(costs, STORED + 1):
                now += 0.11
                show(Progress(done, TOTAL, cost, 0.0))
        return [text for text in re.split("[\\r\\n]", file.getvalue()) if text.strip()]

    return show_all


def test_a_terminal_sees_each_answer_with_time_left_and_cost(lines):
    """Not as many pairs at once as the ledger had, as tqdm would by itself."""
    told = [
        re.search(r"(\d+)/60 pairs, 00:0\d gone, (\d\d:\d\d|\?) left(?:, \$(\S+) so far)?$", text)
        for text in lines(Terminal(), COSTS)
    ]
    assert all(told)
    assert {int(found[1]) for found in told} >= set(range(STORED + 2, TOTAL + 1))
    assert told[-1][3] == "3.0000"


@pytest.mark.parametrize(("costs", "end"), [(COSTS[:2], "$0.5000 so far"), ([math.nan], "price unknown")])
def test_a_log_gets_the_start_and_the_end(lines, costs, end):
    shown = lines(io.StringIO(), costs)
    assert len(shown) == 2
    assert shown[-1].endswith(f" left, {end}")


def test_nothing_is_shown_before_anything_is_known(monkeypatch):
    file = Terminal()
    monkeypatch.setattr("sys.stderr", file)
    with progress_bar("eval"):
        pass
    assert file.getvalue() == ""
