"""Failures: when a server says to come back. What each status means is in test_api_client.py, over the wire."""

import email.utils

import pytest

from alpacafarm_env.llm.failures import Failure, retry_after

NOW = 1_900_000_000


def date(seconds, **settings):
    return email.utils.formatdate(NOW + seconds, usegmt=True, **settings)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"retry-after": "7"}, 7),
        ({"retry-after": " 0.25 "}, 0.25),
        ({"retry-after": "0"}, 0),
        ({"retry-after": date(30)}, 30),
        ({"retry-after": date(30), "date": date(10)}, 20),  # the server's clock is ten seconds ahead
        ({"retry-after": date(30), "date": "yesterday"}, 30),
        ({"retry-after": date(-30)}, 0),
        ({"retry-after": email.utils.formatdate(NOW + 30)}, 30),  # -0000 for GMT
        ({"retry-after": email.utils.formatdate(NOW + 30).replace("-0000", "+0200")}, 0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "0.5"}, 0.0005),
        ({"retry-after-ms": "1500", "retry-after": "1"}, 1.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 2),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2),
        ({"retry-after": "soon"}, 0),
        ({"retry-after": ""}, 0),
        ({"retry-after": "-5"}, 0),
        ({"retry-after": "nan"}, 0),
        ({"retry-after": "inf"}, 0),
        ({"retry-after": "1e3"}, 0),
        ({"retry-after": "٣"}, 0),
        ({"retry-after": "Wed, 99 Foo 2026 99:99:99 GMT"}, 0),
        ({"retry-after": "Fri, 31 Dec 99999 23:59:59 GMT"}, 0),
        ({"retry-after": "9" * 400}, 1e300),
    ],
)
def test_retry_after_in_every_form(headers, seconds):
    assert retry_after(headers, NOW) == pytest.approx(seconds)


def test_retry_after_in_the_far_future_is_long():
    assert retry_after({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, NOW) > 10**9


def test_twin_that_reads_floats_alone_is_early_or_breaks():
    """The twin is `float(header)`: no date, and nan and negative waits where there is none."""

    def naive(headers):
        try:
            return float(headers.get("retry-after", 0))
        except ValueError:
            return 0.0

    wrong = [
        value
        for value in (date(30), "nan", "-5", "inf")
        if naive({"retry-after": value}) != retry_after({"retry-after": value}, NOW)
    ]
    assert len(wrong) == 4


@pytest.mark.parametrize(("status", "crowded"), [(429, True), (503, True), (500, False), (408, False), (None, False)])
def test_crowded(status, crowded):
    assert Failure("", status=status).crowded is crowded
