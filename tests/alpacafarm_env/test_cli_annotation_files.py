"""The commands' files: what is refused before anything is asked, and a write that fails."""

import gzip
import json
import math

import numpy as np
import pytest
from command_files import make_call, make_pairs, outputs, read, requests, write

from alpacafarm_env.__main__ import main
from alpacafarm_env.cli.annotation_files import FIELDS, Pairs, annotate
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.oracles import BothOrders
from alpacafarm_env.oracles.base import Verdicts


@pytest.fixture(scope="module")
def server():
    with JudgeServer(anyway=True) as running:
        yield running


@pytest.fixture(autouse=True)
def call(server, tmp_path, monkeypatch):
    return make_call(server, tmp_path, monkeypatch)


def test_a_file_that_cannot_be_written_loses_nothing(call, server, tmp_path, capsys, monkeypatch):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(10)), tmp_path / "out.json"
    out.write_text("[]")
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError("no space left")

        patch.setattr("alpacafarm_env.data.files.Path.replace", full)
        assert call("annotate", pairs, "--out", out) == 2
    assert "out.json: could not be written: no space left. The answers are kept" in capsys.readouterr().err
    assert out.read_text() == "[]"
    assert not list(tmp_path.glob(".out*"))
    before = requests(server)
    assert call("annotate", pairs, "--out", out) == 0
    assert requests(server) == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "out.csv"], "out.csv: expected a file that ends in one of .json, .jsonl, .json.gz, .jsonl.gz"),
        (["--out", "no/such/out.json"], "expected the folder no/such to be there"),
        (["--out", "pairs.json"], "expected another file than the input"),
        (["--out", "folder.json"], "expected a file's name, got a folder"),
        (["--out", "o.json", "--pool", "evl"], "Unknown name 'evl'"),
        (["--out", "o.json", "--models", "opnai"], "Unknown name 'opnai'"),
        (
            ["--out", "o.json", "--base-url", "ftp://x"],
            "--base-url (or $OPENAI_BASE_URL): base_url must look like https://",
        ),
        (["--out", "o.json", "--base-url", "http://example.org/v1"], "anybody on the way could read the key"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(server, tmp_path, capsys, args, message):
    write(tmp_path / "pairs.json", make_pairs(3))
    (tmp_path / "folder.json").mkdir()
    before = requests(server)
    default = [] if "--base-url" in args else ["--base-url", server.base_url]
    default += [] if "--models" in args else ["--models", "sandbox"]
    assert main(["annotate", "pairs.json", *args, *default]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert requests(server) == before


ROW = {"instruction": "i", "output_1": "a", "output_2": "b"}
ANNOTATED = ROW | dict.fromkeys(FIELDS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out.json", '{"notes": "mine"}'),
        ("out.json", json.dumps([ANNOTATED, ROW])),
        ("out.json", json.dumps([ANNOTATED])[:-9]),
        ("out.json", "\0\0\0\0"),
        ("out.jsonl", json.dumps(ROW) + "\n"),
        ("out.jsonl", json.dumps(ANNOTATED)[:-9]),
        ("out.json.gz", "not compressed"),
    ],
)
@pytest.mark.parametrize("command", ["annotate", "evaluate"])
def test_only_annotations_are_overwritten(call, server, tmp_path, capsys, command, name, content):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(3)), tmp_path / name
    made, references = (write(tmp_path / f"{n}.json", rows) for n, rows in enumerate(outputs(3)))
    given = [pairs] if command == "annotate" else [made, "--reference", references]
    out.write_text(content)
    before = requests(server)
    assert call(command, *given, "--out", out) == 2
    assert str(out) in capsys.readouterr().err
    assert (requests(server), out.read_text()) == (before, content)
    for own in ("", json.dumps(ANNOTATED) if "jsonl" in name else json.dumps([ANNOTATED])):
        out.write_bytes(gzip.compress(own.encode()) if own and name.endswith(".gz") else own.encode())
        assert call(command, *given, "--out", out) == 0
        assert len(read(out)) == 3


def test_orders_that_cannot_be_compared_are_null():
    """One pair whose orders agree, one whose orders do not, one of which an order has no verdict."""
    scores = [1.0, 0.0, 0.0, 0.0, 0.0, math.nan]

    class Judge:
        name = "judge"

        def compare(self, instructions, a, b):
            return self.judge().scores

        def judge(self, *_):
            return Verdicts(np.array(scores), {"shown_first": np.array(["a"] * 6)})

    texts = ["x", "y", "z"]
    verdicts = BothOrders(Judge()).judge(texts, texts, texts)
    rows = annotate(Pairs([{}] * 3, texts, texts, texts), verdicts)
    assert [row["orders_agree"] for row in rows] == [True, False, None]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"instruction": "a", "output_1": "b"}], "record 1 field 'output_2': expected a string"),
        ([{"instruction": "a", "output_1": "b", "output_2": 3}], "record 1 field 'output_2': expected a string"),
        (
            [{"instruction": " ", "output_1": "b", "output_2": "c"}],
            "record 1 field 'instruction': expected a non-empty",
        ),
        (
            [{"instruction": "a", "output_1": "b", "output_2": "c", "score": math.nan}],
            "field 'score': expected a value",
        ),
        ([{"instruction": "a", "output_1": "b", "output_2": "c", "note": "\ud800"}], "field 'note': expected a value"),
        ([], "expected one record or more, got none"),
    ],
)
def test_faulty_pairs_are_named(call, server, tmp_path, capsys, records, message):
    before = requests(server)
    assert call("annotate", write(tmp_path / "pairs.json", records), "--out", "out.json") == 2
    assert message in capsys.readouterr().err
    assert requests(server) == before


def test_labels_of_the_input_are_written_anew_and_that_is_said(call, tmp_path, capsys):
    rows = [{**row, "preference": 1, "annotator": "me"} for row in make_pairs(4)]
    assert call("annotate", write(tmp_path / "pairs.json", rows), "--out", "out.json") == 0
    assert "its fields preference, annotator are written anew" in capsys.readouterr().err
    assert [row["preference"] for row in read(tmp_path / "out.json")][3] == 1.5
    assert "me" not in [row["annotator"] for row in read(tmp_path / "out.json")]
