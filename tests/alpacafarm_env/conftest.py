"""What several of these tests share; see also `pool_worlds`."""

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a reward model: to be read, and copied before it is changed."""
    from tiny_reward_model import make_tiny_reward_model

    return make_tiny_reward_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def pairs():
    """Instructions, first and second responses."""
    from pool_worlds import unequal_pairs

    return unequal_pairs()


@pytest.fixture
def make(tmp_path):
    """A function that makes a pool that asks a server."""
    from pool_worlds import builder

    return builder(tmp_path)
