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
        "10,000 labels, KL penalty 0.02, a rate that falls to 0",
        "25 % flips: gold 4.18, 4.98 (step 6), 5.14 (20), 5.02 (40) at 7 nats; without flips 4.18, 5.08, 4.75, 5.08 at "
        "10 nats. PPO hardly passes its peak, and the two reward models are nearly as good (71.5 and 72.5 % against "
        "gold): the noise averages out, and what is left is the annotators' own taste, which both learn.",
    ),
    Tried(
        "2,000 labels, KL penalty 0.01, constant rate",
        "All fall, those without added noise too, as KL goes to 14 nats and more: 25 % flips 4.97 (step 6) to 3.30, "
        "35 % 4.85 to 4.53 (3.86 at step 25), none 4.99 to 4.71 (4.19 at step 20), one greedy annotator 5.18 to 4.48. "
        "What falls is truth: the policy says all that it knows and more, with false and repeated items (-2.5 of gold "
        "by 25 % flips, -1.4 by the greedy annotator), and calls it complete. Reward models against gold: 66, 64, 68 "
        "and 80 %.",
    ),
    Tried(
        "2,000 labels, KL penalty 0.02, constant rate",
        "25 % flips 5.00 (step 8) to 4.73 at 10 nats, one greedy annotator 5.21 (step 8) to 5.08 at 9 nats.",
    ),
    Tried(
        "2,000 labels, KL penalty 0.04, constant rate: the settings of this study",
        "25 % flips 5.07 (step 6) to 4.54 at 7 nats while the proxy goes from 0.61 to 1.38; one greedy annotator 5.28 "
        "(step 8) to 5.23 at 6.5 nats.",
    ),
    Tried(
        "The same with 5 seeds, and what sets PPO's distance",
        "At one penalty PPO ends 3 to 13 nats from SFT. The reward models' scores have a standard deviation of about 1 "
        "over all of SFT's answers, but among the answers to one instruction, which is all that PPO is moved by, 0.9 "
        "and 0.8 by the greedy annotator (seeds 0 and 1), 0.9 and 0.7 without flips, 0.7 and 0.5 by 25 % flips: the "
        "noisier, the weaker the pull against the penalty. Not tried yet: scores scaled to 1 within an instruction.",
    ),
)
"""In the order in which it was tried: 256 responses a step, 40 steps, one seed (seed 0) unless it says otherwise."""
