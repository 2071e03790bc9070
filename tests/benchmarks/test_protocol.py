"""The command on few instructions: table, report and figures, a ranking beside it, resumption, faulty folders."""

from itertools import islice

import numpy as np
import pytest
from written import rows_of

from alpacafarm_env.benchmarks.experiment.reward_models import fresh_instructions
from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.benchmarks.protocol import answers, held_out, levels, report
from alpacafarm_env.benchmarks.protocol import command as protocol
from alpacafarm_env.benchmarks.protocol.analysis import make_row, placed, rate_row
from alpacafarm_env.benchmarks.protocol.command import ProtocolOptions, run
from alpacafarm_env.benchmarks.protocol.held_out import EVAL, FRESH, LIVE, questions
from alpacafarm_env.benchmarks.protocol.report import draw_live
from alpacafarm_env.oracles import make_oracle
from alpacafarm_env.sandbox import SANDBOX

OWN = {"crowd", "reference_again", "gpt4", "chatgpt", "davinci001", "sft", "best_of_4", "best_of_16"}


@pytest.fixture(scope="module", autouse=True)
def no_other_world():
    """Drawing all splits anew takes seconds: other instructions that no split has stand in for an evaluation set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "generate", lambda seed: {EVAL: [*islice(fresh_instructions(SANDBOX, seed), 60)]})
        yield


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A study of 30 evaluation and 10 held-out instructions."""
    monkeypatch.delenv("ALPACAFARM_DATA", raising=False)
    for name, value in (("NUM_EVAL", 30), ("NUM_LIVE", 10), ("REPEATS", 2), ("RESAMPLES", 20)):
        monkeypatch.setattr(protocol, name, (value, value))


def test_the_command_writes_what_it_says_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "place_labels", lambda *_: None)  # seconds, and tested elsewhere
    options = ProtocolOptions(out=tmp_path, quick=True, seeds=1)
    assert run(options) == 0
    rows = rows_of(tmp_path)
    rates = {(row["subject"], row["other"], row["judge"]) for row in rows if row["figure"] == "win_rate"}
    assert {subject for subject, other, _ in rates if other == "all"} == OWN
    assert {row["level"] for row in rows} == {"sandbox"}
    assert {path.stem for path in tmp_path.glob("*.png")} == {"live", "pairs_sandbox"}
    r2 = next(row for row in rows if (row["figure"], row["other"], row["judge"]) == ("r2", LIVE, "sim_eval"))
    assert f"is {float(r2['value']):.3f} [" in capsys.readouterr().out
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert run(options) == 0
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert rows_of(tmp_path) == rows


@pytest.fixture(scope="module")
def asked():
    return questions(12, 5)


def test_the_best_of_four_are_the_first_of_sixteen(asked):
    found = {(name, which): texts for name, which, texts in answers.by_best_of_n(asked, 0)}
    assert {name for name, _ in found} == {"best_of_4", "best_of_16"}
    for which, question in asked.items():
        proxy = make_oracle("surrogate", dataset=SANDBOX)
        four, sixteen = (proxy.score(question.instructions, found[f"best_of_{num}", which]) for num in (4, 16))
        assert (sixteen >= four - 1e-5).all()
        assert sixteen.mean() > four.mean()


def test_answers_keep_their_seed_where_another_failed(asked):
    kept = ("gpt4, seed 1", "gpt4, seed 2", *(f"davinci001, seed {seed}" for seed in range(3)))
    cells = {cell.key: cell for cell in answers.cells(lambda: asked, range(3))}
    rows = [row for key in kept for row in cells[f"answers of {key}"].work(print)]
    judged = levels.judge_all(rows, asked, "human")
    assert {name: list(seeds) for name, seeds in judged[EVAL].items()} == {"gpt4": [1, 2], "davinci001": [0, 1, 2]}
    (again,) = (row for row in rows if (row["generator"], row["seed"], row["set"]) == ("gpt4", 2, LIVE))
    expected = {which: texts for _, which, texts in answers.by_writer("gpt4", asked, 2)}
    assert again["answers"] == list(expected[LIVE])
    told = [row for row in levels.sandbox_rows(rows, asked, repeats=1, resamples=10) if row["figure"] == "told_apart"]
    assert {row["models"] for row in told if row["subject"] == "all pairs"} == {2}  # of the two seeds that both have


def test_the_figure_tells_the_agreement_with_the_whole_evaluation_set():
    rates = [rate_row(f"g{i}", which, np.eye(4)[i]) for i in range(3) for which in (EVAL, LIVE, FRESH)]
    told = [make_row("r2", subject, LIVE, value) for subject, value in ((EVAL, 0.25), (levels.NO_INPUT, 0.75))]
    (axis,) = draw_live(frame_of(placed("live", "sandbox", "human", [*rates, *told])), "").axes
    assert axis.get_title(loc="left") == "16 simulated human raters: r² live 0.250"
