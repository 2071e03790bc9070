"""What the tests of the annotators' pool share; see `pool_worlds`."""

import pytest


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
