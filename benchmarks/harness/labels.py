"""How many labels a reward model learns from, and how many of them are flipped."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """N labels, of which a share is flipped."""

    labels: int
    flip: float

    @property
    def effective(self) -> float:
        """N(1 - 2e)^2: as many clean labels know as much of a score that is near 0 (Fisher information)."""
        return self.labels * (1 - 2 * self.flip) ** 2
