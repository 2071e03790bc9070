"""API policies against a real server on the loopback interface: what is sent, what comes back, what goes wrong."""

import asyncio
import json
import logging
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import Server, answer, echo, prompt_of

from alpacafarm_env import Instruction
from alpacafarm_env.agents.api_policy import APIPolicy, APIPolicyConfig, TokenUsage, paper_baselines
from alpacafarm_env.errors import AlpacaFarmError, PolicyError, UnknownNameError
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
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def policy(server: Server, *, kind: str = "chat", template: PromptTemplate | None = None, **settings) -> APIPolicy:
    config = APIPolicyConfig(**{"max_retries": 2, **settings})
    return APIPolicy("m-1", base_url=server.url, api_key=KEY, kind=kind, config=config, template=template)


def failure(agent: APIPolicy, *instructions: str) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        agent.act(instructions or (ASK,))
    return caught.value


# ------------------------------------------------------------------------------------------------ what is sent


def test_chat_request_as_sent(server):
    assert policy(server).act([Instruction("Translate.", "Bonjour 日本")]) == ("Re: Translate.\n\nBonjour 日本",)
    assert server.bodies == [
        {
            "model": "m-1",
            "messages": [{"role": "user", "content": "Translate.\n\nBonjour 日本"}],
            "max_tokens": 300,
            "temperature": 0.7,
            "top_p": 1.0,
        }
    ]
    assert server.paths == ["/v1/chat/completions"]
    assert server.keys == [f"Bearer {KEY}"]


def test_completion_request_as_sent(server):
    ask = Instruction("Translate.", "Bonjour")
    assert policy(server, kind="completion").act([ask]) == (f"Re: {ALPACA.render(ask)}",)
    body = {"model": "m-1", "prompt": ALPACA.render(ask), "max_tokens": 300, "temperature": 0.7, "top_p": 1.0}
    assert server.bodies == [body]
    assert server.paths == ["/v1/completions"]


def test_length_limit_is_stated_in_the_prompt(server):
    policy(server, length_limit_chars=500).act([ASK])
    policy(server, length_limit_chars=1000, kind="completion").act([ASK])
    system, user = server.bodies[0]["messages"]
    assert system["role"] == "system"
    assert "500 characters" in system["content"]
    assert user == {"role": "user", "content": ASK}
    rule, prompt = server.bodies[1]["prompt"].split("\n\n", 1)
    assert "1000 characters" in rule
    assert prompt == ALPACA.render(ASK)


def test_template_of_a_chat_and_settings_that_are_left_out(server):
    template = PromptTemplate("{instruction} / {input}", "Q: {instruction}")
    settings = {"temperature": None, "top_p": None, "max_tokens": 9, "max_tokens_field": "max_completion_tokens"}
    policy(server, template=template, **settings).act([ASK])
    messages = [{"role": "user", "content": "Q: Name a fruit."}]
    assert server.bodies == [{"model": "m-1", "messages": messages, "max_completion_tokens": 9}]


def test_completion_requests_know_max_tokens_only(server):
    policy(server, kind="completion", max_tokens_field="max_completion_tokens").act([ASK])
    assert server.bodies[0]["max_tokens"] == 300
    assert "max_completion_tokens" not in server.bodies[0]


def test_seeds_depend_on_seed_instruction_and_occurrence(server):
    asks = ["a", "b", "a"]
    seeds = []
    for agent in (policy(server, seed=1), policy(server, seed=1, max_concurrency=1), policy(server, seed=2)):
        server.bodies.clear()
        agent.act(asks)
        seeds.append(sorted((prompt_of(body), body["seed"]) for body in server.bodies))
    assert seeds[0] == seeds[1]
    assert len({seed for run in seeds for _, seed in run}) == 6
    assert all(0 <= seed < 2**31 for run in seeds for _, seed in run)


def test_key_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    APIPolicy("m-1", base_url=server.url).act([ASK])
    assert server.keys == [f"Bearer {KEY}"]


# ------------------------------------------------------------------------------------------------ what comes back


def test_order_is_kept_and_concurrency_bounded(server):
    delays = random.Random(0)

    def reply(body, attempt):
        time.sleep(delays.uniform(0.005, 0.05))
        return 200, echo(body)

    server.reply = reply
    asks = [f"Say {i}." for i in range(40)]
    assert policy(server, max_concurrency=5).act(asks) == tuple(f"Re: {ask}" for ask in asks)
    assert server.most_active == 5
    assert sorted(map(prompt_of, server.bodies)) == sorted(asks)


def test_nothing_to_ask(server):
    assert policy(server).act([]) == ()
    assert server.bodies == []


def test_act_in_a_running_event_loop(server):
    async def notebook():
        return policy(server).act(["a", "b"])

    assert asyncio.run(notebook()) == ("Re: a", "Re: b")


def test_failure_in_a_running_event_loop(server):
    server.reply = lambda body, attempt: (401, {"error": {"message": "no"}})

    async def notebook():
        return failure(policy(server))

    assert "refused the key" in str(asyncio.run(notebook()))


def test_usage_is_counted(server):
    agent = policy(server)
    agent.act(["a", "b"])
    agent.act(["c"])
    assert agent.usage == TokenUsage(replies=3, prompt_tokens=21, completion_tokens=9)


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -1, "completion_tokens": 2}, {"prompt_tokens": 3}, "free"])
def test_unbelievable_usage_is_not_added(server, usage):
    server.reply = lambda body, attempt: (200, answer("Yes.", usage=usage))
    agent = policy(server)
    assert agent.act([ASK]) == ("Yes.",)
    assert agent.usage == TokenUsage(replies=1, uncounted=1)


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failure_that_passes_is_repeated(server, status):
    server.reply = lambda body, attempt: (status, {"error": {}}, FAST) if attempt <= 2 else (200, echo(body))
    assert policy(server).act([ASK]) == (f"Re: {ASK}",)
    assert len(server.bodies) == 3


def test_a_failure_that_stays_is_an_error_after_the_repeats(server):
    server.reply = lambda body, attempt: (500, {"error": {"message": "out of luck"}}, FAST)
    error = failure(policy(server))
    assert len(server.bodies) == 3
    for part in ("'m-1'", "3 attempts", "500", "out of luck", "Name a fruit."):
        assert part in str(error)
    assert isinstance(error, AlpacaFarmError)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "OPENAI_API_KEY"),
        (403, "may not use"),
        (404, "no model 'm-1'"),
        (400, "max_tokens_field"),
        (422, "config"),
    ],
)
def test_a_failure_that_cannot_pass_ends_the_call_at_once(server, status, says):
    server.reply = lambda body, attempt: (status, {"error": {"message": "never"}})
    error = failure(policy(server, max_concurrency=2), *(f"Say {i}." for i in range(50)))
    assert says in str(error)
    assert "never" in str(error)
    assert len(server.bodies) <= 2  # one for each worker


def test_what_had_arrived_is_in_the_error(server):
    server.reply = lambda body, attempt: (404, {}) if prompt_of(body) == "c" else (200, echo(body))
    agent = policy(server, max_concurrency=1)
    assert failure(agent, "a", "b", "c", "d").responses == ("Re: a", "Re: b", None, None)
    assert agent.usage.replies == 2


@pytest.mark.parametrize(
    ("kind", "reply", "says"),
    [
        ("chat", answer(None, "content_filter"), "finish_reason='content_filter'"),
        ("chat", answer("", "length"), "finish_reason='length'"),
        ("chat", answer(" \n"), "finish_reason='stop'"),
        ("chat", answer(["x"]), "finish_reason='stop'"),
        ("completion", answer("", kind="completion"), "finish_reason='stop'"),
        ("chat", answer("a chat's answer has no text field") | {"choices": []}, "no choice, hence no answer"),
        ("chat", {"error": {"message": "overloaded"}}, "overloaded"),
        ("chat", {"choices": [None]}, "no choice, hence no answer"),
        ("chat", b"<html>Welcome</html>", "not JSON"),
        ("chat", json.dumps(answer("Yes.")).encode()[:-9], "cut off"),
        ("chat", b"", "not JSON"),
    ],
)
def test_a_reply_without_text_is_an_error(server, kind, reply, says):
    server.reply = lambda body, attempt: (200, reply)
    message = str(failure(policy(server, kind=kind)))
    assert says in message
    assert "Name a fruit." in message


def test_a_page_instead_of_json(server):
    server.reply = lambda body, attempt: (200, b"<html>Welcome</html>", {"Content-Type": "text/html"})
    assert "Welcome" in str(failure(policy(server)))


def test_connection_refused_names_the_address(server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    agent = APIPolicy("m-1", base_url=url, api_key=KEY, config=APIPolicyConfig(max_retries=0))
    assert url in str(failure(agent))
    assert "Connection error" in str(failure(agent))


def test_silence_and_the_deadline(server):
    release = threading.Event()
    server.reply = lambda body, attempt: (500 if release.wait(5) else 504, {}, FAST)
    silent = str(failure(policy(server, timeout_s=0.05, max_retries=0)))
    late = str(failure(policy(server, deadline_s=0.1)))
    release.set()
    assert "timed out" in silent
    assert "deadline_s=0.1" in late


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
        with pytest.raises(TypeError, match="not pickled") as caught:
            pickle.dumps(agent)
        texts.append(str(caught.value))
    assert server.keys[0] == f"Bearer {KEY}"
    assert any("[key]" in text for text in texts)
    assert len(caplog.records) > 10
    texts += [record.getMessage() for record in caplog.records] + [str(vars(record)) for record in caplog.records]
    assert not [text for text in [*texts, *capfd.readouterr()] if KEY in text]


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("key", ["", "  ", "sk-“quoted”", "sk-two\nlines"])
def test_a_missing_or_broken_key(server, key):
    with pytest.raises(PolicyError, match="OPENAI_API_KEY") as caught:
        APIPolicy("m-1", base_url="https://example.org/v1", api_key=key)
    assert "sk-" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_server_on_this_machine_needs_no_key(server):
    APIPolicy("m-1", base_url=server.url).act([ASK])
    assert server.keys == ["Bearer no-key"]


def test_plain_http_to_another_machine_is_asked_for(server):
    with pytest.raises(ValueError, match="allow_insecure"):
        APIPolicy("m-1", base_url="http://example.org/v1", api_key=KEY)
    assert APIPolicy("m-1", base_url="http://example.org/v1", api_key=KEY, allow_insecure=True).model == "m-1"


@pytest.mark.parametrize("url", ["localhost:8000", "https://u:secret@host/v1", "https://h/v1?k=secret", "http://[", ""])
def test_addresses_that_are_none_or_hold_a_secret(url):
    with pytest.raises(ValueError, match="https://host/v1") as caught:
        APIPolicy("m-1", base_url=url, api_key=KEY)
    assert "secret" not in str(caught.value)


def test_arguments_are_checked(server):
    with pytest.raises(UnknownNameError, match="'completion'"):
        policy(server, kind="completions")
    with pytest.raises(TypeError, match="sequence of instructions"):
        policy(server).act("Name a fruit.")
    assert server.bodies == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens_field", "n_predict"),
        ("length_limit_chars", 0),
        ("seed", "1"),
        ("max_concurrency", 0),
        ("max_retries", -1),
        ("timeout_s", 0.0),
        ("deadline_s", float("inf")),
    ],
)
def test_config_is_checked(name, value):
    with pytest.raises(ValueError, match=f"APIPolicyConfig.{name} must be .*, got "):
        APIPolicyConfig(**{name: value})


def test_presets():
    assert APIPolicyConfig.paper() == APIPolicyConfig()
    assert APIPolicyConfig.paper(500).length_limit_chars == 500
    assert APIPolicyConfig.sandbox().max_tokens < 300


def test_paper_baselines_are_arguments_of_a_policy():
    baselines = paper_baselines()
    limits = {name: arguments["config"].length_limit_chars for name, arguments in baselines.items()}
    assert limits == {"GPT-4": 500, "ChatGPT": 1000, "Davinci003": None, "Davinci001": None}
    kinds = [APIPolicy(**arguments, api_key=KEY).kind for arguments in baselines.values()]
    assert kinds == ["chat", "chat", "completion", "completion"]
    mapped = APIPolicy(**baselines["ChatGPT"] | {"model": "mine", "api_key": KEY})
    system, user = mapped.request(ASK)["messages"]
    assert mapped.model == "mine"
    assert "1000" in system["content"]
    assert user["content"] == ALPACA.render(ASK)


def test_importing_and_building_loads_neither_openai_nor_torch():
    code = (
        "import sys; from alpacafarm_env.agents.api_policy import APIPolicy; APIPolicy('m', api_key='k');"
        "print(*[name for name in ('openai', 'torch', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
