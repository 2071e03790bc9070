"""What requests to served models cost, and the most that a request can cost before it is sent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import PoolError
from .requests import TokenBounds

SHIPPED = Path(__file__).with_name("prices.yaml")
MAX_USD_PER_MILLION = 1e6


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens of the prompt and of the completion (hidden reasoning included), read at `source`.

    `as_of` is the month ("2026-03") or day it was read.
    """

    input_usd: float
    output_usd: float
    as_of: str
    source: str


@dataclass(frozen=True)
class Prices:
    """Prices by exact model name: a dated snapshot need not have its model's price (gpt-4o-2024-05-13 has not)."""

    models: Mapping[str, Price]

    @classmethod
    def load(cls, overrides: Mapping[str, Sequence[float]] | None = None) -> Self:
        """The package's own prices.

        Args:
            overrides: Your own, {"model": [input, output]} in US dollars per million tokens; they take precedence.

        Raises:
            PoolError: An override is no price; the message lists all that are not.
        """
        import yaml

        models = {}
        for model, entry in yaml.safe_load(SHIPPED.read_text("utf-8")).items():
            input_usd, output_usd = entry["usd_per_million"]
            models[model] = Price(input_usd, output_usd, entry["as_of"], entry["source"])
        given = overrides or {}
        faults = [
            f"  {model}: expected [input, output] in USD per million tokens, each in [0, {MAX_USD_PER_MILLION:.0e}], "
            f"got {pair!r}"
            for model, pair in given.items()
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_price, pair)))
        ]
        if faults:
            raise PoolError("\n".join(["The prices given:", *faults]))
        for model, (input_usd, output_usd) in given.items():
            models[model] = Price(float(input_usd), float(output_usd), "", "given by the user")
        return cls(models)

    def price(self, model: str) -> Price | None:
        """The model's price, or None."""
        return self.models.get(model)

    def cost(self, model: str, prompt_tokens: float, completion_tokens: float) -> float | None:
        """US dollars for so many tokens; None if no price is known."""
        price = self.price(model)
        if price is None:
            return None
        return (prompt_tokens * price.input_usd + completion_tokens * price.output_usd) / 1e6

    def upper_bound(self, model: str, bounds: TokenBounds) -> float | None:
        """The most a request can cost, in US dollars; None if no price is known or the request sets no limit."""
        if math.isinf(bounds.most_completion):
            return None
        return self.cost(model, bounds.most_prompt, bounds.most_completion)

    def charge(self, model: str, bounds: TokenBounds, reported: tuple[object, object]) -> float | None:
        """What to charge for an answered request, in US dollars; None as in `upper_bound`.

        The reported (prompt tokens, completion tokens) if believable, with `fewest_prompt` as a floor for the prompt;
        else the upper bound. A request without a limit is charged what was reported.
        """
        prompt, completion = bounds.believable(reported)
        if prompt is None or completion is None:
            return self.upper_bound(model, bounds)
        return self.cost(model, max(prompt, bounds.fewest_prompt), completion)


def _is_price(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_USD_PER_MILLION  # type: ignore[operator]
