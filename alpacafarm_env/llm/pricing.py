"""What requests to served models cost, and the most that a request can cost before it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import PoolError
from .tokens import TokenBounds, Usage

SHIPPED = Path(__file__).with_name("prices.yaml")
MAX_USD_PER_MILLION = 1e6


@dataclass(frozen=True)
class Price:
    """A model's price.

    Attributes:
        input_usd: US dollars per million tokens of the prompt.
        output_usd: The same for the completion, hidden reasoning included.
        as_of: The month ("2026-03") or day the price was read.
        source: Where it was read.
    """

    input_usd: float
    output_usd: float
    as_of: str
    source: str

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """US dollars for so many tokens."""
        return (prompt_tokens * self.input_usd + completion_tokens * self.output_usd) / 1e6


@dataclass(frozen=True)
class Prices:
    """Prices by model, by exact names: a dated snapshot need not have its model's price (gpt-4o-2024-05-13 has not)."""

    models: Mapping[str, Price]

    @classmethod
    def load(cls, overrides: Mapping[str, Sequence[float]] | None = None) -> Self:
        """The package's own prices.

        Args:
            overrides: Your own prices, {"model": [input, output]} in US dollars per million tokens; they come first.

        Raises:
            PoolError: A price given is none; the message lists every fault.
        """
        import yaml

        models = {}
        for model, entry in yaml.safe_load(SHIPPED.read_text("utf-8")).items():
            input_usd, output_usd = entry["usd_per_million"]
            models[model] = Price(input_usd, output_usd, entry["as_of"], entry["source"])
        faults: list[str] = []
        for model, pair in (overrides or {}).items():
            models[model] = Price(*_pair(model, pair, faults), "", "given by the user")
        if faults:
            raise PoolError("The prices given:\n" + "\n".join(f"  {fault}" for fault in faults))
        return cls(models)

    def price(self, model: str) -> Price | None:
        """The model's price, or None."""
        return self.models.get(model)

    def cost(self, model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
        """US dollars for so many tokens; None: no price is known."""
        price = self.price(model)
        return None if price is None else price.of(prompt_tokens, completion_tokens)

    def upper_bound(self, model: str, bounds: TokenBounds) -> float | None:
        """The most a request can cost, in US dollars; None: no price is known, or the request sets no limit."""
        price = self.price(model)
        if price is None or bounds.most_completion is None:
            return None
        return price.of(bounds.most_prompt, bounds.most_completion)

    def charge(self, model: str, bounds: TokenBounds, usage: Usage) -> float | None:
        """What to charge for a request that was answered.

        Args:
            model: The model's name.
            bounds: What the request can have taken.
            usage: (prompt tokens, completion tokens) as the server reported them; None where it did not.

        Returns:
            The cost of the usage if it can be; else the upper bound. A prompt is charged as `fewest_prompt` at least,
            whatever was reported. None as in `upper_bound`; a request without a limit is charged what was reported.
        """
        prompt, completion = bounds.believable(usage)
        if prompt is None or completion is None:
            return self.upper_bound(model, bounds)
        return self.cost(model, max(prompt, bounds.fewest_prompt), completion)


def _pair(where: str, pair: object, faults: list[str]) -> tuple[float, float]:
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_price, pair)):
        return float(pair[0]), float(pair[1])
    faults.append(
        f"{where}: expected [input, output] in USD per million tokens, each in [0, {MAX_USD_PER_MILLION:.0e}], "
        f"got {pair!r}"
    )
    return 0.0, 0.0


def _is_price(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MAX_USD_PER_MILLION  # type: ignore[operator]
