"""API policies against a real server on the loopback interface: what is sent, what comes back, what goes wrong.

Repeats, time-outs, broken replies and addresses are the client's: tests/alpacafarm_env/test_api_*.py.
"""

import pickle
import time
import traceback
from collections.abc import Iterator

import pytest
from faulty_server import WireServer, failed, http, ok

from alpacafarm_env import Instruction
from alpacafarm_env.agents.api_policy import APIPolicy, APIPolicyConfig, paper_baselines
from alpacafarm_env.errors import PolicyError, UnknownNameError
from alpacafarm_env.templates import ALPACA, PromptTemplate

KEY = "sk-canary-0123456789abcdef"
ASK = Instruction("Name a fruit.")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WireServer]:
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with WireServer(echo) as running:
        yield running


def prompt_of(seen):
    return seen.body["messages"][-1]["content"] if "messages" in seen.body else seen.body["prompt"]


def echo(seen, number=1):
    return ok(f"Re: {prompt_of(seen)}", kind="chat" if "messages" in seen.body else "completion")


def bodies(server):
    return [seen.body for seen in server.seen]


def policy(server: WireServer, *, kind: str = "chat", template: PromptTemplate | None = None, **settings) -> APIPolicy:
    config = APIPolicyConfig(**{"max_retries": 2, **settings})
    return APIPolicy("m-1", base_url=server.url, api_key=KEY, kind=kind, config=config, template=template)


def failure(agent: APIPolicy, *instructions: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        agent.act(instructions or (ASK,))
    return caught.value


def test_requests_as_sent(server):
    ask = Instruction("Translate.", "Bonjour 日本")
    assert policy(server).act([ask]) == ("Re: Translate.\n\nBonjour 日本",)
    assert policy(server, kind="completion").act([ask]) == (f"Re: {ALPACA.render(ask)}",)
    settings = {"model": "m-1", "max_tokens": 300, "temperature": 0.7, "top_p": 1.0}
    assert bodies(server) == [
        settings | {"messages": [{"role": "user", "content": "Translate.\n\nBonjour 日本"}]},
        settings | {"prompt": ALPACA.render(ask)},
    ]
    assert [seen.path for seen in server.seen] == ["/v1/chat/completions", "/v1/completions"]
    assert {seen.headers["authorization"] for seen in server.seen} == {f"Bearer {KEY}"}


def test_length_limit_is_stated_in_the_prompt(server):
    policy(server, length_limit_chars=500).act([ASK])
    policy(server, length_limit_chars=1000, kind="completion").act([ASK])
    system, user = bodies(server)[0]["messages"]
    assert system["role"] == "system"
    assert "500" in system["content"]
    assert user == {"role": "user", "content": ASK}
    rule, prompt = bodies(server)[1]["prompt"].split("\n\n", 1)
    assert "1000" in rule
    assert prompt == ALPACA.render(ASK)


def test_a_system_text_is_the_systems_message_before_the_rule_of_length(server):
    policy(server, length_limit_chars=500).act([Instruction("Be brief.\n\nSum up.", "It sings.", system="Be brief.")])
    system, user = bodies(server)[0]["messages"]
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    assert "500" in system["content"]
    assert user == {"role": "user", "content": "Sum up.\n\nIt sings."}


def test_template_of_a_chat_and_settings_that_are_left_out(server):
    template = PromptTemplate("{instruction} / {input}", "Q: {instruction}")
    settings = {"temperature": None, "top_p": None, "max_tokens": 9, "max_tokens_field": "max_completion_tokens"}
    for kind in ("chat", "completion"):  # which knows max_tokens only
        policy(server, template=template, kind=kind, **settings).act([ASK])
    messages = [{"role": "user", "content": "Q: Name a fruit."}]
    assert bodies(server) == [
        {"model": "m-1", "messages": messages, "max_completion_tokens": 9},
        {"model": "m-1", "prompt": "Q: Name a fruit.", "max_tokens": 9},
    ]


def test_seeds_depend_on_seed_instruction_and_occurrence(server):
    seeds = []
    for agent in (policy(server, seed=1), policy(server, seed=1, max_concurrency=1), policy(server, seed=2)):
        server.seen.clear()
        agent.act(["a", "b", "a"])
        seeds.append(sorted((prompt_of(seen), seen.body["seed"]) for seen in server.seen))
    assert seeds[0] == seeds[1]
    assert len({seed for run in seeds for _, seed in run}) == 6
    assert all(0 <= seed < 2**31 for run in seeds for _, seed in run)


def test_order_is_kept_and_concurrency_bounded(server):
    def reply(seen, number):
        time.sleep(0.03 * (1 + number % 4))
        return echo(seen)

    server.reply = reply
    asks = [f"Say {i}." for i in range(20)]
    agent = policy(server, max_concurrency=5)
    assert agent.act(asks) == tuple(f"Re: {ask}" for ask in asks)
    assert server.most_active == 5
    assert sorted(map(prompt_of, server.seen)) == sorted(asks)
    assert agent.act([]) == ()
    assert agent.usage == {"replies": 20, "prompt_tokens": 140, "completion_tokens": 60}


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -1, "completion_tokens": 2}])
def test_unbelievable_usage_is_not_added(server, usage):
    server.reply = lambda seen, number: ok("Yes.", usage=usage)
    agent = policy(server)
    assert agent.act([ASK]) == ("Yes.",)
    assert agent.usage == {"replies": 1, "uncounted": 1}


@pytest.mark.parametrize("reply", [ok(" \n"), http(200, b"<html>Welcome</html>")])
def test_a_reply_without_text_is_an_error_and_never_an_empty_response(server, reply):
    server.reply = lambda seen, number: reply
    assert "Name a fruit." in str(failure(policy(server)))


def test_a_failure_that_cannot_pass_ends_the_call_with_what_had_arrived(server):
    server.reply = lambda seen, number: http(404, {}) if prompt_of(seen) == "c" else echo(seen)
    agent = policy(server, max_concurrency=1)
    assert failure(agent, "a", "b", "c", "d").responses == ("Re: a", "Re: b", None, None)
    assert agent.usage["replies"] == 2
    assert len(bodies(server)) == 3


def test_a_broken_key_is_refused_at_once_and_not_shown():
    with pytest.raises(PolicyError, match="OPENAI_API_KEY") as caught:
        APIPolicy("m-1", base_url="https://example.org/v1", api_key="sk-two\nlines")
    assert "sk-" not in str(caught.value)
    assert caught.value.__context__ is None


def test_the_key_is_nowhere(server):
    server.reply = lambda seen, number: failed(401, f"Bad key {KEY}")
    agent = policy(server)
    error = failure(agent)
    assert (error.__context__, error.__cause__) == (None, None)
    with pytest.raises(TypeError, match="pickled") as caught:
        pickle.dumps(agent)
    texts = [repr(error), str(vars(error)), *traceback.format_exception(error), repr(agent), str(vars(agent))]
    assert "[key]" in texts[0]
    assert not [text for text in [*texts, str(caught.value)] if KEY in text]


def test_arguments_are_checked(server):
    with pytest.raises(UnknownNameError, match="'completion'"):
        policy(server, kind="completions")
    with pytest.raises(TypeError, match="sequence"):
        policy(server).act("Name a fruit.")
    assert bodies(server) == []
    with pytest.raises(ValueError, match="allow_insecure"):
        APIPolicy("m-1", base_url="http://example.org/v1", api_key=KEY)
    assert APIPolicy("m-1", base_url="http://example.org/v1", api_key=KEY, allow_insecure=True).model == "m-1"


def test_paper_baselines_are_arguments_of_a_policy():
    agents = [APIPolicy(**arguments | {"model": "mine", "api_key": KEY}) for arguments in paper_baselines().values()]
    system, user = agents[1].request(ASK)["messages"]
    assert "1000" in system["content"]
    assert user["content"] == ALPACA.render(ASK)
    assert agents[2].request(ASK)["prompt"] == ALPACA.render(ASK)
    assert {agent.request(ASK)["model"] for agent in agents} == {"mine"}
