"""The study of self-rewarding: agreement by hand, the table's arithmetic, a tiny run of it, and what it claims."""

import math
from dataclasses import replace

import numpy as np
import pytest
from written import rows_of

from alpacafarm_env.agents.sft import FineTuningConfig
from alpacafarm_env.benchmarks.harness.estimates import Estimate, frame_of
from alpacafarm_env.benchmarks.self_rewarding import command, runs
from alpacafarm_env.benchmarks.self_rewarding.command import SelfRewardingOptions, claims, run, summary
from alpacafarm_env.benchmarks.self_rewarding.runs import COLUMNS, JUDGES, Plan, agreement
from alpacafarm_env.sandbox import SANDBOX


def test_agreement_counts_pairs_of_different_gold_within_a_row():
    nan = math.nan
    scores = np.array([[1.0, 2.0, 2.0], [5.0, nan, 4.0], [3.0, 3.0, 3.0]])
    gold = np.array([[0.0, 1.0, 3.0], [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    # First row: two right and a tie; second: one wrong, the others without a score; third: equal gold.
    assert agreement(scores, gold) == 2.5 / 4
    assert math.isnan(agreement(scores[2:], gold[2:]))


def test_the_table_has_means_over_seeds_and_gains_paired_by_seed():
    def row(seed, policy, judge, number, gold):
        return {**dict.fromkeys(COLUMNS), "seed": seed, "policy": policy, "judge": judge, "round": number, "gold": gold}

    rows = [row(seed, "M1", "", 0, 4.0 + seed) for seed in (0, 1)]
    rows += [row(seed, "M2", "self", 1, 5.0 + 3 * seed) for seed in (0, 1)]
    table = summary(frame_of(rows), "")
    assert [line[:4] for line in table.rows] == [
        ("M1", "", "4.50 (0.50)", ""),
        ("M2", "self", "6.50 (1.50)", "+2.00 (1.00)"),
    ]


def test_as_a_judge_it_is_asked_about_its_own_samples_too():
    def row(policy, judge, number, seed, own=None):
        known = {"gold": 5.0, "agreement": own, "agreement_fixed": 0.7}
        return {**dict.fromkeys(COLUMNS), "seed": seed, "policy": policy, "judge": judge, "round": number, **known}

    rows = [row("M1", "", 0, seed) for seed in range(3)]
    rows += [
        row(f"M{number + 1}", judge, number, seed, 0.8 - 0.1 * number + 0.001 * seed * number)
        for judge in JUDGES
        for number in (1, 2)
        for seed in range(3)
    ]
    found = claims(frame_of(rows))
    assert found["judges_better"].holds is None
    assert found["judges_its_own_better"].holds is False
    assert found["judges_its_own_better"].numbers["gain"].mean == pytest.approx(-9.9)


def test_a_tiny_run_writes_a_row_for_each_policy(tmp_path, monkeypatch, capsys):
    tiny = {"num_instructions": 6, "num_ratings": 320, "num_demonstrations": 4, "num_val": 4}
    monkeypatch.setattr(command, "QUICK", tiny)
    monkeypatch.setattr(runs, "NUM_FIXED", 8)
    few = SANDBOX.instructions("unlabeled")[:20]  # their lengths are measured, by each judge's rounds
    monkeypatch.setitem(SANDBOX._instructions, "unlabeled", few)
    sft = replace(FineTuningConfig.sandbox(), epochs=1, batch_size=8, learning_rate=8e-3)
    monkeypatch.setattr(Plan, "sft", sft)
    assert run(SelfRewardingOptions(out=tmp_path, quick=True, seeds=1, rounds=1)) == 0
    rows = rows_of(tmp_path)
    assert [(row["policy"], row["judge"]) for row in rows] == [("SFT", ""), ("M1", ""), *(("M2", j) for j in JUDGES)]
    own, frozen = rows[2:4]
    assert all(own[name] == frozen[name] for name in COLUMNS if name != "judge")  # in the first round they are one
    assert {row["num_val"] for row in rows} == {"4"}
    assert (tmp_path / "gold.png").read_bytes().startswith(b"\x89PNG")
    assert "M2" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"processes": 0}, {"data": "folder"}])
def test_options_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match=f"--{next(iter(bad))}"):
        SelfRewardingOptions(**bad)


def assert_claims(rows):
    """Measured, three seeds: gold +0.64 (0.03); agreement on fixed pairs -0.1 (0.1) points, on samples -6.8 (0.8)."""

    def of(policy, judge, measure):
        return np.array([float(row[measure]) for row in rows if (row["policy"], row["judge"]) == (policy, judge)])

    def change(measure, start, judge=""):
        return Estimate.of(of("M4", "self", measure) - of(start, judge, measure))

    gain = change("gold", "M1")
    assert gain.mean > max(0.3, 3 * gain.standard_error)
    assert abs(change("agreement_fixed", "M2", "self").mean) < 0.03  # what it learns makes it no better a judge
    assert change("agreement", "M2", "self").mean < -0.02  # of ever better responses
    ahead = change("gold", "M4", "frozen")
    assert abs(ahead.mean) < 0.2  # nor do rounds gain by its being no longer the first


@pytest.mark.slow
def test_rounds_on_its_own_ratings_raise_gold_and_make_no_better_judge(tmp_path, capsys):
    assert run(SelfRewardingOptions(out=tmp_path)) == 0
    assert_claims(rows_of(tmp_path))
