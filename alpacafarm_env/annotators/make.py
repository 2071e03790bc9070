"""A pool of annotators from plain keywords: what an oracle's mapping and the command line both say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PoolError
from ..oracles.base import PreferenceOracle
from ..oracles.judges import BothOrders, Flip
from .asking import Progress
from .config import load_pool
from .draws import AlpacaFarmDraws
from .pool import AnnotatorPool, Compat

if TYPE_CHECKING:
    from ..api.ledger import Ledger


def make_pool(
    pool: str | Path = "alpaca_farm",
    *,
    models: Any = None,
    model: str | None = None,
    base_url: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    ledger: Ledger | str | Path | None = None,
    seed: int = 0,
    budget_usd: float | None = None,
    replay: bool = False,
    flip: float | None = None,
    both_orders: bool = False,
    compat: Compat | None = None,
    prices: Mapping[str, tuple[float, float]] | None = None,
    max_concurrency: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PreferenceOracle:
    """The pool with its noise, asked in one order or both.

    Args:
        pool: "alpaca_farm" (the 13), "eval" (the same), "ann" (with 25 % flips), "greedy", "weighted", or a YAML file.
        models: Which model plays which role, see `config.load_models`; "openai" unless `model` is given.
        model: One model for all roles, instead of `models`.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key_env: The environment variable that holds the key. Keys themselves are no keyword: an environment's
            keywords are stored in its spec.
        ledger: The file of answers and spending, or an open `Ledger`; None: the user's own.
        seed: Another seed is another opinion, asked and paid for anew.
        budget_usd: What the ledger may have spent in all, in US dollars.
        replay: Answer from the ledger alone.
        flip: Probability that a verdict is flipped, 0 to 0.5; None: the pool's own.
        both_orders: Ask about each pair in both orders and average.
        compat: "alpacafarm": draw annotators, orders and noise as the released code does.
        prices: US dollars per million tokens by model, (input, output).
        max_concurrency: Requests in flight at once; None: the client's default.
        on_progress: Called after each answer.

    Raises:
        PoolError: The pool or the models are not well written, both `models` and `model` are given, or the variable
            named by `api_key_env` is not set.
        ValueError: `flip` is not within 0 and 0.5, or `both_orders` with `compat`, whose orders are drawn.
    """
    if models is not None and model is not None:
        raise PoolError(f"Give models or model, not both; got models={models!r} and model={model!r}.")
    if both_orders and compat:
        raise ValueError(f"both_orders shows each pair in both orders, compat={compat!r} draws one: leave one out.")
    key = os.environ.get(api_key_env)
    if key is None and api_key_env != "OPENAI_API_KEY" and not replay:
        # Going on would send OpenAI's key to whoever is behind base_url.
        raise PoolError(f"The environment variable {api_key_env}, which is to hold the key, is not set.")
    from ..api.client import ClientConfig

    config = load_pool(pool)
    client = ClientConfig() if max_concurrency is None else ClientConfig(max_concurrency=max_concurrency)
    judge: PreferenceOracle = AnnotatorPool(
        config,
        {"model": model} if model else models if models is not None else "openai",
        base_url=base_url,
        api_key=key,
        ledger=ledger,
        seed=seed,
        budget_usd=budget_usd,
        replay=replay,
        order="as_given" if both_orders else "random",
        compat=compat,
        client_config=client,
        prices=prices,
        on_progress=on_progress,
    )
    if both_orders:
        judge = BothOrders(judge)
    p = config.flip if flip is None else flip
    return Flip(judge, p, seed=seed, draws=AlpacaFarmDraws(seed) if compat else None) if p else judge
