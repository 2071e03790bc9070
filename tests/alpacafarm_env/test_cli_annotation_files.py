"""The commands' files: what is refused before anything is asked, and a write that fails."""

import gzip
import json
import math

import numpy as np
import pytest
from command_files import make_pairs, outputs, read, requests, write

from alpacafarm_env.__main__ import main
from alpacafarm_env.cli.annotation_files import FIELDS, Pairs, annotate
from alpacafarm_env.oracles import BothOrders
from alpacafarm_env.oracles.base import Verdicts

pytestmark = pytest.mark.usefixtures("call")


def test_a_file_that_cannot_be_written_loses_nothing(call, anyway, tmp_path, capsys, monkeypatch):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(10)), tmp_path / "out.json"
    out.write_text("[]")
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError("no space left")

        patch.setattr("alpacafarm_env.data.files.Path.replace", full)
        assert call("annotate", pairs, "--out", out) == 2
    err = capsys.readouterr().err
    assert "out.json" in err
    assert "no space left" in err
    assert out.read_text() == "[]"
    assert not list(tmp_path.glob(".out*"))
    before = requests(anyway)
    assert call("annotate", pairs, "--out", out) == 0
    assert requests(anyway) == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "out.csv"], ".jsonl.gz"),
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
    assert main(["annotate", "pairs.json", *args, *default]) == 2
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
        ("out.json", "\0\0\0\0"),
        ("out.jsonl", json.dumps(ROW) + "\n"),
        ("out.jsonl", json.dumps(ANNOTATED)[:-9]),
        ("out.json.gz", "not compressed"),
    ],
)
@pytest.mark.parametrize("command", ["annotate", "evaluate"])
def test_only_annotations_are_overwritten(call, anyway, tmp_path, capsys, command, name, content):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(3)), tmp_path / name
    made, references = (write(tmp_path / f"{n}.json", rows) for n, rows in enumerate(outputs(3)))
    given = [pairs] if command == "annotate" else [made, "--reference", references]
    out.write_text(content)
    before = requests(anyway)
    assert call(command, *given, "--out", out) == 2
    assert str(out) in capsys.readouterr().err
    assert (requests(anyway), out.read_text()) == (before, content)
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
    assert call("annotate", write(tmp_path / "pairs.json", records), "--out", "out.json") == 2
    assert told in capsys.readouterr().err
    assert requests(anyway) == before


def test_labels_of_the_input_are_written_anew_and_that_is_said(call, tmp_path, capsys):
    rows = [{**row, "preference": 1, "annotator": "me"} for row in make_pairs(4)]
    assert call("annotate", write(tmp_path / "pairs.json", rows), "--out", "out.json") == 0
    assert "preference, annotator" in capsys.readouterr().err
    assert [row["preference"] for row in read(tmp_path / "out.json")][3] == 1.5
    assert "me" not in [row["annotator"] for row in read(tmp_path / "out.json")]
