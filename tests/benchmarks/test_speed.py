"""The comparison of speeds: ratios within a round, and a contender that fails."""

import json
import re
import sys

import pytest

from alpacafarm_env.benchmarks.speed.__main__ import Contender, SpeedOptions, compare, main, measure
from alpacafarm_env.errors import DataError


def test_ratios_are_those_within_a_round():
    ours = [{"tokens": 100, "seconds": seconds, "gb": 1.0} for seconds in (1.0, 2.0, 1.0)]  # a slow round is slow
    theirs = [{"tokens": 50, "seconds": seconds, "gb": 4.0} for seconds in (1.0, 2.0, 4.0)]  # for all
    rows = {row["contender"]: row for row in compare("sft", {"ours": ours, "peft": theirs})}
    assert rows["ours"]["ours/its"] == rows["ours"]["highest"] == 1
    ratios = [rows["peft"][name] for name in ("rounds", "tokens/s", "lowest", "ours/its", "highest", "ours/its GB")]
    assert ratios == [3, 25, 2, 2, 8, 0.25]


@pytest.fixture
def options(tmp_path):
    row = {"instruction": "Hi", "chosen": "Hello", "rejected": "No"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return SpeedOptions(model=str(tmp_path / "none"), rows=tmp_path / "rows.jsonl", batch=1, rounds=1, threads=1)


def test_a_contender_that_ends_is_named(options):
    with pytest.raises(DataError, match="bare"):
        Contender("bare", "sft", options)


@pytest.mark.parametrize(
    "text",
    ["{", '{"instruction": "Hi", "chosen": "Hello"}', "", '{"instruction": "Hi", "chosen": "a", "rejected": "b"}'],
)
def test_faulty_or_too_few_rows_are_told_before_a_model_is_loaded(text, options):
    options.rows.write_text(text + "\n")
    with pytest.raises(DataError, match=re.escape(str(options.rows))):
        main(["--model", "none", "--rows", str(options.rows), "--batch", "1", "--rounds", "1"])


def test_contenders_take_turns(options, tmp_path, monkeypatch):
    turns = tmp_path / "turns"
    program = (
        "import sys; turns = open(sys.argv[-1], 'a'); print('loading'); print('{\"start\": 1}', flush=True)\n"
        "for _ in sys.stdin: turns.write(sys.argv[1] + ' '); turns.flush(); print('{\"loss\": 1}', flush=True)"
    )
    (tmp_path / "contender.py").write_text(f"import sys; sys.argv.append({str(turns)!r})\n{program}")
    monkeypatch.setattr("alpacafarm_env.benchmarks.speed.__main__.CONTENDERS", tmp_path / "contender.py")
    given = SpeedOptions(model="m", rows=options.rows, rounds=2, trl_python=sys.executable)
    assert measure("sft", given) == {name: [{"loss": 1}] * 2 for name in ("ours", "trl", "peft", "bare")}
    assert turns.read_text().split() == ["ours", "trl", "peft", "bare"] * 2
