"""A study's curves beside the facts of their treatments, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..harness.estimates import Estimate
from ..harness.report_text import interval_text, number, signed
from ..harness.study import Row
from .curves import METHODS, Curves, Key, all_curves, paired
from .fits import Array, Drop, Fit, change_after, drop, fit, peak, rises
from .treatments import Treatment


@dataclass(frozen=True)
class Results:
    """The curves of a study and what they are of."""

    curves: Mapping[Key, Curves]
    facts: Mapping[str, Treatment] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row], treatments: Sequence[Treatment]) -> Results:
        """From the rows of table.csv and all treatments that were meant to run.

        Raises:
            ValueError: Rows are faulty, or of a treatment that is not among `treatments`.
        """
        facts = {treatment.name: treatment for treatment in treatments}
        curves = all_curves(rows)
        if unknown := sorted({name for name, _ in curves} - facts.keys()):
            raise ValueError(f"expected rows of the treatments {sorted(facts)}, got rows of {unknown}")
        return cls(curves, facts)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that have rows, PPO first."""
        return tuple(method for method in METHODS if any(key[1] == method for key in self.curves))

    def get(self, treatment: str, method: str) -> Curves | None:
        """The curves of a treatment and method, if there are any."""
        return self.curves.get((treatment, method))

    def title(self, treatment: str) -> str:
        """Of a treatment, for people; its name where it has no facts."""
        return self.facts[treatment].title if treatment in self.facts else treatment

    def drops(self, treatments: Sequence[str], method: str) -> tuple[list[Curves], Array] | None:
        """Curves of the seeds that all treatments have and their drops [T, S]; None where one is missing."""
        found = [curves for name in treatments if (curves := self.get(name, method)) is not None]
        if len(found) < len(treatments) or not (common := paired(*found))[0].seeds:
            return None
        return common, np.stack([drop(curves["gold"]).per_seed for curves in common])

    def fit(self, treatment: str, method: str, form: str) -> Fit | None:
        """The fit of a mean curve in one of `FORMS`."""
        curves = self.get(treatment, method)
        return None if curves is None else fit(curves["kl_exact"], curves["gold"], form)

    def fits(self, method: str, form: str) -> dict[str, Fit]:
        """The fits of a method's curves in a form; of all treatments whose curves can be fitted."""
        found = {name: self.fit(name, method, form) for name, kind in self.curves if kind == method}
        return {name: each for name, each in found.items() if each is not None}


def story(curves: Curves, fallen: Drop) -> str:
    """Where gold peaks, by how much it falls from there to the end, and what the proxy does meanwhile."""
    gold, top = curves["gold"].mean(axis=0), peak(curves["gold"])
    kl = float(curves["kl_exact"][:, top].mean())
    where = f"Mean gold is highest at {curves.place(top)} ({number(float(gold[top]))}, KL {kl:.2f})"
    end = len(curves.positions) - 1
    if (fallen.peaks == end).all():
        start = np.zeros(len(curves.seeds), dtype=np.intp)
        risen = change_after(curves["proxy"], start)
        return (
            f"{where}, its end, for every seed: it does not fall (drop 0, {seeds_text(len(curves.seeds))}); from start "
            f"to end the proxy {_change(risen)}."
        )
    estimate = fallen.estimate
    verb = "falls" if fallen.clear or estimate.num < 2 else "does not clearly fall"
    verb = f"{verb} from its peak (drop " if estimate.mean > 0 else "does not fall (drop "
    return (
        f"{where} and {number(float(gold[-1]))} at {curves.place(end)}: it {verb}{gold_text(estimate)}, "
        f"{errors_text(estimate)}, {seeds_text(estimate.num)}); from there the proxy "
        f"{_change(change_after(curves['proxy'], fallen.peaks))}."
    )


def fit_text(found: Fit) -> str:
    """The parameters of a fit with their intervals, R^2 and the peak that they imply."""
    top = (
        f"peak at d = {found.peak_distance:.2f}, {signed(found.peak_gain)}"
        if found.has_peak
        else f"no peak up to twice the measured d of {found.measured:.1f}"
    )
    return (
        f"a {interval_text(found.a, '')}, b {interval_text(found.b, '')}, R² {found.r_squared:.3f} of "
        f"{found.num_points} points, {top}"
    )


def _change(estimate: Estimate) -> str:
    """For instance "rises by 2.06 [1.79, 2.33] (21.0 standard errors)"."""
    one = estimate.num < 2
    verb = "rises" if estimate.mean > 0 and (one or rises(estimate)) else "does not clearly rise"
    if estimate.mean <= 0:
        verb = "does not rise"
    return f"{verb} (change {gold_text(estimate)}, {errors_text(estimate)})"


def gold_text(estimate: Estimate) -> str:
    """For instance "1.25 [1.02, 1.48]"; the mean alone for one seed."""
    return interval_text(estimate.interval, "")


def errors_text(estimate: Estimate) -> str:
    """For instance "3.2 standard errors"."""
    if estimate.num < 2:
        return "no standard error"
    if not estimate.standard_error > 0:
        return "standard error 0"
    return f"{number(estimate.ratio, '%')} standard errors"


def seeds_text(count: int) -> str:
    """For instance "5 seeds"."""
    return f"{count} seed{'s' * (count != 1)}"
