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
        "2,000 labels, KL penalty 0.04, constant rate",
        "25 % flips 5.07 (step 6) to 4.54 at 7 nats while the proxy goes from 0.61 to 1.38; one greedy annotator 5.28 "
        "(step 8) to 5.23 at 6.5 nats.",
    ),
    Tried(
        "The same with 5 seeds, and what sets PPO's distance",
        "Drops: 25 % flips 0.15 [-0.01, 0.31], one greedy annotator -0.11 [-0.22, 0.00]. At one penalty PPO ends 3 to "
        "13 nats from SFT. The reward models' scores have a standard deviation of about 1 over all of SFT's answers, "
        "but among the answers to one instruction, which is all that PPO is moved by, 0.9 and 0.8 by the greedy "
        "annotator (seeds 0 and 1), 0.9 and 0.7 without flips, 0.7 and 0.5 by 25 % flips: the noisier, the weaker the "
        "pull against the penalty.",
    ),
    Tried(
        "Scores scaled to a standard deviation of 1 within an instruction, three KL penalties (5 seeds)",
        "Drops by 25 % flips: 0.15 [-0.25, 0.55] with 0.05, the default, 0.28 [-0.09, 0.66] with 0.03, "
        "0.42 [0.05, 0.80] with 0.02, where every seed falls; 0.02 less 0.05, paired: 0.27 [-0.16, 0.71]. KL at the "
        "end 3.7 to 9, 4.4 to 9.3, 4.6 to 14.5 nats. By the greedy annotator: -0.06 [-0.16, 0.03] with 0.05 (6 to 9 "
        "nats), 0.62 [0.14, 1.09] with 0.02 (10 to 17); with 0.03 two seeds ran, 0.18 in both. With the weakest both "
        "rewards are fooled, with or without added noise. The peaks differ: 0.64 above SFT at 2 nats by 25 % flips, "
        "0.90 at 3 nats by the greedy annotator (0.02, seeds at equal KL).",
    ),
    Tried(
        "Ensembles of 3 as they come (5 seeds, KL penalty 0.04)",
        "Best-of-1024 by 25 % flips falls by 0.42 with one model, 0.31 [-0.10, 0.71] with the mean, 0.33 [-0.05, 0.71] "
        "with the minimum and 0.29 [-0.14, 0.71] with mean - 0.5 variance; PPO by 0.15, and 0.28 and 0.20 with the "
        "latter two. Members agree more and more on the way (0.54 to 0.31) and warn of nothing. Of the variance "
        "between members 70 % is a constant of the instruction, which no label decides (seed 0): the minimum is often "
        "one member's word on all answers to an instruction.",
    ),
    Tried(
        "Best-of-1024 by the minimum of 3 less each member's level on the instruction",
        "Seeds 0 to 4, where one model falls by 0.42 [0.13, 0.71]; level: the score of SFT's likeliest answer token by "
        "token 0.26 [-0.10, 0.61], of its most frequent one 0.14 [-0.11, 0.38]; the mean of 4 of its samples 0.17 "
        "[-0.13, 0.47], of 16 0.18 [-0.16, 0.52], of all 1,024 0.11 [-0.20, 0.42]. One answer is a rough measure of a "
        "level; the study takes 4 samples (others than these: 0.21). On seeds 5 to 9, which that choice had not seen, "
        "one model falls by 0.36 [0.02, 0.70] and the minimum of 3 by 0.21 [-0.04, 0.47]: 0.15 [-0.23, 0.53] less, and "
        "its end is 0.25 [-0.20, 0.70] higher (paired). The mean - 0.5 variance falls by 0.21 to 0.28 by all of the "
        "levels (seeds 0 to 4).",
    ),
    Tried(
        "Members with labels of their own: best-of-1024, 25 % flips, seeds 2 and 3, not centred",
        "The same 2,000 pairs labelled again for each member: mean 0.11, 0.26; minimum 0.15, 0.57. Pairs of their own, "
        "which is three times the labels: 0.07, 0.32; 0.04, 0.22. Members that share labels share their noise too.",
    ),
    Tried(
        "Why gold falls under best-of-1024 by the greedy annotator",
        "Chosen by its own utility, without a reward model, gold rises to the end: 4.13, 6.30 (n = 16), 6.89 (n = "
        "1024), no fall in any of 5 seeds: hence gpt4_utility. With 10,000 labels instead of 2,000 the reward model "
        "still falls by 0.48 and 0.44 (seeds 2 and 3), from a higher peak (5.53): what is fooled is the reward model, "
        "not the annotator.",
    ),
)
HOW_TRIED: Final = (
    "In the order in which it was tried, whatever the options of this report's own runs: PPO with 256 responses a "
    "step, 40 steps; one seed (seed 0) and no interval unless it says otherwise; gold and drops in gold units "
    "[95 % t-interval]."
)
"""What the trials have in common."""
