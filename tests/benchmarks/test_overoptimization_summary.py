"""Every claim, where it holds, where it does not, and where it cannot be judged: the words say which."""

import pytest
from overoptimization_worlds import FACTS, TRUTH, study

from alpacafarm_env.benchmarks.overoptimization.claims import claims
from alpacafarm_env.benchmarks.overoptimization.results import Results
from alpacafarm_env.benchmarks.overoptimization.summary import beside, missing, others, warnings


def judged(truth=TRUTH, facts=FACTS, **options):
    """Title -> claim, of PPO alone."""
    options.setdefault("methods", ("ppo",))
    return {claim.title: claim for claim in claims(Results.of(study(truth, **options), facts))}


def find(found, words):
    (claim,) = [claim for title, claim in found.items() if words in title]
    return claim


def find_in(rows, words):
    return find({claim.title: claim for claim in claims(Results.of(rows, FACTS))}, words)


def test_over_optimization_holds_with_its_numbers():
    claim = find(judged(), "25 % flips gold falls")
    assert claim.holds
    assert claim.sentence.startswith(
        "With 25 % flips gold falls from its peak while the proxy keeps rising (PPO): holds. Mean gold is highest at"
    )
    assert "falls from its peak (drop 0.5" in claim.text
    assert "5 seeds" in claim.text
    assert "the proxy rises (change" in claim.text


def test_without_a_fall_the_claim_does_not_hold():
    claim = find(judged({**TRUTH, "ann": 0.02}), "25 % flips gold falls")
    assert claim.holds is False
    assert "does not hold. Mean gold is highest at step 40" in claim.sentence
    assert "it does not fall (drop 0, 5 seeds); from start to end the proxy rises" in claim.text


def test_a_proxy_that_stalls_is_no_over_optimization():
    claim = find(judged(stalled=("ann",)), "25 % flips gold falls")
    assert claim.holds is False
    assert "falls from its peak (drop" in claim.text
    assert "the proxy does not" in claim.text


def test_without_noise_gold_does_not_fall_or_it_is_said_that_it_does():
    claim = find(judged(), "GPT-4) gold does not fall")
    assert claim.holds
    assert "With 25 % flips (p_sim^ann) the drop is 0.5" in claim.text
    assert "With the greedy annotator's own utility the drop is 0.00" in claim.text
    claim = find(judged({**TRUTH, "gpt4": 0.47}), "GPT-4) gold does not fall")
    assert claim.holds is False
    assert "falls from its peak (drop 0.5" in claim.text


def test_the_drop_grows_with_flips_or_not():
    claim = find(judged(), "grows with the share")
    assert claim.holds
    assert "0 %: 0.00" in claim.text
    assert "Spearman of the means 1.00 [" in claim.text
    claim = find(judged({**TRUTH, "flip_175": 0.6, "flip_35": 0.4}), "grows with the share")
    assert claim.holds is False
    # Ranks 1, 4, 3, 2: 1 - 6 * (4 + 4) / 60 = 0.2.
    assert "Spearman of the means 0.20" in claim.text
    never = find(judged(dict.fromkeys(TRUTH, 0.0), noise=0.0), "grows with the share")
    assert never.holds is False
    assert "5 seeds: 0 %: 0.00 [0.00, 0.00]" in never.text
    assert "Spearman of the means – (all equal)" in never.text


def test_an_ensemble_cuts_the_drop_by_half_or_not():
    found = judged()
    assert find(found, "(WCO) halves").holds
    assert "a cut of 100 %" in find(found, "(WCO) halves").text
    worse = find(judged({**TRUTH, "wco_3": 0.45}), "(WCO) halves")
    assert worse.holds is False
    nothing = find(judged({**TRUTH, "ann": 0.02}), "(WCO) halves")
    assert nothing.holds is None
    assert "there is nothing to cut" in nothing.text


def test_kl_efficiency_compares_at_equal_kl():
    both = {"methods": ("ppo", "best_of_n")}
    claim = find(judged(**both), "less KL-efficient than best-of-n (in gold)")
    assert claim.holds
    assert "at 4 nats PPO 0.9" in claim.text
    # Best-of-n gains nothing: PPO gains more.
    rows = study(TRUTH, methods=("ppo", "best_of_n"))
    for row in rows:
        if row["treatment"] == "ann" and row["method"] == "best_of_n":
            row["gold"] = 4.5
    (claim,) = [each for each in claims(Results.of(rows, FACTS)) if "(in gold)" in each.title]
    assert claim.holds is False
    assert find(judged(), "less KL-efficient than best-of-n (in gold)").holds is None
    # Clear by two standard errors is not enough: for two seeds the t-interval asks 12.7.
    two = find(judged(**both, seeds=2, noise=0.35, salt=1), "less KL-efficient than best-of-n (in gold)")
    assert "(-6.9 standard errors, 2 seeds)" in two.text
    assert two.holds is False


def test_kl_efficiency_in_the_proxy_is_a_claim_of_its_own():
    rows = study(TRUTH, methods=("ppo", "best_of_n"))
    (same,) = [each for each in claims(Results.of(rows, FACTS)) if "(in proxy)" in each.title]
    assert same.holds is False  # both gain 0.8 d
    for row in rows:
        if row["treatment"] == "ann" and row["method"] == "ppo":
            row["proxy"] *= 0.5
    gold, proxy = [each for each in claims(Results.of(rows, FACTS)) if "less KL-efficient" in each.title]
    assert proxy.holds
    assert "proxy gained over SFT by PPO less that by best-of-n" in proxy.text
    assert gold.text == find(judged(methods=("ppo", "best_of_n")), "(in gold)").text


def test_kl_efficiency_of_a_reward_without_noise_is_told_beside_it():
    rows = study(TRUTH, methods=("ppo", "best_of_n"), noise=0.0)
    plain = find_in(rows, "(in gold)").text
    start = next(row["gold"] for row in rows if row["treatment"] == "gpt4_utility" and row["step"] == 0)
    for row in rows:
        if row["treatment"] == "gpt4_utility" and row["method"] == "ppo":
            row["gold"] = start  # PPO gains nothing by it
    worse = find_in(rows, "(in gold)").text
    told = " With the greedy annotator's own utility it is "
    before, after = (float(text.partition(told)[2].split(" ")[0]) for text in (plain, worse))
    assert after < before - 0.5
    assert worse.partition(told)[0] == plain.partition(told)[0]
    alone = [row for row in rows if (row["treatment"], row["method"]) != ("gpt4_utility", "best_of_n")]
    assert told not in find_in(alone, "(in gold)").text


def test_where_gold_ends_is_told_beside_the_noisy_reward():
    rows = study(TRUTH, methods=("ppo", "best_of_n"), noise=0.0)
    end = {row["treatment"]: row["gold"] for row in rows if row["method"] == "ppo" and row["step"] == 40}
    ppo, best_of_n = beside(Results.of(rows, FACTS))
    assert ppo.startswith("Gold at the end less that by 25 % flips (p_sim^ann), paired by seed (PPO): no noise ")
    assert f"; my <b>own</b> wrapper {end['mine'] - end['ann']:.2f} [" in ppo
    assert "p_sim^ann" not in ppo.partition("(PPO)")[2]
    assert "(best-of-n)" in best_of_n
    assert beside(Results.of([row for row in rows if row["treatment"] != "ann"], FACTS)) == []


def test_fits_are_judged_by_r_squared():
    found = find(judged(), "R(d) = d(a - b log d)")
    assert found.holds
    assert f"{len(TRUTH)} of {len(TRUTH)} curves do" in found.text
    rows = study({"ann": 0.47}, methods=("ppo",))
    for row in rows:
        row["gold"] = 4.5 + (row["step"] % 4 == 2)
    both = [each for each in claims(Results.of(rows, FACTS)) if "R(d)" in each.title]
    assert ["log d" in poor.title for poor in both] == [True, False]  # PPO is asked for best-of-n's form too
    for poor in both:
        assert poor.holds is False
        assert "0 of 1 curves do (not: 25 % flips (p_sim^ann))" in poor.text
    flat = [{**row, "gold": 4.5} for row in rows]
    assert [each.holds for each in claims(Results.of(flat, FACTS)) if "R(d)" in each.title] == [None, None]
    (one,) = [each for each in claims(Results.of(study(TRUTH, methods=("best_of_n",)), FACTS)) if "R(d)" in each.title]
    assert one.holds
    assert "d(a - b d)" in one.title


def test_one_seed_claims_nothing_that_needs_an_error():
    found = judged(seeds=1)
    for words in ("25 % flips gold falls", "GPT-4) gold does not fall", "grows with", "(WCO) halves", "(UWO) halves"):
        claim = find(found, words)
        assert claim.holds is None
        assert claim.text.endswith(" One seed has no standard error.")
    text = " ".join(claim.sentence for claim in found.values())
    assert "nan" not in text
    assert "clearly" not in text
    (line,) = others(Results.of(study(seeds=1, methods=("ppo",)), FACTS))
    assert line.startswith("Drop of gold from peak to end, other treatments (PPO): one seed, not judged: no noise 0.")
    assert "clear" not in line


def test_what_is_missing_is_said():
    found = judged({"ann": 0.47})
    assert find(found, "grows with the share").sentence.endswith("which are not all there.")
    rows = [row for row in study(methods=("ppo",)) if (row["treatment"] == "ann") == (row["seed"] < 2)]
    (apart,) = [each for each in claims(Results.of(rows, FACTS)) if "grows with the share" in each.title]
    assert apart.text.startswith("It needs rows of the same seeds of no noise, 17.5 % flips")
    results = Results.of(study({"ann": 0.47, "none": 0.1}, methods=("ppo",), seeds=3), FACTS[:4])
    assert missing(results, ("ppo",), 5) == [
        "No rows of PPO for: 17.5 % flips; 35 % flips.",
        "Fewer than 5 seeds of PPO: no noise 3; 25 % flips (p_sim^ann) 3.",
    ]
    # A method of which every cell failed.
    assert missing(results, ("ppo", "best_of_n"), 3)[1] == (
        "No rows of best-of-n for: no noise; 17.5 % flips; 25 % flips (p_sim^ann); 35 % flips."
    )
    with pytest.raises(ValueError, match="got rows of \\['ann'\\]"):
        Results.of(study({"ann": 0.47}), FACTS[:1])


def test_warnings_come_before_the_peak_or_where_no_fall_is_clear():
    results = Results.of(study(methods=("ppo",)), FACTS)
    sentences = others(results) + warnings(results)
    (mean,) = [line for line in sentences if line.startswith("25 % flips, mean of 3 (PPO): members'")]
    assert "is first clearly above its start (95 % t-interval above 0) at step 2, before the peak of gold" in mean
    assert "clearly fall" not in mean
    (wco,) = [line for line in sentences if line.startswith("25 % flips, minimum of 3 (WCO) (PPO): members'")]
    assert wco.endswith("; gold does not clearly fall.")
    (drops,) = [line for line in sentences if line.startswith("Drop of gold from peak to end, other")]
    clear, unclear = drops.split("; does not clearly fall: ")
    assert "35 % flips" in clear
    assert "no noise 0.00" in unclear
