"""What the environment itself costs, in CPU time: the wall clock counts other people's work too."""

import time

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode

from alpacafarm_env.envs.vector import InstructionVectorEnv
from alpacafarm_env.oracles.base import Constant


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_episodes_per_second(tiny_dataset, mode, capsys):
    env = InstructionVectorEnv(512, tiny_dataset, oracle=Constant(0.5), autoreset_mode=mode)
    responses = ["A response of ordinary length, such as this one."] * 512
    env.reset(seed=0)
    rates = []
    for _ in range(8):
        start = time.process_time()
        for _ in range(10):
            if mode is AutoresetMode.DISABLED:
                env.reset()
            env.step(responses)
        rates.append(10 * 512 / (time.process_time() - start))
    with capsys.disabled():
        print(f"\n{mode.value}: {max(rates):,.0f} episodes a second")
    assert max(rates) > 100_000


def test_overhead_over_the_oracles_own_call(capsys):
    """The environment's own share of a step on 128 responses of the length a policy writes: 3 % at most."""
    env = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=128, autoreset_mode="Disabled")
    responses = env.dataset.references("eval")[:128]
    instructions, _ = env.reset(seed=0)
    env.oracle.score(instructions[:8], responses[:8])  # loads the model
    start = time.process_time()
    env.oracle.score(instructions, responses)
    oracle_seconds = time.process_time() - start
    own_seconds = []
    for _ in range(8):
        env.reset()
        with env.scored_by(Constant(0.5)):
            start = time.process_time()
            env.step(responses)
            own_seconds.append(time.process_time() - start)
    share = min(own_seconds) / oracle_seconds
    with capsys.disabled():
        print(f"\nenv.step on 128 responses: {1000 * min(own_seconds):.2f} ms, {share:.2%} of the oracle's own time")
    assert share < 0.03
