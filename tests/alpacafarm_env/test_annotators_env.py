"""Pools over HTTP: as rewards; beside the sandbox's judges and raters, seed for seed; through faults and kills.

A faulty run is compared with the annotator's own likelier verdicts, so a wrong label cannot hide.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from faulty_server import FaultyJudgeServer
from judge_requests import SINGLE, builder, cut, truth, unequal_pairs

import alpacafarm_env
from alpacafarm_env import sandbox
from alpacafarm_env.annotators import AnnotatorPool, JudgeServer, RatingPool, make_pool
from alpacafarm_env.annotators.config import PoolConfig, load_pool
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import PermanentAPIError, PoolError, UnknownNameError
from alpacafarm_env.llm.client import ClientConfig
from alpacafarm_env.llm.ledger import Ledger
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.oracles import compare, rated
from alpacafarm_env.oracles.base import judge
from alpacafarm_env.sandbox.judges import POOL
from alpacafarm_env.sandbox.raters import Raters


@pytest.fixture
def oracle(tmp_path):
    return lambda server, **options: {
        "pool": "alpaca_farm",
        "base_url": server.base_url,
        "models": "sandbox",
        "ledger": str(tmp_path / "ledger.sqlite"),
        **options,
    }


def batched(oracle, num_envs):
    """Without autoreset, so that infos are those of the step."""
    return gym.make_vec("AlpacaFarm-Annotators-v0", num_envs=num_envs, autoreset_mode="Disabled", oracle=oracle)


@pytest.mark.parametrize("name", ["AlpacaFarm-Annotators-v0", "AlpacaFarm-WinRate-v0"])
def test_a_step_asks_the_pool(oracle, name):
    with JudgeServer() as server:
        env = gym.make(name, oracle=oracle(server))
        json.dumps(env.spec.kwargs["oracle"])
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step("Sure! Here is an answer that says nothing.")
    assert reward in (0.0, 1.0)
    assert terminated
    assert info["annotator"] in {annotator.config.name for annotator in AnnotatorPool(models="sandbox").served}
    assert info["shown_first"] in ("a", "b")
    assert info["oracle"] == "win_rate:alpaca_farm"


@pytest.mark.parametrize(
    ("mapping", "error", "told"),
    [
        ({"pool": "alpaca_fram"}, PoolError, "alpaca_farm"),
        ({"pool": "ann", "judge": "human"}, ValueError, "'pool'"),
        ({"pool": "ann", "base_urll": "http://127.0.0.1:1/v1"}, UnknownNameError, "'base_url'"),
        ({"pool": "ann", "api_key": "sk-secret"}, UnknownNameError, "api_key_env"),
        ({"pool": "ann", "judge": "human", "api_key": "sk-secret"}, ValueError, "'api_key'"),
        ({"api_key": "sk-secret"}, ValueError, "'api_key'"),
    ],
)
def test_wrong_mappings_are_told_by_make_without_a_key(mapping, error, told):
    with pytest.raises(error, match=told) as raised:
        gym.make("AlpacaFarm-Annotators-v0", oracle=mapping)
    assert "sk-secret" not in str(raised.value)


def test_a_pool_made_again_sees_changed_files(oracle, monkeypatch, tmp_path):
    file = tmp_path / "mine.yaml"
    text = "name: mine\nannotators: [{{name: one, role: gpt4, prompt: greedy_gpt4, max_tokens: {}}}]"
    with JudgeServer(api_key="sk-right") as server:
        spec = oracle(server, pool=str(file), api_key_env="MY_KEY")
        file.write_text(text.format(20))
        monkeypatch.setenv("MY_KEY", "sk-wrong")
        with pytest.raises(PermanentAPIError):
            batched(spec, 2).unwrapped.make_oracle(spec).score(*_asked())
        monkeypatch.setenv("MY_KEY", "sk-right")
        first = batched(spec, 2).unwrapped.make_oracle(spec)
        first.score(*_asked())
        assert batched(spec, 2).unwrapped.make_oracle(spec) is first
        file.write_text(text.format(77))
        assert batched(spec, 2).unwrapped.make_oracle(spec) is not first


@pytest.mark.parametrize(
    "nest", [lambda pool: pool, lambda pool: {"judge": pool}, lambda pool: {"ensemble": ["gold", pool]}, "rating"]
)
def test_a_server_elsewhere_needs_key_and_budget(monkeypatch, tmp_path, nest):
    def make(**options):
        spec = {"pool": "raters" if nest == "rating" else "ann", "ledger": str(tmp_path / "l.sqlite"), **options}
        return gym.make("AlpacaFarm-PPO-v0", oracle={"rating": spec} if nest == "rating" else nest(spec))

    with pytest.raises(PermanentAPIError, match="OPENAI_API_KEY"):
        make(budget_usd=5)
    for local in ({"base_url": "http://localhost:1/v1"}, {"replay": True}):
        make(**local)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    for elsewhere in ({}, {"base_url": "https://example.invalid/v1"}):
        with pytest.raises(PoolError, match="budget_usd"):
            make(**elsewhere)
        for budget_usd in (5, None):
            make(**elsewhere, budget_usd=budget_usd)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    make()


def _asked():
    instructions = load_dataset("sandbox").instructions("preference")[:2]
    return instructions, ["An answer.", "Another."]


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_is_not_replaced_by_another(monkeypatch, value):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    if value is not None:
        monkeypatch.setenv("OTHER_KEY", value)
    with pytest.raises(PoolError, match="api_key_env"):
        alpacafarm_env.annotators.make_pool(api_key_env="OTHER_KEY", base_url="https://example.invalid/v1")


NUM = 250
SAME_DETAILS = ("annotator", "shown_first", "cost_usd")
JUDGES = {"eval": "sim_eval", "ann": "sim_ann"}


@pytest.fixture(scope="module")
def pairs():
    """Pairs of unequal responses: instructions, a, b."""
    return cut(unequal_pairs(), NUM)


@pytest.fixture(scope="module")
def server():
    """Its own seed is another: it is the pool's that counts."""
    with JudgeServer(seed=99) as server:
        yield server


ARRANGED = [(1, False, (NUM,)), (1, False, (60, 60, 130)), (-1, True, (1, 7, 92, 150))]


@pytest.mark.parametrize(
    ("pool", "seed", "step", "swap", "sizes"),
    [("eval", 0, *ARRANGED[0]), ("ann", 1, *ARRANGED[1]), ("ann", 0, *ARRANGED[2])],
)
def test_verdicts_in_any_calls_and_orders(server, tmp_path, pairs, pool, seed, step, swap, sizes):
    """Exactly, and in all they have in common; every pair is asked about anew, among other neighbours."""
    instructions, *ab = (column[::step] for column in pairs)
    arranged = [instructions, *(ab[::-1] if swap else ab)]
    ledger, own = tmp_path / "ledger.sqlite", sandbox.judge(JUDGES[pool], seed)
    live = make_pool(pool, models="sandbox", base_url=server.base_url, ledger=ledger, seed=seed)
    ends = np.cumsum(sizes).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        rows = [column[start:end] for column in arranged]
        got, wanted = compare(live, *rows), compare(own, *rows)
        np.testing.assert_array_equal(got.scores, wanted.scores)
        assert set(wanted.details) == {*SAME_DETAILS, *({"noised"} & set(got.details))}
        for detail in wanted.details:
            np.testing.assert_array_equal(got.details[detail], wanted.details[detail])


MEMBERS = [member.name for member in load_pool("raters").annotators]


@pytest.fixture(scope="module")
def responses():
    """Both responses to each of 60 instructions, one after the other."""
    rows = sandbox.SANDBOX.preferences("preference")[:60]
    return [row.instruction for row in rows for _ in range(2)], [text for row in rows for text in row.responses]


@pytest.fixture
def make(tmp_path):
    return builder(tmp_path, RatingPool)


def own(seed=0):
    """The sandbox's raters of the bundled pool's names."""
    return Raters("sim_eval", [{a.name: a for a in POOL}[name] for name in MEMBERS], seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_ratings_are_those_of_the_sandboxs_raters(make, responses, seed, short_waits):
    """The server's own seed is another; few of its replies fail, and those are asked again as they were."""
    with FaultyJudgeServer({"cut_json": 0.1, "server_error": 0.05}, seed=99) as server:
        got, wanted = judge(make(server, seed=seed), *responses), judge(own(seed), *responses)
    np.testing.assert_array_equal(got.scores, wanted.scores)
    assert set(got.scores) == set(range(1, 8))
    for detail in ("annotator", "critique"):
        np.testing.assert_array_equal(got.details[detail], wanted.details[detail])
    assert set(got.details["annotator"]) == set(MEMBERS)


def test_a_rating_is_asked_for_once(make, responses):
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


def test_a_rating_of_a_pool_is_a_reward(oracle):
    with JudgeServer() as server:
        pool = oracle(server, pool="raters", max_concurrency=4)
        env = gym.make("AlpacaFarm-PPO-v0", oracle={"rating": pool, "seed": 1})
        asked, _ = env.reset(seed=0)
        _, reward, *_, info = env.step("A lion is brave.")
    assert reward == own(1).score([asked], ["A lion is brave."])[0]
    assert info["annotator"] in MEMBERS
    assert info["critique"]
    assert info["reward_components"] == {"raters_rating": reward}


RATES = {
    "rate_limit": 0.1,
    "server_error": 0.05,
    "html": 0.02,
    "cut_json": 0.03,
    "null_content": 0.01,
    "wrong_count": 0.02,
    "hang": 0.02,
}
"""25 % in all."""
CONFIG = ClientConfig(max_concurrency=64, max_attempts=12, attempt_timeout_s=2.0, deadline_s=600.0)


def tally(verdicts, columns):
    """(right, wrong, without verdict), by the annotator's own likelier verdict in the order that was shown."""
    right, missing = truth(verdicts, *columns), np.isnan(verdicts.scores)
    return int((right & ~missing).sum()), int((~right & ~missing).sum()), int(missing.sum())


def judged(path, server, columns, pool=SINGLE):
    ledger = Ledger(path)
    pool = AnnotatorPool(pool, "sandbox", base_url=server.base_url, ledger=ledger)
    pool.limits = CONFIG
    verdicts = pool.judge(*columns)
    spending = ledger.do(sql.spending).result()
    ledger.close()
    return verdicts, spending.sum()


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("count", "size"), [(100, 1), (100, 5), pytest.param(2_000, 1, marks=pytest.mark.slow)])
def test_faults_give_right_labels_or_typed_errors(tmp_path, count, size):
    columns = cut(unequal_pairs(None), count)
    pool = PoolConfig(name="p", annotators=(SINGLE.annotators[0].model_copy(update={"batch_size": size}),))
    with FaultyJudgeServer(RATES) as server:
        verdicts, total = judged(tmp_path / "ledger.sqlite", server, columns, pool)
        stats = server.stats()
    right, wrong, missing = tally(verdicts, columns)
    assert (right + missing, wrong) == (count, 0)
    assert all("Error: " in reason for reason in verdicts.details["unscored_reason"][np.isnan(verdicts.scores)])
    assert missing <= count / 1000 if size == 1 else missing <= 4
    attempts = total[["answered", "failed", "unknown", "running"]].sum()
    assert attempts / count <= 1.5
    assert attempts == stats["requests"]
    # Replies of a wrong count are answers to the ledger, which are paid for and asked again.
    clean = stats["requests"] - sum(stats["by_fault"].values())
    assert total.answered == clean + stats["by_fault"].get("wrong_count", 0)


SCRIPT = """
import json, sys
from alpacafarm_env.annotators.config import PoolConfig
from alpacafarm_env.annotators.pool import AnnotatorPool
from alpacafarm_env.llm.ledger import Ledger
lease_s, path, url = sys.argv[1:]
pool, rows = json.load(open(path + ".json"))
ledger = Ledger(path, lease_s=float(lease_s))
pool = AnnotatorPool(PoolConfig(**pool), "sandbox", base_url=url, ledger=ledger, max_concurrency=8)
print(pool.judge(*rows).scores.tolist())
"""


def asker(path, lease_s, columns):
    """The command, but for the server's address, of a process that asks about the pairs with this ledger."""
    texts = [list(map(str, column)) for column in columns]
    Path(f"{path}.json").write_text(json.dumps([SINGLE.model_dump(mode="json"), texts]), encoding="utf-8")
    return [sys.executable, "-c", SCRIPT, str(lease_s), str(path)]


@pytest.mark.parametrize(("count", "kills"), [(120, 2), pytest.param(2_000, 50, marks=pytest.mark.slow)])
def test_kills_cost_at_most_what_was_in_flight(tmp_path, count, kills):
    """The server bills each answer; a kill can waste those in flight, eight at most, and never a stored one."""
    path, rng, done = tmp_path / "ledger.sqlite", random.Random(0), 0
    columns = cut(unequal_pairs(None), count)
    command = asker(path, 1, columns)
    with JudgeServer(latency_s=0.02) as server:
        for _ in range(kills):
            child = subprocess.Popen([*command, server.base_url], stdout=subprocess.DEVNULL)
            asked = server.stats()["requests"]
            while server.stats()["requests"] == asked and child.poll() is None:
                time.sleep(0.005)  # until it has begun to ask
            time.sleep(rng.uniform(0, 0.8 * count / kills / 200))
            child.send_signal(signal.SIGKILL)
            child.wait()
            with Ledger(path) as ledger:
                answered = ledger.do(sql.spending).result().sum().answered
            assert answered >= done
            done = answered
        subprocess.run([*command, server.base_url], check=True, stdout=subprocess.DEVNULL)
        charged = server.stats()["charged"]["requests"]
        verdicts, total = judged(path, server, columns)
        assert server.stats()["charged"]["requests"] == charged
    right, wrong, missing = tally(verdicts, columns)
    assert (right, wrong, missing) == (count, 0, 0)
    assert total.answered == count
    assert charged - count <= total.unknown <= 8 * kills


@pytest.mark.parametrize(("processes", "count"), [(2, 40), pytest.param(8, 500, marks=pytest.mark.slow)])
def test_processes_that_ask_the_same_pairs_pay_once(tmp_path, processes, count):
    with JudgeServer(latency_s=0.05) as server:
        command = [*asker(tmp_path / "ledger.sqlite", 15, cut(unequal_pairs(None), count)), server.base_url]
        children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
        answers = {child.communicate(timeout=100)[0] for child in children}
        assert server.stats()["requests"] == count
    assert len(answers) == 1
    assert answers != {b""}
