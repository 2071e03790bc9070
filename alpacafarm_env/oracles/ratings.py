"""Ratings and critiques as data: what an oracle of ratings says of responses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from ..instructions import RATINGS, Critique, Instruction, Rating
from .base import OracleError, RewardOracle, judge, shorten


def rated(
    oracle: RewardOracle, instructions: Sequence[Instruction], responses: Sequence[str]
) -> tuple[list[Rating], list[Critique]]:
    """The ratings, and the critiques where it gives any, of an oracle such as {"rating": "human"}; one call.

    Responses without a verdict are left out, with a warning.

    Raises:
        OracleError: A score is no whole number from 1 to 7.
    """
    verdicts = judge(oracle, instructions, responses)
    known = np.isfinite(verdicts.scores)
    if wrong := [score for score in verdicts.scores[known].tolist() if score not in RATINGS]:
        raise OracleError(f"Expected whole ratings from 1 to 7 of {oracle.name!r}, got {wrong[0]}.")
    if not known.all():
        unscored = shorten(responses[int(np.flatnonzero(~known)[0])])
        count = f"{(~known).sum()} of {len(known)} responses"
        warnings.warn(f"{oracle.name!r} gave no rating of {count}, for instance {unscored}.", stacklevel=2)
    said = verdicts.details.get("critique", np.full(len(known), ""))
    rows = [row for row in zip(instructions, responses, verdicts.scores.tolist(), said, known, strict=True) if row[-1]]
    ratings = [Rating(ask, response, int(score)) for ask, response, score, *_ in rows]
    return ratings, [Critique(ask, response, str(text)) for ask, response, _, text, _ in rows if text]
