"""Held-out users' instructions, the sandbox's verdicts on them, and recorded leaderboards."""

import gzip
import json
import shutil

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.protocol import held_out, levels
from alpacafarm_env.benchmarks.protocol.held_out import EVAL, FRESH, LIVE, distances, properties, shares
from alpacafarm_env.data.load import recorded_dataset as load
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError
from alpacafarm_env.sandbox import SANDBOX, tasks
from alpacafarm_env.sandbox.dataset import EVAL_SOURCES

NUM = 60
SOURCES = ("oasst", "koala")
RATES = {"weak": 0.2, "fair": 0.4, "good": 0.6, "best": 0.9}


@pytest.fixture(scope="module")
def asked():
    return held_out.questions(100, 300)


def test_sets_are_new_complete_and_of_the_sizes_asked_for(asked):
    known = {str(row) for split in SANDBOX.splits for row in SANDBOX.instructions(split)}
    assert {which: len(question.references) for which, question in asked.items()} == {EVAL: 100, LIVE: 300, FRESH: 300}
    for which in (LIVE, FRESH):
        texts = {str(row) for row in asked[which].instructions}
        assert len(texts) == 300
        assert not texts & known
        assert all(tasks.read(text) is not None for text in texts)
    assert {row.source for row in asked[FRESH].instructions} == set(EVAL_SOURCES)
    stored = dict(zip(SANDBOX.instructions(EVAL), SANDBOX.references(EVAL), strict=True))
    assert all(stored[row] == text for row, text in zip(asked[EVAL].instructions, asked[EVAL].references, strict=True))


def test_mixture_is_the_one_that_is_said(asked):
    rows = [properties(row) for row in asked[LIVE].instructions]
    for name, value, expected in (
        ("input", "with an input", held_out.WITH_INPUT),
        ("greeting", "", held_out.GREETINGS[""]),
        ("form", "", 1 - held_out.ASKS_FORM),
    ):
        assert stats.binomtest(sum(row[name] == value for row in rows), 300, expected).pvalue > 0.001, name
    # Of "continue" at most four are asked for: those are too few to matter here.
    numbers = [row["count"] for row in rows]
    seen = np.array([numbers.count(word) for word in held_out.COUNTS])
    assert stats.chisquare(seen, np.array(list(held_out.COUNTS.values())) * seen.sum()).pvalue > 0.001


def test_held_out_users_differ_and_fresh_instructions_do_not(asked):
    far, near, none = (distances(asked[EVAL].instructions, asked[which].instructions) for which in (LIVE, FRESH, EVAL))
    assert [*far] == ["verb", "input", "greeting", "form", "count", "category"]
    assert all(value > 0.2 for value in far.values()), far
    assert all(near[name] < far[name] for name in far)
    assert set(none.values()) == {0.0}
    found = shares(asked[LIVE].instructions)
    assert all(sum(share for (which, _), share in found.items() if which == name) == pytest.approx(1) for name in far)


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
    places = range(10, 10 + NUM)
    found = levels.read_credits(bundle / "extras" / "preferences_claude.jsonl.gz", places)
    assert found["fair"][0].tolist() == verdicts(1, ["weak", "fair", "best"])["fair"]
    stored = levels.read_credits(bundle / "preferences_alpaca_eval_gpt4.jsonl.gz", places)
    assert np.isnan(stored["weak"][0][3])


def test_all_rows_of_a_small_folder_and_of_one_without_extras(bundle):
    rows = levels.recorded_rows(load(bundle), repeats=2, resamples=50)
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
    assert {row["judge"] for row in rows if row["part"] == "pairs"} == {"gpt4", "claude", levels.EARLY}
    shutil.rmtree(bundle / "extras")
    assert {row["judge"] for row in levels.recorded_rows(load(bundle), repeats=2, resamples=20)} == {"gpt4"}


def test_tables_are_compared_with_and_without_rows_that_are_equal():
    one = {"a": (40.0, 1.0), "b": (40.0, 1.0), "c": (60.0, 1.0), "d": (80.0, 1.0), "e": (90.0, 1.0)}
    two = {"a": (40.0, 1.0), "b": (10.0, 1.0), "c": (60.0, 1.1), "d": (80.0, 1.2), "e": (90.0, 1.3)}
    rows = levels.table_rows({"x": one, "y": two}, 30)
    assert {(row["other"], row["models"]) for row in rows} == {("y", 5), ("y, without rows that are equal", 3)}
    assert {row["other"] for row in levels.table_rows({"x": two, "y": two}, 30)} == {"y"}
    assert levels.table_rows({"x": dict(list(one.items())[:2]), "y": two}, 30) == []


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"a,b\n1,2\n", mtime=0), gzip.compress(b",win_rate\nx,1\n", mtime=0)]
)
def test_another_table_is_refused(tmp_path, content):
    (tmp_path / "table.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match="expected a gzip CSV table"):
        levels.published(tmp_path / "table.csv.gz")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 1.0), (0, 1.0)], "record 2: expected one judgement of a generator and index"),
        ([(5, 1.0)], "record 1: expected the index of an instruction"),
        ([(0, 3.0)], "expected a number in \\[0, 1\\] or null, got 3.0"),
    ],
)
def test_faulty_verdicts_are_named(tmp_path, rows, message):
    path = tmp_path / "preferences_claude.jsonl.gz"
    write_lines(path, [{"index": index, "generator": "m", "preference": value} for index, value in rows])
    with pytest.raises(DataError, match=message):
        levels.read_credits(path, [0, 1])
