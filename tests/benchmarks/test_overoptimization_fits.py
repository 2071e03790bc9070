"""Peaks, drops and fits on curves whose truth is known, and how often noise alone passes for a drop."""

import math

import numpy as np
import pandas as pd
import pytest
from overoptimization_worlds import NS, START, STEPS, kls, study, true_gain
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import Estimate
from alpacafarm_env.benchmarks.overoptimization.analyse import (
    length_residual,
    length_slope,
    reward_models,
    trend,
    warning_place,
)
from alpacafarm_env.benchmarks.overoptimization.curves import (
    FORMS,
    Story,
    change_after,
    curves_of,
    disagrees,
    drop,
    fit,
    gain_at,
    only,
    other_peaks,
    rises,
    root_kl,
    shared_distances,
)


def curve(name="ann", method="ppo", **options):
    return curves_of(study({name: 0.47}, methods=(method,), **options))[name, method]


def curves(**measures):
    """Of measures [S, K]."""
    return {name: pd.DataFrame(np.array(values)) for name, values in measures.items()}


def test_a_peak_is_chosen_on_the_other_seeds():
    # Sums: 6, 9, 8. Without seed 0: 5, 4, 6; without seed 1: 3, 7, 5; without seed 2: 4, 7, 5.
    gold = pd.DataFrame([[1.0, 5.0, 2.0], [3.0, 2.0, 3.0], [2.0, 2.0, 3.0]])
    assert Story(curves(gold=gold, proxy=gold, kl_exact=gold)).top == 1
    assert other_peaks(gold).tolist() == [2, 1, 1]
    assert drop(gold).tolist() == [0.0, -1.0, -1.0]
    assert change_after(gold, pd.Series([1, 1, 1])).tolist() == [-3.0, 1.0, 1.0]


def test_the_drop_is_the_true_one_where_there_is_one():
    found = [Story(curve(salt=salt)) for salt in range(40)]
    gain = true_gain("ppo", 0.47)
    truth = gain.max() - gain[-1]
    assert np.mean([each.drop.mean for each in found]) == pytest.approx(truth, abs=0.03)
    assert all(each.falls for each in found)


def claims_by(estimate_of, shape, kind, repeats=1500, seeds=5, evaluations=12):
    """How often a rule sees a fall where there is none."""
    rng = np.random.default_rng([seeds, evaluations])
    noise = rng.normal(size=(repeats, seeds, evaluations))
    curves = shape + (noise.cumsum(axis=2) if kind == "walk" else noise)
    return np.mean([estimate_of(gold) for gold in curves])


@pytest.mark.parametrize("kind", ["independent", "walk"])
@pytest.mark.parametrize("shape", ["flat", "saturating", "rising"])
def test_noise_passes_for_a_drop_no_more_often_than_two_standard_errors_allow(shape, kind):
    x = np.linspace(0, 4, 12)
    shapes = {"flat": 0 * x, "saturating": 3 * (1 - np.exp(-x)), "rising": 3 * x}
    nominal = stats.t.sf(2, 4)
    rate = claims_by(lambda gold: rises(Estimate.of(drop(pd.DataFrame(gold)))), shapes[shape], kind)
    assert rate <= nominal + 2 * math.sqrt(nominal / 1500)


def test_the_peak_of_all_seeds_would_not_pass_the_same_test():
    def naive(gold):
        fallen = Estimate.of(gold.max(axis=1) - gold[:, -1])
        return rises(fallen)

    def on_the_mean(gold):
        return (lambda e: e.mean > 2 * e.standard_error)(Estimate.of(gold[:, gold.mean(axis=0).argmax()] - gold[:, -1]))

    nominal = stats.t.sf(2, 4)
    assert claims_by(naive, np.zeros(12), "independent", 400) > 5 * nominal
    assert claims_by(on_the_mean, np.zeros(12), "independent", 400) > 2 * nominal


def test_a_rise_is_a_t_interval_above_0():
    """Of three seeds 4.3 standard errors are asked, not 2; t(.975) of 2 degrees of freedom is 4.303."""
    unit = np.array([-1.0, 0.0, 1.0]) * math.sqrt(3)  # of standard error 1
    assert Estimate.of(unit).standard_error == pytest.approx(1)
    assert not rises(Estimate.of(unit + 4.2))
    assert rises(Estimate.of(unit + 4.4))
    assert not rises(Estimate.of(np.array([5.0])))
    assert not rises(Estimate.of(np.zeros(3)))
    for seeds in range(2, 61):  # of two standard errors it is never said, as the claim is usually put
        values = np.arange(float(seeds))
        values -= values.mean()
        assert not rises(Estimate.of(values + 2 * Estimate.of(values).standard_error))


def test_one_seed_has_no_clear_drop():
    gold = [[1.0, 3.0, 2.0]]
    found = Story(curves(gold=gold, proxy=gold, kl_exact=gold))
    assert found.drops.tolist() == [1.0]
    assert not found.falls


@pytest.mark.parametrize(("method", "a", "b"), [("ppo", 0.8, 0.47), ("best_of_n", 0.9, 0.35 * 0.47)])
def test_a_fit_finds_the_parameters_and_its_intervals_hold_them(method, a, b):
    found = fit(curve(method=method, noise=0.0), FORMS[method])
    assert (found.a.mean, found.b.mean) == pytest.approx((a, b))
    assert found.r_squared == pytest.approx(1)
    d = np.linspace(0.01, 40, 400_000)
    gain = d * (a - b * d) if method == "best_of_n" else d * (a - b * np.log(d))
    assert found.peak_distance == pytest.approx(d[gain.argmax()], abs=2e-4)
    assert found.peak_gain == pytest.approx(gain.max(), abs=1e-6)
    assert found.at(found.peak_distance) == pytest.approx(found.peak_gain)
    inside = []
    for salt in range(100):
        found = fit(curve(method=method, salt=salt), FORMS[method])
        inside.append((found.a.low < a < found.a.high, found.b.low < b < found.b.high))
    assert (np.mean(inside, axis=0) > 0.88).all()


def test_for_equal_kl_the_interval_is_that_of_the_seeds_own_fits():
    seeds = curve(method="best_of_n")
    found = fit(seeds, FORMS["best_of_n"])
    own = [fit(only(seeds, [seed]), FORMS["best_of_n"]).a.mean for seed in range(5)]
    expected = Estimate.of(np.array(own)).interval
    assert (found.a.mean, found.a.low, found.a.high) == pytest.approx((expected.mean, expected.low, expected.high))


def test_what_cannot_be_fitted_is_none_and_a_rise_without_end_has_no_peak():
    few, kl = [[0.0, 1.0, 4.0]], [[0.0, 1.0, 4.0, 9.0]]
    assert fit(curves(kl_exact=few, gold=few), FORMS["ppo"]) is None
    assert fit(curves(kl_exact=kl, gold=np.full((1, 4), 4.5)), FORMS["ppo"]) is None
    straight = fit(curves(kl_exact=kl, gold=kl), FORMS["best_of_n"])  # R = d^2: a = 0, b = -1
    assert straight.b.mean == pytest.approx(-1)
    assert math.isinf(straight.peak_gain)
    assert not straight.has_peak


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
    found = fit(table, FORMS["best_of_n"])
    # Between evaluations a seed is taken as straight: exact but for that.
    assert (found.a.mean, found.b.mean) == pytest.approx((1.2, 0.25), abs=0.01)
    assert found.r_squared > 0.999
    assert shared_distances(curves(kl_exact=[[0.0, 1.0, 0.5, 4.0]])).tolist() == [1.0, 2.0]  # a step back is none
    assert shared_distances(curves(kl_exact=np.zeros((2, 3)))).size == 0


def test_the_trend_over_flips():
    drops = np.array([[0.0, 0.1], [0.2, 0.3], [0.5, 0.5], [0.9, 0.8]])
    found = trend([0, 0.175, 0.25, 0.35], drops)
    assert found["monotone"]
    assert (found["interval"], found["rising"]) == ((1.0, 1.0), 1.0)
    flips = np.array([0, 1.75, 2.5, 3.5])
    assert found["slope"].mean == pytest.approx(np.polyfit(flips, drops.mean(axis=1), 1)[0])
    swapped = trend([0, 0.175, 0.25, 0.35], drops[[0, 2, 1, 3]])
    assert swapped["spearman"] == pytest.approx(0.8)
    assert not swapped["monotone"]
    with pytest.raises(ValueError, match="T >= 3"):
        trend([0, 1], drops[:2])


def test_a_warning_is_the_first_clear_rise_of_disagreement():
    start, wobble = np.full(5, 0.3), np.array([0.01, -0.01, 0.02, -0.02, 0.0])
    rows = pd.DataFrame({0: start, 4: start + wobble, 6: start + 0.1 + wobble, 8: start + 0.2 + wobble})
    assert warning_place(rows) == 6
    assert warning_place(rows[[0, 4]]) is None
    assert warning_place(rows[:1]) is None


def test_length_is_taken_out_within_prompts():
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(50), 20)
    need = rng.normal(size=50)[prompt]
    length = 200 + 50 * need + rng.normal(0, 30, 1000)
    gold = 4 - 2 * need + 0.01 * length + rng.normal(0, 0.1, 1000)  # those that ask for much get less
    assert length_slope(gold, length, prompt) == pytest.approx(0.01, abs=5e-4)
    assert np.polyfit(length, gold, 1)[0] < 0
    left = length_residual(curves(gold=[[4.0, 5.0]], length=[[200.0, 250.0]]), 0.01)
    assert left.to_numpy().tolist() == [[4.0, 4.5]]


def test_members_of_an_ensemble_are_averaged_in_a_seed():
    same = {"treatment": "e", "num_trained": 64, "accuracy_judge": 0.5, "calibration_error": 0.1}
    rows = [{**same, "seed": s, "accuracy_gold": v} for s, v in [(0, 0.6), (0, 0.8), (1, 0.9), (1, None)]]
    assert reward_models(rows).accuracy_gold.tolist() == pytest.approx([70, 90])


def test_rows_become_curves_and_faulty_rows_are_refused():
    rows = study({"ann": 0.47}, methods=("ppo",), seeds=2, noise=0.0)
    table = curves_of(rows[::-1])["ann", "ppo"]
    assert (tuple(table["gold"].index), tuple(table["gold"].columns)) == ((0, 1), STEPS)
    assert table["gold"].loc[0].tolist() == pytest.approx(START + true_gain("ppo", 0.47))
    assert root_kl(table["kl_exact"])[0] ** 2 == pytest.approx(kls("ppo"))
    assert not disagrees(table)
    assert disagrees(curve("mean_3"))
    assert tuple(curve(method="best_of_n")["gold"].columns) == NS
    for broken in (
        [],
        rows[:-1],
        [*rows, rows[0]],
        [row for row in rows if row["step"]],
        [{**rows[0], "step": None}, *rows[1:]],
        [{**rows[0], "gold": None}, *rows[1:]],
        [{**rows[0], "method": "dpo"}],
    ):
        with pytest.raises(ValueError, match="expected"):
            curves_of(broken)
