"""Recorded leaderboards: a small folder by hand, faulty files, and the published judgements if their data is there."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from alpacafarm_env.benchmarks.protocol import recorded as protocol_recorded
from alpacafarm_env.benchmarks.protocol.recorded import (
    EARLY,
    copied,
    leaderboard_rows,
    published,
    read_credits,
    recorded_rates,
    rows_of,
    table_rows,
)
from alpacafarm_env.data.load import recorded_dataset as load
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError

needs_data = pytest.mark.skipif(
    "ALPACAFARM_DATA" not in os.environ, reason="set ALPACAFARM_DATA to the folder of recorded judgements"
)
NUM = 60
SOURCES = ("oasst", "koala")
RATES = {"weak": 0.2, "fair": 0.4, "good": 0.6, "best": 0.9}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_table(path, rows):
    lines = [",win_rate,standard_error", *(f"{name},{rate},{error}" for name, (rate, error) in rows.items())]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def verdicts(seed, names):
    rng = np.random.default_rng(seed)
    return {name: (rng.random(NUM) < RATES[name]).astype(float).tolist() for name in names}


def judgement_rows(credits):
    # Indices count from 10, and the file does not hold them in order.
    return [
        {"index": 10 + i, "generator": name, "preference": value}
        for name, values in credits.items()
        for i, value in reversed(list(enumerate(values)))
    ]


@pytest.fixture
def bundle(tmp_path):
    """Four models judged by GPT-4, three of them by Claude, and two published tables."""
    path = tmp_path / "data"
    questions = [{"index": 10 + i, "instruction": f"Q {i}", "input": "", "dataset": SOURCES[i % 2]} for i in range(NUM)]
    write_lines(path / "eval_instructions.jsonl.gz", questions)
    write_lines(path / "davinci003.jsonl.gz", [{**row, "output": "r", "generator": "ref"} for row in questions])
    pin = {"reference_sha256": reference_digest([row["instruction"] for row in questions], ["r"] * NUM)}
    (path / "recorded.json").write_text(json.dumps(pin), encoding="utf-8")
    for name in RATES:
        outputs = [{**row, "output": f"{name} {row['index']}", "generator": name} for row in questions]
        write_lines(path / "outputs" / f"outputs_{name}.jsonl.gz", outputs)
    gpt4 = verdicts(0, RATES)
    gpt4["weak"][3] = None
    write_lines(path / "preferences_alpaca_eval_gpt4.jsonl.gz", judgement_rows(gpt4))
    extras = path / "extras"
    write_lines(extras / "preferences_claude.jsonl.gz", judgement_rows(verdicts(1, ["weak", "fair", "best"])))
    table = {name: (100 * rate, 2.0) for name, rate in RATES.items()}
    write_table(extras / "leaderboard_alpaca_eval_gpt4.csv.gz", {**table, "ref": (50.0, 0.0), "copy": (20.0, 2.0)})
    write_table(extras / "leaderboard_claude.csv.gz", {**table, "ref": (50.0, 0.0), "copy": (70.0, 2.1)})
    return path


def find(rows, figure, subject, other):
    return next(row for row in rows if (row["figure"], row["subject"], row["other"]) == (figure, subject, other))


def test_verdicts_stand_at_the_place_of_their_instruction(bundle):
    found = read_credits(bundle / "extras" / "preferences_claude.jsonl.gz", {10 + i: i for i in range(NUM)})
    assert found["fair"].tolist() == verdicts(1, ["weak", "fair", "best"])["fair"]
    stored = read_credits(bundle / "preferences_alpaca_eval_gpt4.jsonl.gz", {10 + i: i for i in range(NUM)})
    assert np.isnan(stored["weak"][3])


def test_all_rows_of_a_small_folder(bundle):
    rows = rows_of(load(bundle), repeats=2, resamples=50)
    values = verdicts(0, RATES)["good"]
    row = find(rows, "win_rate", "good", "koala")
    assert (row["value"], row["n"]) == (pytest.approx(100 * np.mean(values[1::2])), NUM // 2)
    both = find(rows, "spearman", "gpt4 recorded", "claude recorded")
    assert (both["value"], both["models"], both["n"]) == (pytest.approx(1), 3, NUM)
    tables = find(rows, "kendall", "gpt4 published", "claude published")
    assert tables["models"] == 5  # the reference, without error, is no model
    clean = find(rows, "kendall", "gpt4 published", "claude published, without rows that are equal")
    assert (clean["value"], clean["models"]) == (pytest.approx(1), 3)
    assert find(rows, "largest_difference", "recorded", "published")["models"] == 4
    assert {row["judge"] for row in rows if row["part"] == "pairs"} == {"gpt4", "claude", EARLY}


def test_without_extras_one_judge_is_told(bundle):
    for file in (bundle / "extras").iterdir():
        file.unlink()
    rows = rows_of(load(bundle), repeats=2, resamples=20)
    assert {row["judge"] for row in rows} == {"gpt4"}
    (bundle / "extras").rmdir()
    assert len(rows_of(load(bundle), repeats=2, resamples=20)) == len(rows)


def test_recorded_win_rates_are_of_models_with_verdicts():
    credits = {"a": np.array([1.0, 0, np.nan, 1]), "none": np.full(4, np.nan), "all": np.ones(4)}
    assert recorded_rates(credits) == {
        "a": (pytest.approx(200 / 3), pytest.approx(100 / 3)),
        "all": (100.0, 0.0),
    }


def test_rows_that_are_equal_are_found_and_told_apart():
    one = {"a": (40.0, 1.0), "b": (40.0, 1.0), "c": (60.0, 1.0), "d": (80.0, 1.0), "e": (90.0, 1.0)}
    two = {"a": (40.0, 1.0), "b": (10.0, 1.0), "c": (60.0, 1.1), "d": (80.0, 1.2), "e": (90.0, 1.3)}
    assert copied(one) == {"a", "b"}
    assert copied(two) == set()
    rows = table_rows(("x", "y"), one, two, 30)
    assert {(row["other"], row["models"]) for row in rows} == {("y", 5), ("y, without rows that are equal", 3)}
    assert table_rows(("x", "y"), dict(list(one.items())[:2]), two, 30) == []


def test_standard_errors_widen_the_interval_of_a_published_table():
    names = [f"m{i}" for i in range(8)]
    widths = []
    for error in (0.5, 8.0):
        table = {name: (10.0 * place + 5, error + place * 1e-6) for place, name in enumerate(names)}
        row = find(table_rows(("x", "y"), table, table, 300), "spearman", "x", "y")
        widths.append(row["high"] - row["low"])
    assert widths[0] < 0.1 < widths[1]


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"a,b\n1,2\n", mtime=0), gzip.compress(b",win_rate\nx,1\n", mtime=0)]
)
def test_another_table_is_refused(tmp_path, content):
    (tmp_path / "table.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match="expected a gzip CSV table of models"):
        published(tmp_path / "table.csv.gz")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 1.0), (0, 1.0)], "record 2: expected one judgement of a model and index"),
        ([(5, 1.0)], "record 1: expected the index of an instruction"),
        ([(0, 3.0)], "expected a number in \\[0, 1\\] or null, got 3.0"),
    ],
)
def test_faulty_verdicts_are_named(tmp_path, rows, message):
    path = tmp_path / "preferences_claude.jsonl.gz"
    write_lines(path, [{"index": index, "generator": "m", "preference": value} for index, value in rows])
    with pytest.raises(DataError, match=message):
        read_credits(path, {0: 0, 1: 1})


def test_judges_of_no_common_model_have_no_correlation():
    stored = {"gpt4": {"a": np.ones(4)}, "claude": {"b": np.zeros(4)}}
    assert {row["figure"] for row in leaderboard_rows(stored, {}, 10)} == {"win_rate"}


@needs_data
def test_published_judgements_by_source_and_between_judges():
    folder = Path(os.environ["ALPACAFARM_DATA"])
    rows = protocol_recorded.rows_of(load(folder), repeats=5, resamples=100)
    gpt4 = [row for row in rows if row["judge"] == "gpt4" and row["part"] == "sources"]
    order = ("selfinstruct", "oasst", "koala", "helpful_base", "vicuna")
    expected = {
        "alpaca-7b": (26.6, 27.9, 27.9, 24.4, 23.1),
        "alpaca-farm-ppo-human": (40.7, 38.6, 41.3, 40.7, 50.0),
        "text_davinci_001": (15.5, 14.9, 16.3, 19.8, 5.1),
    }
    for name, rates in expected.items():
        found = [find(gpt4, "win_rate", name, source)["value"] for source in order]
        assert found == pytest.approx(rates, abs=0.051)
    for judge in ("gpt4", "claude"):
        own = [row for row in rows if row["figure"] == "largest_difference" and row["judge"] == judge]
        assert own[0]["value"] < 1e-9
    assert find(rows, "spearman", "gpt4 published", "claude published")["value"] > 0.9
    all_pairs = [row for row in rows if (row["judge"], row["subject"]) == ("gpt4", "all pairs")]
    curve = {row["n"]: row["value"] for row in all_pairs if row["figure"] == "told_apart"}
    assert 0.7 < curve[300] < 0.9
