"""The study of monitors on a made-up study's folder: what is held out, what is sealed, and what its numbers say."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alpacafarm_env.benchmarks.harness.page import read_table, records
from alpacafarm_env.benchmarks.harness.stored import cell_file, file_name, pack
from alpacafarm_env.benchmarks.monitors.__main__ import MonitorOptions, run
from alpacafarm_env.benchmarks.monitors.analysis import (
    ALL,
    LABELS,
    METHOD,
    SHUFFLED,
    auroc,
    best_fixed,
    detector_of,
    gold_at,
    held_out,
    most_kept,
    watched_of,
)
from alpacafarm_env.benchmarks.monitors.page import page
from alpacafarm_env.benchmarks.monitors.runs import find_runs, outcomes_of
from alpacafarm_env.errors import DataError
from alpacafarm_env.monitors import Detector

pytest.importorskip("sklearn", reason="detectors need scikit-learn")

PLACES = [0, 2, 4, 6, 8, 10, 15, 20]
METHODS = ("ppo", "grpo", "rloo")
KINDS = ("no fault", "flip", "length_bias")


def write_run(out, method, labels, seed):
    """A run whose gold falls from step 8 on, with lengths that run away from step 6 on; without a fault it does not."""
    rng = np.random.default_rng([METHODS.index(method), KINDS.index(labels), seed])
    falls, cell = labels != "no fault", f"{labels}, {method}, seed {seed}"
    steps = np.arange(1, PLACES[-1] + 1)
    lines = []
    for step in steps.tolist():
        late = max(0, step - 6) * falls
        kl = 0.2 * step * (1 + METHODS.index(method))
        row = {"step": step, "kl/k1": kl, "score/mean": np.sqrt(kl) + rng.normal(0, 0.05), "score/std": 1.0}
        row |= {"tokens/mean": 20 + 2 * late + rng.normal(0, 0.4), "tokens": 2560.0, "entropy": 1.0, "finished": 1.0}
        lines.append(json.dumps(row))
    folder = out / "runs" / file_name(cell)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "settings.json").write_text("{}")
    gold = np.minimum(np.array(PLACES), 8) * 0.2 - np.maximum(np.array(PLACES) - 8, 0) * 0.1 * falls
    table = rng.normal(0, 1, (40, 1)) + gold + rng.normal(0, 0.1, (40, len(PLACES)))
    row = {"judge": "own", "kind": labels, "method": method, "seed": seed, "flip": 0.0, "n": PLACES}
    path = cell_file(out, cell)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"key": cell, "sha256": "", "rows": [{**row, "gold": pack(table)}]}))


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The folder of a made-up study."""
    out = tmp_path_factory.mktemp("axis")
    for method in METHODS:
        for labels in KINDS:
            for seed in range(3):
                write_run(out, method, labels, seed)
    return out


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The folder of a study of a real policy with one run, whose gold A falls from step 8 on; gold B rises."""
    out = tmp_path_factory.mktemp("real")
    write_run(out, "ppo", "flip", 0)
    (path,) = (out / "cells").iterdir()
    facts = {"table": "runs", "method": "ppo", "flip": 0.25, "seed": 0, "gold_a_error": 0.01, "gold_b_error": 0.01}
    rows = [{**facts, "step": s, "gold_a": min(s, 8) - 0.5 * max(0, s - 8), "gold_b": s} for s in PLACES]
    path.write_text(json.dumps({**json.loads(path.read_text()), "rows": rows}))
    return out


@pytest.fixture(scope="module")
def done(studied, real, tmp_path_factory):
    out = tmp_path_factory.mktemp("monitors")
    assert run(MonitorOptions(out=out, runs=(studied,), real=real, processes=1)) == 0
    return out


def test_a_real_policy_s_run_is_warned_of_and_its_golds_are_told(done):
    (row,) = records(read_table(done / "real.csv"))
    assert 6 < row["warned"] < 20
    assert (row["a_peak"], row["a_peak_step"], row["a_lost"], row["a_fallen"]) == (8, 8, 6, 1)
    assert (row["b_peak_step"], row["b_lost"], row["b_fallen"]) == (20, 0, 0)
    assert len(page(done).tables["real"].rows) == 1


def test_signals_that_tell_are_found_and_shuffled_outcomes_are_not(done):
    rows = read_table(done / "detectors.csv").set_index("detector")
    assert rows.auroc[ALL] > 0.9
    assert rows.auroc["length"] > 0.9
    assert rows.auroc["distance"] < rows.auroc["length"]
    assert rows.auroc_low[SHUFFLED] < 0.5 < rows.auroc_high[SHUFFLED]
    assert rows.false_alarms[ALL] <= 0.34
    assert rows.warned_of_falls[ALL] > 0.9
    assert rows.at_step["length"] > 0.9
    assert rows.at_step["step"] == pytest.approx(0.5)  # falls come late, and nothing else tells them apart
    made = page(done)
    assert len(made.tables["groups"].rows) == len(METHODS) * len(KINDS)


def test_its_detector_is_of_all_runs_and_can_be_used(done, studied):
    detector = Detector.load(done / "detector.json")
    assert detector.facts["runs"] == 27
    assert detector.weights["length"] > 0


def test_outcomes_are_of_the_run_and_its_peak_of_the_others(studied):
    found = find_runs([studied])
    outcomes = outcomes_of(found)
    for each, _ in found:
        places, gold, past = outcomes[each.name]
        assert places == PLACES
        assert gold[4] == pytest.approx(1.6, abs=0.1)
        assert past.any() == (each.labels != "no fault")
        assert not past[:5].any()


def test_gold_in_a_runs_metrics_is_refused(tmp_path, capsys):
    for seed in range(2):
        write_run(tmp_path, "ppo", "flip", seed)
    (path,) = (tmp_path / "runs").glob("*seed-0*/metrics.jsonl")
    lines = [{**json.loads(line), "info/gold_reward": 1.0} for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert run(MonitorOptions(out=tmp_path / "out", runs=(tmp_path,), processes=1)) != 0
    assert "gold_reward" in capsys.readouterr().err


def test_folders_without_runs_are_refused_before_anything_is_read(tmp_path, studied):
    with pytest.raises(DataError, match="study"):
        find_runs([tmp_path])
    with pytest.raises(DataError, match="--real"):
        run(MonitorOptions(out=tmp_path / "out", runs=(studied,), real=tmp_path, processes=1))
    assert not (tmp_path / "out").exists()


def test_runs_without_a_fall_are_refused(tmp_path):
    write_run(tmp_path, "ppo", "no fault", 0)
    with pytest.raises(DataError, match="falls"):
        run(MonitorOptions(out=tmp_path / "out", runs=(tmp_path,), processes=1))


def watched(past, length, *, method="ppo", labels="flip", gold=None):
    table = pd.DataFrame(
        {"study": "s", "method": method, "labels": labels, "run_seed": 0, "place": range(1, len(past) + 1)}
    )
    gold = np.zeros(len(past)) if gold is None else gold
    (one,) = watched_of(table.assign(length=length, samples=256 * table.place, past=past, gold=gold))
    return one


def test_a_detector_has_not_seen_the_method_or_the_labels_that_it_judges():
    """Length tells the wrong way by PPO: whoever learned from PPO would be right about it, and others are not."""
    up, down, past = [0.0, 0.1, 1.0, 1.1], [1.0, 1.1, 0.1, 0.0], [False, False, True, True]
    kinds = [("ppo", "flip", down), ("ppo", "length", down)]
    kinds += [(method, labels, up) for method in ("grpo", "rloo") for labels in ("flip", "length")]
    runs = [watched(past, length, method=method, labels=labels) for method, labels, length in kinds]
    one = [np.zeros(4)] * len(runs)

    def area(by, chosen):
        held = held_out(runs, ("length",), by=by)
        assert np.isfinite(held.limits).all()
        return auroc([held.scores[i] for i in chosen], [runs[i].past for i in chosen], [one[i] for i in chosen])

    assert area(METHOD, [0, 1]) == 0.0
    assert area(LABELS, [2, 3, 4, 5]) == 1.0
    nothing = held_out(runs[:2], ("length",))
    assert all(np.isnan(each).all() for each in nothing.scores)


def test_areas_are_within_strata():
    scores, past = [np.array([1.0, 2.0]), np.array([3.0, 4.0])], [np.array([False, False]), np.array([True, True])]
    assert auroc(scores, past, [np.zeros(2), np.zeros(2)]) == 1.0
    assert np.isnan(auroc(scores, past, [np.zeros(2), np.ones(2)]))
    ties = [np.array([1.0, 2.0]), np.array([1.0, 3.0])]
    assert auroc(ties, past, [np.zeros(2), np.zeros(2)]) == pytest.approx(2.5 / 4)


def test_stopping_keeps_the_place_before_the_warning():
    gold = np.array([1.0, 2.0, 3.0, 2.0])
    one = watched([False, False, False, True], [0, 0, 0, 0], gold=gold)
    assert [gold_at(one, stop) for stop in (None, 3, 0)] == [2.0, 3.0, 0.0]
    other = watched([False] * 4, [0] * 4, method="grpo", labels="no fault", gold=np.array([0.0, 5.0, 1.0, 1.0]))
    assert best_fixed([one, other], one) == 2.0  # at the other's best place
    rising, scores = np.array([0.0, 1.0, 2.0, 3.0]), [np.array([0.0, 1.0, 2.0, 3.0])]
    assert 2.0 <= most_kept([one], scores) < 3.0  # which warns of the last place, and keeps the one before it
    assert most_kept([watched([False] * 4, [0] * 4, gold=rising)], scores) >= 3.0  # never


def test_the_shipped_detector_is_that_of_the_stored_runs():
    table = Path(__file__).parents[2] / "docs" / "studies" / "monitors" / "table.csv"
    fitted, shipped = detector_of(watched_of(pd.read_csv(table))), Detector.load()
    for name in ("weights", "means", "scales"):
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=1e-4)
    assert shipped.threshold == pytest.approx(fitted.threshold, rel=1e-4)
    assert shipped.facts == fitted.facts
