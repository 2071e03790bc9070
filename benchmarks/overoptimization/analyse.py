"""What the over-optimization study finds: the papers' claims judged one by one, and the numbers next to them.

The sentences are in claims.txt.j2 and findings.txt.j2. Sources of the claims: Dubois et al. 2023 (arXiv 2305.14387,
appendix E), Gao et al. 2022 (arXiv 2210.10760), Coste et al. 2023 (arXiv 2310.02743).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...seeding import keyed_rng
from ..harness.estimates import RESAMPLES, Estimate, frame_of, percentiles, spearman_rows
from ..harness.report import Verdict
from ..harness.study import Row
from .curves import FORMS, METHOD_WORDS, Array, Curves, Key, Story, curves_of, drop, fit, gain_at, rises, root_kl
from .treatments import Treatment

NOISY, CLEAN, UTILITY = "ann", "gpt4", "gpt4_utility"
"""p_sim^ann (25 % flips), p_sim^GPT-4 (no added noise), and what the latter wants, without a reward model."""
FLIPS = ("none", "flip_175", "ann", "flip_35")
"""Treatments that differ in the share of flipped labels only."""
CONSERVATIVE = ("wco_3", "uwo_3")
"""Ensembles over the labels of `NOISY` that distrust what their members disagree on."""
KLS = (0.5, 1.0, 2.0, 4.0)  # nats at which best-of-n and PPO are compared
GAINED = (*KLS, 8.0)  # nats at which gains are tabulated
FITTED = 0.9  # R^2 that a fit of a mean curve should exceed


class Results:
    """The curves of table.csv's rows, and the treatments that were meant to run: `facts`, by name."""

    def __init__(self, rows: Sequence[Row], treatments: Iterable[Treatment]) -> None:
        self.facts = {treatment.name: treatment for treatment in treatments}
        self.curves = curves_of(rows)
        self.methods = [method for method in METHOD_WORDS if any(key[1] == method for key in self.curves)]
        self.stories = {key: Story(curves) for key, curves in self.curves.items()}
        fits = {(*key, form): fit(curves, form) for key, curves in self.curves.items() for form in FORMS.values()}
        self.fits = {key: found for key, found in fits.items() if found is not None}

    def title(self, name: str) -> str:
        """Of a treatment, for people; its name where it has no facts."""
        return self.facts[name].title if name in self.facts else name

    def paired(self, *keys: Key) -> list[Curves] | None:
        """Curves of the seeds that all of these treatments and methods have; None where there is none."""
        if any(key not in self.curves for key in keys):
            return None
        found = [self.curves[key] for key in keys]
        common = [seed for seed in found[0].seeds if all(seed in each.seeds for each in found)]
        return [each.only(common) for each in found] if common else None


Judged = tuple[bool | None, Estimate, dict[str, Any]]
"""Whether a claim holds (None: there is nothing to judge), the estimate that says so, and numbers for its sentence."""


def verdicts(results: Results) -> list[Verdict]:
    """All claims, for each method that ran; with one seed, which has no standard error, nothing is judged."""
    claims: list[tuple[str, tuple[str, ...], Callable[[Results, str, list[Curves]], Judged]]] = [
        ("falls", (NOISY,), falls_with_noise),
        ("stays", (CLEAN,), holds_without_noise),
        ("grows", FLIPS, grows_with_flips),
        *(("halves", (NOISY, name), ensemble_cuts) for name in CONSERVATIVE),
    ]
    found = []
    for method in results.methods:
        for claim, names, judge in claims:
            curves = results.paired(*((name, method) for name in names))
            about = {"of": method, "name": names[-1]}
            if curves is None:
                found.append(Verdict(claim, None, {**about, "missing": names}))
            else:
                found.append(_verdict(claim, about, *judge(results, method, curves)))
    found += [less_efficient(results, measure) for measure in ("gold", "proxy")]
    forms = ((method, form) for method, own in FORMS.items() for form in (own, FORMS["best_of_n"]))
    return found + [fits_well(results, *each) for each in dict.fromkeys(forms) if each[0] in results.methods]


def _verdict(claim: str, about: dict[str, str], holds: bool | None, estimate: Estimate, numbers: Any) -> Verdict:
    alone = estimate.num < 2
    return Verdict(claim, None if alone or holds is None else bool(holds), {**about, "alone": alone, **numbers})


def falls_with_noise(results: Results, method: str, curves: list[Curves]) -> Judged:
    """Claim 1: with 25 % flips gold falls from its peak while the proxy still rises."""
    story = results.stories[NOISY, method]
    return story.falls and rises(story.proxy_after), story.drop, {"story": story}


def holds_without_noise(results: Results, method: str, curves: list[Curves]) -> Judged:
    """Claim 2: with p_sim^GPT-4, without added noise, gold does not fall by more than one standard error."""
    story, beside = results.stories[CLEAN, method], {}
    for name in (NOISY, UTILITY):
        pair = results.paired((name, method), (CLEAN, method))
        if pair is not None and len(pair[0].seeds) > 1:
            other, clean = (drop(each["gold"]) for each in pair)
            beside[name] = Estimate.of(other), Estimate.of(other - clean)
    return story.drop.mean <= story.drop.standard_error, story.drop, {"story": story, "beside": beside}


def grows_with_flips(results: Results, method: str, curves: list[Curves]) -> Judged:
    """Claim 3: the mean drop grows from each share of flips to the next, and its slope is above 0 (t-interval)."""
    found = trend([results.facts[name].flip for name in FLIPS], np.stack([drop(each["gold"]) for each in curves]))
    return found["monotone"] and rises(found["slope"]), found["slope"], found


def trend(flips: Sequence[float], drops: Array) -> dict[str, Any]:
    """Of drops [T, S] at T shares of flips in [0, 1]; column s is the same seed of all treatments.

    spearman: of the mean drops, with a 95 % interval over resamples of the seeds, one draw for all treatments; rising:
    share of the resamples in which the means rise all along, and `monotone` whether they do; slope: gold units for 10
    points of flips, by least squares for each seed.
    """
    count = drops.shape[1]
    drawn = keyed_rng(0, "over-optimization", "drops").integers(0, count, (RESAMPLES, count))
    means = np.concatenate([drops.mean(axis=1)[None], drops[:, drawn].mean(axis=2).T])
    rho, *resampled = spearman_rows(np.broadcast_to(flips, means.shape), means)
    rising = np.array(resampled) > 1 - 1e-9
    alone = count == 1  # one seed has nothing to resample
    return {
        "drops": {share: Estimate.of(each) for share, each in zip(flips, drops, strict=True)},
        "spearman": float(rho),
        "interval": (math.nan, math.nan) if alone else tuple(percentiles(np.array(resampled))),
        "rising": math.nan if alone else float(rising.mean()),
        "monotone": bool(rho > 1 - 1e-9),
        "slope": Estimate.of(np.polyfit(10 * np.asarray(flips), drops, 1)[0]),
    }


def ensemble_cuts(results: Results, method: str, curves: list[Curves]) -> Judged:
    """Claim 4: a conservative ensemble cuts the drop with 25 % flips by half or more, judged by the means.

    The interval of `spare`, half of the single model's drop less the ensemble's, says how sure that is.
    """
    gold = [each["gold"] for each in curves]
    one, two = map(drop, gold)
    before, spare = Estimate.of(one), Estimate.of(one / 2 - two)
    fell = rises(before)
    numbers = {
        "fell": fell,
        "before": before,
        "after": Estimate.of(two),
        "cut": Estimate.of(one - two),
        "spare": spare,
        "gains": [Estimate.of(each[:, -1] + fall - each[:, 0]) for each, fall in zip(gold, (one, two), strict=True)],
        "kls": [float(each["kl_exact"][:, -1].mean()) for each in curves],
        "higher": Estimate.of(gold[1][:, -1] - gold[0][:, -1]),
    }
    return (spare.mean >= 0 if fell else None), before, numbers


def less_efficient(results: Results, measure: str) -> Verdict:
    """Claim 5: at equal KL PPO has gained less than best-of-n, on average over sqrt(KL) up to what both reach.

    Gao et al. 2022 say so of the proxy and of gold. Of the proxy it is near what theory says: best-of-n is nearly the
    best that any policy of its KL can do (Yang et al. 2024, arXiv 2404.01730). Of gold no theory speaks: the rewards
    without noise are reported too, where the proxy that PPO lacks is worth gold.
    """
    both = [name for name in (NOISY, *results.facts) if all((name, method) in results.curves for method in FORMS)]
    if not both:
        return Verdict("less_efficient", None, {"of": measure, "missing": (NOISY,), "name": NOISY})
    gaps, first = {}, both[0]
    pairs = {
        name: results.paired((name, "ppo"), (name, "best_of_n")) for name in dict.fromkeys((first, CLEAN, UTILITY))
    }
    for name, pair in pairs.items():
        if pair is not None:
            limit = min(float(root_kl(curves).max(axis=1).min()) for curves in pair)
            ppo, best = (gain_at(curves, np.linspace(0, limit, 41)[1:], measure) for curves in pair)
            if limit > 0:
                gaps[name] = Estimate.of((ppo - best).mean(axis=1)), limit**2
    if first not in gaps:
        nothing = "PPO and best-of-n share no seed, or PPO did not leave the SFT policy: there is no KL to compare at."
        return Verdict("less_efficient", None, {"of": measure, "nothing": nothing})
    gap, limit = gaps.pop(first)
    levels = {
        level: [Estimate.of(gain_at(each, [math.sqrt(level)], measure)[:, 0]) for each in pairs[first] or []]
        for level in KLS
        if level <= limit
    }
    numbers = {"gap": gap, "limit": limit, "levels": levels, "beside": gaps}
    return _verdict("less_efficient", {"of": measure, "name": first}, gap.interval.high < 0, gap, numbers)


def fits_well(results: Results, method: str, form: str) -> Verdict:
    """Claim 6: the mean curves follow a form of Gao et al. 2022 with R^2 above 0.9.

    They give d(a - b d) to best-of-n and d(a - b log d) to reinforcement learning. Of PPO both are asked.
    """
    fits = {name: found for (name, *key), found in results.fits.items() if key == [method, form]}
    about: dict[str, Any] = {"of": method, "form": form, "limit": FITTED}
    if not fits:
        nothing = "No curve can be fitted: too few evaluations, or gold the same at all of them."
        return Verdict("fits", None, {**about, "nothing": nothing})
    below = [name for name, found in fits.items() if not found.r_squared > FITTED]
    lowest = min(fits, key=lambda name: fits[name].r_squared)
    shown = {name: fits[name] for name in (NOISY, lowest) if name in fits}
    numbers = {"num": len(fits), "below": below, "fits": shown, "lowest": fits[lowest].r_squared}
    return Verdict("fits", not below, {**about, **numbers})


def gaps(results: Results, methods: Iterable[str], num_seeds: int) -> list[tuple[str, list[str], dict[str, int]]]:
    """Of each method what was meant to run and has no rows, and treatments with fewer seeds than were meant."""
    found = []
    for method in methods:
        seeds = {name: len(results.curves[name, method].seeds) for name, kind in results.curves if kind == method}
        short = {name: seeds[name] for name in results.facts if seeds.get(name, num_seeds) < num_seeds}
        found.append((method, [name for name in results.facts if name not in seeds], short))
    return found


def other_falls(results: Results, method: str) -> dict[bool | None, list[str]]:
    """Whether gold clearly falls (None: one seed) -> treatments that no claim singles out."""
    found: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for name in results.facts:
        if (name, method) in results.stories and name not in (NOISY, CLEAN):
            story = results.stories[name, method]
            found[story.falls if story.drop.num > 1 else None].append(name)
    return {fell: names for fell, names in found.items() if names}


def ends_beside(results: Results, method: str) -> dict[str, Estimate]:
    """Treatment -> how much higher gold ends than by the noisy reward of the paper, paired by seed."""
    pairs = {name: results.paired((name, method), (NOISY, method)) for name in results.facts if name != NOISY}
    ends = {name: [each["gold"][:, -1] for each in pair] for name, pair in pairs.items() if pair}
    return {name: Estimate.of(ours - noisy) for name, (ours, noisy) in ends.items()}


def warning_place(curves: Curves) -> int | None:
    """The first place at which an ensemble's disagreement is clearly above its start (`rises`, by seed)."""
    changes = curves["disagreement"] - curves["disagreement"][:, :1]
    found = (place for place, change in zip(curves.places, changes.T, strict=True) if rises(Estimate.of(change)))
    return next(found, None)


def warnings(results: Results) -> list[dict[str, Any]]:
    """How early an ensemble's disagreement tells that gold will fall, of each ensemble and method."""
    return [
        {
            "key": key,
            "ends": [float(curves["disagreement"][:, place].mean()) for place in (0, -1)],
            "place": warning_place(curves),
            "num": len(curves.seeds),
        }
        for key, curves in results.curves.items()
        if curves.disagree
    ]


def reward_models(rows: Sequence[Row]) -> pd.DataFrame:
    """Means over an ensemble's members, a row a treatment and seed; accuracy and calibration error in percent."""
    measures = ["num_trained", "accuracy_gold", "accuracy_judge", "calibration_error"]
    frame = frame_of(rows) if rows else pd.DataFrame(columns=["treatment", "seed", *measures])
    frame[measures[1:]] *= 100
    return frame.groupby(["treatment", "seed"], sort=False)[measures].mean().reset_index()


def length_slope(gold: Array, length: Array, prompt: NDArray[np.int64]) -> float:
    """Gold units for one character more, among responses of the SFT policy to the same prompt; all are [B].

    Least squares of gold on length within prompts, so that instructions that ask for much do not count as an effect of
    length. NaN where lengths do not differ.
    """
    frame = pd.DataFrame({"gold": gold, "length": length})
    y, x = (frame - frame.groupby(prompt).transform("mean")).to_numpy().T
    return float(x @ y / (x @ x)) if x @ x > 0 else math.nan


def length_residual(curves: Curves, slope: float) -> Array:
    """Gold [S, K] less what its change of length since the start is worth; far from SFT's lengths an extrapolation."""
    residual: Array = curves["gold"] - slope * (curves["length"] - curves["length"][:, :1])
    return residual


def lengths(results: Results, slope: float) -> dict[Key, list[Estimate]]:
    """Length at start and end, and the drop of gold before and after what length is worth is taken out."""
    found = {}
    for key, curves in results.curves.items():
        length, drops = curves["length"], (results.stories[key].drops, drop(length_residual(curves, slope)))
        found[key] = [Estimate.of(values) for values in (length[:, 0], length[:, -1], *drops)]
    return found


def gains(curves: Curves) -> list[Estimate]:
    """Gold gained over SFT where KL first reaches the nats of `GAINED`; of no seed where one does not get there."""
    found = gain_at(curves, np.sqrt(GAINED)).T
    return [Estimate.of(gain if np.isfinite(gain).all() else gain * np.nan) for gain in found]
