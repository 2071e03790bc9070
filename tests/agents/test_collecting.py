"""What agents take from an environment: responses without a score, and rewards of a wrong shape."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers.vector import DictInfoToList
from tiny_models import TEMPLATE, build_llama
from tiny_worlds import ASCII, Picky, Share, make_env, small_ppo

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO
from alpacafarm_env.errors import UnscoredError
from alpacafarm_env.oracles import OracleError
from alpacafarm_env.wrappers.vector import AddScore


def test_unscored_responses_are_left_out_and_counted(llama: LanguageModel) -> None:
    env = make_env(16, Picky(ASCII), on_unscored="truncate")
    agent = PPO(env, llama, config=small_ppo())
    rollouts, scores, _, metrics = agent._collector.collect(1)
    assert all(len(text) % 2 for text in rollouts.texts)
    assert len(rollouts) == len(scores) == 16 * (1 - metrics["score/unscored"])
    assert 0 < metrics["score/unscored"] < 1
    assert not scores.isnan().any()
    assert metrics["score/mean"] == pytest.approx(float(scores.mean()))
    assert [m["step"] for m in agent.updates()] == [1, 2]


def test_a_step_without_any_score_is_an_error(llama: LanguageModel) -> None:
    class Silent(Share):
        def score(self, instructions, responses):
            return np.full(len(responses), np.nan)

    agent = PPO(make_env(16, Silent(""), on_unscored="truncate"), llama, config=small_ppo())
    with pytest.raises(UnscoredError, match="Step 1: none of 16"):
        next(agent.updates())


def test_a_reward_for_all_is_not_taken_for_one_each(llama: LanguageModel) -> None:
    class Mean(gym.vector.VectorWrapper):  # type: ignore[type-arg]
        def step(self, actions):
            observations, rewards, *rest = self.env.step(actions)
            return observations, rewards.mean(), *rest

    agent = PPO(Mean(make_env(16, Share(ASCII))), llama, config=small_ppo())
    with pytest.raises(OracleError, match=r"16 rows .*\(\)"):
        next(agent.updates())


def test_lists_of_infos_are_read_as_the_arrays_inside(tokenizer) -> None:
    found = []
    for wrap in (lambda env: env, DictInfoToList):
        policy = LanguageModel(build_llama(len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16)
        env = wrap(AddScore(make_env(16, Picky(ASCII), on_unscored="truncate"), key="share", oracle=Share(ASCII)))
        found.append(list(PPO(env, policy, config=small_ppo()).updates()))
    assert found[0] == found[1]
    assert {name for name in found[0][0] if name.startswith("info/")} >= {"info/response_length", "info/share"}


def test_a_wrapper_around_lists_of_infos_is_refused_at_the_start(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="DictInfoToList"):
        PPO(gym.vector.VectorWrapper(DictInfoToList(make_env(16, Share(ASCII)))), llama, config=small_ppo())
