"""The judge server and `serve`: verdicts in the formats that prompts ask for, and an oracle's scores, over HTTP."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from judge_requests import LOOK_UP, MEMBERS, PATHS, chances, connect, make_body, pairs, port_of, post, text_of
from starlette.applications import Starlette

from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import main
from alpacafarm_env.annotators.config import load_prompt
from alpacafarm_env.annotators.prompts import Item, parse
from alpacafarm_env.errors import PoolError
from alpacafarm_env.judge_server import scoring
from alpacafarm_env.judge_server.sandbox_judge import SandboxJudge
from alpacafarm_env.judge_server.scoring import ScoreServer
from alpacafarm_env.judge_server.server import KINDS, JudgeServer
from alpacafarm_env.llm.replies import read_reply, reported_usage
from alpacafarm_env.llm.requests import TokenBounds
from alpacafarm_env.oracles import Constant, MicroBatched, judge, make_oracle
from alpacafarm_env.sandbox.judges import GREEDY, POOL, Annotators

SERVERS = [ScoreServer, partial(ScoreServer, app=Starlette())]
"""The server by itself, and beside an application."""
GOOD = {"instructions": ["Say a.", "Say b."], "responses": ["a", "bb"]}


@pytest.fixture(scope="module", params=SERVERS)
def server(request):
    with request.param(Constant(0.5)) as running:
        yield running


def ask(server, path="/score", body=GOOD, method="POST"):
    """Status and parsed body of one request."""
    with connect(server.url) as connection:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def refused(server, body):
    """Status of a refusal, and the field that it names."""
    status, content = ask(server, body=body)
    return status, content["error"]["param"]


@pytest.mark.parametrize(("name", "num"), [("gold", 64), pytest.param("surrogate", 1000, marks=pytest.mark.slow)])
def test_many_clients_get_the_oracles_scores(name, num):
    """A reward model's to 1e-5, the difference that other rows in a batch make."""
    oracle, rows, clients = make_oracle(name, dataset=sandbox.SANDBOX), 4, 8
    stored = sandbox.SANDBOX.preferences("preference")
    pairs = [(str(row.instruction), text) for row in stored for text in row.responses][: num * rows]
    instructions, responses = zip(*pairs, strict=True)
    expected = judge(oracle, instructions, responses).scores

    def client(number):
        with connect(server.url, timeout=60) as connection:
            for start in range(number * rows, num * rows, clients * rows):
                part = slice(start, start + rows)
                body = {"instructions": instructions[part], "responses": responses[part]}
                status, _, content = post(connection, "/score", body)
                assert status == 200
                np.testing.assert_allclose(content["scores"], expected[part], rtol=0, atol=1e-5)

    with ScoreServer(oracle) as server, ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, range(clients)))
        told = ask(server, "/health", b"", method="GET")
        assert told == (200, {"status": "healthy", "oracle": oracle.name, "oracle_calls": server.oracle.calls})
        assert ask(server, "/get_reward")[0] == ask(server, method="GET")[0] == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"instructions": None}, "instructions"),
        ({"responses": ["a"]}, "responses"),
        ({"query": ["a"]}, "query"),
        ({"responses": ["a", 5]}, "responses[1]"),
        ({"responses": "ab"}, "responses"),
        ({"instructions": ["a", "\ud800"]}, "instructions[1]"),
        ({"responses": ["a", "b" * (2**20 + 1)]}, "responses[1]"),
        ({"responses": ["a"] * (scoring.MAX_ROWS + 1)}, "responses"),
    ],
)
def test_a_wrong_field_is_named(server, change, field):
    assert refused(server, GOOD | change) == (400, field)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_request_is_refused(server, body):
    assert refused(server, body) == (400, None)


def test_empty_batches_and_empty_texts_are_legal(server):
    assert ask(server, body={"instructions": [], "responses": []}) == (200, {"oracle": "constant", "scores": []})
    assert ask(server, "/score?x=1", {"instructions": [""], "responses": [""]})[1]["scores"] == [0.5]


@pytest.mark.parametrize("make", SERVERS)
def test_oracles_errors_are_answered_and_counted(make, caplog):
    class Broken(Constant):
        def score(self, instructions, responses):
            raise KeyError("lost")

    with make(Broken()) as server:
        status, content = ask(server)
        assert (status, content["error"]["code"]) == (500, "oracle_error")
    assert "lost" in content["error"]["message"]
    assert "lost" in caplog.text


@pytest.mark.parametrize("make", SERVERS)
def test_clients_who_ask_together_are_one_call(make):
    oracle = MicroBatched(Constant(0.5), wait_s=5.0)
    oracle._last = 24  # as after a call for 24
    with make(oracle) as server, ThreadPoolExecutor(24) as threads:
        assert {status for status, _ in threads.map(lambda _: ask(server), range(24))} == {200}
    assert oracle.calls == 1


def test_what_cannot_be_served_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", LOOK_UP)
    for args, reason in [
        (["AlpacaFarm-Token-v0"], "whole responses"),
        (["AlpacaFarm-PPO"], "AlpacaFarm-PPO-v0"),
        (["AlpacaFarm-PPO-v0", "--oracle", "constant", "--dataset", "no/such"], "no/such"),
    ]:
        assert main(["serve", *args]) == 2
        assert reason in capsys.readouterr().err


ALL = [*(annotator.name for annotator in POOL), "greedy_gpt4"]
FOREIGN = "Why is the sky blue?"


def own_chances(name, items):
    """P(second shown preferred) from the sandbox's oracle itself."""
    group = GREEDY if name == "greedy_gpt4" else POOL
    index = [annotator.name for annotator in group].index(name)
    return Annotators("any", group).probabilities(*zip(*items, strict=True), index)


def verdicts_of(connection, name, items, **settings):
    """All items' verdicts, asked in requests of the annotator's batch size."""
    size, opinions = MEMBERS[name].batch_size, []
    for start in range(0, len(items), size):
        batch = items[start : start + size]
        path, body = make_body(name, batch, **settings)
        status, _, content = post(connection, path, body)
        assert status == 200, content
        kind = "chat" if path == PATHS["chat"] else "completion"
        opinions += parse(load_prompt(MEMBERS[name].prompt).format, read_reply(kind, json.dumps(content)), len(batch))
    return [opinion.score for opinion in opinions]


@pytest.fixture(scope="module")
def judges():
    with JudgeServer(seed=5) as judges:
        yield judges


@pytest.fixture
def connection(judges):
    with connect(judges) as connection:
        yield connection


def test_routes(judges, connection):
    assert {kind: route for route, kind in KINDS.items()} == PATHS
    assert judges.base_url == f"http://127.0.0.1:{port_of(judges)}/v1"
    connection.request("GET", "/v1/models")
    listed = json.loads(connection.getresponse().read())
    assert [model["id"] for model in listed["data"]] == ["sandbox-chatgpt", "sandbox-davinci003", "sandbox-gpt4"]
    connection.request("GET", "/stats?pretty")
    assert json.loads(connection.getresponse().read()) == judges.stats()
    status, _, content = post(connection, "/v1/embeddings", {})
    assert (status, content["error"]["code"]) == (404, "not_found")
    connection.request("GET", "/v1/completions")
    assert connection.getresponse().status == 404


def test_bad_bodies_are_refused_one_by_one(connection):
    path, body = make_body("chatgpt_4", pairs(1))
    endless = json.dumps({**body, "extra": 0}).replace('"extra": 0', '"extra": 1e999').encode()
    for content in (b"", b"{", b"\xff", b"[]", b'{"model": NaN}', b'{"a": 1e999}', b"[" * 200_000, endless):
        status, _, refusal = post(connection, path, content)
        assert (status, refusal["error"]["code"]) == (400, "invalid_request_error")
    assert post(connection, path, body)[0] == 200


def test_only_the_key_is_let_in():
    request = make_body("chatgpt_4", pairs(1))
    with JudgeServer(api_key="sk-right") as judges, connect(judges) as connection:
        for key in ("sk-wrong", "", "sk-right2", "sk-r\xefght"):
            status, _, content = post(connection, *request, key=key)
            assert (status, content["error"]["code"]) == (401, "invalid_api_key")
            assert "sk-" not in content["error"]["message"]
        assert post(connection, *request, key="sk-right")[0] == 200
        assert judges.stats()["by_status"] == {"200": 1, "401": 4}


@pytest.mark.parametrize("name", ALL)
def test_probabilities_and_likelier_verdicts_are_the_annotators_own(connection, name):
    items = pairs(60)
    chances_of_all = own_chances(name, items)
    np.testing.assert_allclose(chances(SandboxJudge(), name, items), chances_of_all, rtol=1e-12)
    few = items[: 4 * MEMBERS[name].batch_size]
    assert verdicts_of(connection, name, few, temperature=0) == (chances_of_all[: len(few)] > 0.5).tolist()


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-9, 0.5, 2.0])
def test_temperatures_divide_the_log_odds(temperature):
    """Next to zero the likelier verdict is certain."""
    judging, items = SandboxJudge(), pairs(60)
    chances = own_chances("chatgpt_4", items)
    odds = np.abs(np.log(chances) - np.log1p(-chances))
    bodies = [make_body("chatgpt_4", [item], temperature=temperature)[1] for item in items]
    answers = [judging.answer(judging.read("chat", body), "key").verdicts[0].second for body in bodies]
    share = np.mean(answers == (chances > 0.5))
    expected = 1.0 if temperature < 1e-6 else np.mean(1 / (1 + np.exp(-odds / temperature)))
    assert share == pytest.approx(expected, abs=0.0 if temperature < 1e-6 else 0.2)  # 3 standard errors of 60


@pytest.mark.parametrize("seed", [5, 6])
def test_requests_without_a_seed_take_the_servers(connection, seed):
    items = pairs(20, start=1000)
    with JudgeServer(seed=seed) as other, connect(other) as there:
        for own in ({}, {"seed": None}, {"seed": 0}, {"seed": -(2**70)}):
            here, away = (verdicts_of(c, "gpt4_5", items, **own) for c in (connection, there))
            assert (here == away) == (seed == 5 or own.get("seed") is not None)


def test_weighted_prompt_reads_the_probability(connection):
    items = pairs(40)
    got = verdicts_of(connection, "weighted_gpt4", items, logprobs=True, top_logprobs=20)
    np.testing.assert_allclose(got, own_chances("greedy_gpt4", items), atol=1e-9)


def test_shared_prompt_is_told_apart_by_the_model():
    judging = SandboxJudge()
    assert judging.annotator("gpt4_4", "sandbox-gpt4") == "gpt4_4"
    assert judging.annotator("gpt4_4", "sandbox-chatgpt") == "chatgpt_3"
    assert judging.annotator("gpt4_4", "something-else") == "gpt4_4"


def surface_gap(annotator, first, second):
    """The documented tastes, computed here from the texts alone."""
    length = [math.log2(min(len(text), 300) + 10) for text in (first, second)]
    lists = [float(text.startswith("- ") or "\n- " in text) for text in (first, second)]
    return annotator.length * (length[1] - length[0]) + annotator.lists * (lists[1] - lists[0]) - annotator.position


@pytest.mark.parametrize("annotator", POOL, ids=lambda annotator: annotator.name)
@pytest.mark.parametrize(
    ("first", "second"), [("Air.", "Because of the air. " * 9), ("- a\n- b", "a b"), ("", "x" * 999)]
)
def test_instructions_of_another_world_are_judged_by_taste(annotator, first, second):
    got = chances(SandboxJudge(), annotator.name, [Item(FOREIGN, first, second)])[0]
    assert got == pytest.approx(1 / (1 + math.exp(-surface_gap(annotator, first, second) / annotator.temperature)))


def test_batches_may_mix_worlds_if_asked(connection):
    items = [*pairs(2), Item(FOREIGN, "short", "much longer " * 20), *pairs(1, start=7)]
    expected = chances(SandboxJudge(), "gpt4_5", items)
    status, _, content = post(connection, *make_body("gpt4_5", items))
    assert status == 400
    assert FOREIGN in content["error"]["message"]
    assert "1 of 4" in content["error"]["message"]
    with JudgeServer(anyway=True) as judges, connect(judges) as anyway:
        assert verdicts_of(anyway, "gpt4_5", items, temperature=0) == (expected > 0.5).tolist()
    np.testing.assert_allclose(expected[[0, 1, 3]], own_chances("gpt4_5", [items[0], items[1], items[3]]))


def test_limit_on_tokens_cuts_the_text(connection):
    path, body = make_body("gpt4_2", pairs(3), max_tokens=3)
    _, _, content = post(connection, path, body)
    assert (len(text_of(content)), content["choices"][0]["finish_reason"]) == (12, "length")


WRONG = {
    "model": [None, ""],
    "temperature": ["hot", 3, True],
    "seed": ["1", 1.0, True],
    "max_tokens": [0],
    "max_completion_tokens": [1.5],
    "stream": [True],
    "n": [2],
    "messages": ["hello", [], [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}]],
    "top_logprobs": [21],
}


@pytest.mark.parametrize("field", WRONG)
def test_unanswerable_requests_are_refused_with_the_reason(judges, connection, field):
    path, body = make_body("gpt4_4", pairs(1), logprobs=True, top_logprobs=2)
    for value in WRONG[field]:
        before = judges.stats()
        status, _, content = post(connection, path, {**body, field: value})
        after = judges.stats()
        assert (status, content["error"]["code"]) == (400, "invalid_request_error")
        assert f"\n  {field}" in content["error"]["message"]
        assert after["requests"] == before["requests"] + 1
        assert after["charged"] == before["charged"]


def test_a_pool_of_ones_own_is_read_anew(tmp_path):
    file = tmp_path / "mine.yaml"
    for name in ("before", "after"):
        file.write_text(
            f"{{name: p, annotators: [{{name: {name}, role: mine, prompt: gpt4_4, max_tokens: 9}}]}}", encoding="utf-8"
        )
        assert SandboxJudge(pools=[file]).annotator("gpt4_4", "model-of-mine") == name


def test_a_changed_prompt_is_not_understood():
    _, body = make_body("gpt4_4", pairs(1))
    *head, last = body["messages"]
    judging = SandboxJudge()
    assert judging.read("chat", body).annotator == "gpt4_4"
    for content in (last["content"] + " Be quick.", "hello", "\ud800"):
        with pytest.raises(PoolError, match="prompts"):
            judging.read("chat", {**body, "messages": [*head, {**last, "content": content}]})
    with pytest.raises(PoolError, match="prompt: "):
        judging.read("completion", {**body, "prompt": ["a", "b"]})


@pytest.mark.parametrize("name", ALL)
def test_the_client_believes_the_tokens_that_are_counted(connection, name):
    for text in ("A short answer.", "日本語の文章です。", "🙂🎉", "é" * 500):
        path, body = make_body(name, [Item(item.instruction, text * 400, text * 300) for item in pairs(1)])
        status, _, content = post(connection, path, body)
        assert status == 200, content
        usage = reported_usage(json.dumps(content))
        assert TokenBounds.of(body).believable(usage) == usage
