"""The log of what was tried on the way to the settings of the over-optimization study; it stands in its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tried:
    """One trial: what was run, and what came out."""

    what: str
    found: str


TRIED: Final[tuple[Tried, ...]] = (
    Tried(
        "10,000 labels, 256 responses a step, falling rate, one seed",
        "25 % flips: gold 4.18, 4.98 (step 6), 5.14 (20), 5.02 (40) at 7 nats; without flips 4.18, 5.08, 4.75, 5.08 at "
        "10 nats: PPO hardly passes its peak, and the two reward models are nearly as good (71.5 and 72.5 % against "
        "gold)",
    ),
)
