"""The stored verdicts of real judges: exact figures on the recorded data, faulty files, kappa counted by hand."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alpacafarm_env.benchmarks.annotators import recorded as stored
from alpacafarm_env.benchmarks.annotators.recorded import CROSS, HUMAN, cross_rows
from alpacafarm_env.data.load import recorded_dataset
from alpacafarm_env.errors import DataError
from alpacafarm_env.sandbox.dataset import write_rows


def by_key(rows):
    return {(row["judge"], row["figure"]): row for row in rows}


@pytest.fixture(scope="module")
def recorded():
    folder = Path(os.environ["ALPACAFARM_DATA"])
    rows = stored.recorded_rows(recorded_dataset(str(folder)))
    assert len(by_key(rows)) == len(rows)
    return by_key(rows)


@pytest.mark.data
@pytest.mark.parametrize(
    ("judge", "figure", "count", "n"),
    [
        ("gpt4_b1", "variance", 387 / 4, 648),
        ("gpt4_b1", "disagreement", 101.5, 648),
        ("gpt4_b1", "prefers_longer", 267, 445),
        ("gpt4_b1", "prefers_lists", 39, 53),
        ("gpt4_b1", "prefers_1", 349.25, 648),
        ("longest", "prefers_1", 270, 648),
        ("human", "agreement", 3.25, 4),
        ("gpt4_b1", "bias", 0, 4),
    ],
)
def test_the_recorded_figures_are_exact(recorded, judge, figure, count, n):
    row = recorded[judge, figure]
    assert (row["n"], row["level"]) == (n, "recorded")
    assert row["value"] == pytest.approx(count / n, abs=1e-12)


@pytest.mark.data
def test_the_rule_that_takes_the_longer_equals_the_published_table(recorded):
    assert recorded["longest", "prefers_1"]["value"] == pytest.approx(0.4166667, abs=1e-7)
    within = {key: row["within"] for key, row in recorded.items() if row["within"] is not None}
    assert within == {("longest", figure): True for figure in ("variance", "prefers_longer", "prefers_1")}


CROSS_ROW = {
    "instruction": "Say it.",
    "input": "",
    "output_1": "ab",
    "output_2": "a",
    "preference_gpt4_b1": [0.0, 0.0, 1.0, 0.0],
    "preference_gpt4_b5": [1.0, 1.0, 1.0, 1.0],
    "index": None,
}


def extras(folder, stem, rows):
    write_rows(folder / "extras" / f"{stem}.jsonl.gz", rows)


def test_repeated_verdicts_and_labels_of_a_small_folder(tmp_path):
    other = {**CROSS_ROW, "input": "now", "output_2": "abc", "preference_gpt4_b1": [1.0, 1.0, 1.0, 1.0]}
    extras(tmp_path, CROSS, [CROSS_ROW, other])
    labels = [{**CROSS_ROW, "preference": vote} for vote in (0.0, 0.0, 1.0)]
    extras(tmp_path, HUMAN, [*labels, {**other, "instruction": "Say it.\n\nnow", "preference": 0.0}])
    rows = {(row["judge"], row["figure"]): row["value"] for row in cross_rows(tmp_path)}
    assert rows["gpt4_b1", "variance"] == pytest.approx((0.25 + 0) / 2)
    assert rows["gpt4_b1", "prefers_1"] == pytest.approx((0.75 + 0) / 2)
    assert rows["longest", "prefers_1"] == 0.5
    assert rows["gpt4_b1", "agreement"] == pytest.approx((0.75 + 0) / 2)
    assert rows["gpt4_b5", "bias"] == 1
    assert rows["human", "agreement"] == pytest.approx(1 / 3)  # one label alone has nobody to agree with


def test_labels_of_other_pairs_are_refused(tmp_path):
    extras(tmp_path, CROSS, [CROSS_ROW])
    extras(tmp_path, HUMAN, [{**CROSS_ROW, "preference": 1.0}, {**CROSS_ROW, "output_1": "x", "preference": 1.0}])
    with pytest.raises(DataError, match=f"record 2: expected a pair of {CROSS}"):
        cross_rows(tmp_path)


@pytest.mark.parametrize("votes", [[0.0, 1.0], [0.0, 1.0, 2.0, 1.0], "0101", None])
def test_faulty_votes_are_named(tmp_path, votes):
    extras(tmp_path, CROSS, [CROSS_ROW, {**CROSS_ROW, "preference_gpt4_b5": votes}])
    with pytest.raises(DataError, match="preference_gpt4_b5"):
        cross_rows(tmp_path)


def test_kappa_counted_by_hand():
    # 20 + 15 of 50 agree; by chance 0.5 x 0.6 + 0.5 x 0.4 = 0.5 would.
    assert stored.kappa(np.array([[20.0, 5.0], [10.0, 15.0]])) == pytest.approx(0.4)
    assert stored.kappa(np.array([[5.0, 0.0], [0.0, 5.0]])) == pytest.approx(1)
    assert np.isnan(stored.kappa(np.array([[5.0, 0.0], [0.0, 0.0]])))


KEYS = ["generator", "index"]


def judgements(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [("m", index, "short", "x" * 100) for index in range(4)]
    return stored.decisive(path, pd.DataFrame(texts, columns=["generator", "index", "a", "b"]).set_index(KEYS))


def test_two_judges_are_compared_where_both_decided(tmp_path):
    def row(index, preference, shown="model"):
        return {"index": index, "generator": "m", "preference": preference, "first_shown": shown}

    one = judgements(tmp_path / "one.jsonl", [row(0, 1.0), row(1, 0.0, "reference"), row(2, 0.5), row(3, 1.0)])
    other = judgements(tmp_path / "two.jsonl", [row(0, 1.0), row(1, 1.0), row(2, 1.0), row(3, None), row(9, 1.0)])
    rows = by_key(stored.agreement_rows(one, other))
    assert (rows["claude", "agreement_with_gpt4"]["value"], rows["claude", "agreement_with_gpt4"]["n"]) == (0.5, 2)
    assert rows["claude", "agreement_with_gpt4: m"]["value"] == 0.5
    assert rows["longer_response", "agreement_with_gpt4 where both judged"]["value"] == 0.5
    assert rows["model_always", "agreement_with_claude where both judged"]["value"] == 1
    own = by_key(stored.own_rows("gpt4", one))
    assert own["gpt4", "prefers_first"]["value"] == 1
    assert own["gpt4", "prefers_longer"]["value"] == pytest.approx(2 / 3)
    assert (
        by_key(stored.own_rows("claude", other))["claude", "prefers_longer"]["n"] == 3
    )  # of the last no text is known
    assert stored.agreement_rows(one, other[:0]) == []
