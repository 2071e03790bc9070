"""What a server sends back: replies that are read or refused, when to come back, and whether it was the text.

What each status means is tested over the wire, in test_llm_client.py.
"""

import email.utils
import json
from dataclasses import replace
from math import exp, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_server import said

from alpacafarm_env.errors import InvalidReplyError
from alpacafarm_env.llm.replies import (
    FILTERED,
    TOO_LONG,
    FinalReplyError,
    Reply,
    read_reply,
    refused_text,
    retry_after,
    told_usage,
)

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


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "text", "usage", "error"]), inner, max_size=3
        )
    ),
)


@given(st.sampled_from(["chat", "completion"]), JSON, st.booleans())
def test_any_json_is_a_reply_with_a_text_or_the_one_error(kind, body, inside):
    try:
        reply = read(said() | {"choices": [body], "usage": body} if inside else body, kind)
    except InvalidReplyError:
        return
    assert reply.text.strip()


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


@pytest.mark.parametrize("raw", ["", "[]", "null", "<html>", '{"usage": []}'])
def test_usage_of_anything(raw):
    assert told_usage(raw) == (None, None)


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


@pytest.mark.parametrize("given", [None, [], "x", {"content": None}, {"content": ["x"]}, {"content": [{"token": 1}]}])
def test_malformed_logprobs_are_none(given):
    body = said()
    body["choices"][0]["logprobs"] = given
    assert read(body).logprobs is None


# ------------------------------------------------------------------------------------------------ when to come back

NOW = 1_900_000_000


def date(seconds):
    return email.utils.formatdate(NOW + seconds, usegmt=True)


HEADERS = [  # and the seconds they ask for
    ({}, 0),
    ({"retry-after": " 0.25 "}, 0.25),
    ({"retry-after": date(30), "date": date(10)}, 20),  # the server's clock is ten seconds ahead
    ({"retry-after": date(30), "date": "yesterday"}, 30),
    ({"retry-after": email.utils.formatdate(NOW + 30)}, 30),  # -0000 for GMT
    ({"retry-after": email.utils.formatdate(NOW + 30).replace("-0000", "+0200")}, 0),
    ({"retry-after-ms": "0.5"}, 0.0005),
    ({"retry-after-ms": "1500", "retry-after": "1"}, 1.5),
    ({"retry-after-ms": "1500", "retry-after": "2"}, 2),
    ({"retry-after-ms": "soon", "retry-after": "2"}, 2),
    *(({"retry-after": text}, 0) for text in ("soon", "", "0", "-5", "nan", "inf", "1e3", "٣")),
    ({"retry-after": "Wed, 99 Foo 2026 99:99:99 GMT"}, 0),
    ({"retry-after": "Fri, 31 Dec 99999 23:59:59 GMT"}, 0),
    ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 253402300799 - NOW),
    ({"retry-after": "9" * 400}, 1e300),
]


@pytest.mark.parametrize(("headers", "seconds"), HEADERS)
def test_retry_after_in_every_form(headers, seconds):
    assert retry_after(headers, NOW) == pytest.approx(seconds)


@given(st.integers(-(10**6), 10**6))
def test_seconds_milliseconds_and_dates_say_the_same(seconds):
    forms = {"retry-after": str(seconds)}, {"retry-after": date(seconds)}, {"retry-after-ms": str(1000 * seconds)}
    assert [retry_after(form, NOW) for form in forms] == [max(0, seconds)] * 3


@given(st.text(max_size=40))
def test_any_header_is_a_wait_or_none(text):
    assert 0 <= retry_after({"retry-after": text, "retry-after-ms": text, "date": text}, NOW) <= 1e300


# ------------------------------------------------------------------------------------------------ refusals of a text

SAID = {
    TOO_LONG: (
        "This model's maximum context length is 2048 tokens. However, you requested 9000 tokens.",
        "The decoder prompt (length 9000) is longer than the maximum model length of 2048.",
        "the request exceeds the available context size. try increasing the context size",
        "Requested tokens (9000) exceed context window of 2048",
        "the input length exceeds the context length",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 9000 `inputs` tokens",
        "Input validation error: `inputs` must have less than 4095 tokens. Given: 9000",
        "This endpoint's maximum context length is 8192 tokens. You requested about 9000 tokens",
        "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
        "The input (9000 tokens) is longer than the model's context length (2048 tokens).",
        "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
        "prompt is too long: 212345 tokens > 200000 maximum",
        "Please reduce the length of the messages or completion.",
    ),
    FILTERED: (
        "Your input was flagged",
        "Your chosen model requires moderation and your input was flagged for violence",
        "Your request was rejected as a result of our safety system.",
        "The response was filtered due to the prompt triggering a content management policy.",
        "This prompt appears to violate our usage policies",
        "Refused: prohibited content",
    ),
    "": (
        "Unsupported value: 'temperature' does not support 0.0 with this model.",
        "max_tokens is too large: 300. This model supports at most 100 completion tokens.",
        "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
        "Project does not have access to model gpt-4.1",
        "Your account was flagged for abuse and is closed",
        "The organization's policy forbids this: it violates our data policy",
        "Country, region, or territory not supported",
        "Access denied due to firewall rules.",
        "",
    ),
}


@pytest.mark.parametrize(("why", "words"), [(why, words) for why, each in SAID.items() for words in each])
def test_refusals_in_the_words_of_several_servers(why, words):
    assert refused_text(words) == why


def test_codes_and_metadata():
    assert refused_text("no", {"code": "context_length_exceeded"}) == TOO_LONG
    assert refused_text("no", {"code": 400, "type": "exceed_context_size_error"}) == TOO_LONG
    assert refused_text("no", {"code": "content_filter", "type": None}) == FILTERED
    assert refused_text("your account", {"code": 403, "metadata": {"reasons": ["x"], "flagged_input": "y"}}) == FILTERED
    for other in ({"code": 403, "metadata": {"provider_name": "x"}}, ["content_filter"]):
        assert refused_text("no", other) == ""
