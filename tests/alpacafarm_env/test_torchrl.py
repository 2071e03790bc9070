"""TorchRL's environments over ours, by its own code. Skipped where TorchRL is not installed."""

from importlib.metadata import version

import gymnasium as gym
import pytest

envs = pytest.importorskip("torchrl.envs", reason="torchrl is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("default")  # of other libraries'

from alpacafarm_env import InvalidResponseTypeError, sandbox  # noqa: E402
from alpacafarm_env.envs.registration import IDS  # noqa: E402


@pytest.mark.parametrize("id", IDS)
def test_its_check_of_an_environment_passes(id):
    print(f"\ntorchrl {version('torchrl')}, tensordict {version('tensordict')}: {id}")
    envs.check_env_specs(envs.GymEnv(id))


def test_an_episode_of_texts_is_that_of_the_environment():
    env = envs.GymWrapper(gym.make("AlpacaFarm-Gold-v0"))
    asked = env.reset(seed=3)
    asked.set_non_tensor("action", "A lion is brave.")
    expected = sandbox.gold_oracle().score([asked["observation"]], ["A lion is brave."])
    stepped = env.step(asked)["next"]
    assert stepped["reward"].tolist() == pytest.approx(expected.tolist())
    assert stepped["terminated"].all()


def test_episodes_of_tokens_are_batched_natively():
    one = {"name": "constant", "value": 1.0}
    env = envs.GymWrapper(gym.make_vec("AlpacaFarm-Token-v0", num_envs=3, oracle=one, autoreset_mode="Disabled"))
    envs.check_env_specs(env)
    steps = env.rollout(130, break_when_any_done=False)["next"]  # of at most 64 tokens an episode
    assert (steps["done"].sum(1) >= 2).all()
    assert (steps["reward"] == steps["done"]).all()


def test_a_batch_of_texts_is_refused():
    """TorchRL hands on one text for all slots."""
    env = envs.GymWrapper(gym.make_vec("AlpacaFarm-Gold-v0", num_envs=3, autoreset_mode="Disabled"))
    with pytest.raises(InvalidResponseTypeError, match="3 responses"):
        env.rollout(2)
