"""The leaderboard: a small folder of judgements through the environment, and the published one if its data is there."""

import csv
import gzip
import json

import numpy as np
import pandas as pd
import pytest
from written import rows_of

from alpacafarm_env.benchmarks import leaderboard
from alpacafarm_env.benchmarks.leaderboard import CONTROLLED, compare, main, reproduced
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.statistics import LEADERBOARD_COLUMNS as COLUMNS

NUM = 40
QUESTIONS = [{"index": i, "instruction": f"Question {i}", "input": "an input" * (i % 3 == 0)} for i in range(NUM)]
TEXTS = [row["instruction"] + ("\n\n" + row["input"] if row["input"] else "") for row in QUESTIONS]
REFERENCES = [f"reference {i}" for i in range(NUM)]
# Both write the same text for question 0, and the judge preferred it once and once not.
OUTPUTS = {
    "strong": ["shared"] + ["a long and strong answer" * (1 + i % 3) for i in range(1, NUM - 1)] + [REFERENCES[-1]],
    "weak": ["shared"] + ["weak"[: 1 + i % 4] for i in range(1, NUM)],
}
CREDITS = {
    "strong": [1.0] + [float(i % 5 != 0) for i in range(1, NUM - 2)] + [None, 0.5],
    "weak": [0.0] + [float(i % 7 == 0) for i in range(1, NUM)],
}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def expected_row(generator):
    values = np.array([credit for credit in CREDITS[generator] if credit is not None])
    return {
        "win_rate": 100 * values.mean(),
        "standard_error": 100 * values.std(ddof=1) / np.sqrt(len(values)),
        "n_wins": int((values == 1).sum()),
        "n_wins_base": int((values == 0).sum()),
        "n_draws": int((values == 0.5).sum()),
        "n_total": len(values),
        "avg_length": sum(map(len, OUTPUTS[generator])) // NUM,
    }


@pytest.fixture
def bundle(tmp_path):
    """A folder of judgements with a published table that agrees with them."""
    path = tmp_path / "data"
    write_lines(path / "eval_instructions.jsonl.gz", QUESTIONS)
    references = [{**row, "output": text, "generator": "ref"} for row, text in zip(QUESTIONS, REFERENCES, strict=True)]
    write_lines(path / "davinci003.jsonl.gz", references)
    judgements = [
        {"index": index, "generator": name, "preference": credit}
        for name, credits in CREDITS.items()
        for index, credit in enumerate(credits)
    ]
    write_lines(path / "preferences_my_judge.jsonl.gz", judgements)
    for name, responses in OUTPUTS.items():
        rows = [{**row, "output": text, "generator": name} for row, text in zip(QUESTIONS, responses, strict=True)]
        write_lines(path / "outputs" / f"outputs_{name}.jsonl.gz", rows)
    (path / "recorded.json").write_text(json.dumps({"reference_sha256": reference_digest(TEXTS, REFERENCES)}))
    publish(path, {name: expected_row(name) for name in OUTPUTS})
    return path


def publish(path, rows):
    (path / "extras").mkdir(exist_ok=True)
    with gzip.open(path / "extras" / "leaderboard_my_judge.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, ["", *COLUMNS[1:]])
        writer.writeheader()
        writer.writerows({"": name, **row} for name, row in rows.items())


def test_the_command_writes_table_manifest_figure_and_report(bundle, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--data", str(bundle), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "my_judge" in printed
    assert "counts equal: yes" in printed

    rows = rows_of(out)
    assert [row["generator"] for row in rows] == ["strong", "weak"]
    assert tuple(rows[0]) == COLUMNS
    for row in rows:
        for column, value in expected_row(row["generator"]).items():
            assert float(row[column]) == pytest.approx(value, abs=1e-9)
        assert 0 < float(row["lc_low"]) < float(row[CONTROLLED]) < float(row["lc_high"]) < 100

    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["facts"]["level"] == "recorded"
    assert manifest["facts"]["comparison"]["num_models"] == 2
    assert (out / "leaderboard.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in (out / "report.html").read_text()


def test_a_published_table_that_does_not_come_out_fails_the_command(bundle, tmp_path, capsys):
    rows = {name: expected_row(name) for name in OUTPUTS}
    publish(bundle, {**rows, "weak": {**rows["weak"], "n_wins": 99}})
    assert main(["--data", str(bundle), "--out", str(tmp_path / "out")]) == 1
    assert "counts equal: NO" in capsys.readouterr().out
    (bundle / "extras" / "leaderboard_my_judge.csv.gz").unlink()
    assert main(["--data", str(bundle), "--out", str(tmp_path / "out")]) == 0
    assert "Published" not in capsys.readouterr().out


def test_comparison_by_hand():
    counts = dict.fromkeys(leaderboard.COUNTS, 10)
    same = {"standard_error": 1.0, "avg_length": 7, **counts}
    rates = (("a", 50.0, 45.0), ("b", 60.0, 55.0), ("c", 80.0, 72.0), ("unpublished", 1.0, 1.0))
    rows = [{"generator": name, "win_rate": rate, CONTROLLED: own, **same} for name, rate, own in rates]
    published = pd.DataFrame(rows[:3]).set_index("generator")
    published[CONTROLLED] = published.win_rate
    table = pd.DataFrame(rows)
    result = compare(table, published)
    assert (result["num_models"], result["num_length_controlled"], reproduced(result)) == (3, 3, True)
    assert result["correlation"] == pytest.approx(0.99914, abs=1e-5)
    assert (result["mean_difference"], result["largest_difference"]) == (pytest.approx(6), pytest.approx(8))
    published.loc["b", "standard_error"] += 1e-6
    assert not reproduced(compare(table, published))
    assert not reproduced(compare(table, published[:0]))


@pytest.mark.data
def test_the_published_leaderboard_comes_out(tmp_path):
    """Through the environment: win rate and standard error within 1e-9, counts exact, for every model in both."""
    assert main(["--out", str(tmp_path)]) == 0
    comparison = json.loads((tmp_path / "manifest.json").read_text())["facts"]["comparison"]
    assert comparison["num_models"] == 38
    assert max(comparison["differences"][column] for column in ("win_rate", "standard_error")) <= 1e-9
    assert all(comparison["differences"][column] == 0 for column in (*leaderboard.COUNTS, "avg_length"))
    # At equal lengths, against 36 published figures; no constant of ours is fitted to any of them.
    assert comparison["num_length_controlled"] == 36
    assert comparison["correlation"] >= 0.995
    assert comparison["mean_difference"] <= 1.0
    assert comparison["largest_difference"] <= 4.0
