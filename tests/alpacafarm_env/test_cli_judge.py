"""`judge annotate`, `judge evaluate` and `ledger` over a judge server: what is refused, written, asked and paid."""

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_files import make_pairs, outputs, read, requests, write
from faulty_server import FaultyJudgeServer

from alpacafarm_env.__main__ import main
from alpacafarm_env.annotators.pool import make_pool
from alpacafarm_env.cli.annotations import FIELDS
from alpacafarm_env.judge_server.sandbox_judge import BY_TASTE
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.sandbox import SANDBOX
from alpacafarm_env.statistics import leaderboard_row, win_rate

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-test-0123456789abcdefghij"


pytestmark = pytest.mark.usefixtures("call")


@pytest.fixture
def priced(tmp_path):
    path = tmp_path / "priced.yaml"
    path.write_text("{model: sandbox-gpt4, price_usd_per_million: [10.0, 30.0]}")
    return path


@pytest.mark.parametrize("name", ["out.json", "out.jsonl"])
def test_annotations_are_the_pools_own_verdicts_behind_the_records(call, anyway, tmp_path, name, capsys):
    pairs = make_pairs(40)
    assert (
        call("judge", "annotate", write(tmp_path / "pairs.jsonl", pairs), "--out", tmp_path / name, "--pool", "ann")
        == 0
    )
    rows = read(tmp_path / name)
    texts = [row["instruction"] + ("\n\n" + row["input"] if "input" in row else "") for row in pairs]
    judge = make_pool("ann", models="sandbox", base_url=anyway.base_url, ledger=tmp_path / "ledger.sqlite", replay=True)
    expected = judge.judge(texts, [row["output_1"] for row in pairs], [row["output_2"] for row in pairs])
    assert [{key: row[key] for key in pair} for row, pair in zip(rows, pairs, strict=True)] == pairs
    assert list(rows[0]) == [*pairs[0], *FIELDS]
    np.testing.assert_array_equal([row["preference"] for row in rows], 1 + expected.scores)
    assert [row["annotator"] or "" for row in rows] == expected.details["annotator"].tolist()
    shown = {"a": "output_1", "b": "output_2", "": None}
    assert [row["shown_first"] for row in rows] == [shown[place] for place in expected.details["shown_first"]]
    assert [row["noised"] for row in rows] == expected.details["noised"].tolist()
    assert {row["shown_first"] for row in rows} == {"output_1", "output_2", None}
    for pair, row in zip(pairs, rows, strict=True):
        same = pair["output_1"] == pair["output_2"]
        assert (row["preference"] == 1.5) == same
        assert (row["annotator"] is None) == (same or row["noised"])
        assert row["unscored_reason"] is None
    assert 8 < sum(row["noised"] for row in rows) < 30
    rate = win_rate([row["preference"] - 1 for row in rows])
    out, err = capsys.readouterr()
    judged = [row["annotator"] for row in rows if row["annotator"]]
    num_noised = sum(row["noised"] for row in rows)
    facts = [f"{num_noised} by noise", f"{rate.win_rate:.2f} % +- {rate.standard_error:.2f} of 40"]
    facts += [
        f"sandbox-gpt4 {sum(name.startswith('gpt4') for name in judged)}",
        anyway.base_url.split("/")[2],
        BY_TASTE,
    ]
    assert not [fact for fact in facts if fact not in out]
    assert f"{len(judged)}/{len(judged)}" in err  # the bar counts the pairs that are asked, on stderr alone
    assert "/s" not in out


def test_a_replay_asks_nothing_and_equals_the_run(call, anyway, tmp_path, capsys):
    pairs = write(tmp_path / "pairs.json", make_pairs(20))
    assert call("judge", "annotate", pairs, "--out", "first.json", "--pool", "greedy") == 0
    before = requests(anyway)
    replay = ("--replay", "--api-key-env", "NOPE")  # no key is needed
    assert call("judge", "annotate", pairs, "--out", "again.json", "--pool", "greedy", *replay) == 0
    assert requests(anyway) == before
    costless = [
        [{**row, "cached": True} for row in read(tmp_path / name) if row["annotator"]]
        for name in ("first.json", "again.json")
    ]
    assert costless[0] == costless[1]
    capsys.readouterr()
    assert call("judge", "annotate", pairs, "--out", "no.json", "--pool", "greedy", "--replay", "--seed", "1") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "no.json").exists()
    assert call("judge", "annotate", pairs, "--out", "no.json", "--replay", ledger="none.sqlite") == 2
    assert not (tmp_path / "none.sqlite").exists()


def test_interrupted_it_says_how_to_go_on_and_goes_on(tmp_path):
    """SIGINT in the middle of a run: status 130, no file; given again, the rest is asked and the result is the same."""
    pairs, limit = write(tmp_path / "pairs.jsonl", make_pairs(80)), 3
    with JudgeServer(anyway=True, latency_s=0.05) as slow:
        command = [sys.executable, "-m", "alpacafarm_env", "judge", "annotate", str(pairs)]
        command += ["--out", str(tmp_path / "out.jsonl")]
        command += ["--pool", "greedy", "--base-url", slow.base_url, "--models", "sandbox"]
        command += ["--max-concurrency", str(limit), "--ledger", str(tmp_path / "ledger.sqlite")]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while slow.stats()["answered"] < 6 and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=20)
        assert run.returncode == 130
        assert re.search(f"interrupted: .*{tmp_path / 'ledger.sqlite'}", err)
        assert "Traceback" not in err
        assert out == ""
        assert not (tmp_path / "out.jsonl").exists()
        first, slow.latency_s = slow.stats()["answered"], 0.0
        assert main(command[3:]) == 0
        total = slow.stats()["answered"]
        assert main([*command[3:-1], str(tmp_path / "fresh.sqlite"), "--out", str(tmp_path / "whole.jsonl")]) == 0
        whole = slow.stats()["answered"] - total
    assert 6 <= first < whole
    assert whole <= total <= whole + limit  # again: at most what was in flight
    again, fresh = ([{**row, "cached": 0} for row in read(tmp_path / f"{name}.jsonl")] for name in ("out", "whole"))
    assert again == fresh  # this annotator does not draw


def test_the_ledger_is_told_by_host_model_and_annotator(anyway, priced, tmp_path, capsys):
    pairs = write(tmp_path / "pairs.json", make_pairs(20))
    before = anyway.stats()["charged"]
    args = ["judge", "annotate", str(pairs), "--out", "out.json", "--base-url", anyway.base_url, "--ledger", "l.sqlite"]
    assert main([*args, "--models", str(priced), "--pool", "greedy"]) == 0
    charged = {name: count - before[name] for name, count in anyway.stats()["charged"].items()}
    usd = (10 * charged["prompt_tokens"] + 30 * charged["completion_tokens"]) / 1e6
    out = capsys.readouterr().out
    assert f"${usd:.4f} for 18 pairs" in out
    assert sum(row["cost_usd"] for row in read(tmp_path / "out.json")) == pytest.approx(usd)
    assert main(["ledger", "--ledger", "l.sqlite"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row, total = dict(zip(lines[1].split(), lines[2].split(), strict=True)), lines[3].split()
    told = {"host": anyway.base_url.split("/")[2], "model": "sandbox-gpt4", "annotator": "greedy_gpt4", "questions": 18}
    told |= {"answered": charged["requests"], "usd": f"{usd:.4f}"}
    told |= {name: charged[name] for name in ("prompt_tokens", "completion_tokens")}
    assert {name: row[name] for name in told} == {name: str(value) for name, value in told.items()}
    assert total == ["total", *lines[2].split()[3:]]
    assert main(["ledger", "--ledger", "missing.sqlite"]) == 2
    assert not (tmp_path / "missing.sqlite").exists()


def test_a_budget_ends_the_run_and_a_higher_one_goes_on(anyway, priced, tmp_path, capsys):
    pairs = write(tmp_path / "pairs.json", make_pairs(40))
    args = ["judge", "annotate", str(pairs), "--out", "out.json", "--base-url", anyway.base_url, "--ledger", "l.sqlite"]
    args += ["--models", str(priced), "--pool", "greedy", "--max-concurrency", "1"]
    before = anyway.stats()["answered"]
    assert main([*args, "--budget-usd", "0.1"]) == 2
    some = anyway.stats()["answered"] - before
    assert 0 < some < 8
    err = capsys.readouterr().err
    assert "$0.1000" in err
    assert not (tmp_path / "out.json").exists()
    assert main([*args, "--budget-usd", "10"]) == 0
    assert anyway.stats()["answered"] - before == math.ceil(36 / 5)
    assert re.search(r" (\d+) of 36 ", err)[1] == re.search(r"(\d+) were answered before", capsys.readouterr().out)[1]


def test_keys_come_from_the_environment_and_are_shown_nowhere(tmp_path, capsys, monkeypatch):
    write(tmp_path / "pairs.json", make_pairs(6))
    with JudgeServer(anyway=True, api_key=KEY) as strict:
        args = ["judge", "annotate", "pairs.json", "--out", "out.json", "--models", "sandbox"]
        args += ["--base-url", strict.base_url]
        for wrong in (["--api-key", KEY], [f"--api-key={KEY}"]):
            assert main([*args, *wrong]) == 2
        assert main([*args, "--api-key-env", KEY.replace("-", "_")]) == 2
        assert strict.stats()["requests"] == 0
        monkeypatch.setenv("OPENAI_API_KEY", KEY[::-1])
        assert main(args) == 2
        monkeypatch.setenv("JUDGE_KEY", KEY)
        assert main([*args, "--api-key-env", "JUDGE_KEY"]) == 0
    out, err = capsys.readouterr()
    for text in (out, err, *(path.read_bytes().decode("latin-1") for path in tmp_path.iterdir())):
        assert not any(key in text for key in (KEY, KEY[::-1], KEY.replace("-", "_")))
    assert "--api-key-env" in err


def test_both_orders_ask_the_missing_one_and_average(call, tmp_path, capsys):
    pairs = write(tmp_path / "pairs.json", make_pairs(20))
    assert call("judge", "annotate", pairs, "--out", "out.json", "--pool", "greedy") == 0
    capsys.readouterr()
    assert call("judge", "annotate", pairs, "--out", "out.json", "--pool", "greedy", "--both-orders") == 0
    assert "18 pairs asked" in capsys.readouterr().out
    rows = [row for row in read(tmp_path / "out.json") if row["annotator"]]
    assert {row["shown_first"] for row in rows} == {"both"}
    assert all(row["orders_agree"] == (row["preference"] != 1.5) for row in rows)


def test_refused_texts_are_asked_again_and_unreadable_replies_are_not(call, tmp_path, capsys):
    pairs, counts = write(tmp_path / "pairs.json", make_pairs(40)), []
    with FaultyJudgeServer({"finish_length": 0.5, "content_filter": 0.2}, anyway=True) as filtering:
        for _ in range(3):
            assert call("judge", "annotate", pairs, "--out", "out.json", at=filtering) == 1
            text = capsys.readouterr().out
            kinds = {kind: int(count) for count, kind in re.findall(r"^  (\d+) (\w+Error)", text, re.MULTILINE)}
            counts.append((int(re.search(r"(\d+) pairs asked", text)[1]), kinds))
    for (_, before), (num_asked, after) in itertools.pairwise(counts):
        assert num_asked == before.get("ContentRefusedError", 0)
        assert after["UnparsableVerdictError"] >= before["UnparsableVerdictError"]
    assert counts[0][1].keys() == {"ContentRefusedError", "UnparsableVerdictError"}


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
        (["--out", "o.json", "--api-key-env", "NOPE"], "--api-key-env"),
        (["--out", "o.json", "--budget-usd", "1", "--model", "unheard-of"], "price_usd_per_million"),
        (["--out", "o.json", "--base-url", "http://example.org/v1"], "--allow-insecure"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(anyway, tmp_path, capsys, args, message):
    write(tmp_path / "pairs.json", make_pairs(3))
    (tmp_path / "folder.json").mkdir()
    before = requests(anyway)
    default = [] if "--base-url" in args else ["--base-url", anyway.base_url]
    default += [] if "--model" in args else ["--models", "sandbox"]
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
