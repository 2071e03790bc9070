"""Raw replies: what is read, and what is refused."""

import json
from dataclasses import replace
from math import exp, inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_server import said

from alpacafarm_env.errors import InvalidReplyError
from alpacafarm_env.llm.replies import FinalReplyError, Reply, read_reply, told_usage

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


@pytest.mark.parametrize(
    "body", [said("Half an ans", "content_filter"), said(None, "content_filter"), said("", "length")]
)
def test_what_would_not_be_better_another_time(body):
    with pytest.raises(FinalReplyError):
        read(body)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ((7, 3), (7, 3)),
        ((0, 0), (0, 0)),
        ((-1, 3), (None, 3)),
        ((7, 10**12), (7, 10**12)),
        ((True, 3.0), (None, None)),
        (("7", None), (None, None)),
        (None, (None, None)),
        ("free", (None, None)),
    ],
)
def test_usage_that_cannot_be_is_none(usage, counts):
    reply = read(said(usage=usage))
    assert (reply.prompt_tokens, reply.completion_tokens) == counts


@pytest.mark.parametrize("raw", ["", "[]", "null", "<html>", '{"usage": []}'])
def test_usage_of_anything(raw):
    assert told_usage(raw) == (None, None)


def chat_logprobs(*tops, **more):
    body = said()
    tokens = [
        {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": t, "logprob": p} for t, p in top]} for top in tops
    ]
    body["choices"][0]["logprobs"] = {"content": tokens, **more}
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
