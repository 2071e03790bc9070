"""Every claim, where it holds, where it does not, and where it cannot be judged; and what is told beside them."""

import numpy as np
import pytest
from overoptimization_worlds import FACTS, TRUTH, study

from alpacafarm_env.benchmarks.overoptimization.analyse import (
    Results,
    ends_beside,
    gaps,
    other_falls,
    verdicts,
    warnings,
)

BOTH = ("ppo", "best_of_n")


def judge(rows):
    """(Claim, what it is of) -> verdict; of an ensemble's with its name, of a fit's with its form."""
    found = {}
    for verdict in verdicts(Results(rows, FACTS)):
        more = [verdict.numbers[name] for name in ("form",) if name in verdict.numbers]
        more += [verdict.numbers["name"]] if verdict.id == "halves" else []
        found[verdict.id, verdict.numbers["of"], *more] = verdict
    return found


def judged(truth=TRUTH, **options):
    return judge(study(truth, **{"methods": ("ppo",), **options}))


def test_over_optimization_is_a_clear_fall_while_the_proxy_rises():
    found = judged()["falls", "ppo"]
    assert found.holds
    assert found.numbers["story"].drop.mean == pytest.approx(0.52, abs=0.01)
    assert found.numbers["story"].proxy_after.mean > 1
    never = judged({**TRUTH, "ann": 0.02})["falls", "ppo"]
    assert never.holds is False
    assert (never.numbers["story"].top, never.numbers["story"].rising) == (40, True)
    stalled = judged(stalled=("ann",))["falls", "ppo"]
    assert stalled.holds is False
    assert stalled.numbers["story"].falls


def test_without_noise_gold_does_not_fall_or_it_is_said_that_it_does():
    found = judged()["stays", "ppo"]
    assert found.holds
    drops = {name: (drop.mean, more.mean) for name, (drop, more) in found.numbers["beside"].items()}
    assert drops["ann"] == pytest.approx((0.52, 0.52), abs=0.01)
    assert drops["gpt4_utility"] == (0, 0)
    falling = judged({**TRUTH, "gpt4": 0.47})["stays", "ppo"]
    assert falling.holds is False
    assert falling.numbers["story"].drop.mean == pytest.approx(0.5, abs=0.1)


def test_the_drop_grows_with_flips_or_not():
    found = judged()["grows", "ppo"]
    assert found.holds
    assert found.numbers["spearman"] == pytest.approx(1)
    assert found.numbers["drops"][0.0].mean == pytest.approx(0)
    mixed = judged({**TRUTH, "flip_175": 0.6, "flip_35": 0.4})["grows", "ppo"]
    assert mixed.holds is False
    assert mixed.numbers["spearman"] == pytest.approx(0.2)  # ranks 1, 4, 3, 2: 1 - 6 * (4 + 4) / 60
    never = judged(dict.fromkeys(TRUTH, 0.0), noise=0.0)["grows", "ppo"]
    assert never.holds is False
    assert np.isnan(never.numbers["spearman"])


def test_an_ensemble_cuts_the_drop_by_half_or_not():
    found = judged()["halves", "ppo", "wco_3"]
    assert found.holds
    numbers = found.numbers
    assert numbers["spare"].mean == pytest.approx(numbers["before"].mean / 2 - numbers["after"].mean)
    assert judged({**TRUTH, "wco_3": 0.45})["halves", "ppo", "wco_3"].holds is False
    nothing = judged({**TRUTH, "ann": 0.02})["halves", "ppo", "wco_3"]
    assert nothing.holds is None
    assert not nothing.numbers["fell"]


def test_kl_efficiency_compares_at_equal_kl():
    rows = study(methods=BOTH)
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
    assert judged()["less_efficient", "gold"].holds is None
    # Clear by two standard errors is not enough: for two seeds the t-interval asks 12.7.
    two = judged(methods=BOTH, seeds=2, noise=0.35, salt=1)["less_efficient", "gold"]
    assert two.numbers["gap"].ratio < -6
    assert two.holds is False


def test_kl_efficiency_of_a_reward_without_noise_is_told_beside_it():
    rows = study(methods=BOTH, noise=0.0)
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


def test_fits_are_judged_by_r_squared():
    found = judged()["fits", "ppo", "d(a - b log d)"]
    assert found.holds
    assert (found.numbers["num"], found.numbers["below"]) == (len(TRUTH), [])
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
    assert list(other_falls(Results(study(seeds=1, methods=("ppo",)), FACTS), "ppo")) == [None]


def test_what_is_missing_is_said():
    assert judged({"ann": 0.47})["grows", "ppo"].numbers["missing"] == ("none", "flip_175", "ann", "flip_35")
    rows = [row for row in study(methods=("ppo",)) if (row["treatment"] == "ann") == (row["seed"] < 2)]
    assert "missing" in judge(rows)["grows", "ppo"].numbers  # of no seed are there all
    results = Results(study({"ann": 0.47, "none": 0.1}, methods=("ppo",), seeds=3), FACTS[:4])
    assert list(gaps(results, BOTH, 5)) == [
        ("ppo", ["flip_175", "flip_35"], {"none": 3, "ann": 3}),
        ("best_of_n", ["none", "flip_175", "ann", "flip_35"], {}),  # every cell of it failed
    ]
    with pytest.raises(ValueError, match="got rows of \\['ann'\\]"):
        Results(study({"ann": 0.47}), FACTS[:1])


def test_where_gold_ends_is_told_beside_the_noisy_reward():
    rows = study(noise=0.0)
    ends = {row["treatment"]: row["gold"] for row in rows if row["method"] == "ppo" and row["step"] == 40}
    found = ends_beside(Results(rows, FACTS), "ppo")
    assert found.keys() == TRUTH.keys() - {"ann"}
    assert found["mine"].mean == pytest.approx(ends["mine"] - ends["ann"], abs=0.1)
    assert ends_beside(Results([row for row in rows if row["treatment"] != "ann"], FACTS), "ppo") == {}


def test_warnings_come_before_the_peak_or_where_no_fall_is_clear():
    results = Results(study(methods=("ppo",)), FACTS)
    found = {warning["key"][0]: warning for warning in warnings(results)}
    assert list(found) == ["mean_3", "wco_3", "uwo_3"]
    assert found["mean_3"]["place"] == 2 < results.stories["mean_3", "ppo"].top
    falls = other_falls(results, "ppo")
    assert {"flip_35", "mean_3"} <= set(falls[True])
    assert {"none", "wco_3"} <= set(falls[False])
