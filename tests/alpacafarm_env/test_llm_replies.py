"""What a server sends back, what it costs, and how fast it is asked. No test waits: the clock is the test's."""

import asyncio
import email.utils
import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from math import exp, inf, log
from types import SimpleNamespace

import pytest
from faulty_server import said
from hypothesis import given
from hypothesis import strategies as st

from alpacafarm_env.annotators.config import read_yaml
from alpacafarm_env.errors import InvalidReplyError, PoolError
from alpacafarm_env.llm import limits
from alpacafarm_env.llm.limits import OUTAGE, OUTAGE_S, ClientConfig, Limiter
from alpacafarm_env.llm.replies import FinalReplyError, Reply, explain, read_reply, retry_after
from alpacafarm_env.llm.requests import SHIPPED_PRICES, Prices, Request

FULL = Reply("Yes.", "stop", None, 7, 3)


def read(body, kind="chat"):
    return read_reply(kind, body if isinstance(body, str) else json.dumps(body))


def test_chat_and_completion():
    assert read(said()) == FULL
    assert read(said(kind="completion"), "completion") == FULL
    assert read(said(" two\nlines 日本 ", "length")) == replace(FULL, text=" two\nlines 日本 ", finish_reason="length")
    assert read(said() | {"error": None}) == FULL
    assert read({"choices": [{"message": {"content": "Yes."}}]}) == Reply("Yes.")


NO_ANSWER = [
    *("", "<html>Welcome</html>", json.dumps(said())[:-9], "[" * 100_000, "1" * 5000, "[]", '"text"', {}),
    *({"error": {"message": "overloaded"}}, said() | {"error": "overloaded"}, said(kind="completion")),
    *(said() | {"choices": choices} for choices in ([], {}, [None])),
    *(said(text) for text in (None, "", " \n", ["x"], 1, "half \ud800")),
]


@pytest.mark.parametrize("body", NO_ANSWER, ids=range(len(NO_ANSWER)))
def test_what_is_no_answer_is_an_error(body):
    with pytest.raises(InvalidReplyError) as caught:
        read(body)
    assert not isinstance(caught.value, FinalReplyError)
    assert caught.value.__context__ is None
    assert len(str(caught.value)) < 400


def test_a_fault_beside_the_answer_is_not_paid_for_again():
    body = said()
    body["choices"][0]["finish_reason"] = {"type": "stop"}
    body["choices"].append(None)
    body["id"] = "half \ud800"
    assert read(body) == replace(FULL, finish_reason=None)


def test_an_error_code_that_is_no_text_is_explained():
    error = Exception("refused")
    error.status_code, error.body = 400, {"code": {"number": 1}, "type": ["x"]}
    endpoint = SimpleNamespace(redact=str, base_url="http://x/v1", host="x", api_key_env="KEY")
    assert explain(error, endpoint, "m").kind == "text"


@pytest.mark.parametrize("body", [said("Half", "content_filter"), said(None, "content_filter"), said("", "length")])
def test_what_would_not_be_better_another_time(body):
    with pytest.raises(FinalReplyError):
        read(body)


USAGES = [  # as reported, and as read
    *(((7, 3), (7, 3)), ((0, 0), (0, 0)), ((-1, 3), (None, 3)), ((7, 10**12), (7, 10**12))),
    *(((True, 3.0), (None, None)), (("7", None), (None, None)), (None, (None, None)), ("free", (None, None))),
]


@pytest.mark.parametrize(("usage", "counts"), USAGES)
def test_usage_that_cannot_be_is_none(usage, counts):
    reply = read(said(usage=usage))
    assert (reply.prompt_tokens, reply.completion_tokens) == counts


def chat_logprobs(*tops):
    body = said()
    tokens = [
        {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": t, "logprob": p} for t, p in top]} for top in tops
    ]
    body["choices"][0]["logprobs"] = {"content": tokens}
    return body


def completion_logprobs(*tops):
    body = said(kind="completion")
    body["choices"][0]["logprobs"] = {"tokens": ["a"], "top_logprobs": list(tops)}
    return body


def test_logprobs_of_both_endpoints():
    chat = read(chat_logprobs([("a", -0.1), ("b", -2)], [("\n", 0)]))
    completion = read(completion_logprobs({"a": -0.1, "b": -2}, {"\n": 0}), "completion")
    assert chat.logprobs == completion.logprobs == ({"a": -0.1, "b": -2.0}, {"\n": 0.0})
    assert read(chat_logprobs([])).logprobs == ({"a": -0.5},)  # no list of others: the token itself


def test_equal_tokens_add_up():
    (row,) = read(chat_logprobs([("a", log(0.25)), ("a", log(0.5)), ("b", -inf), ("b", -inf)])).logprobs
    assert exp(row["a"]) == pytest.approx(0.75)
    assert row["b"] == -inf


@pytest.mark.parametrize("value", [0.5, "x", None, True, float("nan"), inf, -(10**400)])
def test_logprobs_that_cannot_be_are_none(value):
    assert read(chat_logprobs([("a", value)])).logprobs is None
    assert read(completion_logprobs({"a": value}), "completion").logprobs is None


def date(seconds):
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


HEADERS = [  # and the seconds they ask for
    ({}, 0),
    ({"retry-after": " 0.25 "}, 0.25),
    ({"retry-after": date(3000)}, 3000),
    ({"retry-after": date(-10)}, 0),
    ({"retry-after-ms": "0.5"}, 0.0005),
    ({"retry-after-ms": "1500", "retry-after": "1"}, 1.5),
    ({"retry-after-ms": "soon", "retry-after": "2"}, 2),
    *(({"retry-after": text}, 0) for text in ("soon", "", "0", "-5", "nan", "1e999")),
    ({"retry-after": "Wed, 99 Foo 2026 99:99:99 GMT"}, 0),
    ({"retry-after": "Fri, 31 Dec 99999 23:59:59 GMT"}, 0),
]


@pytest.mark.parametrize(("headers", "seconds"), HEADERS)
def test_retry_after_in_every_form(headers, seconds):
    assert retry_after(headers) == pytest.approx(seconds, abs=0 if seconds < 100 else 900)


def request_of(body):
    return Request("http://localhost:1/v1", "chat", {"model": "gpt-4.1"} | body)


BODY = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "日本 “now” 🙂" * 50}], "max_tokens": 100}
BYTES = len(json.dumps(BODY, ensure_ascii=False).encode())
FEWEST = len("日本 “now” 🙂".encode()) * 50 // 8
REQUEST = request_of(BODY)
BOUNDS = REQUEST.bounds
PRICES = Prices.load()


def test_every_shipped_price_is_dated_and_sourced():
    assert len(PRICES.models) == 18
    for model, price in PRICES.models.items():
        assert price.source in ("deploybase.ai/articles/openai-pricing", f"the price of {model[:-11]}")
        year, month = map(int, price.as_of.split("-"))
        assert (year >= 2026, 1 <= month <= 12) == (True, True), model
        assert 0 < price.input_usd < price.output_usd, model
    assert set(read_yaml(SHIPPED_PRICES)) == set(PRICES.models)  # which takes no model twice


@pytest.mark.parametrize(
    ("change", "completion"),
    [
        ({}, 100),
        ({"n": 3}, 300),
        ({"n": 2, "best_of": 4}, 400),
        ({"max_completion_tokens": 500}, 500),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
        ({"prompt": "text"}, 100),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 100),
        *(({"max_tokens": limit}, math.inf) for limit in (None, -1, "100", 1.5, True)),
    ],
)
def test_the_upper_bound_is_bytes_and_the_bodys_limit(change, completion):
    body = BODY | change
    request, unheard = request_of(body), request_of(body | {"model": "unheard-of"})
    size = len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    assert (request.bounds.most_prompt, request.bounds.most_completion) == (size, completion)
    bound = None if completion == math.inf else pytest.approx((size * 2 + completion * 8) / 1e6)
    assert PRICES.upper_bound(request) == PRICES.charge(request, (None, None)) == bound
    assert PRICES.upper_bound(unheard) is None
    if completion == math.inf:  # then what was reported is charged
        assert PRICES.charge(request, (150, 10)) == pytest.approx(380 / 1e6)


def test_a_prompt_has_a_least_number_of_tokens():
    assert BOUNDS.fewest_prompt == FEWEST > 100
    for body in ({"prompt": "x" * 80}, {"messages": [{"role": "user", "content": "x" * 80}, {"role": "tool"}]}):
        assert request_of(body).bounds.fewest_prompt == 10
    for body in ({"prompt": list(range(80))}, {}):
        assert request_of(body).bounds.fewest_prompt == 1


ODD = st.sampled_from([None, True, 10.0, "10", math.nan, -1, 0, 10**12])
PROMPTS = ODD | st.integers(1, FEWEST + 1) | st.integers(FEWEST, BYTES + 1)


@given(PROMPTS, ODD | st.integers(0, 101))
def test_usage_is_charged_between_floor_and_bound(prompt, completion):
    """What can be is charged as it is, a prompt by its bytes at least; else the bound."""
    believed = type(prompt) is int and 1 <= prompt <= BYTES and type(completion) is int and 0 <= completion <= 100
    charge = PRICES.charge(REQUEST, (prompt, completion))
    if believed:
        assert charge == pytest.approx((max(prompt, FEWEST) * 2 + completion * 8) / 1e6)
    else:
        assert charge == PRICES.upper_bound(REQUEST)


def test_own_prices_come_first():
    own = Prices.load(overrides={"mine": [1, 2.5], "gpt-4.1": (0, 0)})
    assert own.cost("mine", 10**6, 10**6) == 3.5
    assert own.cost("gpt-4.1", 5, 5) == 0
    assert own.cost("gpt-4.1-2025-04-14", 10**6, 0) == 2
    assert PRICES.cost("mine", 1, 1) is None
    dated = Prices.load(overrides={"gpt-4.1": (0, 0), "gpt-4.1-2025-04-14": [3, 3]})
    assert dated.cost("gpt-4.1-2025-04-14", 10**6, 0) == 3


def test_all_faults_of_the_prices_given_are_listed():
    faults = {"low": [-1, 2], "nan": [math.nan, 2], "text": ["1", 2], "three": [1, 2, 3], "one": 1, "yes": [True, 1]}
    with pytest.raises(PoolError) as caught:
        Prices.load({"good": [1, 2], **faults})
    assert all(name in str(caught.value) for name in faults)
    assert "good" not in str(caught.value)


def limiter_of(most, **settings):
    return Limiter(ClientConfig(max_concurrency=most, **settings))


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose clock a test sets; where nothing is left to do, it moves on to the next timer by itself."""

    def __init__(self):
        self.now = 1000.0
        super().__init__()
        select = self._selector.select

        def skip(timeout):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip

    def time(self):
        return self.now

    def settle(self):
        """Run what can run now."""
        for _ in range(5):
            self.call_soon(self.stop)
            self.run_forever()

    def slot(self, later=1.0):
        """A slot that starts `later` than now."""
        self.now += later
        return self.now


@pytest.fixture
def clock(monkeypatch):
    loop = Clock()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=loop.time))
    yield loop
    loop.close()


def test_slots_are_given_in_order_within_the_limits(clock):
    """Repeats go before all others; one that is cancelled holds nobody up; starts are spaced."""
    limiter, order = limiter_of(2, requests_per_minute=120), []

    async def ask(name, *, again=False):
        order.append((name, await limiter.acquire(again=again)))

    tasks = [clock.create_task(ask(name, again=name == "repeat")) for name in ("a", "b", "c", "gone", "d", "repeat")]
    clock.run_until_complete(asyncio.sleep(2.0))
    assert order == [("a", 1000.0), ("repeat", pytest.approx(1000.5))]
    assert limiter.active == 2
    tasks[3].cancel()
    for _ in range(4):
        limiter.failed(clock.now, retry_after_s=1.0)
        clock.call_soon(limiter.release)
        clock.run_until_complete(asyncio.sleep(2.0))
        assert limiter.active <= 2
    names, starts = zip(*order, strict=True)
    assert names == ("a", "repeat", "b", "c", "d")
    assert min(later - start for start, later in pairwise(starts)) >= 0.5 - 1e-9


def test_a_crowded_server_halves_the_limit_once(clock):
    limiter = limiter_of(32)
    together = [clock.slot(0.0) for _ in range(32)]
    clock.now += 1
    for slot in together:
        assert not limiter.failed(slot, crowded=True)
    assert limiter.pace.limit == 16
    limiter.succeeded(together[0])  # from before the cut: it says nothing of the new limit
    assert limiter.pace.limit == 16
    for expected in (8, 4, 2, 1, 1, 1):
        limiter.failed(clock.slot(), crowded=True)
        assert limiter.pace.limit == expected


def test_successes_raise_the_limit_one_by_one(clock):
    limiter = limiter_of(32)
    limiter.failed(clock.slot(), crowded=True)
    for window in range(1, 16):
        for _ in range(int(limiter.pace.limit)):
            limiter.succeeded(clock.slot(0.001))
        assert 16 + 0.9 * window <= limiter.pace.limit <= 16 + window
    for _ in range(200):
        limiter.succeeded(clock.slot(0.001))
    assert limiter.pace.limit == 32


def test_an_outage_is_many_failures_over_a_while(clock):
    """A server that restarts breaks all connections at once, which is none."""
    limiter = limiter_of(64)
    for _ in range(2):
        assert not any(limiter.failed(clock.now) for _ in range(64))
        limiter.succeeded(clock.slot(OUTAGE_S))  # the count starts anew
    for _ in range(OUTAGE - 1):
        assert not limiter.failed(clock.slot(OUTAGE_S))
    assert limiter.failed(clock.slot())
    later = Limiter(limiter.config, limiter.pace)
    assert (later.failures, later.refused()) == (0, None)


@pytest.mark.parametrize(("name", "value"), [("max_concurrency", True), ("attempt_timeout_s", 0), ("deadline_s", inf)])
def test_a_config_is_checked(name, value):
    with pytest.raises(ValueError, match=name):
        ClientConfig(**{name: value})
