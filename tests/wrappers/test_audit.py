"""RewardAudit: the reward stays, second opinions stand beside it, and what was asked can be read again."""

import gymnasium as gym
import numpy as np
import pytest
from equality import assert_same

from alpacafarm_env import wrappers
from alpacafarm_env.data.files import read_records
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.errors import DataError
from alpacafarm_env.look.runs import find_runs, read_runs
from alpacafarm_env.monitors import agreement
from alpacafarm_env.monitors.runs import ROLLOUTS

TEXTS = ["a b c a b c", "one", "one two three four", ""]


class Length:
    """How many characters a response has; counts whom it was asked about."""

    name = "length"

    def __init__(self, sign=1.0):
        self.asked, self.sign = [], sign

    def score(self, instructions, responses):
        self.asked.append(len(responses))
        return np.array([self.sign * len(response) for response in responses], dtype=np.float64)

    def __deepcopy__(self, memo):
        return self


def batched(tiny_dataset, **options):
    env = InstructionVectorEnv(4, dataset=tiny_dataset, split="val", oracle=Length(), autoreset_mode="Disabled")
    return wrappers.vector.RewardAudit(env, **options) if options else env


def test_the_reward_and_all_else_stay(tiny_dataset):
    plain, audited = batched(tiny_dataset), batched(tiny_dataset, seconds={"short": Length(-1.0)})
    for seed in range(5):
        first, second = (env.reset(seed=seed) and env.step(TEXTS) for env in (plain, audited))
        told = second[4]
        for name in ("repetition", "short_reward", "short_agreement"):
            values = told.pop(name)
            assert told.pop(f"_{name}").all()
            assert len(values) == 4
        assert_same(first, second)


def test_second_opinions_are_of_the_first_responses_and_agreement_of_the_last(tiny_dataset):
    second = Length(-1.0)
    env = batched(tiny_dataset, seconds={"short": second}, most=3)
    for _ in range(2):
        env.reset(seed=0)
        *_, info = env.step(TEXTS)
    assert second.asked == [3, 3]
    np.testing.assert_array_equal(info["short_reward"], [-11, -3, -18, np.nan])
    np.testing.assert_array_equal(info["short_agreement"], [-1] * 4)
    np.testing.assert_allclose(info["repetition"], [0.25, 0, 0, 0])


def test_a_single_environment_agrees_over_its_last_episodes(tiny_dataset):
    env = InstructionEnv(dataset=tiny_dataset, split="val", oracle=Length())
    env = wrappers.RewardAudit(env, seconds={"long": Length()}, most=4)
    found, rewards = [], []
    for text in ("a", "bb", "ccc", "dd"):
        env.reset(seed=0)
        _, reward, *_, info = env.step(text)
        found.append(info["long_agreement"])
        rewards.append(reward)
    assert np.isnan(found[:2]).all()
    assert found[2:] == [1.0, pytest.approx(agreement(rewards, rewards))]


def test_an_ensemble_tells_its_disagreement(tiny_dataset):
    members = [{"name": "constant", "value": 1.0}, {"name": "constant", "value": 3.0}]
    env = batched(tiny_dataset, seconds={"several": {"ensemble": members}}, most=2)
    env.reset(seed=0)
    np.testing.assert_array_equal(env.step(TEXTS)[4]["disagreement"], [1, 1, np.nan, np.nan])


def test_what_was_scored_is_kept_as_an_agents_rollouts(tiny_dataset, tmp_path):
    env = batched(tiny_dataset, seconds={"short": Length(-1.0)}, most=3, out=tmp_path / "run")
    for _ in range(2):
        asked, _ = env.reset(seed=0)
        env.step(TEXTS)
    rows = read_records(tmp_path / "run" / ROLLOUTS)
    assert [row["step"] for row in rows] == [1] * 3 + [2] * 3
    assert [row["instruction"] for row in rows[:3]] == [str(text) for text in asked[:3]]
    assert [row["response"] for row in rows[3:]] == TEXTS[:3]
    assert [row["score"] for row in rows[3:]] == [11, 3, 18]
    assert [row["info"]["short_reward"] for row in rows[3:]] == [-11, -3, -18]
    (run,) = read_runs(find_runs([tmp_path / "run"]), most_bytes=1e6)  # no metrics are needed to look at it
    assert [len(run.texts[step]) for step in (1, 2)] == [3, 3]
    with pytest.raises(DataError, match="run"):  # two runs in one file could not be told apart
        batched(tiny_dataset, most=3, out=tmp_path / "run")


@pytest.mark.parametrize("wrong", ["annotators", {"": "gold"}])
def test_second_opinions_need_names(tiny_dataset, wrong):
    with pytest.raises(DataError, match="by name"):
        batched(tiny_dataset, seconds=wrong)


def test_token_environments_report_it_where_episodes_end():
    env = wrappers.vector.RewardAudit(gym.make_vec("AlpacaFarm-Token-v0", num_envs=2), seconds={"gold": "gold"})
    env.reset(seed=0)
    end = env.unwrapped.tokenizer.eos_token_id
    *_, infos = env.step(np.array([end, end]))
    assert {"repetition", "gold_reward"} <= infos["final_info"].keys()
    env.close()


def test_most_is_at_least_one(tiny_dataset):
    with pytest.raises(ValueError, match="most"):
        batched(tiny_dataset, most=0)
