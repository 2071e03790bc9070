"""What the environment itself costs, in CPU time: the wall clock counts other people's work too."""

import time

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
