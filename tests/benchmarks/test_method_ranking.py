"""The ranking of methods: the command, cells that are run once, a method of one's own, and the page by hand."""

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from method_worlds import Facts, summarize
from written import rows_of

from alpacafarm_env.benchmarks.experiment.engine import COLUMNS
from alpacafarm_env.benchmarks.experiment.evaluation import answer
from alpacafarm_env.benchmarks.harness.page import QUICK
from alpacafarm_env.benchmarks.harness.report import Provenance
from alpacafarm_env.benchmarks.method_ranking import __main__ as command
from alpacafarm_env.benchmarks.method_ranking.__main__ import MethodRankingOptions
from alpacafarm_env.benchmarks.method_ranking.page import (
    agreements_of,
    page_of,
    reversal_table,
)
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
    resumed, expected = ([{**row, "seconds": ""} for row in rows_of(out)] for out in (killed, whole))
    assert len(resumed) == 5  # SFT and GPT-4 stand in both feedbacks
    assert resumed == expected


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


WINS = {
    "gpt4": [(80, 70), (80, 71), (80, 69)],
    "ppo": [(60, 55), (66, 59), (60, 57)],
    "dpo": [(50, 43), (44, 40), (41, 40)],
    "sft": [(40, 44), (42, 40), (38, 42)],
    "quark": [(20, 50), (22, 50), (21, 50)],
}
METHODS = [
    Facts("gpt4", (79.0, 69.8), "nothing", trained=False, paper_note="stand-in"),
    Facts("ppo", (46.8, 55.1)),
    Facts("dpo", (46.8, None), "preferences"),
    Facts("sft", (36.7, 44.3), "nothing", trained=False),
    Facts("quark", (35.6, 10.0)),
]
WHERE = Provenance("sandbox", "sandbox", "sandbox", "surrogate", 200, 805, 3, 0.7)


def page(wins=WINS, methods=METHODS, **options):
    summary, credits = summarize(wins, methods, **options)
    return page_of(summary, agreements_of(summary, credits), WHERE)


def test_differences_are_paired_by_seed_and_rankings_compared():
    summary, credits = summarize({name: WINS[name] for name in ("sft", "ppo", "dpo", "quark")})
    lead = summary.lead("ppo", "simulated")
    assert (lead.mean, lead.num) == (pytest.approx(22), 3)  # 60-40, 66-42, 60-38: 20, 24, 22
    assert lead.standard_error == pytest.approx(2 / math.sqrt(3))
    assert not summary.lead("dpo", "simulated").clear  # 10, 2, 3: mean 5, sd 4.36, error 2.52
    assert list(summary.columns["simulated"]) == ["ppo", "dpo", "sft", "quark"]
    assert list(summary.columns["human"]) == ["ppo", "quark", "sft", "dpo"]
    # Ranks 1 2 3 4 against 1 4 3 2: 1 - 6 (0 + 4 + 0 + 4) / 60 = 0.2; pairs: 3 agree, 3 differ.
    agreements = agreements_of(summary, credits)
    rho, tau = agreements["both"]["spearman"], agreements["both"]["kendall"]
    assert (rho.mean, tau.mean) == (pytest.approx(0.2), pytest.approx(0))
    assert rho.low <= 0.2 <= rho.high
    # Nothing published is nothing compared.
    assert (agreements["simulated"], agreements["human"], summary.pairs("human")) == (None, None, [])


def test_each_column_is_of_its_own_feedback():
    """The human number is that of the run trained on human labels, not of the other one judged by humans."""
    wins = {**WINS, "other": [(1, 90)] * 3}
    summary, _ = summarize(wins, only=lambda row: (row["method"], row["feedback"]) != ("other", "simulated"))
    assert "other" not in summary.columns["simulated"]
    assert next(iter(summary.columns["human"])) == "other"


def test_order_against_the_paper():
    paper = {"sft": (40.0, 30.0), "ppo": (50.0, 50.0), "dpo": (39.0, None), "quark": (40.0, 20.0)}
    wins = {name: WINS[name] for name in paper} | {"quark": [(41, 50), (42, 50), (43, 50)]}
    summary, credits = summarize(wins, [Facts(*each) for each in paper.items()])
    pairs = {feedback: summary.pairs(feedback) for feedback in summary.feedbacks}
    # Of the simulated column's six pairs sft and quark have no order.
    assert [len(each) for each in pairs.values()] == [5, 3]
    # Simulated: dpo is above quark and sft here, below in the paper.
    rows = {row[:3]: row[3:] for row in map(tuple, reversal_table(summary, pairs, "").rows)}
    assert set(rows) == {("simulated", "SFT", "DPO"), ("simulated", "QUARK", "DPO"), ("human", "SFT", "QUARK")}
    # 44-50, 40-50, 42-50: -6, -10, -8.
    assert rows["human", "SFT", "QUARK"] == ("+10.0", "-8.0", "1.15", "yes", "3")
    assert rows["simulated", "SFT", "DPO"][3] == "no"
    # Here ppo > quark > sft, there ppo > sft > quark.
    assert agreements_of(summary, credits)["human"]["spearman"].mean == pytest.approx(0.5)


def test_failed_seeds_are_left_out_and_counted():
    wins = {"sft": WINS["sft"], "ppo": [(60, 55), None, (64, 59)], "dpo": [None, (44, 40), None], "quark": [None] * 3}
    summary, credits = summarize(wins)
    assert (summary.lead("ppo", "simulated").mean, summary.lead("ppo", "simulated").num) == (23, 2)  # 60-40, 64-38
    assert summary.lead("ppo", "simulated", "dpo").num == 0
    assert list(summary.columns["simulated"]) == ["ppo", "dpo", "sft"]
    assert agreements_of(summary, credits)["both"]["spearman"].num == 3


def test_the_tables_stand_beside_the_papers():
    made = page(lengths={"sft": [100.0] * 3, "ppo": [220.0, 230.0, 240.0]})
    assert list(made.figures) == ["human_against_simulated", "win_rates"]
    cells = {row[0]: tuple(row[1:]) for row in made.tables["ranking"].rows}
    assert list(cells) == ["GPT4", "PPO", "DPO", "SFT", "QUARK"]
    # sd(60, 66, 60) / sqrt(3) = 2; sd(55, 59, 57) / sqrt(3) = 1.15.
    assert cells["PPO"] == ("62.0 ± 2.0", "46.8", "57.0 ± 1.2", "55.1", "5.70", "230", "12", "1000", "3")
    assert cells["DPO"][2:4] == ("41.0 ± 1.0", "–")
    assert [list(row) for row in made.tables["reversals"].rows] == (
        [["human", "SFT", "QUARK", "+34.3", "-8.0", "1.15", "yes", "3"]]
    )
    assert "nan" not in " ".join(made.findings)


def test_one_seed_or_two_methods_have_a_page():
    made = page({name: WINS[name][:1] for name in ("ppo", "sft")}, METHODS[1:4:2])
    assert list(made.figures) == ["win_rates"]
    assert "nan" not in " ".join([*made.findings, json.dumps(made.tables["ranking"].rows)])
