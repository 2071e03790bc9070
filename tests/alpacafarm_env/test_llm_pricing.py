"""Prices, upper bounds and charges."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpacafarm_env.annotators.strict_yaml import read_yaml
from alpacafarm_env.errors import PoolError
from alpacafarm_env.llm.pricing import SHIPPED, Prices
from alpacafarm_env.llm.requests import TokenBounds

BODY = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "日本 “now” 🙂" * 50}], "max_tokens": 100}
BYTES = len(json.dumps(BODY, ensure_ascii=False).encode())
FEWEST = len("日本 “now” 🙂".encode()) * 50 // 8
BOUNDS = TokenBounds.of(BODY)
PRICES = Prices.load()


def test_every_shipped_price_is_dated_and_sourced():
    assert len(PRICES.models) == 18
    for model, price in PRICES.models.items():
        assert price.source in ("deploybase.ai/articles/openai-pricing", f"the price of {model[:-11]}")
        year, month = map(int, price.as_of.split("-"))
        assert (year >= 2026, 1 <= month <= 12) == (True, True), model
        assert 0 < price.input_usd < price.output_usd, model
    assert set(read_yaml(SHIPPED)) == set(PRICES.models)  # which takes no model twice


def test_costs_by_hand_and_no_price_guessed_by_a_name_that_is_like_another():
    assert PRICES.cost("gpt-4.1", 1_000_000, 0) == 2
    assert PRICES.cost("gpt-4.1", 0, 1_000_000) == 8
    assert PRICES.cost("gpt-5-nano", 1_000, 100) == pytest.approx(0.00009)
    for snapshot in ("gpt-4.1-2025-04-14", "gpt-4o-2024-08-06", "gpt-4o-mini-2024-07-18"):
        assert PRICES.cost(snapshot, 10, 10) == PRICES.cost(snapshot[:-11], 10, 10) > 0
    for model in ("unheard-of", "gpt-4.1-turbo", "gpt-4o-2024-05-13", "gpt-4.1-2031-01-01", "gpt-5-2025-08-07"):
        assert PRICES.cost(model, 1, 1) is PRICES.price(model) is None


@pytest.mark.parametrize(
    ("change", "completion"),
    [
        ({}, 100),
        ({"n": 3}, 300),
        ({"n": 2, "best_of": 4}, 400),
        ({"max_completion_tokens": 500}, 500),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
        ({"prompt": ["one", "two"]}, 200),
        ({"prompt": [1, 2, 3]}, 100),
        ({"prompt": "text"}, 100),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 100),
        *(({"max_tokens": limit}, math.inf) for limit in (None, -1, "100", 1.5, True)),
    ],
)
def test_the_upper_bound_is_bytes_and_the_bodys_limit(change, completion):
    body = BODY | change
    bounds = TokenBounds.of(body)
    size = len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    assert (bounds.most_prompt, bounds.most_completion) == (size, completion)
    bound = None if completion == math.inf else pytest.approx((size * 2 + completion * 8) / 1e6)
    assert PRICES.upper_bound("gpt-4.1", bounds) == PRICES.charge("gpt-4.1", bounds, (None, None)) == bound
    assert PRICES.upper_bound("unheard-of", bounds) is None
    if completion == math.inf:  # then what was reported is charged
        assert PRICES.charge("gpt-4.1", bounds, (150, 10)) == pytest.approx(380 / 1e6)


def test_a_prompt_has_a_token_for_eight_bytes_of_its_texts_at_least():
    assert BOUNDS.fewest_prompt == FEWEST > 100
    parts = [{"type": "text", "text": "x" * 80}, {"type": "image_url", "image_url": {"url": "y" * 800}}]
    messages = [{"role": "user", "content": parts}, {"role": "tool"}]
    for body in ({"prompt": "x" * 80}, {"prompt": ["x" * 40] * 2}, {"messages": messages}):
        assert TokenBounds.of(body).fewest_prompt == 10
    for body in ({"prompt": list(range(80))}, {}):
        assert TokenBounds.of(body).fewest_prompt == 1


ODD = st.sampled_from([None, True, 10.0, "10", math.nan, -1, 0, 10**12])
PROMPTS = ODD | st.integers(1, FEWEST + 1) | st.integers(FEWEST, BYTES + 1)


@given(PROMPTS, ODD | st.integers(0, 101))
def test_any_usage_is_charged_between_the_floor_and_the_bound(prompt, completion):
    """What can be is charged as it is, a prompt by its bytes at least; else the bound."""
    believed = type(prompt) is int and 1 <= prompt <= BYTES and type(completion) is int and 0 <= completion <= 100
    charge = PRICES.charge("gpt-4.1", BOUNDS, (prompt, completion))
    if believed:
        assert charge == pytest.approx((max(prompt, FEWEST) * 2 + completion * 8) / 1e6)
    else:
        assert charge == PRICES.upper_bound("gpt-4.1", BOUNDS)
    assert PRICES.charge("unheard-of", BOUNDS, (prompt, completion)) is None
    told = BOUNDS.doubts((prompt, completion))
    for count, name, low, high in ((prompt, "prompt", FEWEST, BYTES), (completion, "completion", 0, 100)):
        doubted = count is not None and not (type(count) is int and low <= count <= high)
        assert (f"{count} {name} tokens where {low:,} to {high:,} can be" in told) == doubted
        assert (name in told) == doubted


def test_own_prices_come_first():
    own = Prices.load(overrides={"mine": [1, 2.5], "gpt-4.1": (0, 0)})
    assert own.cost("mine", 10**6, 10**6) == 3.5
    assert own.cost("gpt-4.1", 5, 5) == 0
    assert own.cost("gpt-4.1-2025-04-14", 10**6, 0) == 2
    assert PRICES.cost("mine", 1, 1) is None


def test_all_faults_of_the_prices_given_are_listed():
    faults = {"low": [-1, 2], "nan": [math.nan, 2], "text": ["1", 2], "three": [1, 2, 3], "one": 1, "yes": [True, 1]}
    with pytest.raises(PoolError) as caught:
        Prices.load({"good": [1, 2], **faults})
    found = [line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert found == list(faults)
    assert "yaml" not in str(caught.value)  # the package's own file is not to blame
