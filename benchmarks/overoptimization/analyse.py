"""What the over-optimization study finds: the papers' claims judged one by one, and the numbers told beside them.

A claim that does not come out reads as plainly as one that does; its sentence is a line of findings.txt.j2.
Sources of the claims: Dubois et al. 2023 (arXiv 2305.14387, appendix E), Gao et al. 2022 (arXiv 2210.10760), Coste et
al. 2023 (arXiv 2310.02743).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...seeding import keyed_rng
from ..harness.estimates import RESAMPLES, Estimate, frame_of, percentiles, spearman_rows
from ..harness.report import Verdict
from ..harness.study import Row
from .curves import (
    FORMS,
    METHOD_WORDS,
    Array,
    Curves,
    Key,
    Story,
    curves_of,
    disagrees,
    drop,
    fit,
    gain_at,
    only,
    rises,
    root_kl,
)
from .treatments import Treatment

NOISY, CLEAN, UTILITY = "ann", "gpt4", "gpt4_utility"
"""p_sim^ann (25 % flips), p_sim^GPT-4 (no added noise), and what the latter wants, without a reward model."""
FLIPS = ("none", "flip_175", "ann", "flip_35")
"""Treatments that differ in the share of flipped labels only."""
CONSERVATIVE = ("wco_3", "uwo_3")
"""Ensembles over the labels of `NOISY` that distrust what their members disagree on."""
KLS = (0.5, 1.0, 2.0, 4.0)
"""Nats at which best-of-n and PPO are compared."""
GAINED = (*KLS, 8.0)
"""Nats at which gains are tabulated."""
FITTED = 0.9
"""R^2 that a fit of a mean curve should exceed."""


class Results:
    """The curves of a study and what they are of.

    Args:
        rows: Of table.csv.
        treatments: All that were meant to run.

    Raises:
        ValueError: Rows are faulty, or of a treatment that is not among `treatments`.
    """

    def __init__(self, rows: Sequence[Row], treatments: Iterable[Treatment]) -> None:
        self.facts = {treatment.name: treatment for treatment in treatments}
        self.curves = curves_of(rows)
        if unknown := sorted({name for name, _ in self.curves} - self.facts.keys()):
            raise ValueError(f"expected rows of the treatments {sorted(self.facts)}, got rows of {unknown}")
        self.methods = [method for method in METHOD_WORDS if any(key[1] == method for key in self.curves)]
        self.stories = {key: Story(curves) for key, curves in self.curves.items()}
        self.fits = {
            (*key, form): found
            for key, curves in self.curves.items()
            for form in FORMS.values()
            if (found := fit(curves, form)) is not None
        }

    def title(self, name: str) -> str:
        """Of a treatment, for people; its name where it has no facts."""
        return self.facts[name].title if name in self.facts else name

    def paired(self, *keys: Key) -> list[Curves] | None:
        """Curves of the seeds that all of these treatments and methods have; None where there is none."""
        if any(key not in self.curves for key in keys):
            return None
        found = [self.curves[key] for key in keys]
        common = [seed for seed in found[0]["gold"].index if all(seed in each["gold"].index for each in found)]
        return [only(each, common) for each in found] if common else None


def verdicts(results: Results) -> list[Verdict]:
    """All claims, for each method that ran."""
    found = []
    for method in results.methods:
        found += [falls_with_noise(results, method), holds_without_noise(results, method)]
        found += [grows_with_flips(results, method)]
        found += [ensemble_cuts(results, name, method) for name in CONSERVATIVE]
    found += [less_efficient(results, measure) for measure in ("gold", "proxy")]
    forms = ((method, form) for method in results.methods for form in (FORMS[method], FORMS["best_of_n"]))
    return found + [fits_well(results, method, form) for method, form in dict.fromkeys(forms)]


def falls_with_noise(results: Results, method: str) -> Verdict:
    """Claim 1: with 25 % flips gold falls from its peak while the proxy still rises.

    Both are asked of the 95 % t-intervals, which must be above 0. The claim as it is usually put asks for more than two
    standard errors; with few seeds the t-interval is the stricter of the two: 4.3 standard errors for 3 seeds, 2.8 for
    5.
    """
    if (story := results.stories.get((NOISY, method))) is None:
        return _missing("falls", method, NOISY)
    holds = story.falls and rises(story.proxy_after)
    return _judged("falls", method, holds, story.drop, name=NOISY, story=story)


def holds_without_noise(results: Results, method: str) -> Verdict:
    """Claim 2: with p_sim^GPT-4, without added noise, gold does not fall by more than one standard error."""
    if (story := results.stories.get((CLEAN, method))) is None:
        return _missing("stays", method, CLEAN)
    beside = {}
    for name in (NOISY, UTILITY):
        pair = results.paired((name, method), (CLEAN, method))
        if pair is not None and len(pair[0]["gold"]) > 1:
            drops = [drop(curves["gold"]) for curves in pair]
            beside[name] = Estimate.of(drops[0]), Estimate.of(drops[0] - drops[1])
    holds = story.drop.mean <= story.drop.standard_error
    return _judged("stays", method, holds, story.drop, name=CLEAN, story=story, beside=beside)


def grows_with_flips(results: Results, method: str) -> Verdict:
    """Claim 3: the mean drop grows from each share of flips to the next, and its slope is above 0 (t-interval)."""
    curves = results.paired(*((name, method) for name in FLIPS))
    if curves is None:
        return _missing("grows", method, *FLIPS)
    found = trend([results.facts[name].flip for name in FLIPS], np.stack([drop(each["gold"]) for each in curves]))
    return _judged("grows", method, found["monotone"] and rises(found["slope"]), found["slope"], **found)


def trend(flips: Sequence[float], drops: Array) -> dict[str, Any]:
    """Of drops [T, S] at T shares of flips in [0, 1], seeds paired: column s is the same seed of all treatments.

    Returns:
        drops: share -> mean drop; spearman: of the mean drops, and its 95 % interval over resamples of the seeds, one
        draw for all treatments; rising: share of the resamples in which the means rise all along, and `monotone`
        whether they do; slope: gold units for 10 points of flips, by least squares for each seed.

    Raises:
        ValueError: Fewer than three shares, or shapes that do not belong together.
    """
    if len(flips) < 3 or drops.ndim != 2 or len(drops) != len(flips) or not drops.size:
        raise ValueError(f"expected drops [T, S] at T >= 3 shares of flips, got {drops.shape} at {tuple(flips)}")
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


def ensemble_cuts(results: Results, name: str, method: str) -> Verdict:
    """Claim 4: a conservative ensemble cuts the drop with 25 % flips by half or more.

    Judged by the means, as the claim is; (half of the single model's drop) - (the ensemble's drop), paired by seed, is
    told with its interval, which says how sure that is.
    """
    pair = results.paired((NOISY, method), (name, method))
    if pair is None:
        return _missing("halves", method, NOISY, name)
    gold = [curves["gold"] for curves in pair]
    one, two = map(drop, gold)
    ends = [each.iloc[:, -1].to_numpy() for each in gold]
    starts = [each.iloc[:, 0].to_numpy() for each in gold]
    before, spare = Estimate.of(one), Estimate.of(one / 2 - two)
    numbers = {
        "before": before,
        "after": Estimate.of(two),
        "cut": Estimate.of(one - two),
        "spare": spare,
        "gains": [Estimate.of(end + fall - start) for end, fall, start in zip(ends, (one, two), starts, strict=True)],
        "kls": [float(curves["kl_exact"].iloc[:, -1].mean()) for curves in pair],
        "higher": Estimate.of(ends[1] - ends[0]),
        "name": name,
    }
    fell = rises(before)
    return _judged("halves", method, spare.mean >= 0 if fell else None, before, fell=fell, **numbers)


def less_efficient(results: Results, measure: str) -> Verdict:
    """Claim 5: at equal KL PPO has gained less than best-of-n, on average over sqrt(KL) up to what both reach.

    Gao et al. 2022 say so of the proxy and of gold. Of the proxy it is near what theory says: best-of-n is nearly the
    best that any policy of its KL can do (Yang et al. 2024, arXiv 2404.01730). Of gold no theory speaks: the text tells
    it of the rewards without noise too, where the proxy that PPO lacks is worth gold.

    Args:
        results: The study's.
        measure: "gold" or "proxy".
    """
    both = [name for name in (NOISY, *results.facts) if all((name, method) in results.curves for method in FORMS)]
    if not both:
        return _missing("less_efficient", measure, NOISY)
    gaps = {}
    for name in dict.fromkeys((both[0], CLEAN, UTILITY)):
        if (pair := results.paired((name, "ppo"), (name, "best_of_n"))) is not None:
            limit = min(float(root_kl(curves["kl_exact"]).max(axis=1).min()) for curves in pair)
            grid = np.linspace(0, limit, 41)[1:]
            ppo, best = (gain_at(curves, grid, measure) for curves in pair)
            if limit > 0:
                gaps[name] = Estimate.of((ppo - best).mean(axis=1)), limit**2
    if both[0] not in gaps:
        nothing = "PPO and best-of-n share no seed, or PPO did not leave the SFT policy: there is no KL to compare at."
        return Verdict("less_efficient", None, {"of": measure, "nothing": nothing})
    gap, limit = gaps.pop(both[0])
    pair = results.paired((both[0], "ppo"), (both[0], "best_of_n")) or []
    levels = [level for level in KLS if level <= limit]
    told = {level: [Estimate.of(gain_at(each, [math.sqrt(level)], measure)[:, 0]) for each in pair] for level in levels}
    numbers = {"name": both[0], "gap": gap, "limit": limit, "levels": told, "beside": gaps}
    return _judged("less_efficient", measure, gap.interval.high < 0, gap, **numbers)


def fits_well(results: Results, method: str, form: str) -> Verdict:
    """Claim 6: the mean curves follow a form of Gao et al. 2022 with R^2 above 0.9.

    They give d(a - b d) to best-of-n and d(a - b log d) to reinforcement learning. Of PPO both are asked.
    """
    fits = {name: found for (name, *key), found in results.fits.items() if key == [method, form]}
    if not fits:
        nothing = "No curve can be fitted: too few evaluations, or gold the same at all of them."
        return Verdict("fits", None, {"of": method, "form": form, "limit": FITTED, "nothing": nothing})
    below = [name for name, found in fits.items() if not found.r_squared > FITTED]
    lowest = min(fits, key=lambda name: fits[name].r_squared)
    told = {name: fits[name] for name in (NOISY, lowest) if name in fits}
    numbers = {"of": method, "form": form, "limit": FITTED, "num": len(fits), "below": below, "fits": told}
    return Verdict("fits", not below, {**numbers, "lowest": fits[lowest].r_squared})


def _judged(claim: str, of: str, holds: bool | None, estimate: Estimate, **numbers: Any) -> Verdict:
    """Of one seed nothing is judged: it has no standard error."""
    alone = estimate.num < 2
    return Verdict(claim, None if alone or holds is None else bool(holds), {"of": of, "alone": alone, **numbers})


def _missing(claim: str, of: str, *names: str) -> Verdict:
    """What it needs is not among the rows."""
    return Verdict(claim, None, {"of": of, "missing": names, "name": names[-1]})


# -------------------------------------------------------------------------------------------------- beside the claims


def gaps(results: Results, methods: Iterable[str], num_seeds: int) -> Iterator[tuple[str, list[str], dict[str, int]]]:
    """Of each method what was meant to run and has no rows, and treatments with fewer seeds than were meant."""
    for method in methods:
        known = {name: results.stories.get((name, method)) for name in results.facts}
        seeds = {name: story.drop.num if story else 0 for name, story in known.items()}
        yield method, [name for name in seeds if not seeds[name]], {k: n for k, n in seeds.items() if 0 < n < num_seeds}


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
    found = {}
    for name in results.facts:
        pair = results.paired((name, method), (NOISY, method))
        if name != NOISY and pair is not None:
            ends = [curves["gold"].iloc[:, -1].to_numpy() for curves in pair]
            found[name] = Estimate.of(ends[0] - ends[1])
    return found


def warning_place(disagreement: pd.DataFrame) -> int | None:
    """The first place at which an ensemble's disagreement [S, K] is clearly above its start (`rises`, by seed).

    None where it never is, and for one seed.
    """
    changes = disagreement.sub(disagreement.iloc[:, 0], axis=0).to_numpy().T
    places = [int(place) for place in disagreement.columns]
    return next((place for place, change in zip(places, changes, strict=True) if rises(Estimate.of(change))), None)


def warnings(results: Results) -> list[dict[str, Any]]:
    """How early an ensemble's disagreement tells that gold will fall, of each ensemble and method."""
    return [
        {
            "key": key,
            "ends": [float(curves["disagreement"].iloc[:, place].mean()) for place in (0, -1)],
            "place": warning_place(curves["disagreement"]),
            "num": len(curves["gold"]),
        }
        for key, curves in results.curves.items()
        if disagrees(curves)
    ]


def reward_models(rows: Sequence[Row]) -> pd.DataFrame:
    """Means over an ensemble's members, a row a treatment and seed; accuracy and calibration error in percent."""
    measures = ["num_trained", "accuracy_gold", "accuracy_judge", "calibration_error"]
    frame = frame_of(rows) if rows else pd.DataFrame(columns=["treatment", "seed", *measures])
    frame[measures[1:]] *= 100
    return frame.groupby(["treatment", "seed"], sort=False)[measures].mean().reset_index()


def length_slope(gold: Array, length: Array, prompt: NDArray[np.int64]) -> float:
    """Gold units for one character more, among responses of the SFT policy to the same prompt; all are [B].

    Least squares of gold on length within prompts (both less their prompt's mean), so that instructions that ask for
    much do not count as an effect of length. NaN where lengths do not differ.
    """
    frame = pd.DataFrame({"gold": gold, "length": length})
    y, x = (frame - frame.groupby(prompt).transform("mean")).to_numpy().T
    return float(x @ y / (x @ x)) if x @ x > 0 else math.nan


def length_residual(curves: Curves, slope: float) -> pd.DataFrame:
    """Gold [S, K] less what its change of length since the start is worth: gold - slope (length - length at start).

    The slope is that of SFT's responses; far from their lengths it is an extrapolation.
    """
    length = curves["length"]
    return curves["gold"] - slope * length.sub(length.iloc[:, 0], axis=0)


def lengths(results: Results, slope: float) -> dict[Key, list[Estimate]]:
    """Length at start and end, and the drop of gold before and after what length is worth is taken out."""
    found = {}
    for key, curves in results.curves.items():
        if np.isfinite(length := curves["length"].to_numpy()).all():
            drops = [results.stories[key].drops, drop(length_residual(curves, slope))]
            found[key] = [Estimate.of(values) for values in (length[:, 0], length[:, -1], *drops)]
    return found


def gains(curves: Curves) -> list[Estimate | None]:
    """Gold gained over SFT where KL first reaches the nats of `GAINED`; None where a seed does not get there."""
    found = gain_at(curves, np.sqrt(GAINED)).T
    return [Estimate.of(gain) if np.isfinite(gain).all() else None for gain in found]
