"""The ranking of methods as a command: cells that are run once, a method of one's own, and what it writes."""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from written import rows_of

from alpacafarm_env.benchmarks.experiment.engine import COLUMNS
from alpacafarm_env.benchmarks.experiment.evaluation import answer
from alpacafarm_env.benchmarks.harness.page import QUICK
from alpacafarm_env.benchmarks.method_ranking import plan as command
from alpacafarm_env.benchmarks.method_ranking.plan import MethodRankingOptions
from alpacafarm_env.instructions import Instruction

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OWN = """from alpacafarm_env.benchmarks.methods.methods import Method, make_sft
METHOD = Method({name!r}, "Mine", make_sft, "nothing")
"""
ONLY_ASKED = ("gpt4", "chatgpt", "davinci001")


def rank(out, *methods, num_eval=20, **changes):
    options = {"quick": True, "seeds": 1, "processes": 1, **changes}
    return command.run(MethodRankingOptions(out=out, methods=methods, num_eval=num_eval, **options))


def test_models_behind_an_api_and_sft_are_ranked(tmp_path, capsys):
    assert rank(tmp_path, *ONLY_ASKED, seeds=2, num_eval=60) == 0
    rows = rows_of(tmp_path)
    assert tuple(rows[0]) == COLUMNS
    assert {(row["method"], row["feedback"], row["seed"]) for row in rows} == {
        (method, feedback, seed)
        for method in (*ONLY_ASKED, "sft")
        for feedback in ("simulated", "human")
        for seed in ("0", "1")
    }
    gold = {row["method"]: float(row["gold"]) for row in rows}
    assert gold["gpt4"] > gold["davinci001"] + 1  # a difference of 2.7 with a spread of 0.2 over instructions
    shown = capsys.readouterr().out
    assert "GPT-4 stand-in" in shown
    assert shown.count(QUICK) == 1
    assert "Spearman" in shown
    for name in ("report.html", "win_rates.png", "human_against_simulated.png", "manifest.json"):
        assert (tmp_path / name).stat().st_size > 1000
    assert json.loads((tmp_path / "manifest.json").read_text())["complete"]


def test_a_finished_cell_is_not_run_again(tmp_path, capsys, monkeypatch):
    assert rank(tmp_path, "gpt4") == 0
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    cells, run = [], command.run_experiment
    monkeypatch.setattr(command, "run_experiment", lambda plan, tell: cells.append(plan.cell) or run(plan, tell))
    assert rank(tmp_path, "gpt4", "davinci001") == 0
    assert cells == ["davinci001, seed 0"]
    after = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert {name: after[name] for name in before} == before


def rank_three(out, processes=1):
    rank(out, "sft", "method_worlds:SMALL", "gpt4", feedback=("ann",), processes=processes)


def test_killed_it_goes_on_with_what_is_left_and_ends_the_same(tmp_path, capsys):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = multiprocessing.get_context("spawn").Process(target=rank_three, args=(killed, 2))
    process.start()
    cells = killed / "cells"
    while not (cells.is_dir() and any(cells.glob("*.json"))):  # the first of three is stored, two are under way
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    stored = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in cells.glob("*.json")}
    assert 1 <= len(stored) < 3
    rank_three(killed)
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in stored} == stored
    rank_three(whole)
    found, expected = ([{**row, "seconds": ""} for row in rows_of(out)] for out in (killed, whole))
    assert len(found) == 5  # SFT and GPT-4 stand in both feedbacks
    assert found == expected


def test_a_method_that_was_edited_is_another_one(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = OWN.format(name="mine")
    (tmp_path / "mine.py").write_text(source)
    assert rank(tmp_path / "out", "mine:METHOD") == 0
    (tmp_path / "mine.py").write_text(source + "# edited\n")
    monkeypatch.delitem(sys.modules, "mine")  # as another call
    assert rank(tmp_path / "out", "mine:METHOD") == 0
    assert len([file for file in (tmp_path / "out" / "cells").iterdir() if "mine" in file.name]) == 2
    (tmp_path / "taken.py").write_text(OWN.format(name="ppo"))
    with pytest.raises(ValueError, match="got 'ppo', which is taken"):
        rank(tmp_path / "out", "taken:METHOD")


class Asked:
    """An agent that answers in capitals, two instructions at a time."""

    instructions_at_once, num_tokens = 2, 0

    def __init__(self):
        self.calls = []

    def act(self, instructions):
        self.calls.append(tuple(instructions))
        self.num_tokens += 10 * len(instructions)
        return tuple(text.upper() for text in instructions if text != "silence")


def test_best_of_n_is_not_asked_again_for_what_it_has_answered(tmp_path):
    instructions, shares = tuple(Instruction(text) for text in "abcde"), []
    first, again = Asked(), Asked()
    expected = (("A", "B", "C", "D", "E"), 50)
    assert answer(first, instructions, tmp_path, shares.append) == expected
    assert shares == [0.4, 0.8, 1.0]
    (tmp_path / "000002-2.json").unlink()
    assert answer(again, instructions, tmp_path, shares.append) == expected
    assert again.calls == [("c", "d")]


def test_an_agent_that_answers_too_little_is_told_before_anything_is_stored(tmp_path):
    instructions = tuple(Instruction(text) for text in ("a", "silence"))
    with pytest.raises(ValueError, match="Asked.act: expected a response to each of 2 instructions, got 1"):
        answer(Asked(), instructions, tmp_path, lambda share: None)
    assert not list(tmp_path.iterdir())


def test_the_example_s_agent_is_ranked(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    out = tmp_path / "out"
    assert rank(out, "reinforce:METHOD", feedback=("ann",)) == 0
    row = next(row for row in rows_of(out) if row["method"] == "reinforce")
    assert float(row["tokens"]) > 64 * 10
    assert 0 <= float(row["win_rate_human"]) <= 100


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_eval": 0}, "--num-eval"),
        ({"data": "my_data"}, "--data: expected none"),
        ({"feedback": ()}, "--feedback"),
        ({"methods": ("pp0",)}, "Did you mean 'ppo'"),
        ({"methods": ("alpacafarm_env.errors:DataError",)}, "expected a Method, got type"),
    ],
)
def test_bad_options_are_named(tmp_path, changes, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        command.run(MethodRankingOptions(**{"out": tmp_path, **changes}))


def test_quick_changes_the_defaults_that_are_not_given():
    quick, full = (MethodRankingOptions.parse(given) for given in (["--quick", "--num-eval", "50"], ["--out", "quick"]))
    assert (quick.quick, quick.seeds, quick.num_eval, quick.folder("x").name) == (True, 1, 50, "x-quick")
    assert (full.quick, full.seeds, full.num_eval) == (False, 3, 805)
