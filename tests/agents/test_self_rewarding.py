"""Ratings: learned by a reward model, imitated at their best, given by the policy itself; policies as judges."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_worlds import ASCII, INSTRUCTIONS, TEXTS, Share, TinyDataset, say_more

from alpacafarm_env.agents import SFT, FeedME, RatingModeling, RewardModelingConfig, SFTConfig
from alpacafarm_env.agents.best_of_n import BestOfNSamples
from alpacafarm_env.agents.dpo import DPOConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.policy_agent import PolicyActor
from alpacafarm_env.agents.self_rewarding import SelfRewardingConfig, best_against_worst, self_rewarding
from alpacafarm_env.errors import CheckpointError, UnscoredError
from alpacafarm_env.instructions import Demonstration, Instruction, Preference, Rating
from alpacafarm_env.oracles import Constant, make_oracle
from alpacafarm_env.oracles.policies import PolicyRating, rating_demonstrations, rating_question

ASKED = tuple(Instruction(f"{text} {n}") for n in range(8) for text in TEXTS)
CONFIG = SelfRewardingConfig(
    num_rounds=2,
    num_instructions=6,
    temperature=1.0,
    max_response_tokens=4,
    dpo=DPOConfig(batch_size=8, learning_rate=1e-2),
)


def test_the_best_is_preferred_to_the_worst_of_those_that_have_a_score():
    nan = math.nan
    rewards = np.array([[2, 5, 1, 5], [nan, 3, nan, 4], [3, 3, 3, nan], [nan, 6, nan, nan], [nan] * 4])
    asked = tuple(Instruction(str(n)) for n in range(5))
    samples = BestOfNSamples(asked, (("a", "b", "c", "d"),) * 5, rewards, rewards > 0, 0)
    assert best_against_worst(samples) == (Preference(asked[0], ("b", "c"), 1), Preference(asked[1], ("d", "b"), 1))


def test_rounds_take_new_instructions_and_raise_what_the_oracle_likes(llama):
    config = replace(CONFIG, num_instructions=None, dpo=DPOConfig(epochs=4, batch_size=4, learning_rate=3e-2))
    rounds = list(self_rewarding(llama, ASKED, Share(ASCII), config=config))
    assert [(each.number, len(each.samples)) for each in rounds] == [(1, 20), (2, 20)]
    assert {x for each in rounds for x in each.samples.instructions} == set(ASKED)
    assert all(each.preferences == best_against_worst(each.samples) for each in rounds)
    first, second = (each.samples.rewards for each in rounds)
    gain, error = second.mean() - first.mean(), np.hypot(first.std(), second.std()) / math.sqrt(first.size)
    assert gain > 3 * error


def test_the_policy_rates_as_it_is_in_each_round_and_the_seed_decides_the_rest(llama, tokenizer):
    for digit, bonus in (("2", 14.0), ("6", 15.0)):  # as one that has learned to rate
        say_more(llama.model, tokenizer.convert_tokens_to_ids(digit), bonus)
    states = [copy.deepcopy(llama.model.state_dict())]
    found = []
    for each in self_rewarding(llama, ASKED, config=CONFIG, seed=3):
        found.append(each)
        states.append(copy.deepcopy(llama.model.state_dict()))
    for before, each in zip(states, found, strict=False):
        llama.model.load_state_dict(before)
        asked = [x for x in each.samples.instructions for _ in range(4)]
        rated = PolicyRating(llama).score(asked, [text for row in each.samples.responses for text in row])
        np.testing.assert_allclose(rated, each.samples.rewards.ravel(), atol=1e-4)
    assert not np.array_equal(states[0]["lm_head.weight"], states[1]["lm_head.weight"])
    llama.model.load_state_dict(states[0])
    again = next(iter(self_rewarding(llama, ASKED, config=CONFIG, seed=3)))
    assert again.preferences == found[0].preferences
    llama.model.load_state_dict(states[0])
    assert next(iter(self_rewarding(llama, ASKED, config=CONFIG, seed=4))).preferences != again.preferences


def test_what_cannot_be_learned_from_is_refused(llama):
    with pytest.raises(ValueError, match="needs 80 instructions, 40 in each of 2 rounds, got 40"):
        next(self_rewarding(llama, ASKED, Share(ASCII), config=replace(CONFIG, num_instructions=40)))
    for oracle in (Constant(), None):  # an untrained policy does not rate at all
        with pytest.raises(ValueError, match="no two responses differently"):
            next(self_rewarding(llama, ASKED, oracle, config=CONFIG))
    with pytest.raises(ValueError, match="num_samples"):
        SelfRewardingConfig(num_samples=1)


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


def test_ratings_are_learned(policy_folder: Path) -> None:
    told = fit(policy_folder, epochs=24).learn()
    assert told["loss"] < 0.1
    assert told["eval/accuracy"] == 1


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


ANSWERS = [f"{text[::-1]} {'!' * (3 * n % 7)}" for n, text in enumerate(TEXTS)]


@pytest.fixture
def rater(llama, tokenizer):
    """Likes to say 2, and more so 6."""
    for digit, bonus in (("2", 14.0), ("6", 15.0)):
        say_more(llama.model, tokenizer.convert_tokens_to_ids(digit), bonus)
    llama.max_prompt_tokens = 150
    return llama


def test_a_rating_is_expected_over_the_digits(rater, tokenizer):
    responses = ["x" * 90, *ANSWERS[1:]]
    verdicts = PolicyRating(PolicyActor(rater)).judge(TEXTS, responses)
    assert np.isnan(verdicts.scores[0])
    assert "max_prompt_tokens" in verdicts.details["unscored_reason"][0]
    ids = tokenizer.convert_tokens_to_ids(list("1234567"))
    for row in range(1, 5):
        (tokens,) = rater.encode_prompts([rating_question(TEXTS[row], responses[row])])
        chances = rater.model(torch.tensor([tokens])).logits[0, -1].softmax(-1)[ids].detach().double()
        expected = float(chances @ torch.arange(1.0, 8.0).double() / chances.sum())
        assert verdicts.scores[row] == pytest.approx(expected, abs=1e-5)
    assert np.ptp(verdicts.scores[1:]) > 0.01


def test_a_policy_learns_to_rate_from_ratings(llama):
    """Untrained it gives no verdict; then it tells good from bad, and still answers what is no question of a rating."""
    texts = ["good", "bad"]
    oracle = PolicyRating(llama)
    none = oracle.judge(["Say it."] * 2, texts)
    assert np.isnan(none.scores).all()
    assert all("probability" in reason for reason in none.details["unscored_reason"])
    ratings = [Rating(Instruction(x), y, 7 if y == "good" else 2) for x in ("Say it.", "Hm?") for y in texts]
    data = rating_demonstrations(ratings)
    assert [each.response for each in data] == ["7", "2", "7", "2"]
    SFT(llama, data, config=SFTConfig(epochs=40, batch_size=4, learning_rate=1e-2)).learn()
    np.testing.assert_allclose(oracle.score(["Say it."] * 2, texts), [7, 2], atol=0.5)


def test_digits_need_tokens_of_their_own(llama, monkeypatch):
    monkeypatch.setattr(llama, "encode_responses", lambda texts, *, eos: [[5, 6]] * len(texts))
    with pytest.raises(ValueError, match="1 different tokens"):
        PolicyRating(llama)


def test_the_registry_takes_policies_and_folders(rater, tmp_path):
    def spec(policy, key="policy"):
        return {"rating": {key: policy}}

    dataset = TinyDataset()
    oracle = make_oracle(spec(rater), dataset=dataset)
    assert make_oracle(spec(rater), dataset=dataset) is not oracle  # what holds an object is nobody else's
    rater.save(tmp_path / "policy")
    stored = make_oracle(spec(str(tmp_path / "policy")), dataset=dataset)
    assert make_oracle(spec(tmp_path / "policy"), dataset=dataset) is stored
    (tmp_path / "policy" / "new").write_text("")
    assert make_oracle(spec(str(tmp_path / "policy")), dataset=dataset) is not stored
    env = gym.make("AlpacaFarm-PPO-v0", dataset=dataset, oracle=spec(rater))
    with pytest.raises(TypeError, match="save it"):  # the spec has no copy of the policy
        gym.make(env.spec)
    env.reset(seed=0)
    with pytest.raises(UnscoredError, match="max_prompt_tokens"):
        env.step("b" * 200)
    for policy in (5, LanguageModel):
        with pytest.raises(TypeError, match="policy that judges"):
            gym.make("AlpacaFarm-PPO-v0", dataset=dataset, oracle=spec(policy))
    with pytest.raises(CheckpointError, match="no/where"):
        make_oracle(spec("no/where"), dataset=dataset)
    with pytest.raises(ValueError, match="polcy"):
        make_oracle(spec(rater, "polcy"), dataset=dataset)
