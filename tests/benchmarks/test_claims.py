"""The claims of the README about learning, each with a margin that comes from the spread of the seeds."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from written import rows_of

from alpacafarm_env.benchmarks import reward_model_accuracy
from alpacafarm_env.benchmarks.experiment.engine import run as run_experiment
from alpacafarm_env.benchmarks.method_ranking import __main__ as method_ranking
from alpacafarm_env.benchmarks.method_ranking.__main__ import MethodRankingOptions
from alpacafarm_env.benchmarks.methods.methods import METHODS
from alpacafarm_env.benchmarks.win_rate_curve import __main__ as win_rate_curve
from alpacafarm_env.benchmarks.win_rate_curve.__main__ import WinRateCurveOptions, make_plans
from alpacafarm_env.benchmarks.win_rate_curve.page import Choice, choose, compare, curves_of


def assert_ppo_beats_sft(found, choice):
    gains = {measure: compare(found, choice)[measure]["difference"] for measure in ("gold", "win_rate_human")}
    for gain in gains.values():
        assert gain.mean > 3 * gain.standard_error > 0, gains
    return gains["win_rate_human"].mean


def test_two_steps_of_ppo_beat_sft(tmp_path):
    plans = make_plans(WinRateCurveOptions(tmp_path, seeds=3, steps=2, evaluate_every=2, num_val=1, num_eval=201))
    rows = [row for plan in plans for row in run_experiment(plan, print) if row["split"] == "eval"]
    assert_ppo_beats_sft(curves_of(rows), Choice(dict.fromkeys(range(3), 2), "fixed"))


@pytest.mark.slow
def test_the_main_job_beats_sft_over_five_seeds(tmp_path, capsys):
    assert win_rate_curve.run(WinRateCurveOptions(out=tmp_path, seeds=5)) == 0
    found, val = (curves_of(pd.read_csv(tmp_path / name).to_dict("records")) for name in ("table.csv", "val.csv"))
    assert assert_ppo_beats_sft(found, choose(val)) >= 10


def ranking(tmp_path, **options):
    assert method_ranking.run(MethodRankingOptions(out=tmp_path / "ranking", **options)) == 0
    found = {}
    for row in rows_of(tmp_path / "ranking"):
        found.setdefault((row["method"], row["feedback"]), []).append(row)
    return {key: sorted(rows, key=lambda row: row["seed"]) for key, rows in found.items()}


def win_rates(found, method, feedback):
    return np.array([float(row[f"win_rate_{feedback}"]) for row in found[method, feedback]])


def assert_above_sft(found, method, feedback):
    gains = win_rates(found, method, feedback) - win_rates(found, "sft", feedback)
    assert gains.mean() > 2 * gains.std(ddof=1) / math.sqrt(len(gains)) > 0, (method, feedback, gains)


def test_best_of_16_beats_sft_and_is_longer(tmp_path, capsys):
    found = ranking(tmp_path, methods=("best_of_16",), feedback=("ann",), quick=True, seeds=3, num_eval=67, processes=1)
    assert_above_sft(found, "best_of_16", "simulated")
    lengths = [np.array([float(row["length"]) for row in found[name, "simulated"]]) for name in ("best_of_16", "sft")]
    assert lengths[0].min() > 1.2 * lengths[1].max()


@pytest.mark.slow
def test_the_ranking_of_all_methods(tmp_path, capsys):
    found = ranking(tmp_path, seeds=3)
    trained = [method.name for method in METHODS if method.trained]
    for feedback in ("simulated", "human"):
        for method in ("ppo", "best_of_n", "expert_iteration"):
            assert_above_sft(found, method, feedback)
        means = {name: win_rates(found, name, feedback).mean() for name in trained}
        assert max(means, key=means.get) in ("ppo", "best_of_n", "best_of_16")
    columns = [
        [win_rates(found, method.name, feedback).mean() for method in METHODS] for feedback in ("simulated", "human")
    ]
    assert spearmanr(*columns).statistic >= 0.9


@pytest.mark.parametrize(
    ("num", "least", "apart"),
    [
        (600, 0.8 - 2 * math.sqrt(0.16 / 600), 0.0),  # two standard errors of a share
        pytest.param(2000, 0.8, 2 * math.sqrt(0.5 / 2000), marks=pytest.mark.slow),  # of a difference, at most
    ],
)
def test_the_clean_reward_model_is_right_on_four_of_five_fresh_pairs(tmp_path, capsys, num, least, apart):
    options = reward_model_accuracy.AccuracyOptions(out=tmp_path, num=num, seeds=1)
    assert reward_model_accuracy.run(options) == 0
    found = {row["judge"]: float(row["accuracy"]) for row in rows_of(tmp_path) if row["subset"] == "all"}
    assert found["reward_model_clean"] >= least
    assert found["reward_model_clean"] - found["reward_model"] > apart
