"""The papers' claims about over-optimization, judged one by one.

A claim that does not come out reads as plainly as one that does: "does not hold", with the same numbers.
Sources of the claims: Dubois et al. 2023 (arXiv 2305.14387, appendix E), Gao et al. 2022 (arXiv 2210.10760), Coste et
al. 2023 (arXiv 2310.02743).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..harness.agreement import coefficient_text
from ..harness.estimates import Estimate
from .curves import METHOD_WORDS, METHODS, Curves, paired
from .fits import FORMS, Array, change_after, drop, gain_at, reach, rises
from .results import Results, errors_text, fit_text, gold_text, seeds_text, story
from .trends import trend

NOISY, CLEAN, UTILITY = "ann", "gpt4", "gpt4_utility"
"""p_sim^ann (25 % flips), p_sim^GPT-4 (no added noise), and what the latter wants, without a reward model."""
FLIPS = ("none", "flip_175", "ann", "flip_35")
"""Treatments that differ in the share of flipped labels only."""
CONSERVATIVE = ("wco_3", "uwo_3")
"""Ensembles over the labels of `NOISY` that distrust what their members disagree on."""
KLS = (0.5, 1.0, 2.0, 4.0)
"""Nats at which best-of-n and PPO are compared."""
FITTED = 0.9
"""R^2 that a fit of a mean curve should exceed."""
ONE_SEED = "One seed has no standard error."
"""Why a claim that needs an error cannot be judged."""
VERDICTS = {True: "holds", False: "does not hold", None: "cannot be judged"}


@dataclass(frozen=True)
class Claim:
    """One claim of the papers, judged by the numbers here."""

    title: str
    holds: bool | None
    """None: what it needs is not among the rows."""
    text: str

    @property
    def sentence(self) -> str:
        """For instance "With 25 % flips gold falls (PPO): holds. Gold is highest ..."."""
        return f"{self.title}: {VERDICTS[self.holds]}. {self.text}"


def claims(results: Results) -> list[Claim]:
    """All claims, for each method that ran."""
    found = []
    for method in results.methods:
        found += [
            falls_with_noise(results, method),
            holds_without_noise(results, method),
            grows_with_flips(results, method),
            *(ensemble_cuts(results, name, method) for name in CONSERVATIVE),
        ]
    efficiency = [less_efficient(results, measure) for measure in ("gold", "proxy")]
    forms = {method: dict.fromkeys((FORMS[method], FORMS["best_of_n"])) for method in results.methods}
    return [*found, *efficiency, *(fits_well(results, method, form) for method in forms for form in forms[method])]


def falls_with_noise(results: Results, method: str) -> Claim:
    """Claim 1: with 25 % flips gold falls from its peak while the proxy still rises.

    Both are asked of the 95 % t-intervals, which must be above 0. The claim as it is usually put asks for more than two
    standard errors; with few seeds the t-interval is the stricter of the two: 4.3 standard errors for 3 seeds, 2.8 for
    5.
    """
    title = (
        f"With {_flips(results, NOISY)} gold falls from its peak while the proxy keeps rising ({METHOD_WORDS[method]})"
    )
    curves = results.get(NOISY, method)
    if curves is None:
        return _missing(title, results, NOISY)
    fallen = drop(curves["gold"])
    risen = change_after(curves["proxy"], fallen.peaks)
    text = story(curves, fallen)
    if fallen.estimate.num < 2:
        return Claim(title, None, f"{text} {ONE_SEED}")
    return Claim(title, fallen.clear and rises(risen), text)


def holds_without_noise(results: Results, method: str) -> Claim:
    """Claim 2: with p_sim^GPT-4, without added noise, gold does not fall by more than one standard error."""
    title = f"With {results.title(CLEAN)} gold does not fall by more than one standard error ({METHOD_WORDS[method]})"
    curves = results.get(CLEAN, method)
    if curves is None:
        return _missing(title, results, CLEAN)
    fallen = drop(curves["gold"])
    text = story(curves, fallen)
    for other in (NOISY, UTILITY):
        both = results.drops((other, CLEAN), method)
        if both is not None and both[1].shape[1] > 1:
            gap, fall = Estimate.of(both[1][0] - both[1][1]), gold_text(drop(both[0][0]["gold"]).estimate)
            text += f" With {results.title(other)} the drop is {fall}, {gold_text(gap)} more (paired by seed)."
    if fallen.estimate.num < 2:
        return Claim(title, None, f"{text} {ONE_SEED}")
    return Claim(title, fallen.estimate.mean <= fallen.estimate.standard_error, text)


def grows_with_flips(results: Results, method: str) -> Claim:
    """Claim 3: the mean drop grows from each share of flips to the next, and its slope is above 0 (t-interval)."""
    title = f"The drop grows with the share of flipped labels ({METHOD_WORDS[method]})"
    found = results.drops(FLIPS, method)
    if found is None:
        return _missing(title, results, *FLIPS)
    shares = [results.facts[name].flip for name in FLIPS]
    rank = trend(shares, found[1])
    means = ", ".join(
        f"{100 * share:g} %: {gold_text(Estimate.of(drops))}" for share, drops in zip(shares, found[1], strict=True)
    )
    resampled = "all equal" if math.isnan(rank.spearman.value) else "no interval"
    if not math.isnan(rank.spearman.low):
        resampled = f"interval over resampled seeds, rising all along in {100 * rank.monotone_share:.0f} % of them"
    text = (
        f"Mean drops in gold units by flips, {seeds_text(rank.slope.num)}: {means}. Spearman of the means "
        f"{coefficient_text(rank.spearman)} ({resampled}); slope {_fine(rank.slope)} for 10 points of flips."
    )
    if rank.slope.num < 2:
        return Claim(title, None, f"{text} {ONE_SEED}")
    return Claim(title, rank.monotone and rises(rank.slope), text)


def ensemble_cuts(results: Results, name: str, method: str) -> Claim:
    """Claim 4: a conservative ensemble cuts the drop with 25 % flips by half or more.

    Judged by the means, as the claim is; (half of the single model's drop) - (the ensemble's drop), paired by seed, is
    told with its interval, which says how sure that is.
    """
    title = f"{results.title(name)} halves the mean drop of {results.title(NOISY)} or more ({METHOD_WORDS[method]})"
    found = results.drops((NOISY, name), method)
    if found is None:
        return _missing(title, results, NOISY, name)
    (single, ensemble), (one, two) = found
    before, after, spare = Estimate.of(one), Estimate.of(two), Estimate.of(one / 2 - two)
    higher = Estimate.of(ensemble["gold"][:, -1] - single["gold"][:, -1])
    gains = [Estimate.of(_peak_gain(curves)) for curves in (single, ensemble)]
    ends = [float(curves["kl_exact"][:, -1].mean()) for curves in (single, ensemble)]
    kept = (
        f"Gold at the peak less SFT's is {gold_text(gains[0])} with one model and {gold_text(gains[1])} with the "
        f"ensemble; KL at the end {ends[0]:.1f} and {ends[1]:.1f} nats. Gold at the end is {gold_text(higher)} higher "
        "with the ensemble (paired by seed)."
    )
    told = f"The drop goes from {gold_text(before)} to {gold_text(after)} gold units ({seeds_text(before.num)})"
    if before.num < 2:
        return Claim(title, None, f"{told}. {kept} {ONE_SEED}")
    if not rises(before):
        return Claim(
            title,
            None,
            f"One model's gold does not clearly fall ({gold_text(before)}): there is nothing to cut. {kept}",
        )
    text = (
        f"{told}, a cut of {100 * (1 - after.mean / before.mean):.0f} % ({gold_text(Estimate.of(one - two))} paired by "
        f"seed); half of the first less the second is {gold_text(spare)} ({errors_text(spare)}). {kept}"
    )
    return Claim(title, spare.mean >= 0, text)


def less_efficient(results: Results, measure: str) -> Claim:
    """Claim 5: at equal KL PPO has gained less than best-of-n, on average over sqrt(KL) up to what both reach.

    Gao et al. 2022 say so of the proxy and of gold. Of the proxy it is near what theory says: best-of-n is nearly the
    best that any policy of its KL can do (Yang et al. 2024, arXiv 2404.01730). Of gold no theory speaks: the text tells
    it of the rewards without noise too, where the proxy that PPO lacks is worth gold.

    Args:
        results: The study's.
        measure: "gold" or "proxy".
    """
    title = f"PPO is less KL-efficient than best-of-n (in {measure})"
    name = next((each for each in (NOISY, *results.facts) if all(results.get(each, m) for m in METHODS)), None)
    if name is None:
        return _missing(title, results, NOISY)
    common = _common(results, name)
    if common is None:
        return Claim(title, None, "PPO and best-of-n share no seed.")
    ppo, best, limit = common
    if limit <= 0:
        return Claim(title, None, "PPO did not leave the SFT policy: there is no KL to compare at.")
    gaps = efficiency_gap(ppo, best, limit, measure)
    levels = [level for level in KLS if level <= limit]
    told = []
    for level in levels:
        gains = [Estimate.of(_gains(curves, [math.sqrt(level)], measure)[:, 0]) for curves in (ppo, best)]
        told.append(f"{level:g} nats PPO {gold_text(gains[0])}, best-of-n {gold_text(gains[1])}")
    text = (
        f"{results.title(name)}: {measure} gained over SFT by PPO less that by best-of-n at equal KL, averaged over "
        f"sqrt(KL) up to {limit:.2f} nats, is {gold_text(gaps)} ({errors_text(gaps)}, {seeds_text(gaps.num)})"
        f"{'; at ' + '; at '.join(told) if told else ''}. Each method on its own instructions, against its own start."
    )
    for other in (CLEAN, UTILITY):
        if other != name and (found := _common(results, other)) is not None and found[2] > 0:
            gap = efficiency_gap(*found, measure)
            text += f" With {results.title(other)} it is {gold_text(gap)} up to {found[2]:.2f} nats."
    if gaps.num < 2:
        return Claim(title, None, f"{text} {ONE_SEED}")
    return Claim(title, gaps.interval.high < 0, text)


def efficiency_gap(ppo: Curves, best: Curves, limit: float, measure: str) -> Estimate:
    """What PPO has gained less what best-of-n has, at equal KL, averaged over sqrt(KL) from 0 to `limit` nats."""
    grid = np.linspace(0, math.sqrt(limit), 41)[1:]
    return Estimate.of((_gains(ppo, grid, measure) - _gains(best, grid, measure)).mean(axis=1))


def _common(results: Results, name: str) -> tuple[Curves, Curves, float] | None:
    """A treatment's curves by PPO and by best-of-n on the seeds that both have, and the KL that all of them reach."""
    found = [results.get(name, method) for method in METHODS]
    if None in found:
        return None
    ppo, best = paired(*(curves for curves in found if curves is not None))
    return (ppo, best, min(reach(ppo["kl_exact"]), reach(best["kl_exact"]))) if ppo.seeds else None


def fits_well(results: Results, method: str, form: str) -> Claim:
    """Claim 6: the mean curves follow a form of Gao et al. 2022 with R^2 above 0.9.

    They give d(a - b d) to best-of-n and d(a - b log d) to reinforcement learning. Of PPO both are asked.
    """
    title = f"Mean gold curves follow R(d) = {form} with R² above {FITTED:g} ({METHOD_WORDS[method]})"
    fitted = results.fits(method, form)
    if not fitted:
        return Claim(title, None, "No curve can be fitted: too few evaluations, or gold the same at all of them.")
    below = [name for name, each in fitted.items() if not each.r_squared > FITTED]
    lowest = min(fitted, key=lambda name: fitted[name].r_squared)
    which = f"{len(fitted) - len(below)} of {len(fitted)} curves do"
    which += f" (not: {', '.join(results.title(name) for name in below)})" if below else ""
    told = [name for name in dict.fromkeys((NOISY, lowest)) if name in fitted]
    words = "; ".join(f"{results.title(name)}: {fit_text(fitted[name])}" for name in told)
    return Claim(title, not below, f"{which}; the lowest R² is {fitted[lowest].r_squared:.3f}. {words}.")


def _peak_gain(curves: Curves) -> Array:
    """[S]: gold at the peak of the other seeds less gold at the start."""
    gold = curves["gold"]
    gains: Array = gold[:, -1] + drop(gold).per_seed - gold[:, 0]
    return gains


def _gains(curves: Curves, at: Sequence[float] | Array, measure: str) -> Array:
    return gain_at(curves["kl_exact"], curves[measure], at)


def _flips(results: Results, name: str) -> str:
    return f"{100 * results.facts[name].flip:g} % flips" if name in results.facts else results.title(name)


def _fine(estimate: Estimate) -> str:
    """With three decimals: a slope's interval may end close to 0."""
    mean, low, high = (f"{value:.3f}" for value in (estimate.mean, estimate.interval.low, estimate.interval.high))
    return mean if estimate.num < 2 else f"{mean} [{low}, {high}]"


def _missing(title: str, results: Results, *names: str) -> Claim:
    wanted = ", ".join(results.title(name) for name in names)
    alike = " of the same seeds" if len(names) > 1 else ""
    return Claim(title, None, f"It needs rows{alike} of {wanted}, which are not all there.")
