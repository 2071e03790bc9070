"""TokenVectorEnv: equal to SyncVectorEnv of single environments, one oracle call a step, its errors."""

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from equality import assert_same
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList
from token_worlds import EOS, HELLO, WORDS, Brevity, make_keywords

from alpacafarm_env import UnscoredError, wrappers
from alpacafarm_env.envs.token import TokenEnv
from alpacafarm_env.envs.token_vector import TokenVectorEnv

NUM_ENVS = 5
each_mode = pytest.mark.parametrize("mode", list(AutoresetMode))


class Counting(Brevity):
    """Remembers the size of each batch; no verdict on "hello" alone."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def score(self, instructions, responses):
        self.calls.append(len(responses))
        silent = np.array([response == "hello" for response in responses])
        return np.where(silent, np.nan, super().score(instructions, responses))


@pytest.fixture(scope="module")
def keywords(tmp_path_factory):
    return make_keywords(tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("policy"))


def pair(keywords, mode, **changes):
    changes = {**keywords, "on_unscored": "truncate", **changes}
    ours = TokenVectorEnv(NUM_ENVS, oracle=Counting(), autoreset_mode=mode, **changes)
    theirs = SyncVectorEnv([lambda: TokenEnv(oracle=Counting(), **changes)] * NUM_ENVS, autoreset_mode=mode)
    return ours, theirs


def assert_same_step(ours, theirs):
    ours, theirs = ([*step[:-1], dict(step[-1])] for step in (ours, theirs))
    final, expected = (infos[-1].pop("final_obs", np.array([])).tolist() for infos in (ours, theirs))
    assert_same(tuple(final), tuple(expected), "final_obs")
    assert_same(tuple(ours), tuple(theirs))


@each_mode
def test_equals_sync_episode_by_episode(keywords, mode):
    ours, theirs = pair(keywords, mode)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    rng = np.random.default_rng(0)
    assert_same_step(ours.reset(seed=5), theirs.reset(seed=5))
    ends = truncations = 0
    for step in range(60):
        actions = np.where(rng.random(NUM_ENVS) < 0.3, EOS, rng.integers(len(WORDS), size=NUM_ENVS))
        found, expected = ours.step(actions), theirs.step(actions)
        assert_same_step(found, expected)
        ended = found[2] | found[3]
        ends, truncations = ends + ended.sum(), truncations + found[3].sum()
        if step % 20 == 7:
            ended[step % NUM_ENVS] = True  # an open episode is given up
        if ended.any() and (mode is AutoresetMode.DISABLED or step % 20 == 7):
            options = {"reset_mask": ended}
            assert_same_step(ours.reset(seed=step, options=dict(options)), theirs.reset(seed=step, options=options))
    assert ends > 50
    assert truncations > 0


def test_the_id_makes_it_and_json_can_name_it(keywords):
    made = gym.make_vec(
        "AlpacaFarm-Token-v0", num_envs=3, vectorization_mode="vector_entry_point", oracle="constant", **keywords
    )
    assert isinstance(made.unwrapped, TokenVectorEnv)
    assert made.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    again = gym.make_vec(gym.envs.registration.EnvSpec.from_json(made.spec.to_json()), num_envs=3)
    assert_same(made.reset(seed=0), again.reset(seed=0))


@each_mode
def test_what_ends_on_a_step_is_scored_by_one_call(keywords, mode):
    env = TokenVectorEnv(64, oracle=(oracle := Brevity()), autoreset_mode=mode, **keywords)
    calls = []
    score, oracle.score = oracle.score, lambda i, r: calls.append(len(r)) or score(i, r)
    env.reset(seed=0)
    env.step(np.full(64, HELLO))
    assert calls == []
    env.step(np.where(np.arange(64) % 2, EOS, HELLO))
    assert calls == [32]


def test_reward_wrappers_decide_and_report(keywords):
    env = TokenVectorEnv(2, oracle="constant", **keywords)
    env = wrappers.vector.SurrogateReward(
        wrappers.vector.AddScore(env, key="word_reward", oracle=Brevity()), oracle=Brevity()
    )
    env.reset(seed=0)
    env.step([HELLO, HELLO])
    _, rewards, _, _, infos = env.step([EOS, HELLO])
    assert rewards.tolist() == [-1, 0]
    assert infos["final_info"]["word_reward"][0] == -1
    table = pd.json_normalize(DictInfoToList(env).step([EOS, HELLO])[4])
    assert table["final_info.word_reward"].tolist()[0] == 0
    assert table["instruction_id"].notna().all()


def test_rendering_equals_sync(keywords):
    ours, theirs = pair(keywords, AutoresetMode.SAME_STEP, render_mode="ansi")
    for env in (ours, theirs):
        env.reset(seed=0)
    for token in (HELLO, HELLO, EOS, HELLO):
        for env in (ours, theirs):
            env.step(np.array([token, HELLO, HELLO, EOS, HELLO]))
        assert ours.render() == theirs.render()


def test_what_it_is_given_stays_as_it_was(keywords):
    env = TokenVectorEnv(2, oracle=Brevity(), **keywords)
    observed = [env.reset(seed=0)[0], env.step([HELLO, EOS])[0]]
    kept = [{key: values.copy() for key, values in each.items()} for each in observed]
    env.step([HELLO, HELLO])
    observed[1]["input_ids"][:] = 0
    assert_same(observed[0], kept[0])
    assert (env.step([EOS, EOS])[0]["input_ids"] != 0).any()


def test_a_step_that_raises_changes_nothing(keywords):
    env, other = (TokenVectorEnv(2, oracle=Counting(), autoreset_mode="Disabled", **keywords) for _ in range(2))
    for each in (env, other):
        each.reset(seed=0)
        each.step([HELLO, HELLO])
    for wrong in ([HELLO], HELLO, "no", [HELLO, len(WORDS)], [HELLO, -1], [0.5, HELLO], None):
        with pytest.raises(InvalidAction):
            env.step(wrong)
    with pytest.raises(UnscoredError):
        env.step([EOS, HELLO])
    assert_same(env.step([HELLO, HELLO]), other.step([HELLO, HELLO]))
    env.step([EOS, EOS])
    with pytest.raises(ResetNeeded):
        env.step([EOS, EOS])


def test_a_prompt_that_does_not_fit_and_groups_are_refused(keywords):
    env = TokenVectorEnv(2, oracle=Brevity(), **{**keywords, "max_prompt_tokens": 3})
    with pytest.raises(ResetNeeded):
        env.step([HELLO, HELLO])
    ids = [instruction.id for instruction in env.instructions]
    with pytest.raises(ValueError, match="num_generations"):
        env.reset(options={"num_generations": 2})
    env.reset(options={"instruction_ids": [ids[0], ids[0]]})
    with pytest.raises(ValueError, match=rf"=3 .* {ids[1]} .* 5"):
        env.reset(options={"instruction_ids": [ids[0], ids[1]]})
    with pytest.raises(ResetNeeded):
        env.step([HELLO, HELLO])
