"""Peaks, drops and fits of curves whose truth is known, and how often noise alone passes for a drop."""

import math

import numpy as np
import pytest
from overoptimization_worlds import FACTS, NS, START, STEPS, kls, study, true_gain
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import Estimate, drop, holm, other_peaks
from alpacafarm_env.benchmarks.overoptimization import analysis
from alpacafarm_env.benchmarks.overoptimization.analysis import (
    Curves,
    Results,
    curves_of,
    fit,
    fit_mean,
    gain_at,
    root_kl,
    shared_distances,
)


def curve(name="ann", method="ppo", **options):
    return curves_of(study({name: 0.47}, methods=(method,), **options))[name, method]


def curves(**measures):
    """Of measures [S, K]."""
    values = {name: np.array(each, dtype=float) for name, each in measures.items()}
    seeds, places = map(range, next(iter(values.values())).shape)
    return Curves(seeds, places, values)


def test_a_peak_is_chosen_on_the_other_seeds():
    # Sums: 6, 9, 8. Without seed 0: 5, 4, 6; without seed 1: 3, 7, 5; without seed 2: 4, 7, 5.
    gold = np.array([[1.0, 5.0, 2.0], [3.0, 2.0, 3.0], [2.0, 2.0, 3.0]])
    assert other_peaks(gold).tolist() == [2, 1, 1]
    assert drop(gold).tolist() == [0.0, -1.0, -1.0]


def test_the_drop_is_the_true_one_where_there_is_one():
    found = [Estimate.of(drop(curve(salt=salt)["gold"])) for salt in range(40)]
    gain = true_gain("ppo", 0.47)
    truth = gain.max() - gain[-1]
    assert np.mean([each.mean for each in found]) == pytest.approx(truth, abs=0.03)
    assert all(each.interval.low > 0 for each in found)


@pytest.mark.parametrize("kind", ["independent", "walk"])
@pytest.mark.parametrize("shape", ["flat", "saturating", "rising"])
def test_noise_passes_for_a_drop_no_more_often_than_two_standard_errors_allow(shape, kind):
    x = np.linspace(0, 4, 12)
    shapes = {"flat": 0 * x, "saturating": 3 * (1 - np.exp(-x)), "rising": 3 * x}
    noise = np.random.default_rng([5, 12]).normal(size=(1500, 5, 12))
    studies = shapes[shape] + (noise.cumsum(axis=2) if kind == "walk" else noise)
    nominal, rate = stats.t.sf(2, 4), np.mean([Estimate.of(drop(gold)).interval.low > 0 for gold in studies])
    assert rate <= nominal + 2 * math.sqrt(nominal / 1500)


def test_a_fit_gives_the_parameters_and_its_intervals_hold_them():
    a, b = 0.9, 0.35 * 0.47
    found = fit(curve(method="best_of_n", noise=0.0))
    assert (found.alpha.mean, found.beta.mean) == pytest.approx((a, b))
    inside = []
    for salt in range(100):
        found = fit(curve(method="best_of_n", salt=salt))
        inside.append((found.alpha.low < a < found.alpha.high, found.beta.low < b < found.beta.high))
    assert (np.mean(inside, axis=0) > 0.88).all()


def test_for_equal_kl_the_interval_is_that_of_the_seeds_own_fits():
    seeds = curve(method="best_of_n")
    found = fit(seeds)
    own = [fit_mean(seeds.only([seed]))[0] for seed in range(5)]
    expected = Estimate.of(np.array(own)).interval
    assert (found.alpha.mean, found.alpha.low, found.alpha.high) == pytest.approx(
        (expected.mean, expected.low, expected.high)
    )


def test_what_cannot_be_fitted_is_none():
    few, kl = [[0.0, 1.0, 4.0]], [[0.0, 1.0, 4.0, 9.0]]
    assert fit(curves(kl_exact=few, gold=few)) is None
    assert fit(curves(kl_exact=kl, gold=np.full((1, 4), 4.5))) is None
    straight = fit(curves(kl_exact=kl, gold=kl))  # R = d^2: a = 0, b = -1
    assert straight.beta.mean == pytest.approx(-1)
    assert np.isnan(straight.beta.low)  # one seed has no interval


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
    found = fit(table)
    # Between evaluations a seed is taken as straight: exact but for that.
    assert (found.alpha.mean, found.beta.mean) == pytest.approx((1.2, 0.25), abs=0.01)
    assert shared_distances(curves(kl_exact=[[0.0, 1.0, 0.5, 4.0]])).tolist() == [1.0, 2.0]  # a step back is none
    assert shared_distances(curves(kl_exact=np.zeros((2, 3)))).size == 0


def test_members_of_an_ensemble_are_averaged_in_a_seed():
    same = {"treatment": "e", "num_trained": 64, "accuracy_judge": 0.5, "calibration_error": 0.1}
    rows = [{**same, "seed": s, "accuracy_gold": v} for s, v in [(0, 0.6), (0, 0.8), (1, 0.9), (1, None)]]
    assert analysis.reward_models(rows).accuracy_gold.tolist() == pytest.approx([70, 90])


def test_rows_become_curves_and_faulty_rows_are_refused():
    rows = study({"ann": 0.47}, methods=("ppo",), seeds=2, noise=0.0)
    table = curves_of(rows[::-1])["ann", "ppo"]
    assert (table.seeds, tuple(table.places)) == ([0, 1], STEPS)
    assert table["gold"][0].tolist() == pytest.approx(START + true_gain("ppo", 0.47))
    assert root_kl(table)[0] ** 2 == pytest.approx(kls("ppo"))
    assert tuple(curve(method="best_of_n").places) == NS
    for broken in (rows[:-1], [*rows, rows[0]]):
        with pytest.raises(ValueError, match="expected one row for each seed, step"):
            curves_of(broken)


def test_holm_keeps_what_is_clear_among_all():
    """p of the t-tests of means 1, 2, 3 and 4 standard errors, 9 degrees of freedom: .343, .077, .015, .003."""
    unit = np.arange(10.0) - 4.5
    unit /= Estimate.of(unit).standard_error
    assert holm([unit + 2, unit + 4, unit + 1, unit + 3]) == [False, True, False, True]
    assert holm([unit + 2.5, unit + 4, unit + 2.5, unit + 2.5]) == [False, True, False, False]  # .034 is above .05 / 3
    assert holm([np.zeros(3), np.ones(3)]) == [False, True]
    assert holm([]) == []


def test_falls_are_compared_at_equal_kl_and_to_the_ends():
    """Both follow one R(d), d(2 - d), highest at d = 1; the noisy runs go to d = 1.5 only, the clean ones to 2."""
    rows = []
    for name, end in (("none", 2.0), ("ann", 1.5)):
        for seed in range(3):
            for step, d in enumerate(np.linspace(0, end, 31)):
                row = {"treatment": name, "method": "ppo", "seed": seed, "step": step, "n": None, "kl_exact": d**2}
                gold = d * (2 - d) + (0.001 * seed if step else 0)
                win = {"win_rate_simulated": 50 + 10 * d, "win_rate_human": 50 + 10 * gold}
                rows.append(row | win | {"proxy": d, "gold": gold, "length": 1.0, "disagreement": None})
    results = Results(rows, FACTS)
    equal, ends = results.deeper("ann", "ppo")
    assert equal.mean == pytest.approx(0, abs=0.01)
    assert ends.mean == pytest.approx(0.25 - 1, abs=0.01)
    assert results.relative(("none", "ppo")) == pytest.approx(100, abs=1)
    assert results.relative(("ann", "ppo")) == pytest.approx(25, abs=1)
    won = results.won(("none", "ppo"))
    assert won["win_rate_simulated"][0] == 30  # it rises to the end
    assert won["win_rate_simulated"][1].mean == pytest.approx(0)
    assert won["win_rate_human"][1].mean == pytest.approx(10, abs=0.1)
    assert results.kept_falls == {("none", "ppo"): True, ("ann", "ppo"): True}
