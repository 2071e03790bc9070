"""The page and its figures hold what the rows say."""

import json

import numpy as np
import pytest
from overoptimization_worlds import FACTS, TRUTH, reward_models, study, true_gain

from alpacafarm_env.benchmarks.harness.study import write_csv
from alpacafarm_env.benchmarks.overoptimization import figures
from alpacafarm_env.benchmarks.overoptimization.analysis import COLUMNS, Along, Results, cost, gain_at
from alpacafarm_env.benchmarks.overoptimization.page import NOWHERE, UNJUDGED, page, page_of
from alpacafarm_env.benchmarks.overoptimization.runs import Sizes


@pytest.fixture(scope="module")
def results():
    return Results(study(), FACTS)


def test_the_tables_of_everything():
    shown = {name: TRUTH[name] for name in ("none", "ann", "gpt4", "mean_3", "mine")}
    made = page_of(Results(study(shown), FACTS), reward_models(), Sizes())
    # Reward models stand with the labels that they learn from.
    cells = {cell for row in made.tables["reward_models"].rows for cell in row}
    assert {"9,200", "81.8 [80.7, 82.8]", "1.8 [1.0, 3.2]", "9,201"} <= cells
    assert len(made.figures) > 5
    assert next(iter(made.figures)) == figures.NOISE
    assert "nan" not in " ".join(made.findings)


def test_one_treatment_and_one_seed_have_a_page_without_intervals(tmp_path):
    found = page_of(Results(study({"ann": 0.47}, methods=("ppo",), seeds=1), FACTS), (), Sizes())
    assert "nan" not in " ".join([*found.findings, *(cell for row in found.tables["falls"].rows for cell in row)])
    assert {*found.figures} == {"flips_against_kl_ppo"}
    (row,) = found.tables["falls"].rows
    assert row[8] == UNJUDGED


def test_ranges_begin_where_it_was_measured():
    """Nearer to SFT a gap is interpolated from the exact 0, with an interval that never holds it."""
    rows = study({"none": 0.05, "ann": 0.47}, methods=("best_of_n",), noise=0)
    curves = Results(rows, FACTS).curves
    found = cost(curves["none", "best_of_n"], curves["ann", "best_of_n"])
    first = curves["ann", "best_of_n"]["kl_exact"][:, 1].max()
    assert found.kl[0] == pytest.approx(first)
    worse = Along(found.kl, np.ones_like(found.values) + 0.1 * np.arange(len(found.values))[:, None])
    assert worse.ranges == [(pytest.approx(first), found.kl[-1])]


def test_methods_share_one_axis_as_far_as_all_their_seeds_reach(results):
    keys = {"PPO": ("ann", "ppo"), "best": ("ann", "best_of_n")}
    for axis, measure in zip(figures.draw_gains(results, keys, "title").axes, ("proxy", "gold"), strict=True):
        for line, key in zip(axis.lines, keys.values(), strict=True):
            curves = results.curves[key]
            assert line.get_xdata()[-1] == pytest.approx(np.sqrt(curves["kl_exact"][:, -1].min()))
            gains = gain_at(curves, line.get_xdata()[[50, -1]], measure).mean(axis=0)
            assert line.get_ydata()[[50, -1]] == pytest.approx(gains)
        assert len({(line.get_linestyle(), line.get_marker()) for line in axis.lines}) == 2


def test_the_page_is_made_from_the_stored_table(tmp_path):
    rows = study({name: TRUTH[name] for name in ("none", "ann", "mine")}, noise=0.01)
    write_csv(tmp_path / "table.csv", [row for row in rows if row["seed"] < 3 or row["method"] == "ppo"], COLUMNS)
    write_csv(tmp_path / "reward_models.csv", [row for row in reward_models() if row["treatment"] in ("none", "ann")])
    (tmp_path / "manifest.json").write_text(json.dumps({"config": {"sizes": {}}, "seeds": [], "facts": {}}))
    found = page(tmp_path)
    clean, noisy = found.tables["reward_models"].rows
    assert [float(cell.split()[0]) for cell in clean[2:5]] == pytest.approx([81.8, 81.8, 1.8])
    assert (clean[0], noisy[0], noisy[5]) == ("no noise", "25 % flips (p_sim^ann)", "5")
    clean, noisy, *_ = found.findings
    assert "runs' ends" not in clean  # nothing falls
    assert noisy.startswith("25 % flips (p_sim^ann): gold has clearly fallen from its peak under PPO")
    grouped = {f"{group}_against_kl_{method}" for group in ("flips", "own") for method in ("ppo", "best_of_n")}
    assert {*found.figures} == {figures.NOISE, "methods_ann", "methods_none", *grouped}
    rows = {row[:2]: row for row in found.tables["falls"].rows}
    assert len(rows) == 6
    assert [rows["25 % flips (p_sim^ann)", method][2] for method in ("PPO", "best-of-n")] == ["5", "3"]
    assert "3 to 5 seeds" in found.tables["falls"].caption
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
    assert rows["no noise", "PPO"][9] == NOWHERE
    (costs,) = (row for row in found.tables["costs"].rows if row[0] == "PPO")
    assert float(costs[4].split()[0]) == pytest.approx((true_gain("ppo", 0.05) - truth)[-1], abs=0.03)
    assert any("25 % flips" in finding for finding in found.findings)
    assert "3 seeds" in found.headline


def test_no_two_figures_show_the_same_treatments(results):
    truth = {name: TRUTH[name] for name in ("none", "ann", "uwo_3")}
    # "Who labels" would be flips again, and "number of labels" a part of both.
    assert list(figures.groups(Results(study(truth, methods=("ppo",)), FACTS), "ppo")) == ["flips", "ensembles"]
    assert list(figures.groups(Results(study({"ann": 0.47}), FACTS), "ppo")) == ["flips"]
    sizes = {name: len(names) for name, (_, names) in figures.groups(results, "ppo").items()}
    assert sizes == {"flips": 4, "labellers": 5, "sizes": 3, "ensembles": 4, "own": 2}
