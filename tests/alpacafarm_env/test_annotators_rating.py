"""The pool that rates over HTTP: beside the sandbox's raters of this process, seed for seed, and as a reward."""

import gymnasium as gym
import numpy as np
import pytest
from faulty_server import Faults, FaultyJudgeServer

from alpacafarm_env import sandbox
from alpacafarm_env.annotators import AnnotatorPool, JudgeServer, RatingPool
from alpacafarm_env.annotators.config import PoolConfig, load_pool
from alpacafarm_env.annotators.prompts import Single
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import InvalidResponseError, PoolError, UnknownNameError
from alpacafarm_env.judge_server.replies import JudgeQuestion
from alpacafarm_env.judge_server.sandbox_judge import SandboxJudge
from alpacafarm_env.llm.client import ClientConfig
from alpacafarm_env.oracles import make_oracle, rated
from alpacafarm_env.oracles.base import judge
from alpacafarm_env.sandbox.judges import POOL, Annotator
from alpacafarm_env.sandbox.raters import Raters

MEMBERS = [member.name for member in load_pool("raters").annotators]


@pytest.fixture(scope="module")
def responses():
    """Both responses to each of 60 instructions, one after the other."""
    rows = sandbox.SANDBOX.preferences("preference")[:60]
    return [row.instruction for row in rows for _ in range(2)], [text for row in rows for text in row.responses]


@pytest.fixture
def make(tmp_path):
    def build(server, **options):
        defaults = {"base_url": server.base_url, "ledger": tmp_path / "ledger.sqlite", "models": "sandbox"}
        return RatingPool(**{**defaults, **options})

    return build


def own(seed=0):
    """The sandbox's raters of the bundled pool's names."""
    return Raters("sim_eval", [{a.name: a for a in POOL}[name] for name in MEMBERS], seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_ratings_are_those_of_the_sandboxs_raters(make, responses, seed, short_waits):
    """The server's own seed is another; few of its replies fail, and those are asked again as they were."""
    with FaultyJudgeServer(seed=99, faults=Faults({"cut_json": 0.1, "server_error": 0.05})) as server:
        got, wanted = judge(make(server, seed=seed), *responses), judge(own(seed), *responses)
    np.testing.assert_array_equal(got.scores, wanted.scores)
    assert set(got.scores) == set(range(1, 8))
    for detail in ("annotator", "critique"):
        np.testing.assert_array_equal(got.details[detail], wanted.details[detail])
    assert set(got.details["annotator"]) == set(MEMBERS)


def test_what_was_answered_is_read_from_the_ledger_and_asked_once(make, responses):
    asked, texts = (column[:40] for column in responses)
    with JudgeServer() as server:
        first = make(server).judge([*asked, asked[0]], [*texts, texts[0]])
        assert first.details["cached"].tolist() == [False] * 40 + [True]
        requests = server.stats()["requests"]
        again = make(server).judge(asked[::-1], texts[::-1])
        assert server.stats()["requests"] == requests
        replayed = make(server, replay=True).judge(asked, texts)
        ratings, critiques = rated(make(server), asked, texts)  # as data
    assert [each.rating for each in ratings] == first.scores[:40].tolist()
    assert [each.critique for each in critiques] == first.details["critique"][:40].tolist()
    assert again.details["cached"].all()
    for scores, critiques in (
        (again.scores[::-1], again.details["critique"][::-1]),
        (replayed.scores, replayed.details["critique"]),
    ):
        np.testing.assert_array_equal(scores, first.scores[:40])
        np.testing.assert_array_equal(critiques, first.details["critique"][:40])


def test_two_responses_to_one_instruction_never_share_a_request(make, responses):
    member = load_pool("raters").annotators[0]
    pool, size = PoolConfig(name="one", annotators=(member,)), member.batch_size
    for count, requests in ((2, 2), (2 * size, 2)):  # each instruction comes twice
        with JudgeServer() as server:
            make(server, pool=pool, seed=count).judge(*(column[:count] for column in responses))
            assert server.stats()["requests"] == requests


def test_a_reply_without_ratings_is_no_score(make, responses, short_waits):
    columns = [column[:30] for column in responses]
    with FaultyJudgeServer(faults=Faults({"content_filter": 0.3})) as server:
        got = make(server, client_config=ClientConfig(max_attempts=1)).judge(*columns)
    missing = np.isnan(got.scores)
    assert 0 < missing.mean() < 0.6
    assert all("ContentRefusedError" in reason for reason in got.details["unscored_reason"][missing])
    assert set(got.details["critique"][missing]) == set(got.details["unscored_reason"][~missing]) == {""}
    np.testing.assert_array_equal(got.scores[~missing], own().score(*columns)[~missing])


def test_at_temperature_zero_the_server_gives_each_its_mean_liking(responses):
    judging, items = SandboxJudge(0), [Single(str(ask), text) for ask, text in zip(*responses, strict=True)]

    def rated(temperature, seed):
        asked = JudgeQuestion("gpt4_1", items, "chat", "any", "rating", seed=seed, temperature=temperature)
        return np.array([said.rating for said in judging.answer(asked, "key").verdicts])

    certain = rated(0.0, 0)
    np.testing.assert_array_equal(certain, rated(0.0, 1))
    off = {temperature: np.abs(rated(temperature, 0) - certain).mean() for temperature in (0.3, 1.0, 2.0)}
    assert 0 < off[0.3] < off[1.0] < off[2.0]
    blind = Raters("blind", [Annotator("blind", (0.0,) * 6, 0.0, 0.0, 0.0, 0.0, 2.0)])
    assert set(blind.rate(items, np.zeros(len(items), int), temperature=0.0)) == {4.0}


def test_another_worlds_responses_are_rated_by_taste_if_asked(make):
    rows = ["What is the capital of France?"] * 2, ["Paris.", "- Paris\n- It has been the capital for long."]
    with JudgeServer() as server, pytest.raises(Exception, match="sandbox"):
        make(server).score(*rows)
    with JudgeServer(anyway=True) as server:
        assert set(make(server).score(*rows)) <= set(range(1, 8))


def test_a_rating_of_a_pool_is_a_reward(tmp_path):
    with JudgeServer() as server:
        pool = {
            "pool": "raters",
            "base_url": server.base_url,
            "models": "sandbox",
            "ledger": str(tmp_path / "l.sqlite"),
        }
        env = gym.make("AlpacaFarm-PPO-v0", oracle={"rating": {**pool, "max_concurrency": 4}, "seed": 1})
        asked, _ = env.reset(seed=0)
        _, reward, *_, info = env.step("A lion is brave.")
    assert reward == own(1).score([asked], ["A lion is brave."])[0]
    assert info["annotator"] in MEMBERS
    assert info["critique"]
    assert info["reward_components"] == {"raters_rating": reward}


WRONG = [
    ({"rating": {"pool": "ratters"}}, PoolError, "'raters'"),
    ({"rating": {"pool": "eval"}}, PoolError, "compares pairs"),
    ({"pool": "raters"}, PoolError, "rates single responses"),
    ({"rating": {"pool": "raters", "flip": 0.25}}, UnknownNameError, "'flip'"),
    ({"rating": {"name": "raters"}}, UnknownNameError, "sim_eval"),
    ({"rating": {"pool": "raters"}, "sead": 1}, UnknownNameError, "'sead'"),
]


@pytest.mark.parametrize(("mapping", "error", "told"), WRONG)
def test_wrong_mappings_are_told_by_make(mapping, error, told):
    with pytest.raises(error, match=told):
        gym.make("AlpacaFarm-PPO-v0", oracle=mapping)


def test_what_cannot_be_asked(make):
    with JudgeServer() as server, pytest.raises(InvalidResponseError, match="Task 2, output.* character 1"):
        make(server).score(["Why?", "Why?"], ["x", "y\ud800"])
    with pytest.raises(PoolError, match="rates single responses"):
        AnnotatorPool("raters", "sandbox")


def test_a_pool_made_again_is_the_same_until_its_file_changes(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("name: own\nannotators:\n  - {name: a, role: gpt4, prompt: rating_2, max_tokens: 90}\n")
    pool = {"pool": str(path), "models": "sandbox", "base_url": "http://localhost:1/v1"}
    spec = {"rating": {**pool, "ledger": str(tmp_path / "l.sqlite")}}
    data = load_dataset("sandbox")
    first = make_oracle(spec, dataset=data)
    assert make_oracle(spec, dataset=data) is first
    path.write_text(path.read_text().replace("90", "91"))
    assert make_oracle(spec, dataset=data) is not first
