"""Accuracy of reward models: the arithmetic by hand, fresh instructions, and the command on a few pairs."""

import csv
import json
from itertools import islice

import numpy as np
import pytest

from alpacafarm_env.benchmarks import reward_model_accuracy
from alpacafarm_env.benchmarks.experiment.reward_models import against_gold, fresh_instructions, reliability
from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.benchmarks.reward_model_accuracy import COLUMNS, TRAINED_ON, main
from alpacafarm_env.sandbox import tasks
from alpacafarm_env.sandbox.dataset import ASSETS, Sandbox
from alpacafarm_env.statistics import wilson


def test_accuracy_against_gold_by_quartile():
    gap = np.array([-1, 2, -3, 4, -5, 6, -7, 8], dtype=float)
    chance = np.where(gap > 0, 0.9, 0.1)
    chance[:2] = 1 - chance[:2]  # wrong where the gap is smallest
    rows = {row["subset"]: row for row in against_gold("judge", chance, gap)}
    assert [rows[f"gap quartile {k}"]["accuracy"] for k in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert [rows[f"gap quartile {k}"]["mean_gold_gap"] for k in (1, 2, 3, 4)] == [1.5, 3.5, 5.5, 7.5]
    assert (rows["all"]["accuracy"], rows["all"]["n"], rows["all"]["num_correct"]) == (0.75, 8, 6)


def test_reliability_is_by_confidence_on_either_side():
    chance, label = np.array([0.95, 0.05, 0.55, 0.45, 1.0]), np.array([1.0, 0.0, 0.0, 0.0, 1.0])
    low, high = reliability("model", chance, "judge", label)
    assert (low["subset"], low["n"], low["accuracy"]) == ("confidence 0.5 to 0.6", 2, 0.5)
    assert (high["subset"], high["n"], high["accuracy"]) == ("confidence 0.9 to 1.0", 3, 1.0)
    assert low["confidence"] == pytest.approx(0.55)
    assert high["confidence"] == pytest.approx((0.95 + 0.95 + 1) / 3)
    # 2 pairs at |.55 - .5|, 3 at |.9667 - 1|
    errors = reward_model_accuracy.calibration_errors(reward_model_accuracy.pooled(frame_of([low, high])))
    assert errors == {"model": pytest.approx(100 * (2 * 0.05 + 3 * (1 - 2.9 / 3)) / 5)}


def test_confidences_of_few_pairs_are_taken_together():
    chance = np.repeat([0.55, 0.65, 0.75, 0.95], [40, 60, 20, 5])
    label = np.ones(len(chance))
    label[:20] = 0
    rows = reward_model_accuracy.pooled(frame_of(reliability("model", chance, "judge", label)))
    low, high = reward_model_accuracy.merged(rows).itertuples()
    assert (low.subset, low.n, low.accuracy) == ("confidence 0.5 to 0.6", 40, 50)
    assert (high.subset, high.n, high.accuracy) == ("confidence 0.6 to 1.0", 85, 100)
    assert high.confidence == pytest.approx((65 * 60 + 75 * 20 + 95 * 5) / 85)
    assert high.low == pytest.approx(100 * wilson(85, 85)[0])


def test_pooling_weighs_draws_by_their_pairs():
    few = against_gold("judge", np.full(8, 0.9), np.full(8, 1.0))
    many = against_gold("judge", np.full(24, 0.1), np.full(24, 2.0))
    (row,) = reward_model_accuracy.pooled(frame_of([{"seed": 0, **few[0]}, {"seed": 1, **many[0]}])).itertuples()
    assert (row.subset, row.accuracy, row.n, row.mean_gold_gap) == ("all", 25, 32, 1.75)
    assert (row.low, row.high) == tuple(100 * bound for bound in wilson(8, 32))


def test_fresh_instructions_stand_in_no_split_and_are_readable():
    data = Sandbox()
    known = {str(row) for split in data.splits for row in data.instructions(split)}
    fresh = list(islice(fresh_instructions(data, 3), 300))
    assert len(set(fresh)) == 300
    assert not known & set(map(str, fresh))
    assert all(tasks.read(str(row)) is not None for row in fresh)
    assert np.mean([bool(row.input) for row in fresh]) == pytest.approx(0.25, abs=0.1)  # 4 standard errors
    assert list(islice(fresh_instructions(data, 3), 5)) == fresh[:5]
    assert list(islice(fresh_instructions(data, 4), 5)) != fresh[:5]


def test_the_command_measures_models_and_judges_on_the_same_pairs_once(tmp_path, capsys, monkeypatch):
    arguments = ["--out", str(tmp_path), "--num", "24", "--seeds", "2"]
    assert main(arguments) == 0
    table = (tmp_path / "table.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    assert list(rows[0]) == list(COLUMNS)
    total = {(row["seed"], row["judge"]): row for row in rows if row["subset"] == "all"}
    assert len(total) == 2 * len(reward_model_accuracy.MEANINGS)
    assert {row["n"] for row in total.values()} == {"24"}
    assert [float(total[seed, "gold"]["accuracy"]) for seed in "01"] == [1, 1]
    assert {row["against"] for row in rows if row["confidence"]} == set(TRAINED_ON.values())
    for row in rows:
        assert float(row["low"]) <= float(row["accuracy"]) <= float(row["high"])
    accuracy = {name: np.mean([float(total[seed, name]["accuracy"]) for seed in "01"]) for name in TRAINED_ON}
    printed = capsys.readouterr().out
    assert all(f"Right on {100 * value:.1f} %" in printed for value in accuracy.values())
    assert "n = 48 fresh pairs" in printed
    assert accuracy["reward_model_clean"] > 0.6  # 48 pairs: far above a coin, whatever the draw
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["complete"] is True
    assert set(manifest["contents"]) == {"data", "policy", *TRAINED_ON}

    monkeypatch.setattr(reward_model_accuracy, "measure", lambda *_: pytest.fail("drawn again"))
    assert main([*arguments, "--data", str(ASSETS)]) == 0
    assert (tmp_path / "table.csv").read_text(encoding="utf-8") == table
    assert capsys.readouterr().out == printed


def test_missing_models_end_with_status_2(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out"), "--data", str(tmp_path)]) == 2
    assert str(tmp_path / "policy") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
