"""What tests of several files share: an environment without keys, a ledger, servers, pools."""

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a reward model: to be read, and copied before it is changed."""
    from hub_models import make_tiny_reward_model

    return make_tiny_reward_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def short_waits(monkeypatch):
    """A client's first repeat comes at once."""
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.01)


@pytest.fixture
def ledger(tmp_path):
    from alpacafarm_env.llm.ledger import Ledger

    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def anyway():
    """A judge server that judges any instruction."""
    from alpacafarm_env.judge_server.server import JudgeServer

    with JudgeServer(anyway=True) as running:
        yield running


@pytest.fixture(scope="module")
def pairs():
    """Instructions, first and second responses."""
    from judge_requests import unequal_pairs

    return unequal_pairs()


@pytest.fixture
def make(tmp_path):
    """A function that makes a pool that asks a server."""
    from judge_requests import builder

    return builder(tmp_path)


@pytest.fixture
def call(anyway, tmp_path, monkeypatch):
    """A function that runs a command against the server `anyway`, in an empty folder, with a ledger of its own."""
    from command_files import make_call

    return make_call(anyway, tmp_path, monkeypatch)
