"""`--compat alpacafarm` of the commands on the published instructions: the released code's allocation, order, noise."""

import os

import pytest
from command_files import make_call, read, write
from test_annotators_draws import POOL, needs_data, records

from alpacafarm_env.annotators.draws import AlpacaFarmDraws
from alpacafarm_env.cli import annotation_files
from alpacafarm_env.judge_server.server import JudgeServer

pytestmark = needs_data
DATA = os.environ.get("ALPACAFARM_DATA", "")
DEALT_OUT = [48, 65, 60, 60, 49, 68, 82, 60, 79, 44, 60, 66, 64]
"""Annotator -> how many of the 805 instructions it judges."""


@pytest.fixture(scope="module")
def server():
    with JudgeServer(anyway=True) as running:
        yield running


@pytest.fixture
def call(server, tmp_path, monkeypatch):
    return make_call(server, tmp_path, monkeypatch)


@pytest.fixture
def rows(call, monkeypatch):
    monkeypatch.setenv("ALPACAFARM_DATA", DATA)  # which a command would take its references from
    return [{key: row[key] for key in ("instruction", "input")} for row in records("eval_instructions")]


def dealt_out(instructions):
    drawn = AlpacaFarmDraws().annotators([(text, "a", "b") for text in instructions], 13).tolist()
    return [drawn.count(number) for number in range(13)]


def test_both_kinds_of_files_are_dealt_out_as_by_the_released_code(rows, tmp_path):
    pairs = write(tmp_path / "pairs.json", [{**row, "output_1": "One.", "output_2": "Two."} for row in rows])
    ours = write(tmp_path / "ours.json", [{**row, "output": "Two.", "generator": "g"} for row in rows[::-1]])
    base = write(tmp_path / "base.json", [{**row, "output": "One.", "generator": "h"} for row in rows])
    found = [
        annotation_files.read_pairs(pairs),
        annotation_files.read_contest(ours, None, DATA).pairs,
        annotation_files.read_contest(ours, base, None).pairs,
    ]
    assert [dealt_out(each.instructions) for each in found] == [DEALT_OUT] * 3
    assert [list(each.instructions) for each in found] == [list(map(str, found[0].instructions))] * 3
    # The twin that reads instruction and input as one text deals otherwise.
    assert dealt_out(map(str, found[0].instructions)) != DEALT_OUT


def test_the_commands_draw_allocation_order_and_noise(call, rows, tmp_path):
    """`evaluate` asks, and `annotate` finds all its answers: both draw the same of the same pairs."""
    ours = write(tmp_path / "ours.json", [{**row, "output": "Two.", "generator": "g"} for row in rows])
    assert call("evaluate", ours, "--out", "first.json", "--compat", "alpacafarm") == 0
    first = read(tmp_path / "first.json")
    assert call("annotate", "first.json", "--out", "again.json", "--compat", "alpacafarm") == 0
    assert call("annotate", "first.json", "--out", "ann.json", "--compat", "alpacafarm", "--pool", "ann") == 0
    again, noisy = read(tmp_path / "again.json"), read(tmp_path / "ann.json")
    for found in (first, again):
        names = [row["annotator"] for row in found]
        assert [names.count(name) for name in POOL] == DEALT_OUT
        assert sum(row["shown_first"] == "output_2" for row in found) == 406
    assert not any(row["cached"] for row in first)
    assert all(row["cached"] for row in again)
    labels = [row["preference"] for row in noisy if row["noised"]]
    assert (805 - len(labels), labels.count(1), labels.count(2)) == (402, 198, 205)
    assert all(row["cached"] for row in noisy if not row["noised"])
