"""Learning from ratings: reward modeling by least squares, and FeedME's first form."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_worlds import files
from tiny_models import INSTRUCTIONS

from alpacafarm_env.agents import SFT, FeedME, RatingModeling, RewardModelingConfig, SFTConfig
from alpacafarm_env.instructions import Demonstration, Instruction, Preference, Rating

RATINGS = [
    Rating(Instruction(ask), "a" * count + "b" * (6 - count), 1 + count) for ask in INSTRUCTIONS for count in range(7)
]
HELD_OUT = [Preference(Instruction("Name a fish"), ("aaaaab", "abbbbb"), 1)]


def fit(folder: Path, ratings: list[Rating] = RATINGS, epochs: int = 1, **options: Any) -> RatingModeling:
    config = RewardModelingConfig(epochs=epochs, batch_size=35, learning_rate=3e-3, schedule="constant", save_every=2)
    return RatingModeling(folder, ratings, validation=HELD_OUT, config=config, device="cpu", **options)


def test_the_loss_is_the_squared_error_of_standardized_ratings(policy_folder: Path) -> None:
    agent = fit(policy_folder)
    scores = agent.score([each.instruction for each in RATINGS], [each.response for each in RATINGS])
    values = np.array([each.rating for each in RATINGS])
    expected = np.mean((scores - (values - 4) / 2) ** 2)  # 1 to 7, each as often: mean 4, standard deviation 2
    told = agent.learn()
    assert told["loss"] == pytest.approx(expected, rel=1e-4)
    assert {"eval/accuracy", "eval/loss", "grad_norm"} <= told.keys()


def test_ratings_are_learned_and_a_resumed_run_is_the_same(policy_folder: Path, tmp_path: Path) -> None:
    straight = fit(policy_folder, epochs=24, out=tmp_path / "straight")
    told = straight.learn()
    assert told["loss"] < 0.1
    assert told["eval/accuracy"] == 1
    for metrics in fit(policy_folder, epochs=24, out=tmp_path / "resumed").updates():
        if metrics["step"] == 7:
            break
    fit(policy_folder, epochs=24, out=tmp_path / "resumed").learn()
    assert files(tmp_path / "resumed") == files(tmp_path / "straight") != {}


def test_ratings_without_a_difference_are_refused(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match="differ"):
        fit(policy_folder, RATINGS[::7])
    with pytest.raises(ValueError, match="ratings"):
        fit(policy_folder, [])
    with pytest.raises(TypeError, match="Preference"):
        fit(policy_folder, [*RATINGS, *HELD_OUT])


def test_feedme_imitates_what_was_rated_seven(policy_folder: Path) -> None:
    config = SFTConfig(epochs=1, batch_size=2, learning_rate=1e-2)
    best = [Demonstration(each.instruction, each.response) for each in RATINGS if each.rating == 7]
    assert len(best) == len(INSTRUCTIONS)
    agents = FeedME(policy_folder, RATINGS, config=config), SFT(policy_folder, best, config=config)
    for agent in agents:
        agent.learn()
    for ours, theirs in zip(*(agent.policy.model.parameters() for agent in agents), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(ValueError, match="none among 30"):
        FeedME(policy_folder, [each for each in RATINGS if each.rating < 7])
