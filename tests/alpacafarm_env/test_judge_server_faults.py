"""Faults that the tests inject: each on the wire, as often as it should come."""

import json
import math
from email.utils import parsedate_to_datetime

import pytest
from faulty_server import FAULTS, Faults, FaultyJudgeServer
from judge_requests import exchange, make_body, pairs, text_of
from scipy.stats import binom

from alpacafarm_env.judge_server.server import JudgeServer

RETRY_S, DRIP_S, HANG_S = 1.5, 0.0005, 0.1
KEY = "sk-canary-5e1f"
UNBILLED = {
    *("retry_after_seconds", "retry_after_date", "retry_after_ms", "retry_after_garbage", "server_error"),
    *("unavailable", "html", "error_in_200", "echo_key", "redirect"),
}


def parsed(wire):
    assert wire.end == "whole"
    assert wire.headers["content-type"] == "application/json"
    return json.loads(wire.body)


def check_refusal(status, header=None, holds=lambda value, wire: True):
    """A status and an error message; one header says when to retry, or where to go."""

    def check(wire, clean):
        assert wire.status == status
        assert parsed(wire)["error"]["message"]
        assert {name for name in wire.headers if "retry-after" in name or name == "location"} == ({header} - {None})
        assert header is None or holds(wire.headers[header], wire)

    return check


def is_soon(date, wire):
    return wire.sent + RETRY_S <= parsedate_to_datetime(date).timestamp() <= wire.sent + wire.seconds + RETRY_S + 1


def is_garbage(text, wire):
    try:
        return not (math.isfinite(float(text)) and float(text) >= 0)
    except ValueError:
        return True


def check_half(end):
    def check(wire, clean):
        assert (wire.status, wire.end) == (200, end)
        assert wire.body == clean.body[: len(clean.body) // 2]
        assert int(wire.headers["content-length"]) == len(clean.body if end == "reset" else wire.body)

    return check


def check_html(wire, clean):
    assert (wire.status, wire.end) == (200, "whole")
    assert wire.headers["content-type"].startswith("text/html")
    assert wire.body.startswith(b"<!doctype html>")


def check_same_but(**fields):
    """The clean reply, but for some of its fields; a function says what holds for the value of one."""

    def check(wire, clean):
        content, wanted = parsed(wire), parsed(clean)
        for name, value in fields.items():
            found, _ = content.pop(name, None), wanted.pop(name)
            assert value(found) if callable(value) else found == value
        assert (wire.status, content) == (200, wanted)

    return check


def check_changed(text, finish_reason):
    """The clean reply, but for the text, the reason to stop and the logprobs of its choice."""

    def check(wire, clean):
        content, wanted = parsed(wire), parsed(clean)
        choice, right = content["choices"][0], wanted["choices"][0]
        assert text_of(content) == text(text_of(wanted))
        assert choice["finish_reason"] == finish_reason
        assert choice.keys() == right.keys()
        assert content["usage"] == wanted["usage"]

    return check


def check_count(wire, clean):
    content = parsed(wire)
    asked, got = len(text_of(parsed(clean)).split("\n")), text_of(content).split("\n")
    assert len(got) in (asked - 1, asked + 1)
    assert all("Output (" in line for line in got)
    assert (wire.status, content["choices"][0]["finish_reason"]) == (200, "stop")


def check_drip(wire, clean):
    assert (wire.end, wire.status, wire.body) == ("whole", 200, clean.body)
    assert wire.seconds >= DRIP_S * (len(clean.body) - 1)
    assert len(wire.chunks) > 10  # not one a byte: some meet in the buffer of a client that is slow


def check_hang(wire, clean):
    assert (wire.end, wire.chunks) == ("closed", [])
    assert wire.seconds >= HANG_S - 0.05


def absurd(usage):
    return usage["prompt_tokens"] < 0 or usage["completion_tokens"] == 10**12


def check_echo(wire, clean):
    check_refusal(401)(wire, clean)
    assert KEY in parsed(wire)["error"]["message"]


CHECKS = {
    "retry_after_seconds": check_refusal(429, "retry-after", lambda text, wire: float(text) == RETRY_S),
    "retry_after_date": check_refusal(429, "retry-after", is_soon),
    "retry_after_ms": check_refusal(429, "retry-after-ms", lambda text, wire: float(text) == 1000 * RETRY_S),
    "retry_after_garbage": check_refusal(429, "retry-after", is_garbage),
    "server_error": check_refusal(500),
    "unavailable": check_refusal(503),
    "reset": check_half("reset"),
    "cut_json": check_half("whole"),
    "html": check_html,
    "error_in_200": check_refusal(200),
    "empty_choices": check_same_but(choices=[]),
    "null_content": check_changed(lambda text: None, "stop"),
    "wrong_count": check_count,
    "content_filter": check_changed(lambda text: "", "content_filter"),
    "finish_length": check_changed(lambda text: text[: len(text) // 2], "length"),
    "drip": check_drip,
    "hang": check_hang,
    "absurd_usage": check_same_but(usage=absurd),
    "no_usage": check_same_but(usage=None),
    "echo_key": check_echo,
    "redirect": check_refusal(307, "location", lambda place, wire: place == "http://127.0.0.1:9/elsewhere"),
}
REQUESTS = [make_body("gpt4_2", pairs(2)), make_body("gpt4_4", pairs(1)), make_body("davinci003_2", pairs(1))]
"""A batch of two, a single pair by chat, and a completion."""


@pytest.fixture(scope="module")
def clean():
    with JudgeServer() as server:
        yield [exchange(server, *request) for request in REQUESTS]


def make_server(fault, seed=0):
    place = "http://127.0.0.1:9/elsewhere"
    settings = {"retry_s": RETRY_S, "drip_s": DRIP_S, "hang_s": HANG_S, "redirect_to": place}
    return FaultyJudgeServer(seed=seed, faults=Faults({fault: 1.0} if fault else {}, **settings))


@pytest.mark.parametrize("fault", FAULTS)  # each has to have a check
def test_fault_is_on_the_wire_what_it_says(fault, clean):
    with make_server(fault) as server:
        for request, wanted in zip(REQUESTS, clean, strict=True):
            CHECKS[fault](exchange(server, *request, key=KEY), wanted)
        stats = server.stats()
    assert stats["by_fault"] == {fault: len(REQUESTS)}
    assert stats["answered"] == len(REQUESTS) * (fault in ("drip", "absurd_usage", "no_usage"))
    assert list(stats["by_status"].values()) == [stats["requests"]] == [len(REQUESTS)]
    assert len(stats["charged_by_model"]) == (0 if fault in UNBILLED else 2)
    assert stats["charged"]["requests"] == (0 if fault in UNBILLED else len(REQUESTS))
    if fault not in UNBILLED:
        usages = [parsed(wire)["usage"] for wire in clean]
        assert stats["charged"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)


@pytest.mark.parametrize(
    ("fault", "detail", "all_of_them"),
    [
        ("retry_after_garbage", lambda wire: wire.headers["retry-after"], 8),
        ("absurd_usage", lambda wire: parsed(wire)["usage"]["prompt_tokens"] < 0, {True, False}),
        ("wrong_count", lambda wire: len(text_of(parsed(wire)).split("\n")), {1, 3}),
    ],
)
def test_details_of_a_fault_vary(fault, detail, all_of_them):
    with make_server(fault) as server:
        seen = {detail(exchange(server, *REQUESTS[0])) for _ in range(60)}
    assert all_of_them in (seen, len(seen))


RATES = {"retry_after_date": 0.1, "server_error": 0.05, "cut_json": 0.03, "hang": 0.02, "redirect": 0.001}


def all_draws(mix, seed=0, count=4_000):
    return [[mix.draw(seed, f"body {n}", k).fault for k in (0, 1)] for n in range(count)]


def within(count, num, rate):
    return binom.ppf(1e-6, num, rate) <= count <= binom.ppf(1 - 1e-6, num, rate)


def test_rates_hold_and_repeats_of_a_body_fail_independently():
    pairs = all_draws(Faults(RATES))
    draws = [fault for pair in pairs for fault in pair]
    assert all(within(draws.count(fault), len(draws), RATES.get(fault, 0.0)) for fault in FAULTS)
    assert within(sum(None not in pair for pair in pairs), len(pairs), sum(RATES.values()) ** 2)


def test_draws_are_keyed_by_seed_body_and_occurrence_alone():
    mixes = Faults(RATES), Faults(dict(reversed(RATES.items())))
    draws = [all_draws(mix, seed, 300) for mix, seed in ((mixes[0], 0), (mixes[1], 0), (mixes[0], 1))]
    assert draws[0] == draws[1] != draws[2]
