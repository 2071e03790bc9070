"""Peaks, drops and fits of curves whose truth is known, and the page that says them."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from overoptimization_worlds import FACTS, NS, START, STEPS, TRUTH, kls, reward_models, study, true_gain

from alpacafarm_env.benchmarks.harness.study import write_csv
from alpacafarm_env.benchmarks.overoptimization.__main__ import REWARD_MODELS
from alpacafarm_env.benchmarks.overoptimization.analysis import (
    COLUMNS,
    Along,
    Cost,
    Curves,
    Results,
    curves_of,
    fit,
    gain_at,
    root_kl,
    shared_distances,
)
from alpacafarm_env.benchmarks.overoptimization.analysis import reward_models as means_of_models
from alpacafarm_env.benchmarks.overoptimization.page import NOISE, UNJUDGED, page


def curve(name="ann", method="ppo", **options):
    return curves_of(study({name: 0.47}, methods=(method,), **options))[name, method]


def curves(**measures):
    """Of measures [S, K]."""
    return Curves(pd.concat({name: pd.DataFrame(each, dtype=float) for name, each in measures.items()}, axis=1))


def test_a_fit_gives_the_parameters_and_its_intervals_hold_them():
    a, b = 0.9, 0.35 * 0.47
    alpha, beta = fit(curve(method="best_of_n", noise=0.0))
    assert (alpha.mean, beta.mean) == pytest.approx((a, b))
    inside = []
    for salt in range(100):
        alpha, beta = fit(curve(method="best_of_n", salt=salt))
        inside.append((alpha.low < a < alpha.high, beta.low < b < beta.high))
    assert (np.mean(inside, axis=0) > 0.88).all()


def test_what_cannot_be_fitted_is_none():
    few, kl = [[0.0, 1.0, 4.0]], [[0.0, 1.0, 4.0, 9.0]]
    assert fit(curves(kl_exact=few, gold=few)) is None
    assert fit(curves(kl_exact=kl, gold=np.full((1, 4), 4.5))) is None
    _, beta = fit(curves(kl_exact=kl, gold=kl))  # R = d^2: a = 0, b = -1
    assert beta.mean == pytest.approx(-1)
    assert np.isnan(beta.low)  # one seed has no interval


def test_gold_at_equal_kl_is_where_a_seed_first_gets_there():
    one = curves(kl_exact=[[0.0, 4.0, 1.0, 16.0]], gold=[[1.0, 3.0, 9.0, 4.0]])
    # d = 0, 2, (1: a step back), 4; gains 0, 2, 3.
    assert gain_at(one, [1.0, 2.0, 3.0, 5.0])[0].tolist() == pytest.approx([1.0, 2.0, 2.5, math.nan], nan_ok=True)


def test_seeds_that_are_unequally_far_are_averaged_at_equal_distances():
    """Each seed follows one and the same R(d); at a step they are at different places of it."""
    steps, speed = np.arange(0, 8, 0.1), np.array([[0.5], [1.0], [3.0]])
    kl = (speed * steps) ** 2
    d = np.sqrt(kl)
    gold = 4 + d * (1.2 - 0.25 * d)
    table = curves(kl_exact=kl, gold=gold)
    assert shared_distances(table).tolist() == pytest.approx(0.5 * steps[1:])
    alpha, beta = fit(table)
    # Between evaluations a seed is taken as straight: exact but for that.
    assert (alpha.mean, beta.mean) == pytest.approx((1.2, 0.25), abs=0.01)
    assert shared_distances(curves(kl_exact=[[0.0, 1.0, 0.5, 4.0]])).tolist() == [1.0, 2.0]  # a step back is none
    assert shared_distances(curves(kl_exact=np.zeros((2, 3)))).size == 0


def test_members_of_an_ensemble_are_averaged_in_a_seed():
    same = {"treatment": "e", "num_trained": 64, "accuracy_judge": 0.5, "calibration_error": 0.1}
    rows = [{**same, "seed": s, "accuracy_gold": v} for s, v in [(0, 0.6), (0, 0.8), (1, 0.9), (1, None)]]
    accuracy = means_of_models(pd.DataFrame(rows))["e"]["accuracy_gold"]
    assert (accuracy.mean, accuracy.num) == (pytest.approx(80), 2)


def test_rows_become_curves_and_double_rows_are_refused():
    rows = study({"ann": 0.47}, methods=("ppo",), seeds=2, noise=0.0)
    table = curves_of(rows[::-1])["ann", "ppo"]
    assert (table.table.index.tolist(), tuple(table.places)) == ([0, 1], STEPS)
    assert table["gold"][0].tolist() == pytest.approx(START + true_gain("ppo", 0.47))
    assert root_kl(table)[0] ** 2 == pytest.approx(kls("ppo"))
    assert tuple(curve(method="best_of_n").places) == NS
    with pytest.raises(ValueError, match="duplicate"):
        curves_of([*rows, rows[0]])


def test_falls_are_compared_at_equal_kl_and_to_the_ends():
    """Both follow one R(d), d(2 - d), highest at d = 1; the noisy runs go to d = 1.5 only, the clean ones to 2."""
    rows = []
    for name, end in (("none", 2.0), ("ann", 1.5), ("mean_3", 1.0)):
        for seed in range(3):
            for step, d in enumerate(np.linspace(0, end, 31)):
                row = {"treatment": name, "method": "ppo", "seed": seed, "step": step, "n": None, "kl_exact": d**2}
                gold = d * (2 - d) + (0.001 * seed if step else 0)
                win = {"win_rate_simulated": 50 + 10 * d, "win_rate_human": 50 + 10 * gold}
                rows.append(row | win | {"proxy": d, "gold": gold, "length": 1.0, "disagreement": None})
    results = Results(rows)
    cost, clean, noisy = results.costs["ann", "ppo"], results.falls["none", "ppo"], results.falls["ann", "ppo"]
    assert cost.deeper.mean == pytest.approx(0, abs=0.01)
    assert cost.to_ends.mean == pytest.approx(0.25 - 1, abs=0.01)
    assert (clean.share, noisy.share) == (pytest.approx(100, abs=1), pytest.approx(25, abs=1))
    place, dropped = clean.won["win_rate_simulated"]
    assert (place, dropped.mean) == (30, pytest.approx(0))  # it rises to the end
    assert clean.won["win_rate_human"][1].mean == pytest.approx(10, abs=0.1)
    assert results.kept_falls == {("none", "ppo"): True, ("ann", "ppo"): True, ("mean_3", "ppo"): False}
    assert [*results.eased] == [("mean_3", "ppo")]
    assert results.eased["mean_3", "ppo"].to_ends.mean == pytest.approx(0.25, abs=0.01)


def test_ranges_begin_where_it_was_measured():
    """Nearer to SFT a gap is interpolated from the exact 0, with an interval that never holds it."""
    table = curves_of(study({"none": 0.05, "ann": 0.47}, methods=("best_of_n",), noise=0))
    less = Cost.of(table["none", "best_of_n"], table["ann", "best_of_n"]).along
    first = table["ann", "best_of_n"]["kl_exact"][:, 1].max()
    assert less.kl[0] == pytest.approx(first)
    worse = Along(less.kl, np.ones_like(less.values) + 0.1 * np.arange(len(less.values))[:, None])
    assert worse.ranges == [(pytest.approx(first), less.kl[-1])]


def page_of(folder, rows, models=()):
    """The page of a folder that holds these rows."""
    write_csv(folder / "table.csv", rows, COLUMNS)
    write_csv(folder / "reward_models.csv", [dict.fromkeys(REWARD_MODELS) | row for row in models], REWARD_MODELS)
    facts = {"treatments": {each.name: {"title": each.title} for each in FACTS}}
    sizes = {"num_prompts": 100, "num_eval": 201}
    (folder / "manifest.json").write_text(json.dumps({"config": {"sizes": sizes}, "seeds": [], "facts": facts}))
    return page(folder)


def test_one_treatment_and_one_seed_have_a_page_without_intervals(tmp_path):
    made = page_of(tmp_path, study({"ann": 0.47}, methods=("ppo",), seeds=1))
    assert "nan" not in " ".join([*made.findings, *(cell for row in made.tables["falls"].rows for cell in row)])
    assert not made.figures
    (row,) = made.tables["falls"].rows
    assert row[8] == UNJUDGED


def test_the_page_is_made_from_the_stored_table(tmp_path):
    rows = study({name: TRUTH[name] for name in ("none", "ann", "mine")}, noise=0.01)
    rows = [row for row in rows if row["seed"] < 3 or row["method"] == "ppo"]
    made = page_of(tmp_path, rows, [row for row in reward_models() if row["treatment"] in ("none", "ann")])
    clean, noisy = made.tables["reward_models"].rows
    assert [float(cell.split()[0]) for cell in clean[2:5]] == pytest.approx([81.8, 81.8, 1.8])
    assert (clean[0], noisy[0], noisy[5]) == ("no noise", "25 % flips (p_sim^ann)", "5")
    clean, noisy, *_ = made.findings
    assert "clearly fallen under PPO" in clean  # nothing falls
    assert noisy.startswith("25 % flips (p_sim^ann): gold has clearly fallen from its peak under PPO")
    groups = ("flips", "labellers", "others")
    grouped = {f"{group}_against_kl_{method}" for group in groups for method in ("ppo", "best_of_n")}
    assert {*made.figures} == {NOISE, "methods_ann", "methods_none", *grouped}
    rows = {tuple(row[:2]): row for row in made.tables["falls"].rows}
    assert len(rows) == 6
    assert [rows["25 % flips (p_sim^ann)", method][2] for method in ("PPO", "best-of-n")] == ["5", "3"]
    assert "3 to 5 seeds" in made.tables["falls"].caption
    # The truth: d(0.8 - 0.47 log d) is highest at d = exp(0.8 / 0.47 - 1), KL 4.1, and falls to the end, 20.
    _, _, _, _, kl, end, fall, _, _, at, last, fall_to_the_end = rows["25 % flips (p_sim^ann)", "PPO"]
    assert float(kl) == pytest.approx(4.1, abs=0.5)
    assert float(end) == pytest.approx(20, abs=0.2)
    truth = true_gain("ppo", 0.47)
    for each in (fall, fall_to_the_end):
        assert float(each.split()[0]) == pytest.approx(truth.max() - truth[-1], abs=0.03)
    assert float(last.split()[0]) == float(end)
    low, high = map(float, at.split(" to "))
    assert 4 < low < 8
    assert high == pytest.approx(20, abs=0.2)
    assert rows["no noise", "PPO"][9] == "nowhere"
    (costs,) = (row for row in made.tables["costs"].rows if row[1] == "PPO")
    assert float(costs[4].split()[0]) == pytest.approx((true_gain("ppo", 0.05) - truth)[-1], abs=0.03)
    assert any("25 % flips" in finding for finding in made.findings)
    assert "3 seeds" in made.headline
