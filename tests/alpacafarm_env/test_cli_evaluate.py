"""`evaluate` over a real judge server: the row, its bounds, and how outputs meet their references."""

import json
import random
import re

import numpy as np
import pytest
from command_files import outputs, read, requests, write

from alpacafarm_env import sandbox
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.judge_server.faults import Faults
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.sandbox import SANDBOX
from alpacafarm_env.statistics import credits_from_preferences, leaderboard_row


@pytest.fixture(scope="module")
def cutting():
    with JudgeServer(anyway=True, faults=Faults({"finish_length": 0.7})) as running:
        yield running


def test_a_leaderboard_row_with_bounds(call, cutting, tmp_path, capsys):
    ours, base = outputs(24)
    args = (write(tmp_path / "ours.json", ours), "--reference", write(tmp_path / "base.json", base))
    assert call("evaluate", *args, "--out", "annotations.json", at=cutting) == 1
    rows = read(tmp_path / "annotations.json")
    assert [row["output_1"] for row in rows] == [row["output"] for row in base]
    credits = credits_from_preferences([row["preference"] for row in rows])
    ranked = {row["instruction"]: row["output"] for row in ours}
    responses = [ranked[row["instruction"]] for row in rows]
    assert [row["output_2"] for row in rows] == responses
    assert {(row["generator_1"], row["generator_2"]) for row in rows} == {("base", "g")}
    expected = leaderboard_row("g", credits, responses, [row["output"] for row in base])
    out = capsys.readouterr().out
    names, cells = (line.split() for line in out.splitlines()[:2])
    shown = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in expected.items()}
    assert dict(zip(names, cells, strict=True)) == shown
    num_lost = int(np.isnan(credits).sum())
    assert 0 < num_lost < 24
    low, high = (100 * np.nan_to_num(credits, nan=fill).mean() for fill in (0.0, 1.0))
    assert f"{num_lost} of 24" in out
    assert f"[{low:.2f}, {high:.2f}]" in out
    assert re.search("judge: eval, seed 0, .*sandbox-gpt4.*sandbox-chatgpt.*sandbox-davinci003.*127.0.0.1.*: base", out)


def test_outputs_are_joined_by_instruction(call, tmp_path, capsys):
    """Whatever their order, the row is the same."""
    ours, base = outputs()
    found = set()
    for n in range(4):
        args = (write(tmp_path / "g.json", ours), "--reference", write(tmp_path / "base.json", base))
        assert call("evaluate", *args) == 0
        found.add(capsys.readouterr().out.splitlines()[1])
        random.Random(n).shuffle(ours)
    assert len(found) == 1


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
    assert call("evaluate", write(tmp_path / "g.json", change(ours)), "--reference", "base.json") == 2
    err = capsys.readouterr().err
    assert all(part in err for part in told)
    assert requests(anyway) == before


def test_references_of_a_folder_and_of_the_environment(call, tmp_path, capsys, monkeypatch):
    ours, base = outputs()
    folder = tmp_path / "data"
    folder.mkdir()
    plain = [{"index": n, "instruction": row["instruction"], "input": row["input"]} for n, row in enumerate(base)]
    write(folder / "eval_instructions.json", plain)
    write(folder / "davinci003.json", [{**row, "generator": "text_davinci_003"} for row in base])
    write(folder / "preferences_gpt4.json", [{"index": 0, "generator": "g", "preference": 1.0}])
    texts = [row["instruction"] + "\n\n" * bool(row["input"]) + row["input"] for row in base]
    digest = reference_digest(texts, [row["output"] for row in base])
    (folder / "recorded.json").write_text(json.dumps({"reference_sha256": digest}))
    (folder / "outputs").mkdir()
    write(folder / "outputs" / "outputs_g.json", ours)
    file = write(tmp_path / "nameless.json", [{**row, "generator": None} for row in ours])
    assert call("evaluate", file, "--data", folder) == 0
    given = capsys.readouterr().out
    assert given.splitlines()[1].startswith("nameless ")
    assert "| reference: text_davinci_003\n" in given
    monkeypatch.setenv("ALPACAFARM_DATA", str(folder))
    assert call("evaluate", file) == 0
    assert capsys.readouterr().out.splitlines()[:3] == given.splitlines()[:3]


def test_the_sandbox_has_references(call, tmp_path, capsys):
    asks = zip(sandbox.SANDBOX.instructions("eval"), sandbox.SANDBOX.references("eval"), strict=True)
    same = [{"instruction": ask.instruction, "input": ask.input, "output": text} for ask, text in asks]
    assert call("evaluate", write(tmp_path / "mirror.json", same), "--data", "sandbox") == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:7] == ["mirror", "50.00", "0.00", "0", "0", "805", "805"]
    assert call("evaluate", tmp_path / "mirror.json") == 2
    assert "--reference" in capsys.readouterr().err


@pytest.mark.parametrize("own", [False, True])
def test_instructions_that_the_sandboxs_annotators_do_not_understand_are_refused_unless_asked(
    call, tmp_path, capsys, own
):
    ours, base = outputs(12)
    if own:
        rows = [{"instruction": str(row.instruction), "output": row.responses[0]} for row in SANDBOX.preferences()[:12]]
        base = list({row["instruction"]: row for row in rows}.values())
        ours = [{**row, "output": "\u00e9\u00df 7?! \n\n"} for row in base]
    args = (write(tmp_path / "ours.json", ours), "--reference", write(tmp_path / "base.json", base))
    with JudgeServer() as strict:
        assert call("evaluate", *args, at=strict) == (0 if own else 2)
    out, err = capsys.readouterr()
    assert ("--anyway" in err) == (not own)
    if not own:
        assert call("evaluate", *args) == 0
        out = capsys.readouterr().out
    assert ("12 instructions are not the sandbox's" in out) == (not own)
