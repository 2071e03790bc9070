"""Prices, upper bounds and charges."""

import json
import math

import pytest

from alpacafarm_env.annotators.strict_yaml import read_yaml
from alpacafarm_env.errors import PoolError
from alpacafarm_env.llm.pricing import SHIPPED, Prices
from alpacafarm_env.llm.tokens import TokenBounds

BODY = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "日本 “now” 🙂" * 50}], "max_tokens": 100}
BYTES = len(json.dumps(BODY, ensure_ascii=False).encode())
BOUNDS = TokenBounds.of(BODY)


@pytest.fixture(scope="module")
def prices():
    return Prices.load()


def test_every_shipped_price_is_dated_and_sourced(prices):
    assert len(prices.models) == 18
    for model, price in prices.models.items():
        assert price.source in ("deploybase.ai/articles/openai-pricing", f"the price of {model[:-11]}")
        year, month = map(int, price.as_of.split("-"))
        assert year >= 2026, model
        assert 1 <= month <= 12, model
        assert price.source, model
        assert 0 < price.input_usd < price.output_usd, model
    assert set(read_yaml(SHIPPED)) == set(prices.models)  # which takes no model twice


def test_costs_by_hand(prices):
    assert prices.cost("gpt-4.1", 1_000_000, 0) == 2
    assert prices.cost("gpt-4.1", 0, 1_000_000) == 8
    assert prices.cost("gpt-5-nano", 1_000, 100) == pytest.approx(0.00009)
    assert prices.cost("unheard-of", 1, 1) is None
    assert prices.cost("gpt-4.1-turbo", 1, 1) is None


def test_the_upper_bound_is_bytes_and_the_bodys_limit(prices):
    assert (BOUNDS.most_prompt, BOUNDS.most_completion) == (BYTES, 100)
    assert prices.upper_bound("gpt-4.1", BOUNDS) == pytest.approx((BYTES * 2 + 100 * 8) / 1e6)
    assert prices.upper_bound("unheard-of", BOUNDS) is None
    lone = {**BODY, "messages": [{"role": "user", "content": "\ud800"}]}
    assert prices.upper_bound("gpt-4.1", TokenBounds.of(lone)) > 0


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
    assert TokenBounds.of({**BODY, **change}).most_completion == completion


@pytest.mark.parametrize("limit", [None, -1, "100", 1.5, True])
def test_a_body_without_a_believable_limit_has_no_bound(prices, limit):
    bounds = TokenBounds.of({**BODY, "max_tokens": limit})
    assert prices.upper_bound("gpt-4.1", bounds) is None
    assert prices.charge("gpt-4.1", bounds, (None, None)) is None
    assert prices.charge("gpt-4.1", bounds, (150, 10)) == pytest.approx(380 / 1e6)


SNAPSHOTS = [
    *("gpt-4.1-2025-04-14", "gpt-4.1-mini-2025-04-14", "gpt-4.1-nano-2025-04-14"),
    *("gpt-4o-2024-08-06", "gpt-4o-2024-11-20", "gpt-4o-mini-2024-07-18"),
]


def check_snapshots(prices):
    for model in SNAPSHOTS:
        assert prices.cost(model, 10, 10) == prices.cost(model[:-11], 10, 10) > 0
    for model in ("gpt-4o-2024-05-13", "gpt-4.1-2031-01-01", "gpt-5-2025-08-07"):
        assert prices.price(model) is None


def test_snapshots_have_a_price_only_where_it_is_listed(prices):
    check_snapshots(prices)


def test_a_twin_that_guesses_by_the_date_fails():
    class Guessing(Prices):
        def price(self, model):
            return self.models.get(model) or self.models.get(model[:-11])

    with pytest.raises(AssertionError):
        check_snapshots(Guessing.load())


FEWEST = len("日本 “now” 🙂".encode()) * 50 // 8


def check_floor(prices):
    assert FEWEST > 100
    for told in (1, 10, FEWEST - 1, FEWEST):
        assert prices.charge("gpt-4.1", BOUNDS, (told, 5)) == pytest.approx((FEWEST * 2 + 5 * 8) / 1e6)


def test_a_prompt_is_charged_by_its_bytes_at_least(prices):
    check_floor(prices)
    for body in ({"prompt": "x" * 80}, {"prompt": ["x" * 40] * 2}, {"prompt": list(range(80))}, {}):
        assert TokenBounds.of(body).fewest_prompt == (10 if "x" in str(body) else 1)
    parts = [{"type": "text", "text": "x" * 80}, {"type": "image_url", "image_url": {"url": "y" * 800}}]
    messages = [{"role": "user", "content": parts}, {"role": "tool"}]
    assert TokenBounds.of({"messages": messages}).fewest_prompt == 10


class Believing(Prices):
    """The twin: charges whatever is reported."""

    def charge(self, model, bounds, usage):
        return self.cost(model, *usage)


def test_a_twin_that_believes_the_server_is_told_to_charge_nothing():
    with pytest.raises(AssertionError):
        check_floor(Believing.load())


def test_doubts_name_both_numbers():
    assert BOUNDS.doubts((FEWEST, 100)) == BOUNDS.doubts((None, None)) == ""
    assert BOUNDS.doubts((3, 5)) == f"3 prompt tokens where {FEWEST} to {BYTES:,} can be"
    assert BOUNDS.doubts((-7, 10**12)) == (
        f"-7 prompt tokens where {FEWEST} to {BYTES:,} can be, 1000000000000 completion tokens where 0 to 100 can be"
    )


@pytest.mark.parametrize("usage", [(FEWEST, 5), (BYTES, 0), (BYTES, 100)])
def test_believable_usage_is_charged(prices, usage):
    assert prices.charge("gpt-4.1", BOUNDS, usage) == pytest.approx((usage[0] * 2 + usage[1] * 8) / 1e6)
    assert prices.charge("unheard-of", BOUNDS, usage) is None


def check_charge(prices, usage):
    charge = prices.charge("gpt-4.1", BOUNDS, usage)
    assert charge == prices.upper_bound("gpt-4.1", BOUNDS)


LIES = [
    (-1, 5), (10, -5), (10**12, 5), (10, 10**12), (None, 5), (10, None), (None, None), (0, 5), (BYTES + 1, 5),
    (10, 101), (True, True), (10.0, 5), ("10", 5), (math.nan, 5),
]  # fmt: skip


@pytest.mark.parametrize("usage", LIES)
def test_usage_that_cannot_be_is_charged_at_the_bound(prices, usage):
    check_charge(prices, usage)


def test_a_twin_that_believes_every_usage_fails():
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


def test_all_faults_of_the_prices_given_are_listed():
    faults = {
        "negative": [-1, 2],
        "nan": [math.nan, 2],
        "text": ["1", 2],
        "three": [1, 2, 3],
        "one": 1,
        "yes": [True, 1],
    }
    with pytest.raises(PoolError, match="^The prices given:\n") as caught:
        Prices.load({"good": [1, 2], **faults})
    text = str(caught.value)
    assert all(f"\n  {name}: expected [input, output]" in text for name in faults)
    assert "good" not in text
    assert "yaml" not in text  # the package's own file is not to blame
