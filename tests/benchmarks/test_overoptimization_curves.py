"""Peaks, drops, fits and claims on curves whose truth is known, and how often noise alone passes for a drop."""

import math

import numpy as np
import pytest
from overoptimization_worlds import FACTS, NS, START, STEPS, TRUTH, kls, study, true_gain
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import Estimate
from alpacafarm_env.benchmarks.overoptimization import analyse
from alpacafarm_env.benchmarks.overoptimization.analyse import Results
from alpacafarm_env.benchmarks.overoptimization.curves import (
    FORMS,
    Curves,
    Story,
    change_after,
    curves_of,
    drop,
    fit,
    gain_at,
    other_peaks,
    rises,
    root_kl,
    shared_distances,
)

BOTH = ("ppo", "best_of_n")
CLAIMED = {name: TRUTH[name] for name in (*analyse.FLIPS, "gpt4", "gpt4_utility", "wco_3")}
"""The treatments that the claims are about."""


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
    assert Story(curves(gold=gold, proxy=gold, kl_exact=gold)).top == 1
    assert other_peaks(gold).tolist() == [2, 1, 1]
    assert drop(gold).tolist() == [0.0, -1.0, -1.0]
    assert change_after(gold, np.array([1, 1, 1])).tolist() == [-3.0, 1.0, 1.0]


def test_the_drop_is_the_true_one_where_there_is_one():
    found = [Story(curve(salt=salt)) for salt in range(40)]
    gain = true_gain("ppo", 0.47)
    truth = gain.max() - gain[-1]
    assert np.mean([each.drop.mean for each in found]) == pytest.approx(truth, abs=0.03)
    assert all(each.falls for each in found)


@pytest.mark.parametrize("kind", ["independent", "walk"])
@pytest.mark.parametrize("shape", ["flat", "saturating", "rising"])
def test_noise_passes_for_a_drop_no_more_often_than_two_standard_errors_allow(shape, kind):
    x = np.linspace(0, 4, 12)
    shapes = {"flat": 0 * x, "saturating": 3 * (1 - np.exp(-x)), "rising": 3 * x}
    noise = np.random.default_rng([5, 12]).normal(size=(1500, 5, 12))
    studies = shapes[shape] + (noise.cumsum(axis=2) if kind == "walk" else noise)
    nominal, rate = stats.t.sf(2, 4), np.mean([rises(Estimate.of(drop(gold))) for gold in studies])
    assert rate <= nominal + 2 * math.sqrt(nominal / 1500)


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


@pytest.mark.parametrize(("method", "a", "b"), [("ppo", 0.8, 0.47), ("best_of_n", 0.9, 0.35 * 0.47)])
def test_a_fit_finds_the_parameters_and_its_intervals_hold_them(method, a, b):
    found = fit(curve(method=method, noise=0.0), FORMS[method])
    assert (found.a.mean, found.b.mean) == pytest.approx((a, b))
    assert found.r_squared == pytest.approx(1)
    d = np.linspace(0.01, 40, 400_000)
    gain = d * (a - b * d) if method == "best_of_n" else d * (a - b * np.log(d))
    assert found.peak == (pytest.approx(d[gain.argmax()], abs=2e-4), pytest.approx(gain.max(), abs=1e-6))
    inside = []
    for salt in range(100):
        found = fit(curve(method=method, salt=salt), FORMS[method])
        inside.append((found.a.low < a < found.a.high, found.b.low < b < found.b.high))
    assert (np.mean(inside, axis=0) > 0.88).all()


def test_for_equal_kl_the_interval_is_that_of_the_seeds_own_fits():
    seeds = curve(method="best_of_n")
    found = fit(seeds, FORMS["best_of_n"])
    own = [fit(seeds.only([seed]), FORMS["best_of_n"]).a.mean for seed in range(5)]
    expected = Estimate.of(np.array(own)).interval
    assert (found.a.mean, found.a.low, found.a.high) == pytest.approx((expected.mean, expected.low, expected.high))


def test_what_cannot_be_fitted_is_none_and_a_rise_without_end_has_no_peak():
    few, kl = [[0.0, 1.0, 4.0]], [[0.0, 1.0, 4.0, 9.0]]
    assert fit(curves(kl_exact=few, gold=few), FORMS["ppo"]) is None
    assert fit(curves(kl_exact=kl, gold=np.full((1, 4), 4.5)), FORMS["ppo"]) is None
    straight = fit(curves(kl_exact=kl, gold=kl), FORMS["best_of_n"])  # R = d^2: a = 0, b = -1
    assert straight.b.mean == pytest.approx(-1)
    assert straight.peak is None


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
    found = analyse.trend([0, 0.175, 0.25, 0.35], drops)
    assert found["monotone"]
    assert (found["interval"], found["rising"]) == ((1.0, 1.0), 1.0)
    flips = np.array([0, 1.75, 2.5, 3.5])
    assert found["slope"].mean == pytest.approx(np.polyfit(flips, drops.mean(axis=1), 1)[0])
    swapped = analyse.trend([0, 0.175, 0.25, 0.35], drops[[0, 2, 1, 3]])
    assert swapped["spearman"] == pytest.approx(0.8)
    assert not swapped["monotone"]


def test_a_warning_is_the_first_clear_rise_of_disagreement():
    start, wobble = np.full(5, 0.3), np.array([0.01, -0.01, 0.02, -0.02, 0.0])
    spread = np.stack([start, start + wobble, start + 0.1 + wobble, start + 0.2 + wobble], axis=1)
    rows = Curves(range(5), (0, 4, 6, 8), {"disagreement": spread})
    assert analyse.warning_place(rows) == 6
    assert analyse.warning_place(curves(disagreement=spread[:, :2])) is None
    assert analyse.warning_place(rows.only([0])) is None


def test_length_is_taken_out_within_prompts():
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(50), 20)
    need = rng.normal(size=50)[prompt]
    length = 200 + 50 * need + rng.normal(0, 30, 1000)
    gold = 4 - 2 * need + 0.01 * length + rng.normal(0, 0.1, 1000)  # those that ask for much get less
    assert analyse.length_slope(gold, length, prompt) == pytest.approx(0.01, abs=5e-4)
    assert np.polyfit(length, gold, 1)[0] < 0
    left = analyse.length_residual(curves(gold=[[4.0, 5.0]], length=[[200.0, 250.0]]), 0.01)
    assert left.tolist() == [[4.0, 4.5]]


def test_members_of_an_ensemble_are_averaged_in_a_seed():
    same = {"treatment": "e", "num_trained": 64, "accuracy_judge": 0.5, "calibration_error": 0.1}
    rows = [{**same, "seed": s, "accuracy_gold": v} for s, v in [(0, 0.6), (0, 0.8), (1, 0.9), (1, None)]]
    assert analyse.reward_models(rows).accuracy_gold.tolist() == pytest.approx([70, 90])


def test_rows_become_curves_and_faulty_rows_are_refused():
    rows = study({"ann": 0.47}, methods=("ppo",), seeds=2, noise=0.0)
    table = curves_of(rows[::-1])["ann", "ppo"]
    assert (table.seeds, tuple(table.places)) == ([0, 1], STEPS)
    assert table["gold"][0].tolist() == pytest.approx(START + true_gain("ppo", 0.47))
    assert root_kl(table)[0] ** 2 == pytest.approx(kls("ppo"))
    assert not table.disagree
    assert curve("mean_3").disagree
    assert tuple(curve(method="best_of_n").places) == NS
    for broken in (rows[:-1], [*rows, rows[0]]):
        with pytest.raises(ValueError, match="expected one row for each seed, step"):
            curves_of(broken)


def judge(rows):
    """(Claim, what it is of) -> verdict; of an ensemble's with its name, of a fit's with its form."""
    found = {}
    for verdict in analyse.verdicts(Results(rows, FACTS)):
        more = {"fits": ["form"], "halves": ["name"]}.get(verdict.id, [])
        found[verdict.id, verdict.numbers["of"], *(verdict.numbers[name] for name in more)] = verdict
    return found


def judged(truth=CLAIMED, **options):
    return judge(study(truth, **{"methods": ("ppo",), **options}))


@pytest.fixture(scope="module")
def usual():
    return judged()


def test_over_optimization_is_a_clear_fall_while_the_proxy_rises(usual):
    found = usual["falls", "ppo"]
    assert found.holds
    assert found.numbers["story"].drop.mean == pytest.approx(0.52, abs=0.01)
    assert found.numbers["story"].proxy_after.mean > 1
    never = judged({**CLAIMED, "ann": 0.02})["falls", "ppo"]
    assert never.holds is False
    assert (never.numbers["story"].top, never.numbers["story"].rising) == (40, True)
    stalled = judged(stalled=("ann",))["falls", "ppo"]
    assert stalled.holds is False
    assert stalled.numbers["story"].falls


def test_without_noise_gold_does_not_fall_or_it_is_said_that_it_does(usual):
    found = usual["stays", "ppo"]
    assert found.holds
    drops = {name: (drop.mean, more.mean) for name, (drop, more) in found.numbers["beside"].items()}
    assert drops["ann"] == pytest.approx((0.52, 0.52), abs=0.01)
    assert drops["gpt4_utility"] == (0, 0)
    falling = judged({**CLAIMED, "gpt4": 0.47})["stays", "ppo"]
    assert falling.holds is False
    assert falling.numbers["story"].drop.mean == pytest.approx(0.5, abs=0.1)


def test_the_drop_grows_with_flips_or_not(usual):
    found = usual["grows", "ppo"]
    assert found.holds
    assert found.numbers["spearman"] == pytest.approx(1)
    assert found.numbers["drops"][0.0].mean == pytest.approx(0)
    mixed = judged({**CLAIMED, "flip_175": 0.6, "flip_35": 0.4})["grows", "ppo"]
    assert mixed.holds is False
    assert mixed.numbers["spearman"] == pytest.approx(0.2)  # ranks 1, 4, 3, 2: 1 - 6 * (4 + 4) / 60
    never = judged(dict.fromkeys(CLAIMED, 0.0), noise=0.0)["grows", "ppo"]
    assert never.holds is False
    assert np.isnan(never.numbers["spearman"])


def test_an_ensemble_cuts_the_drop_by_half_or_not(usual):
    found = usual["halves", "ppo", "wco_3"]
    assert found.holds
    numbers = found.numbers
    assert numbers["spare"].mean == pytest.approx(numbers["before"].mean / 2 - numbers["after"].mean)
    assert judged({**CLAIMED, "wco_3": 0.45})["halves", "ppo", "wco_3"].holds is False
    nothing = judged({**CLAIMED, "ann": 0.02})["halves", "ppo", "wco_3"]
    assert nothing.holds is None
    assert not nothing.numbers["fell"]


def test_kl_efficiency_compares_at_equal_kl(usual):
    rows = study(CLAIMED, methods=BOTH)
    found = judge(rows)
    assert found["less_efficient", "gold"].holds
    assert found["less_efficient", "proxy"].holds is False  # both gain 0.8 d
    levels = found["less_efficient", "gold"].numbers["levels"]
    assert list(levels) == [0.5, 1, 2, 4]
    assert [each.mean for each in levels[4]] == pytest.approx([0.97, 1.15], abs=0.01)
    worse = [{**row, "proxy": row["proxy"] / 2} if row["method"] == "ppo" else row for row in rows]
    assert judge(worse)["less_efficient", "proxy"].holds
    better = [{**row, "gold": 4.5} if row["method"] == "best_of_n" else row for row in rows]
    assert judge(better)["less_efficient", "gold"].holds is False
    assert usual["less_efficient", "gold"].holds is None
    # Clear by two standard errors is not enough: for two seeds the t-interval asks 12.7.
    two = judged(methods=BOTH, seeds=2, noise=0.35, salt=1)["less_efficient", "gold"]
    assert two.numbers["gap"].ratio < -6
    assert two.holds is False


def test_kl_efficiency_of_a_reward_without_noise_is_told_beside_it():
    rows = study(CLAIMED, methods=BOTH, noise=0.0)
    plain = judge(rows)["less_efficient", "gold"].numbers
    is_utility = [row["treatment"] == "gpt4_utility" and row["method"] == "ppo" for row in rows]
    start = next(row["gold"] for row in rows if row["treatment"] == "gpt4_utility" and row["step"] == 0)
    still = [{**row, "gold": start} if ours else row for row, ours in zip(rows, is_utility, strict=True)]
    found = judge(still)["less_efficient", "gold"].numbers
    (before, _), (after, _) = (numbers["beside"]["gpt4_utility"] for numbers in (plain, found))
    assert after.mean < before.mean - 0.5
    assert found["gap"] == plain["gap"]
    alone = [row for row, ours in zip(rows, is_utility, strict=True) if not ours]
    assert list(judge(alone)["less_efficient", "gold"].numbers["beside"]) == ["gpt4"]


def test_fits_are_judged_by_r_squared(usual):
    found = usual["fits", "ppo", "d(a - b log d)"]
    assert found.holds
    assert (found.numbers["num"], found.numbers["below"]) == (len(CLAIMED), [])
    rows = study({"ann": 0.47}, methods=("ppo",))
    poor = judge([{**row, "gold": 4.5 + (row["step"] % 4 == 2)} for row in rows])
    flat = judge([{**row, "gold": 4.5} for row in rows])
    for form in ("d(a - b log d)", "d(a - b d)"):  # PPO is asked for best-of-n's form too
        assert poor["fits", "ppo", form].holds is False
        assert poor["fits", "ppo", form].numbers["below"] == ["ann"]
        assert flat["fits", "ppo", form].holds is None
    forms = [key for key in judged(methods=("best_of_n",)) if key[0] == "fits"]
    assert forms == [("fits", "best_of_n", "d(a - b d)")]


def test_one_seed_claims_nothing_that_needs_an_error():
    found = judged(seeds=1)
    needing = [verdict for (claim, *_), verdict in found.items() if claim != "fits"]
    assert len(needing) == 7
    assert {verdict.holds for verdict in needing} == {None}
    assert list(analyse.other_falls(Results(study(seeds=1, methods=("ppo",)), FACTS), "ppo")) == [None]


def test_what_is_missing_is_said():
    assert judged({"ann": 0.47})["grows", "ppo"].numbers["missing"] == ("none", "flip_175", "ann", "flip_35")
    rows = [row for row in study(methods=("ppo",)) if (row["treatment"] == "ann") == (row["seed"] < 2)]
    assert "missing" in judge(rows)["grows", "ppo"].numbers  # of no seed are there all
    results = Results(study({"ann": 0.47, "none": 0.1}, methods=("ppo",), seeds=3), FACTS[:4])
    assert list(analyse.gaps(results, BOTH, 5)) == [
        ("ppo", ["flip_175", "flip_35"], {"none": 3, "ann": 3}),
        ("best_of_n", ["none", "flip_175", "ann", "flip_35"], {}),  # every cell of it failed
    ]


def test_where_gold_ends_is_told_beside_the_noisy_reward():
    rows = study({name: TRUTH[name] for name in ("none", "ann", "mine")}, noise=0.0)
    ends = {row["treatment"]: row["gold"] for row in rows if row["method"] == "ppo" and row["step"] == 40}
    found = analyse.ends_beside(Results(rows, FACTS), "ppo")
    assert found.keys() == {"none", "mine"}
    assert found["mine"].mean == pytest.approx(ends["mine"] - ends["ann"], abs=0.1)
    assert analyse.ends_beside(Results([row for row in rows if row["treatment"] != "ann"], FACTS), "ppo") == {}


def test_warnings_come_before_the_peak_or_where_no_fall_is_clear():
    results = Results(study(methods=("ppo",)), FACTS)
    found = {warning["key"][0]: warning for warning in analyse.warnings(results)}
    assert list(found) == ["mean_3", "wco_3", "uwo_3"]
    assert found["mean_3"]["place"] == 2 < results.stories["mean_3", "ppo"].top
    falls = analyse.other_falls(results, "ppo")
    assert {"flip_35", "mean_3"} <= set(falls[True])
    assert {"none", "wco_3"} <= set(falls[False])
