"""What requests to served models cost, and the most that a request can cost before it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from ..errors import PoolError
from .tokens import TokenBounds, Usage

SHIPPED = Path(__file__).with_name("prices.yaml")
MAX_BYTES = 1 << 20
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
    def load(
        cls, path: str | PathLike[str] | None = None, overrides: Mapping[str, Sequence[float]] | None = None
    ) -> Self:
        """Reads a price list.

        Args:
            path: A YAML file, model -> {usd_per_million: [input, output], as_of, source}; None: the one shipped.
            overrides: Your own prices, {"model": [input, output]} in US dollars per million tokens; they come first.

        Raises:
            PoolError: The file or a price is not well written; the message lists every fault.
        """
        source = SHIPPED if path is None else Path(path)
        entries = _read(source)
        faults: list[str] = []
        models = {str(model): _entry(str(model), entry, faults) for model, entry in entries.items()}
        for model, pair in (overrides or {}).items():
            price = _pair(f"overrides: {model}", pair, faults)
            models[model] = Price(*price, "", "given by the user")
        if faults:
            raise PoolError(f"Prices in {source}:\n" + "\n".join(f"  {fault}" for fault in faults))
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


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        if path.stat().st_size > MAX_BYTES:
            raise PoolError(f"Prices in {path}: the file is larger than {MAX_BYTES} bytes.")
        entries = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PoolError(f"Prices in {path} cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise PoolError(
            f"Prices in {path}: expected model: {{usd_per_million: [input, output], as_of: ..., source: ...}}, got "
            f"{type(entries).__name__}."
        )
    return entries


def _entry(model: str, entry: object, faults: list[str]) -> Price:
    expected = {"usd_per_million", "as_of", "source"}
    if not isinstance(entry, dict) or set(entry) != expected:
        got = sorted(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        faults.append(f"{model}: expected the fields {sorted(expected)}, got {got}")
        return Price(0, 0, "", "")
    blank = [name for name in ("as_of", "source") if not str(entry[name] or "").strip()]
    faults += [f"{model}.{name}: expected text, got nothing" for name in blank]
    return Price(
        *_pair(f"{model}.usd_per_million", entry["usd_per_million"], faults), str(entry["as_of"]), str(entry["source"])
    )


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
