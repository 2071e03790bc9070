"""Reward models on features: exact best-of-n curves, errors that cover, labels that flip together."""

import itertools
import sys

import numpy as np
import pytest
from scipy import stats

from alpacafarm_env.benchmarks.harness.estimates import rejected
from alpacafarm_env.benchmarks.surrogates.curves import TwoWay, best_of_n, drop_and_peak, policy_kl, slope
from alpacafarm_env.benchmarks.surrogates.features import MEASURES, Scaling, WordComponents, measured, measures
from alpacafarm_env.benchmarks.surrogates.models import accuracy, fit, flipped
from alpacafarm_env.errors import DataError

RNG = np.random.default_rng(0)


def by_hand(proxy, gold):
    """Gold, proxy and KL for each n, over every subset; equal proxies share a choice."""
    known = [i for i in range(len(gold)) if not np.isnan(gold[i])]
    lines = []
    for n in range(1, len(known) + 1):
        chances = dict.fromkeys(known, 0.0)
        subsets = list(itertools.combinations(known, n))
        for subset in subsets:
            best = [i for i in subset if proxy[i] == max(proxy[j] for j in subset)]
            for i in best:
                chances[i] += 1 / len(best) / len(subsets)
        parts = [(p * gold[i], p * proxy[i], p * np.log(p * len(known)) if p else 0) for i, p in chances.items()]
        lines.append(np.sum(parts, axis=0))
    return np.array(lines).T


@pytest.mark.parametrize("proxy", [[0.3, -1.0, 2.0, 0.1, 7.0, 0.2], [1.0, 1.0, 0.0, 2.0, 2.0, 1.0], [4.0] * 6])
@pytest.mark.parametrize("gap", [False, True])
def test_best_of_n_equals_every_subset_by_hand(proxy, gap):
    gold = RNG.random(6)
    gold[2] = np.nan if gap else gold[2]
    found = best_of_n(np.array([proxy, proxy]), np.array([gold, gold]))
    expected = by_hand(proxy, gold)
    for curve, line in zip((found.gold, found.proxy, found.kl), expected, strict=True):
        np.testing.assert_allclose(curve[1, : len(line)], line, atol=1e-12)
        np.testing.assert_allclose(curve[1, len(line) :], line[-1], atol=1e-12)


def test_candidates_without_any_gold_have_no_curve():
    found = best_of_n(np.ones((1, 3)), np.full((1, 3), np.nan))
    assert np.isnan(found.gold).all()


def test_kl_of_few_candidates_is_near_that_of_samples():
    kl = best_of_n(RNG.random((1, 200)), np.zeros((1, 200))).kl[0]
    assert kl[-1] == pytest.approx(np.log(200))
    np.testing.assert_allclose(kl[:20], policy_kl(np.arange(1, 21)), atol=0.05)
    assert (np.diff(kl) > 0).all()


def test_flips_of_a_lower_rate_are_among_a_higher():
    labels = RNG.integers(0, 2, 4_000).astype(float)
    changed = [flipped(labels, rate, "r", 3) != labels for rate in (0, 0.25, 0.35, 0.45)]
    assert [each.mean() for each in changed] == pytest.approx([0, 0.25, 0.35, 0.45], abs=0.03)
    assert all((few <= many).all() for few, many in itertools.pairwise(changed))
    np.testing.assert_array_equal(flipped(labels[:50], 0.25, "r", 3), flipped(labels, 0.25, "r", 3)[:50])
    assert (flipped(labels, 0.25, "r", 4) != flipped(labels, 0.25, "r", 3)).any()


def pairs(num, seed):
    rng = np.random.default_rng(seed)
    differences = rng.normal(size=(num, 6)) * [1, 10, 0.1, 1, 1, 0]
    true = differences @ [2, 0.05, 0, -1, 0, 3]
    return differences, (rng.random(num) < 1 / (1 + np.exp(-true))).astype(float), true


@pytest.mark.parametrize("kind", ["linear", "trees"])
def test_models_learn_odd_scores_and_repeat_themselves(kind):
    pytest.importorskip("sklearn", reason="boosted trees need scikit-learn")
    differences, labels, _ = pairs(3_000, 0)
    fresh, _, true = pairs(500, 1)
    model = fit(kind, differences, labels)
    score = model(fresh)
    np.testing.assert_allclose(model(-fresh), -score, atol=1e-9)
    np.testing.assert_array_equal(fit(kind, differences, labels)(fresh), score)
    assert np.corrcoef(score, true)[0, 1] > 0.9
    assert accuracy(model, fresh, (true > 0).astype(float)) > 0.85


def test_linear_model_is_the_optimum_of_its_loss():
    from scipy.optimize import minimize

    differences, labels, _ = pairs(300, 2)
    scale = np.sqrt((differences**2).mean(axis=0))
    used = differences[:, :5] / scale[:5]

    def loss(weights):
        return np.logaddexp(0, -(2 * labels - 1) * (used @ weights)).sum() + 0.5 * 3 * (weights**2).sum()

    best = minimize(loss, np.zeros(5), tol=1e-10).x
    np.testing.assert_allclose(fit("linear", differences, labels, ridge=3)(differences), used @ best, atol=1e-4)


def test_few_pairs_of_one_label_still_give_a_model():
    differences, labels, _ = pairs(12, 3)
    assert np.isfinite(fit("linear", differences, np.ones_like(labels))(differences)).all()


def simulated(rng, mean):
    rows, columns = rng.normal(size=(20, 1)), rng.normal(size=(1, 60))
    return mean + 0.3 * rows + 0.8 * columns + rng.normal(size=(20, 60))


def test_two_way_intervals_cover_other_repeats_and_instructions():
    tables = [simulated(np.random.default_rng(i), 0.5) for i in range(400)]
    found = [TwoWay.of(table) for table in tables]
    assert 0.925 <= np.mean([each.low <= 0.5 <= each.high for each in found]) <= 0.985
    alone = [table.mean(axis=1) for table in tables]
    repeats = [abs(each.mean() - 0.5) <= 2.093 * each.std(ddof=1) / np.sqrt(20) for each in alone]
    assert np.mean(repeats) < 0.85  # what the instructions add cannot be left out


def test_two_way_error_leans_towards_caution_on_noise_alone():
    rng = np.random.default_rng(1)
    chances = [TwoWay.of(rng.normal(size=(20, 60))).chance for _ in range(400)]
    assert np.mean(np.array(chances) < 0.05) <= 0.07


def test_two_one_sided_tests_take_the_seeds_own_t():
    found = TwoWay.of(np.array([[0.1], [0.3], [0.6], [-0.2]]) + np.zeros((1, 5)))
    low, high = stats.t.interval(0.9, 3, found.mean, found.standard_error)
    assert found.within == pytest.approx(max(high, -low))


def test_one_repeat_has_a_mean_without_an_error():
    found = TwoWay.of(np.ones((1, 5)))
    assert found.mean == 1
    assert np.isnan(found.low)
    assert TwoWay.of(np.zeros((3, 5))).chance == 1


def test_drops_are_right_at_a_peak_and_none_on_noise():
    shape = np.array([0, 2, 3, 2.5, 1.0])
    rng = np.random.default_rng(2)
    found = [drop_and_peak(shape + rng.normal(size=(20, 50, 5))) for _ in range(20)]
    assert np.mean([drop.mean() for drop, _ in found]) == pytest.approx(2, abs=0.05)
    assert np.mean([peak.mean() for _, peak in found]) == pytest.approx(3, abs=0.05)
    flat = [drop_and_peak(rng.normal(size=(20, 50, 5)))[0].mean() for _ in range(100)]
    assert abs(np.mean(flat)) < 3 * np.std(flat) / 10


def test_slope_is_that_of_least_squares():
    values = RNG.normal(size=(4, 3, 2))
    at = [0, 0.175, 0.25, 0.35]
    np.testing.assert_allclose(slope(values, at)[1, 1], np.polyfit(at, values[:, 1, 1], 1)[0])


def test_holm_rejects_step_by_step():
    assert rejected([0.04, 0.01, 0.02, np.nan, 0.0]) == [False, True, False, False, True]
    assert rejected([0.012, 0.001, 0.02, 0.06]) == [True, True, True, False]


def test_measures_are_finite_and_know_their_instruction():
    texts = ["", "A list:\n- one\n- two", "I'm sorry, as an AI I cannot.", "def f():\n```x```", "\ud83c é 12"]
    found = measured(["Make a list of numbers"] * 5, texts)
    assert found.shape == (5, len(MEASURES))
    assert np.isfinite(found).all()
    assert measures("x", texts[1])["has a list"]
    assert measures("x", texts[2])["refusal"]
    used = [measures(asked, texts[1])["instruction's words used"] for asked in ("Make a list", "Speak")]
    assert used[0] > used[1]


def test_components_are_those_of_the_texts_fitted_on():
    pytest.importorskip("sklearn", reason="word components need scikit-learn")
    texts = [f"the {a} {b} jumps" for a in ("red", "blue", "green") for b in ("fox", "dog", "cow", "cat")]
    fitted = WordComponents(texts, 3)
    found = fitted(["the red fox jumps", "nothing here is known"])
    assert found.shape == (2, 3)
    np.testing.assert_array_equal(WordComponents(texts, 3)(["the red fox jumps"]), found[:1])
    assert np.abs(found[1]).max() < 1e-9


def test_scaling_leaves_out_constant_columns():
    table = np.array([[1.0, 5.0], [3.0, 5.0]])
    np.testing.assert_allclose(Scaling.of(table)(table), [[-1, 0], [1, 0]])


def test_missing_library_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"alpacafarm-env\[recorded\]"):
        WordComponents(["a", "b"], 1)
