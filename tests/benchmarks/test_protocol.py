"""The command on few instructions: table, report and figures, a ranking beside it, resumption, faulty folders."""

import json
import re
from itertools import islice

import numpy as np
import pytest
from written import rows_of

from alpacafarm_env.benchmarks.experiment.reward_models import fresh_instructions
from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.benchmarks.harness.stored import file_name
from alpacafarm_env.benchmarks.harness.study import Study
from alpacafarm_env.benchmarks.protocol import answers, held_out, levels, report
from alpacafarm_env.benchmarks.protocol import command as protocol
from alpacafarm_env.benchmarks.protocol.analysis import make_row, placed, rate_row
from alpacafarm_env.benchmarks.protocol.command import ProtocolOptions, main, run
from alpacafarm_env.benchmarks.protocol.held_out import EVAL, FRESH, LIVE, questions
from alpacafarm_env.benchmarks.protocol.report import draw_judges, draw_live, findings
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.oracles.registry import make_oracle
from alpacafarm_env.sandbox import POLICY, SANDBOX

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


def write_ranking(folder, answers, *, policy=()):
    """A folder as method_ranking leaves it: {cell: (method, feedbacks, seed, {instruction: answer})}."""
    study = Study(folder, "method_ranking", {})
    study.cell("reward model, human, seed 0", lambda: [{"feedback": "human", "seed": 0, "seconds": 1.0}])
    (folder / "evaluations").mkdir(exist_ok=True)
    for cell, (method, feedbacks, seed, responses) in answers.items():
        rows = [{"method": method, "feedback": feedback, "seed": seed} for feedback in feedbacks]
        study.cell(cell, lambda rows=rows: rows)
        stored = {"instructions": list(responses), "responses": list(responses.values())}
        (folder / "evaluations" / f"{file_name(cell)}.json").write_text(json.dumps(stored), encoding="utf-8")
        if cell in policy:
            (folder / "runs" / file_name(cell)).mkdir(parents=True)
            (folder / "runs" / file_name(cell) / "policy").symlink_to(POLICY)
    study.finish()
    return folder


@pytest.fixture
def ranking(tmp_path):
    texts = {str(row): "It depends." for row in SANDBOX.instructions("eval")}
    best = {str(row): text for row, text in zip(SANDBOX.instructions("eval"), SANDBOX.references("eval"), strict=True)}
    return write_ranking(
        tmp_path / "ranking",
        {
            "dpo, human, seed 0": ("dpo", ["human"], 0, texts),
            "base, seed 0": ("base", ["simulated", "human"], 0, best),
            "base, seed 7": ("base", ["simulated", "human"], 7, best),
            "sft, seed 0": ("sft", ["simulated", "human"], 0, texts),
            "my own (0123abcd), human, seed 0": ("my own", ["human"], 0, best),
        },
        policy=("dpo, human, seed 0", "my own (0123abcd), human, seed 0"),
    )


def test_the_command_with_a_ranking_writes_what_it_says_and_resumes(tmp_path, ranking, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(report, "place_labels", lambda *_: None)  # seconds, and tested elsewhere
    assert run(ProtocolOptions(out=out, quick=True, seeds=1, ranking=ranking)) == 0
    rows = rows_of(out)
    rates = {(row["subject"], row["other"], row["judge"]): row for row in rows if row["figure"] == "win_rate"}
    names = {subject for subject, other, _ in rates if other == "all"}
    assert names == OWN | {"ranked dpo (human)", "ranked base", "ranked my own (human)"}
    assert float(rates["ranked base", "all", "human"]["value"]) == 50  # the references themselves
    assert float(rates["ranked dpo (human)", "all", "human"]["value"]) < 25
    assert ("ranked dpo (human)", LIVE, "human") in rates  # by its policy
    assert ("ranked base", LIVE, "human") not in rates  # nothing saved
    assert float(rates["ranked my own (human)", "all", "human"]["value"]) == 50
    assert ("ranked my own (human)", LIVE, "human") in rates
    assert {row["level"] for row in rows} == {"sandbox"}
    for name in ("live", "pairs_sandbox", "sources_sandbox", "roots_sandbox"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "judges.png").exists()
    assert (out / "roots.csv").read_text().startswith("level,split,verb,noun,instructions,n\nsandbox,sft,")
    printed = capsys.readouterr().out
    html = (out / "report.html").read_text(encoding="utf-8")
    said = json.loads((out / "manifest.json").read_text())["facts"]["findings"]
    assert len(said) == 7
    r2 = next(row for row in rows if (row["figure"], row["other"], row["judge"]) == ("r2", LIVE, "sim_eval"))
    assert f"is {float(r2['value']):.3f} [" in said[2]
    assert all(sentence in printed for sentence in said)
    assert html.count("<img") == 4
    assert str(ranking) not in html + json.dumps(rows)
    before = {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    assert run(ProtocolOptions(out=out, quick=True, seeds=1, ranking=ranking)) == 0
    assert before == {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    assert rows_of(out) == rows
    assert main(["--out", str(out), "--quick", "--seeds", "1"]) == 2  # without the ranking it is another study
    assert "settings" in capsys.readouterr().err


@pytest.fixture(scope="module")
def asked():
    return questions(12, 5)


def test_the_best_of_four_are_the_first_of_sixteen(asked):
    found = {(name, which): texts for name, which, texts in answers.answer_by_best_of_n(asked, 0)}
    assert {name for name, _ in found} == {"best_of_4", "best_of_16"}
    for which, question in asked.items():
        proxy = make_oracle("surrogate", dataset=SANDBOX)
        four, sixteen = (proxy.score(question.instructions, found[f"best_of_{num}", which]) for num in (4, 16))
        assert (sixteen >= four - 1e-5).all()
        assert sixteen.mean() > four.mean()


def test_answers_keep_their_seed_where_another_failed(asked):
    kept = ("gpt4, seed 1", "gpt4, seed 2", *(f"davinci001, seed {seed}" for seed in range(3)))
    cells = {cell.key: cell for cell in answers.cells(lambda: asked, range(3), None)}
    rows = [row for key in kept for row in cells[f"answers of {key}"].work(print)]
    judged = levels.judge_all(rows, asked, "human")
    assert {name: list(seeds) for name, seeds in judged[EVAL].items()} == {"gpt4": [1, 2], "davinci001": [0, 1, 2]}
    (again,) = (row for row in rows if (row["generator"], row["seed"], row["set"]) == ("gpt4", 2, LIVE))
    expected = {which: texts for _, which, texts in answers.answer_by_writer("gpt4", asked, 2)}
    assert again["answers"] == list(expected[LIVE])
    told = [row for row in levels.sandbox_rows(rows, asked, repeats=1, resamples=10) if row["figure"] == "told_apart"]
    assert {row["models"] for row in told if row["subject"] == "all pairs"} == {2}  # of the two seeds that both have


def test_only_the_last_version_of_an_edited_method_is_taken(tmp_path):
    text = {str(SANDBOX.instructions("eval")[0]): "x"}
    folder = write_ranking(tmp_path / "r", {"mine (00000000), seed 0": ("mine", ["simulated", "human"], 0, text)})
    write_ranking(folder, {"mine (ffffffff), seed 0": ("mine", ["simulated", "human"], 0, text)})
    ((name, _, answer),) = answers.ranked(folder, range(1))
    assert name == "ranked mine"
    assert "ffffffff" in str(answer)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"name": "method_ranking", "complete": False}, "expected the folder of a finished method_ranking"),
        ({"name": "protocol", "complete": True}, "got name 'protocol'"),
        (None, "manifest.json"),
        ([1], "manifest.json"),
    ],
)
def test_a_folder_that_is_no_finished_ranking_is_refused(tmp_path, capsys, manifest, message):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises((CheckpointError, DataError), match=re.escape(message)):
        list(answers.ranked(tmp_path, range(1)))
    assert main(["--out", str(tmp_path / "out"), "--ranking", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_ranking_of_fewer_instructions_is_refused_by_name(tmp_path, asked):
    text = str(asked[EVAL].instructions[0])
    folder = write_ranking(tmp_path / "r", {"dpo, human, seed 0": ("dpo", ["human"], 0, {text: "x"})})
    ((_, seed, answer),) = answers.ranked(folder, range(1))
    with pytest.raises(DataError, match="expected an answer to each of 12 evaluation instructions, got none to 11"):
        list(answer(asked, seed))


def test_the_place_of_a_ranking_does_not_matter_to_its_digest(tmp_path, ranking):
    moved = ranking.rename(tmp_path / "elsewhere")
    before = protocol.ranking_content(moved)
    assert before == protocol.ranking_content(moved.rename(ranking))
    (ranking / "evaluations" / "base-seed-0.json").write_text("{}", encoding="utf-8")
    assert protocol.ranking_content(ranking) != before


def test_the_figure_tells_the_agreement_with_the_whole_evaluation_set():
    rates = [rate_row(f"g{i}", which, np.eye(4)[i]) for i in range(3) for which in (EVAL, LIVE, FRESH)]
    told = [make_row("r2", subject, LIVE, value) for subject, value in ((EVAL, 0.25), (levels.NO_INPUT, 0.75))]
    (axis,) = draw_live(frame_of(placed("live", "sandbox", "human", [*rates, *told])), "").axes
    assert axis.get_title(loc="left") == "16 simulated human raters: r² live 0.250"


def test_every_model_of_two_judges_is_inside_the_figure():
    values = enumerate((1.5, 40.0, 98.0))
    rates = [make_row("win_rate", f"g{i}", "published", value, standard_error=1.0) for i, value in values]
    rows = [row for judge in ("gpt4", "claude") for row in placed("judges", "recorded", judge, rates)]
    (axis,) = draw_judges(frame_of(rows), "").axes
    assert axis.get_xlim()[0] < 1.5
    assert axis.get_ylim()[0] < 1.5


@pytest.mark.parametrize(("value", "num"), [(float("nan"), 0), (0.25, 1)])
def test_sources_without_an_agreement_are_not_spoken_of(value, num):
    rates = [make_row("win_rate", "m", other, 50.0, standard_error=1.0, n=9) for other in ("a", "b")]
    told = make_row("r2", "a", "the other sources", value, n=9, models=3)
    said = findings(frame_of(placed("sources", "recorded", "gpt4", [*rates, told])))
    assert len(said) == num
    assert all("over 3 generators is between 0.250 (a, n = 9)" in sentence for sentence in said)
