"""Prices, upper bounds and charges."""

import json
import math

import pytest
import yaml

from alpacafarm_env.api.prices import SHIPPED, Prices, token_bounds
from alpacafarm_env.errors import PoolError

BODY = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "日本 “now” 🙂" * 50}], "max_tokens": 100}
BYTES = len(json.dumps(BODY, ensure_ascii=False).encode())


@pytest.fixture(scope="module")
def prices():
    return Prices.load()


def test_every_shipped_price_is_dated_and_sourced(prices):
    assert len(prices.models) == 12
    for model, price in prices.models.items():
        year, month = map(int, price.as_of.split("-"))
        assert year >= 2026, model
        assert 1 <= month <= 12, model
        assert price.source, model
        assert 0 < price.input_usd < price.output_usd, model
    assert set(yaml.safe_load(SHIPPED.read_text())) == set(prices.models)


def test_costs_by_hand(prices):
    assert prices.cost("gpt-4.1", 1_000_000, 0) == 2
    assert prices.cost("gpt-4.1", 0, 1_000_000) == 8
    assert prices.cost("gpt-5-nano", 1_000, 100) == pytest.approx(0.00009)
    assert prices.cost("unheard-of", 1, 1) is None
    assert prices.cost("gpt-4.1-2025-04-14", 10, 10) == prices.cost("gpt-4.1", 10, 10)
    assert prices.cost("gpt-4.1-turbo", 1, 1) is None


def test_the_upper_bound_is_bytes_and_the_bodys_limit(prices):
    assert token_bounds(BODY) == (BYTES, 100)
    assert prices.upper_bound("gpt-4.1", BODY) == pytest.approx((BYTES * 2 + 100 * 8) / 1e6)
    assert prices.upper_bound("unheard-of", BODY) is None
    lone = {**BODY, "messages": [{"role": "user", "content": "\ud800"}]}
    assert prices.upper_bound("gpt-4.1", lone) > 0


@pytest.mark.parametrize(
    ("change", "completion"),
    [
        ({"n": 3}, 300),
        ({"n": 2, "best_of": 4}, 400),
        ({"max_completion_tokens": 500}, 500),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
        ({"prompt": ["one", "two"]}, 200),
        ({"prompt": [1, 2, 3]}, 100),
        ({"prompt": "text"}, 100),
    ],
)
def test_limits_that_multiply(change, completion):
    assert token_bounds({**BODY, **change})[1] == completion


@pytest.mark.parametrize("limit", [None, -1, "100", 1.5, True])
def test_a_body_without_a_believable_limit_has_no_bound(prices, limit):
    body = {**BODY, "max_tokens": limit}
    assert prices.upper_bound("gpt-4.1", body) is None
    assert prices.charge("gpt-4.1", body, (None, None)) is None
    assert prices.charge("gpt-4.1", body, (10, 10)) == pytest.approx(100 / 1e6)


@pytest.mark.parametrize("usage", [(10, 5), (1, 0), (BYTES, 100)])
def test_believable_usage_is_charged(prices, usage):
    assert prices.charge("gpt-4.1", BODY, usage) == pytest.approx((usage[0] * 2 + usage[1] * 8) / 1e6)
    assert prices.charge("unheard-of", BODY, usage) is None


def check_charge(prices, usage):
    charge = prices.charge("gpt-4.1", BODY, usage)
    assert charge == prices.upper_bound("gpt-4.1", BODY)


LIES = [
    (-1, 5), (10, -5), (10**12, 5), (10, 10**12), (None, 5), (10, None), (None, None), (0, 5), (BYTES + 1, 5),
    (10, 101), (True, True), (10.0, 5), ("10", 5), (math.nan, 5),
]  # fmt: skip


@pytest.mark.parametrize("usage", LIES)
def test_usage_that_cannot_be_is_charged_at_the_bound(prices, usage):
    check_charge(prices, usage)


def test_a_twin_that_believes_every_usage_fails():
    class Believing(Prices):
        def charge(self, model, body, usage):
            return self.cost(model, *usage)

    believing = Believing.load()
    for usage in [(-1, 5), (10**12, 5), (0, 5)]:
        with pytest.raises(AssertionError):
            check_charge(believing, usage)


def test_own_prices_come_first(prices):
    own = Prices.load(overrides={"mine": [1, 2.5], "gpt-4.1": (0, 0), "gpt-4.1-2025-04-14": [3, 3]})
    assert own.cost("mine", 10**6, 10**6) == 3.5
    assert own.cost("gpt-4.1", 5, 5) == 0
    assert own.cost("gpt-4.1-2025-04-14", 10**6, 0) == 3
    assert own.price("mine").source == "given by the user"
    assert prices.cost("mine", 1, 1) is None


def test_all_faults_of_a_file_are_listed(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "good: {usd_per_million: [1, 2], as_of: 2026-03, source: page}\n"
        "negative: {usd_per_million: [-1, 2], as_of: 2026-03, source: page}\n"
        "nan: {usd_per_million: [.nan, 2], as_of: 2026-03, source: page}\n"
        "text: {usd_per_million: ['1', 2], as_of: 2026-03, source: page}\n"
        "three: {usd_per_million: [1, 2, 3], as_of: 2026-03, source: page}\n"
        "undated: {usd_per_million: [1, 2], as_of: , source: page}\n"
        "more: {usd_per_million: [1, 2], as_of: 2026-03, source: page, cached: 1}\n"
        "list: [1, 2]\n"
    )
    with pytest.raises(PoolError) as caught:
        Prices.load(path, overrides={"own": [1]})
    text = str(caught.value)
    assert str(path) in text
    for name in ("negative", "nan", "text", "three", "undated.as_of", "more", "list", "overrides: own"):
        assert f"\n  {name}" in text
    assert "good" not in text


@pytest.mark.parametrize(
    "content", [b"", b"- 1\n", b"a: [", b"a: !!python/object/apply:os.getcwd []\n", b"\xff\xfe", b" " * (2 << 20)]
)
def test_files_that_are_no_price_list_are_refused(tmp_path, content):
    path = tmp_path / "prices.yaml"
    path.write_bytes(content)
    with pytest.raises(PoolError, match="prices.yaml"):
        Prices.load(path)
    with pytest.raises(PoolError, match="cannot be read"):
        Prices.load(tmp_path / "none")
