"""A function of instructions and responses as an oracle, wherever an object can be one."""

import math

import gymnasium as gym
import numpy as np
import pytest

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.oracles import FunctionOracle, make_oracle
from alpacafarm_env.oracles.base import OracleError
from alpacafarm_env.wrappers import AddScore


def length(instructions, responses):
    return [len(text) for text in responses]


def test_a_function_is_an_oracle_of_its_own_name(tiny_dataset):
    env = InstructionEnv(tiny_dataset, oracle=length)
    env = AddScore(env, key="half", oracle=lambda instructions, responses: np.array([0.5] * len(responses)))
    env.reset(seed=0)
    _, reward, *_, info = env.step("123")
    assert (reward, info["half"], info["reward_components"]) == (3, 0.5, {"length": 3})
    given = {"oracle": lambda asked, texts: [float(len(asked) == 2)] * len(texts), "autoreset_mode": "Disabled"}
    envs = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=2, **given)
    envs.reset(seed=0)
    _, rewards, *_, infos = envs.step(["a", "b"])
    assert rewards.tolist() == [1, 1]
    assert set(infos["oracle"]) == {"lambda"}
    named = make_oracle(FunctionOracle(length, name="mine"), dataset=tiny_dataset)
    both = make_oracle({"ensemble": [length, named, {"name": "constant", "value": 3}]}, dataset=tiny_dataset)
    assert list(both.member_names) == ["length", "mine", "constant"]
    assert both.score(["x", "y"], ["", "123"]).tolist() == [1, 3]


@pytest.mark.parametrize("wrong", [["a"], [[1.0]], 1.0, [1.0, 2.0], [math.inf], None, ["1"]])
def test_what_a_function_answers_is_checked_as_any_oracles_answer(tiny_dataset, wrong):
    env = InstructionEnv(tiny_dataset, oracle=lambda instructions, responses: wrong)
    env.reset(seed=0)
    with pytest.raises(OracleError, match="lambda"):
        env.step("x")
