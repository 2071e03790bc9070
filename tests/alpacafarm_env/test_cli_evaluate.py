"""`evaluate`, and the files of both commands: what is refused before anything is asked, and a write that fails."""

import json
import math
import re

import numpy as np
import pytest
from command_files import make_pairs, outputs, read, requests, write
from faulty_server import FaultyJudgeServer

from alpacafarm_env.__main__ import main
from alpacafarm_env.cli.annotations import FIELDS
from alpacafarm_env.sandbox import SANDBOX
from alpacafarm_env.statistics import leaderboard_row

pytestmark = pytest.mark.usefixtures("call")


def test_a_file_that_cannot_be_written_loses_nothing(call, anyway, tmp_path, capsys, monkeypatch):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(10)), tmp_path / "out.json"
    out.write_text("[]")
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError("no space left")

        patch.setattr("alpacafarm_env.data.files.Path.replace", full)
        assert call("judge", "annotate", pairs, "--out", out) == 2
    err = capsys.readouterr().err
    assert "out.json" in err
    assert "no space left" in err
    assert out.read_text() == "[]"
    assert not list(tmp_path.glob(".out*"))
    before = requests(anyway)
    assert call("judge", "annotate", pairs, "--out", out) == 0
    assert requests(anyway) == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "out.csv"], ".jsonl"),
        (["--out", "no/such/out.json"], "no/such"),
        (["--out", "pairs.json"], "overwritten"),
        (["--out", "folder.json"], "folder.json"),
        (["--out", "o.json", "--pool", "evl"], "'eval'"),
        (["--out", "o.json", "--models", "opnai"], "'openai'"),
        (["--out", "o.json", "--base-url", "ftp://x"], "--base-url"),
        (["--out", "o.json", "--base-url", "http://example.org/v1"], "--allow-insecure"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(anyway, tmp_path, capsys, args, message):
    write(tmp_path / "pairs.json", make_pairs(3))
    (tmp_path / "folder.json").mkdir()
    before = requests(anyway)
    default = [] if "--base-url" in args else ["--base-url", anyway.base_url]
    default += [] if "--models" in args else ["--models", "sandbox"]
    assert main(["judge", "annotate", "pairs.json", *args, *default]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert requests(anyway) == before


ROW = {"instruction": "i", "output_1": "a", "output_2": "b"}
ANNOTATED = ROW | dict.fromkeys(FIELDS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out.json", '{"notes": "mine"}'),
        ("out.json", json.dumps([ANNOTATED, ROW])),
        ("out.json", json.dumps([ANNOTATED])[:-9]),
        ("out.jsonl", json.dumps(ANNOTATED)[:-9]),
    ],
)
@pytest.mark.parametrize("command", ["annotate", "evaluate"])
def test_only_annotations_are_overwritten(call, anyway, tmp_path, capsys, command, name, content):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(3)), tmp_path / name
    made, references = (write(tmp_path / f"{n}.json", rows) for n, rows in enumerate(outputs(3)))
    given = [pairs] if command == "annotate" else [made, "--reference", references]
    out.write_text(content)
    before = requests(anyway)
    assert call("judge", command, *given, "--out", out) == 2
    assert str(out) in capsys.readouterr().err
    assert (requests(anyway), out.read_text()) == (before, content)
    for own in ("", json.dumps(ANNOTATED) if "jsonl" in name else json.dumps([ANNOTATED])):
        out.write_text(own)
        assert call("judge", command, *given, "--out", out) == 0
        assert len(read(out)) == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"output_2": None}, "record 1 field 'output_2'"),
        ({"output_2": 3}, "record 1 field 'output_2'"),
        ({"instruction": " "}, "record 1 field 'instruction'"),
        ({"score": math.nan}, "field 'score'"),
        ({"note": "\ud800"}, "field 'note'"),
        (None, "got none"),
    ],
)
def test_faulty_pairs_are_named(call, anyway, tmp_path, capsys, change, told):
    before = requests(anyway)
    records = [] if change is None else [{name: v for name, v in (ROW | change).items() if v is not None}]
    assert call("judge", "annotate", write(tmp_path / "pairs.json", records), "--out", "out.json") == 2
    assert told in capsys.readouterr().err
    assert requests(anyway) == before


def test_a_leaderboard_row_with_bounds(call, tmp_path, capsys):
    ours, base = outputs(24)
    args = (write(tmp_path / "ours.json", ours), "--reference", write(tmp_path / "base.json", base))
    with FaultyJudgeServer({"finish_length": 0.7}, anyway=True) as cutting:
        assert call("judge", "evaluate", *args, "--out", "annotations.json", at=cutting) == 1
    rows = read(tmp_path / "annotations.json")
    assert [row["output_1"] for row in rows] == [row["output"] for row in base]
    credits = [np.nan if row["preference"] is None else row["preference"] - 1 for row in rows]
    ranked = {row["instruction"]: row["output"] for row in ours}
    responses = [ranked[row["instruction"]] for row in rows]
    assert [row["output_2"] for row in rows] == responses
    assert {(row["generator_1"], row["generator_2"]) for row in rows} == {("base", "g")}
    expected = leaderboard_row("g", credits, responses, [row["output"] for row in base])
    out, err = capsys.readouterr()
    names, cells = (line.split() for line in out.splitlines()[:2])
    shown = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in expected.items()}
    assert dict(zip(names, cells, strict=True)) == shown
    num_lost = int(np.isnan(credits).sum())
    assert 0 < num_lost < 24
    low, high = (100 * np.nan_to_num(credits, nan=fill).mean() for fill in (0.0, 1.0))
    assert f"{num_lost} of 24" in err
    assert f"[{low:.2f}, {high:.2f}]" in err
    assert re.search("judge: eval, seed 0, .*sandbox-gpt4.*sandbox-chatgpt.*sandbox-davinci003.*127.0.0.1.*: base", out)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[:-2], ("base.json", "2", "'Question 10'", "'Question 11")),
        (lambda rows: [*rows, rows[3]], ("record 13 field 'instruction'",)),
        (lambda rows: [*rows, {**rows[0], "instruction": "Another"}], ("base.json", "'Another'")),
        (lambda rows: [{**rows[0], "generator": "h"}, *rows[1:]], ("'h', 'g'",)),
        (lambda rows: [{"instruction": "Question 0"}, *rows[1:]], ("record 1 field 'output'",)),
    ],
)
def test_outputs_that_do_not_meet_the_references_are_named(call, anyway, tmp_path, capsys, change, told):
    ours, base = outputs()
    before = requests(anyway)
    write(tmp_path / "base.json", base)
    assert call("judge", "evaluate", write(tmp_path / "g.json", change(ours)), "--reference", "base.json") == 2
    err = capsys.readouterr().err
    assert all(part in err for part in told)
    assert requests(anyway) == before


def test_references_of_a_folder_and_of_the_environment(call, tmp_path, capsys, monkeypatch):
    ours, base = outputs()
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "eval.json", base)
    file = write(tmp_path / "nameless.json", [{**row, "generator": None} for row in ours])
    assert call("judge", "evaluate", file, "--data", folder) == 0
    given = capsys.readouterr().out
    assert given.splitlines()[1].startswith("nameless ")
    monkeypatch.setenv("ALPACAFARM_DATA", str(folder))
    assert call("judge", "evaluate", file) == 0
    assert capsys.readouterr().out.splitlines()[:3] == given.splitlines()[:3]


@pytest.mark.parametrize("source", ["--data", "--reference"])
def test_a_subset_of_the_references_is_judged_where_that_is_asked_for(call, tmp_path, capsys, source):
    asks = zip(SANDBOX.instructions("eval"), SANDBOX.references("eval"), strict=True)
    same = [{"instruction": ask.instruction, "input": ask.input, "output": text} for ask, text in asks]
    some = write(tmp_path / "some.json", same[700:660:-1])
    args = ("judge", "evaluate", some, source, "sandbox" if source == "--data" else write(tmp_path / "all.json", same))
    assert call(*args) == 2
    assert "--subset" in capsys.readouterr().err
    assert call(*args, "--subset", "--out", "out.json") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:7] == ["some", "50.00", "0.00", "0", "0", "40", "40"]
    assert "40 of its 805" in printed[2]
    assert all(row["output_1"] == row["output_2"] for row in read(tmp_path / "out.json"))
    write(some, [{**same[0], "instruction": "Another"}])
    assert call(*args, "--subset") == 2
    assert "'Another" in capsys.readouterr().err
