"""Reward modeling on ratings: a score r(x, y) fitted to the rating of y by least squares.

Source: Ziegler et al. 2019 (arXiv:1909.08593), sec. 2, name ratings as the other way to ask; AlpacaFarm (Dubois et al.
2023, arXiv:2305.14387), sec. 7, as feedback still to be simulated. Ratings are first shifted and scaled to mean 0 and
standard deviation 1, so that learning rates for preferences fit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from ..instructions import Preference, Rating
from .reward_modeling import RewardModeling, RewardModelingConfig, Texts


class RatingModeling(RewardModeling):
    """Fits a reward model to ratings; a step is one update. Other arguments and errors as of `RewardModeling`.

    A batch holds `batch_size` ratings, and `loss` is the mean squared error in variances of the ratings: 1 is that of
    their mean. Ratings whose prompts alone reach `max_length` are left out, with a warning.

    Args:
        ratings: Rated responses, not all alike; the same response may have several.
        validation: Held-out preferences, evaluated while training.

    Raises:
        TypeError: There are other records than ratings.
        ValueError: The ratings are all alike.
    """

    label: ClassVar[str] = "Reward model"
    counted: ClassVar[str] = "ratings"

    def __init__(
        self,
        init: str | Path,
        ratings: Sequence[Rating],
        *,
        validation: Sequence[Preference] = (),
        config: RewardModelingConfig | None = None,
        **options: Any,
    ) -> None:
        records: Sequence[Any] = ratings
        if wrong := [each for each in records if not isinstance(each, Rating)]:
            raise TypeError(f"RatingModeling learns from records of Rating, got a {type(wrong[0]).__name__}.")
        values = np.array([rating.rating for rating in ratings], np.float64)
        if len(values) and not values.std():
            raise ValueError(f"Expected ratings that differ, got {len(values)} of {values[0]:.0f}.")
        targets = (values - values.mean()) / values.std() if len(values) else values
        super().__init__(init, records, targets=targets.tolist(), validation=validation, config=config, **options)

    def _texts(self, ratings: Sequence[Rating]) -> list[Texts]:
        instructions = [rating.instruction for rating in ratings]
        return [(text,) for text in self._encode(instructions, [rating.response for rating in ratings])]

    def _training_sums(self, rows: Sequence[Texts], targets: Tensor | None) -> dict[str, Tensor]:
        scores = self._forward([text for (text,) in rows])
        assert targets is not None
        return {"loss": (scores - targets.to(scores.device)).square().sum()}
