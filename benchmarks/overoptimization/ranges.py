"""Within which KL a finding holds: how far gold has fallen from its peak, and what noise costs, at each distance."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..harness.estimates import Estimate
from ..harness.plots import band
from .curves import Array, Curves, gain_at, other_peaks, root_kl

NUM_DISTANCES: Final = 201


def distances(*curves: Curves) -> Array:
    """[J] distances sqrt(KL), evenly from 0 to the farthest that every seed of all these curves reaches."""
    return np.linspace(0, min(float(root_kl(each).max(axis=1).min()) for each in curves), NUM_DISTANCES)


@dataclass(frozen=True)
class Along:
    """A difference in gold at each of J distances from SFT.

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
    def ranges(self) -> list[tuple[float, float]]:
        """Ranges of KL, in nats, in which the pointwise 95 % t-interval of the mean is above 0; none of one seed."""
        above = np.r_[False, band(self.values)[1] > 0, False]
        first, beyond = (np.flatnonzero(each) for each in (above[1:] & ~above[:-1], above[:-1] & ~above[1:]))
        return [(float(self.kl[i]), float(self.kl[j - 1])) for i, j in zip(first, beyond, strict=True)]


def fall(curves: Curves) -> Along:
    """Gold at its peak less gold at each distance beyond; each seed's peak is that of the other seeds' mean curve.

    Before a seed's peak it is 0: what a rise has still to come is no fall.
    """
    at = distances(curves)
    gold = gain_at(curves, at)
    peaks = other_peaks(gold)
    since = gold[np.arange(len(gold)), peaks][:, None] - gold
    return Along(at**2, np.where(np.arange(len(at)) > peaks[:, None], since, 0.0))


def cost(clean: Curves, noisy: Curves) -> Along:
    """Gold by clean labels less gold by noisy ones at equal KL; both are curves of the same seeds."""
    at = distances(clean, noisy)
    return Along(at**2, gain_at(clean, at) - gain_at(noisy, at))


def peak(curves: Curves) -> tuple[float, Estimate]:
    """Where the mean gold is highest, in nats, and the gold gained there."""
    at = distances(curves)
    gold = gain_at(curves, at)
    highest = int(gold.mean(axis=0).argmax())
    return float(at[highest] ** 2), Estimate.of(gold[:, highest])
