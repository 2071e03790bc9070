"""API policies against a real server on the loopback interface: what is sent, what comes back, what goes wrong.

Repeats, time-outs, broken replies and addresses are the client's: tests/alpacafarm_env/test_api_*.py.
"""

import logging
import pickle
import time
import traceback
from collections.abc import Iterator

import pytest
from servers import Server, answer, echo, prompt_of

from alpacafarm_env import Instruction
from alpacafarm_env.agents.api_policy import APIPolicy, APIPolicyConfig, paper_baselines
from alpacafarm_env.errors import PolicyError, UnknownNameError
from alpacafarm_env.templates import ALPACA, PromptTemplate

KEY = "sk-canary-0123456789abcdef"
ASK = Instruction("Name a fruit.")
FAST = {"Retry-After-Ms": "1"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    running = Server()
    yield running
    running.close()


def policy(server: Server, *, kind: str = "chat", template: PromptTemplate | None = None, **settings) -> APIPolicy:
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
    assert server.bodies == [
        settings | {"messages": [{"role": "user", "content": "Translate.\n\nBonjour 日本"}]},
        settings | {"prompt": ALPACA.render(ask)},
    ]
    assert server.paths == ["/v1/chat/completions", "/v1/completions"]
    assert server.keys == [KEY] * 2


def test_length_limit_is_stated_in_the_prompt(server):
    policy(server, length_limit_chars=500).act([ASK])
    policy(server, length_limit_chars=1000, kind="completion").act([ASK])
    system, user = server.bodies[0]["messages"]
    assert system["role"] == "system"
    assert "500" in system["content"]
    assert user == {"role": "user", "content": ASK}
    rule, prompt = server.bodies[1]["prompt"].split("\n\n", 1)
    assert "1000" in rule
    assert prompt == ALPACA.render(ASK)


def test_a_system_text_is_the_systems_message_before_the_rule_of_length(server):
    policy(server, length_limit_chars=500).act([Instruction("Be brief.\n\nSum up.", "It sings.", system="Be brief.")])
    system, user = server.bodies[0]["messages"]
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
    assert server.bodies == [
        {"model": "m-1", "messages": messages, "max_completion_tokens": 9},
        {"model": "m-1", "prompt": "Q: Name a fruit.", "max_tokens": 9},
    ]


def test_seeds_depend_on_seed_instruction_and_occurrence(server):
    seeds = []
    for agent in (policy(server, seed=1), policy(server, seed=1, max_concurrency=1), policy(server, seed=2)):
        server.bodies.clear()
        agent.act(["a", "b", "a"])
        seeds.append(sorted((prompt_of(body), body["seed"]) for body in server.bodies))
    assert seeds[0] == seeds[1]
    assert len({seed for run in seeds for _, seed in run}) == 6
    assert all(0 <= seed < 2**31 for run in seeds for _, seed in run)


def test_keys(server, monkeypatch):
    """None is needed on this machine; one of the environment is read; a broken one is refused, and not shown."""
    APIPolicy("m-1", base_url=server.url).act([ASK])
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    APIPolicy("m-1", base_url=server.url).act([ASK])
    assert server.keys == ["no-key", KEY]
    with pytest.raises(PolicyError, match="OPENAI_API_KEY") as caught:
        APIPolicy("m-1", base_url="https://example.org/v1", api_key="sk-two\nlines")
    assert "sk-" not in str(caught.value)
    assert caught.value.__context__ is None


def test_order_is_kept_and_concurrency_bounded(server):
    def reply(body, attempt):
        time.sleep(0.03 * (1 + attempt % 4))
        return 200, echo(body)

    server.reply = reply
    asks = [f"Say {i}." for i in range(20)]
    agent = policy(server, max_concurrency=5)
    assert agent.act(asks) == tuple(f"Re: {ask}" for ask in asks)
    assert server.most_active == 5
    assert sorted(map(prompt_of, server.bodies)) == sorted(asks)
    assert agent.act([]) == ()
    assert agent.usage == {"replies": 20, "prompt_tokens": 140, "completion_tokens": 60}


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -1, "completion_tokens": 2}])
def test_unbelievable_usage_is_not_added(server, usage):
    server.reply = lambda body, attempt: (200, answer("Yes.", usage=usage))
    agent = policy(server)
    assert agent.act([ASK]) == ("Yes.",)
    assert agent.usage == {"replies": 1, "uncounted": 1}


@pytest.mark.parametrize("reply", [answer(" \n"), b"<html>Welcome</html>"])
def test_a_reply_without_text_is_an_error_and_never_an_empty_response(server, reply):
    server.reply = lambda body, attempt: (200, reply)
    assert "Name a fruit." in str(failure(policy(server)))


def test_a_failure_that_cannot_pass_ends_the_call_with_what_had_arrived(server):
    server.reply = lambda body, attempt: (404, {}) if prompt_of(body) == "c" else (200, echo(body))
    agent = policy(server, max_concurrency=1)
    assert failure(agent, "a", "b", "c", "d").responses == ("Re: a", "Re: b", None, None)
    assert agent.usage["replies"] == 2
    assert len(server.bodies) == 3


def test_the_key_is_nowhere(server, caplog, capfd):
    """A server that quotes the key in its refusals; everything the libraries log; every way to print an error."""
    caplog.set_level(logging.DEBUG)
    texts = []
    for status, body in (
        (401, {"error": {"message": f"Bad key {KEY}"}}),
        (500, KEY.encode()),
        (200, {"error": KEY}),
        (200, answer([KEY])),
        (200, f"{{{KEY}".encode()),
    ):
        server.reply = lambda _, attempt, status=status, body=body: (status, body, FAST)
        agent = policy(server, max_retries=1)
        error = failure(agent)
        assert error.__context__ is None
        assert error.__cause__ is None
        texts += [repr(error), str(vars(error)), *traceback.format_exception(error), repr(agent), str(vars(agent))]
        with pytest.raises(TypeError, match="pickled") as caught:
            pickle.dumps(agent)
        texts.append(str(caught.value))
    assert server.keys[0] == KEY
    assert any("[key]" in text for text in texts)
    assert caplog.records
    texts += [record.getMessage() for record in caplog.records] + [str(vars(record)) for record in caplog.records]
    assert not [text for text in [*texts, *capfd.readouterr()] if KEY in text]


def test_arguments_are_checked(server):
    with pytest.raises(UnknownNameError, match="'completion'"):
        policy(server, kind="completions")
    with pytest.raises(TypeError, match="sequence"):
        policy(server).act("Name a fruit.")
    assert server.bodies == []
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
