"""`serve --openenv`, asked by OpenEnv's own client. Skipped where OpenEnv is not installed."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from importlib.metadata import version

import pytest

openenv = pytest.importorskip("openenv.core", reason="openenv is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("default")  # of other libraries'

from alpacafarm_env import sandbox  # noqa: E402
from alpacafarm_env.integrations.openenv import make_app  # noqa: E402
from alpacafarm_env.judge_server.asgi import AppServer  # noqa: E402
from alpacafarm_env.oracles import Constant, MicroBatched, judge, make_oracle  # noqa: E402

ID, NAME = "AlpacaFarm-PPO-v0", "alpacafarm-ppo-v0"
WORLD, GOLD = sandbox.SANDBOX, sandbox.gold_oracle()


@pytest.fixture(scope="module")
def server():
    oracle = MicroBatched(GOLD)
    with AppServer(oracle, app=make_app(ID, WORLD, "unlabeled", oracle)) as running:
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


def test_versions(capsys):
    with capsys.disabled():
        print(f"\nopenenv {version('openenv')}, fastapi {version('fastapi')}, uvicorn {version('uvicorn')}")


def test_an_episode_is_that_of_the_environment(server):
    asked = WORLD.instructions("unlabeled")[7]
    with openenv.GenericEnvClient(base_url=server.base).sync() as env:
        first = env.reset(seed=3)
        assert first.observation["split"] == "unlabeled"
        assert env.reset(seed=3).observation == first.observation
        found = env.reset(instruction_id=asked.id, episode_id="mine")
        assert (found.observation["instruction"], found.observation["instruction_id"]) == (str(asked), asked.id)
        assert (found.done, found.reward) == (False, None)
        done = env.step({"response": "A lion is brave."})
        assert done.done
        assert done.reward == GOLD.score([asked], ["A lion is brave."])[0]
        assert done.observation["metadata"]["reward_components"] == {"gold": done.reward}
        assert env.state() == {"episode_id": "mine", "step_count": 1}
        with pytest.raises(RuntimeError, match="reset"):
            env.step({"response": "Once more."})


def test_a_task_is_asked_by_its_place_in_a_split(server):
    asked = WORLD.instructions("eval")[5]
    with openenv.GenericEnvClient(base_url=server.base).sync() as env:
        found = env.reset(split="eval", index=5).observation
        assert (found["instruction"], found["instruction_id"], found["split"]) == (str(asked), asked.id, "eval")
        assert env.step({"response": ""}).reward == GOLD.score([asked], [""])[0]
        for wrong in ({"split": "evil"}, {"index": 10**9}, {"index": -1}, {"instruction": 5}, {"instruction_id": -5}):
            with pytest.raises(RuntimeError, match=next(iter(wrong)) if "split" not in wrong else "evil"):
                env.reset(**wrong)
        with pytest.raises(RuntimeError):
            env.step({"answer": "x"})
        assert env.reset().observation["split"] == "unlabeled"


def test_tasks_are_listed(server):
    asked, base = WORLD.instructions("eval"), f"{server.base}/{NAME}"
    assert get(f"{server.base}/list_environments") == (200, [ID])
    kinds = {split["name"]: split["type"] for split in get(f"{base}/splits")[1]}
    assert kinds == {"sft": "train", "preference": "train", "unlabeled": "train", "val": "validation", "eval": "test"}
    assert get(f"{base}/num_tasks", {"split": "eval"}) == (200, {"num_tasks": len(asked)})
    assert len(get(f"{base}/tasks", {"split": "eval"})[1]["tasks"]) == len(asked)
    task = {"id": f"eval-{asked[3].id}", "index": 3, "instruction_id": asked[3].id, "instruction": str(asked[3])}
    assert get(f"{base}/task", {"split": "eval", "index": 3}) == (200, {"task": task})
    assert get(f"{base}/task_range", {"split": "eval", "start": 3, "stop": 4}) == (200, {"tasks": [task]})
    assert [get(f"{base}/task", {"split": "eval", "index": place})[0] for place in (-1, len(asked))] == [400, 400]
    assert get(f"{base}/num_tasks", {"split": "evil"})[0] == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"split": "nope"}, "split"),
        ({"split": ["a"]}, "split"),
        ({"index": "x"}, "index"),
        ({"index": True}, "index"),
        ({"index": 10**9}, "index"),
        ({"instruction_id": 99999999}, "instruction_id"),
        ({"instruction_id": [1]}, "instruction_id"),
        ({"index": 1, "instruction_id": 5}, "index"),
        ({"instruction": 5}, "instruction"),
    ],
)
def test_a_wrong_field_is_named_whichever_way_it_comes(server, body, field):
    status, told = get(f"{server.base}/reset", body)
    assert status == 400
    assert field in told["error"]["message"]
    with openenv.GenericEnvClient(base_url=server.base).sync() as env, pytest.raises(RuntimeError, match=field):
        env.reset(**body)


def test_errors_of_the_server_are_told_as_json(server, monkeypatch):
    assert get(f"{server.base}/step", {"action": {"response": "a"}})[0] == 400  # a session is needed
    monkeypatch.setattr(sandbox.SANDBOX.__class__, "instructions", lambda *_: 1 / 0)
    status, told = get(f"{server.base}/{NAME}/num_tasks", {"split": "eval"})
    assert (status, told["error"]["code"]) == (500, "oracle_error")


def test_pages_of_other_sites_reach_no_session(server):
    with pytest.raises(Exception, match="403"):  # of websockets
        asyncio.run(dial(server.base, Origin="http://evil.com"))
    asyncio.run(dial(server.base, Origin="http://localhost:1"))


async def dial(base, **headers):
    from websockets.asyncio.client import connect

    async with connect(f"ws{base.removeprefix('http')}/ws", additional_headers=headers):
        pass


def test_scores_and_health_are_on_the_same_port(server):
    asked = [str(each) for each in WORLD.instructions("eval")[:2]]
    status, scored = get(server.url, {"instructions": asked, "responses": ["a", "b"]})
    assert (status, scored["scores"]) == (200, GOLD.score(asked, ["a", "b"]).tolist())
    assert get(f"{server.base}/health")[1]["oracle"] == "gold"


async def session(base, episodes=1):
    """Episodes of one client: what was asked, which is also answered, and the reward."""
    found = []
    async with openenv.GenericEnvClient(base_url=base) as env:
        for _ in range(episodes):
            asked = (await env.reset()).observation["instruction"]
            found.append((asked, (await env.step({"response": asked})).reward))
    return found


def episodes(oracle, sessions, each=1):
    """The episodes of many sessions at once, and how many there were a second."""

    async def all_sessions(base):
        return await asyncio.gather(*(session(base, each) for _ in range(sessions)))

    with AppServer(oracle, app=make_app(ID, WORLD, "unlabeled", oracle)) as running:
        began = time.perf_counter()
        found = [one for each in asyncio.run(all_sessions(running.url.removesuffix("/score"))) for one in each]
        return found, len(found) / (time.perf_counter() - began)


def test_steps_of_all_sessions_are_asked_for_together():
    oracle = MicroBatched(GOLD, wait_s=0.5)
    oracle._last = 8  # as after a call for eight
    found, _ = episodes(oracle, sessions=8)
    assert [reward for _, reward in found] == [GOLD.score([asked], [asked])[0] for asked, _ in found]
    assert oracle.calls < 4


class Distant(Constant):
    """Takes 20 ms a call, whatever is asked: a model on a GPU, or behind an API."""

    def score(self, instructions, responses):
        time.sleep(0.02)
        return super().score(instructions, responses)


@pytest.mark.slow
@pytest.mark.parametrize(("oracle", "least"), [(make_oracle("surrogate", dataset=WORLD), 1.3), (Distant(0.5), 5.0)])
def test_together_is_faster_than_one_by_one(oracle, least, capsys):
    """The sandbox's reward model on one CPU thread gains what a call costs beside its rows; a distant one all of it."""
    judge(oracle, [str(WORLD.instructions("eval")[0])], ["warm"])
    alone = episodes(MicroBatched(oracle, max_rows=1), sessions=32, each=8)[1]
    together = episodes(MicroBatched(oracle), sessions=32, each=8)[1]
    with capsys.disabled():
        told = f"32 sessions, {oracle.name}: {alone:.0f} episodes/s one by one, {together:.0f} together"
        print(f"\n{told}, {together / alone:.1f} times")
    assert together > least * alone
