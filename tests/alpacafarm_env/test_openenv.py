"""`serve --openenv`, instruction by OpenEnv's own client. Skipped where OpenEnv is not installed."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

openenv = pytest.importorskip("openenv.core", reason="openenv is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("default")  # of other libraries'

from alpacafarm_env import sandbox  # noqa: E402
from alpacafarm_env.integrations.openenv import make_app  # noqa: E402
from alpacafarm_env.judge_server.scoring import ScoreServer  # noqa: E402
from alpacafarm_env.oracles import MicroBatched  # noqa: E402

ID = "AlpacaFarm-PPO-v0"
WORLD, GOLD = sandbox.SANDBOX, sandbox.gold_oracle()


@pytest.fixture(scope="module")
def server():
    oracle = MicroBatched(GOLD)
    with ScoreServer(oracle, app=make_app(ID, WORLD, "unlabeled", oracle)) as running:
        running.base = running.url.removesuffix("/score")
        yield running


def get(url, body=None):
    """Status and parsed body of one request."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def test_an_episode_is_that_of_the_environment(server):
    row = WORLD.instructions("unlabeled")[7]
    with openenv.GenericEnvClient(base_url=server.base).sync() as env:
        first = env.reset(seed=3)
        assert first.observation["split"] == "unlabeled"
        assert env.reset(seed=3).observation == first.observation
        again = env.reset(instruction_id=row.id, episode_id="mine")
        assert (again.observation["instruction"], again.done, again.reward) == (str(row), False, None)
        done = env.step({"response": "A lion is brave."})
        assert (done.done, done.reward) == (True, GOLD.score([row], ["A lion is brave."])[0])
        assert done.observation["metadata"]["reward_components"] == {"gold": done.reward}
        assert env.state() == {"episode_id": "mine", "step_count": 1}
        with pytest.raises(RuntimeError, match="reset"):
            env.step({"response": "Once more."})
        assert env.reset(split="eval").observation["split"] == "eval"
        with pytest.raises(RuntimeError):
            env.step({"answer": "x"})
        assert env.reset().observation["split"] == "unlabeled"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"split": "nope"}, "split"),
        ({"split": ["a"]}, "split"),
        ({"instruction_id": 99999999}, "instruction_id"),
        ({"instruction_id": [1]}, "instruction_id"),
        ({"instruction_id": True}, "instruction_id"),
        ({"instruction": 5}, "instruction"),
    ],
)
def test_a_wrong_field_is_named_whichever_way(server, body, field):
    status, content = get(f"{server.base}/reset", body)
    assert status == 400
    assert field in content["error"]["message"]
    with openenv.GenericEnvClient(base_url=server.base).sync() as env, pytest.raises(RuntimeError, match=field):
        env.reset(**body)


def test_errors_of_the_server_are_told_as_json(server, monkeypatch):
    assert get(f"{server.base}/step", {"action": {"response": "a"}})[0] == 400  # a session is needed
    monkeypatch.setattr(sandbox.SANDBOX.__class__, "instructions", lambda *_: 1 / 0)
    status, content = get(f"{server.base}/reset", {})
    assert (status, content["error"]["code"]) == (500, "oracle_error")


def test_pages_of_other_sites_reach_no_session(server):
    with pytest.raises(Exception, match="403"):  # of websockets
        asyncio.run(dial(server.base, Origin="http://evil.com"))
    asyncio.run(dial(server.base, Origin="http://localhost:1"))


async def dial(base, **headers):
    from websockets.asyncio.client import connect

    async with connect(f"ws{base.removeprefix('http')}/ws", additional_headers=headers):
        pass


def test_scores_and_health_are_on_the_same_port(server):
    rows = [str(each) for each in WORLD.instructions("eval")[:2]]
    status, scored = get(server.url, {"instructions": rows, "responses": ["a", "b"]})
    assert (status, scored["scores"]) == (200, GOLD.score(rows, ["a", "b"]).tolist())
    assert get(f"{server.base}/health")[1]["oracle"] == "gold"


def test_steps_of_all_sessions_are_one_call():
    oracle = MicroBatched(GOLD, wait_s=0.5)
    oracle._last = 8  # as after a call for eight

    async def session(base):
        async with openenv.GenericEnvClient(base_url=base) as env:
            instruction = (await env.reset()).observation["instruction"]
            return instruction, (await env.step({"response": instruction})).reward

    async def sessions(base):
        return await asyncio.gather(*(session(base) for _ in range(8)))

    with ScoreServer(oracle, app=make_app(ID, WORLD, "unlabeled", oracle)) as running:
        for instruction, reward in asyncio.run(sessions(running.url.removesuffix("/score"))):
            assert reward == GOLD.score([instruction], [instruction])[0]
    assert oracle.calls < 4
