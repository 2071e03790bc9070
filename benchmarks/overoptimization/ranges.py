"""Within which KL a finding holds: how far gold has fallen from its peak, and what noise costs, at each distance."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..harness.estimates import Estimate, other_peaks
from ..harness.plots import band
from .curves import Array, Curves, gain_at, root_kl

NUM_DISTANCES: Final = 201
FEWEST: Final = 3
"""Seeds that ranges are judged by. Along a whole curve two are somewhere alike by chance, however far apart."""


def distances(*curves: Curves) -> Array:
    """[J] distances sqrt(KL): evenly from 0 to the farthest that every seed of all these curves reaches; `nearest`."""
    end = min(float(root_kl(each).max(axis=1).min()) for each in curves)
    return np.union1d(np.linspace(0, end, NUM_DISTANCES), min(end, nearest(*curves)))


def nearest(*curves: Curves) -> float:
    """The distance sqrt(KL) from which on every seed of all these curves has been measured.

    Between SFT, where every gain is 0, and the first evaluation all gains are interpolated, and so are their intervals.
    """
    found = [root_kl(each) for each in curves]
    return max(float(each[np.arange(len(each)), (each > 0).argmax(axis=1)].max()) for each in found)


@dataclass(frozen=True)
class Along:
    """A difference in gold at each of J distances from SFT, from `nearest` on.

    Attributes:
        kl: [J] nats, ascending.
        values: [S, J] gold units, of the seeds.
    """

    kl: Array
    values: Array

    @property
    def end(self) -> Estimate:
        """At the largest KL."""
        return Estimate.of(self.values[:, -1])

    @property
    def reached(self) -> float:
        """The largest KL, in nats."""
        return float(self.kl[-1])

    @property
    def judged(self) -> bool:
        """Whether there are seeds enough for ranges, and all of them have left SFT."""
        return len(self.values) >= FEWEST and self.reached > 0

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """Ranges of KL, in nats, in which the pointwise 95 % t-interval of the mean is above 0; none of one seed.

        One distance alone is no range.
        """
        above = np.r_[False, band(self.values)[1] > 0, False]
        first, beyond = (np.flatnonzero(each) for each in (above[1:] & ~above[:-1], above[:-1] & ~above[1:]))
        return [(float(self.kl[i]), float(self.kl[j - 1])) for i, j in zip(first, beyond, strict=True) if j - i > 1]


def fall(curves: Curves) -> Along:
    """Gold at its peak less gold at each distance beyond; each seed's peak is that of the other seeds' mean curve.

    Before a seed's peak it is 0: what a rise has still to come is no fall.
    """
    at = distances(curves)
    gold = gain_at(curves, at)
    peaks = other_peaks(gold)
    since = gold[np.arange(len(gold)), peaks][:, None] - gold
    return _along(at, np.where(np.arange(len(at)) > peaks[:, None], since, 0.0), curves)


def cost(clean: Curves, noisy: Curves) -> Along:
    """Gold by clean labels less gold by noisy ones at equal KL; both are curves of the same seeds."""
    at = distances(clean, noisy)
    return _along(at, gain_at(clean, at) - gain_at(noisy, at), clean, noisy)


def _along(at: Array, values: Array, *curves: Curves) -> Along:
    """Of values [S, J] at distances [J] those where all curves have been measured."""
    measured = at >= min(at[-1], nearest(*curves))
    return Along(at[measured] ** 2, values[:, measured])


def peak(curves: Curves) -> tuple[float, Estimate]:
    """Where the mean gold is highest, in nats, and the gold gained there."""
    at = distances(curves)
    gold = gain_at(curves, at)
    highest = int(gold.mean(axis=0).argmax())
    return float(at[highest] ** 2), Estimate.of(gold[:, highest])
