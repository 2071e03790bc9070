"""What requests to served models cost, and the most that a request can cost before it is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeGuard

from ..errors import PoolError

SHIPPED = Path(__file__).with_name("prices.yaml")
MAX_BYTES = 1 << 20
MAX_USD_PER_MILLION = 1e6
_BYTES_PER_TOKEN = 8
"""Bytes of text that a token holds at most on average. English takes four to five, and Chinese three to six. Only runs
of one character, such as blanks, take more; such a text is then charged too much, which no budget minds."""


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

    def upper_bound(self, model: str, body: Mapping[str, Any]) -> float | None:
        """The most a request can cost, in US dollars.

        A token is at least one byte, so the body's size in UTF-8 bounds the prompt; the body's own limit bounds the
        completions.

        Returns:
            The bound; None: no price is known, or the body sets no limit to the completion.
        """
        price, bounds = self.price(model), token_bounds(body)
        return None if price is None or bounds is None else price.of(*bounds)

    def charge(self, model: str, body: Mapping[str, Any], usage: tuple[int | None, int | None]) -> float | None:
        """What to charge for a request that was answered.

        Args:
            model: The model's name.
            body: The request.
            usage: (prompt tokens, completion tokens) as the server reported them; None where it did not.

        Returns:
            The cost of the usage if it is believable, that is within the request's bounds; else the upper bound. A
            prompt is charged as `fewest_prompt_tokens` at least, whatever was reported. None as in `upper_bound`; a
            request without a limit is charged what was reported.
        """
        prompt, completion = believable(body, usage)
        if prompt is None or completion is None:
            return self.upper_bound(model, body)
        return self.cost(model, max(prompt, fewest_prompt_tokens(body)), completion)


def believable(body: Mapping[str, Any], usage: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The tokens that a server reported, None for each count that the request cannot have taken."""
    bounds = token_bounds(body) or (math.inf, math.inf)
    prompt, completion = usage
    return (
        prompt if _within(prompt, 1, bounds[0]) else None,
        completion if _within(completion, 0, bounds[1]) else None,
    )


def doubts(body: Mapping[str, Any], reported: tuple[object, object]) -> str:
    """What cannot be in a reported usage, with both numbers; "" where all of it can, or nothing was reported.

    Args:
        body: The request.
        reported: (prompt tokens, completion tokens) as they stand in the reply, of whatever type.
    """
    most = token_bounds(body) or (math.inf, math.inf)
    bounds = {"prompt": (max(1, fewest_prompt_tokens(body)), most[0]), "completion": (0, most[1])}
    return ", ".join(
        f"{str(count)[:40]} {name} tokens where {least:,} to {limit:,} can be"
        for (name, (least, limit)), count in zip(bounds.items(), reported, strict=True)
        if count is not None and not _within(count, least, limit)
    )


def fewest_prompt_tokens(body: Mapping[str, Any]) -> int:
    """The fewest tokens that the texts of a request take: one for `_BYTES_PER_TOKEN` bytes."""
    prompt = body.get("prompt")
    texts = [message.get("content") for message in body.get("messages") or () if isinstance(message, dict)]
    texts += prompt if isinstance(prompt, list) else [prompt]
    parts = [part.get("text") for text in texts if isinstance(text, list) for part in text if isinstance(part, dict)]
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in [*texts, *parts] if isinstance(text, str))
    return size // _BYTES_PER_TOKEN


def token_bounds(body: Mapping[str, Any]) -> tuple[int, int] | None:
    """The most tokens a request can take: (prompt, completion); None if it sets no limit to the completion."""
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not limits or not all(_within(limit, 0, math.inf) for limit in limits):
        return None
    prompts = body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    choices = max(_count(body.get("n")), _count(body.get("best_of")))
    text = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(text), max(limits) * choices * several


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 1 else 1


def _within(value: object, least: float, most: float) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


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
