"""A pool of annotators from plain keywords: what an oracle's mapping and the command line both say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PoolError
from ..llm.client import ClientConfig
from ..llm.endpoint import OPENAI_KEY
from ..llm.requests import content_key
from ..oracles.base import PreferenceOracle
from ..oracles.judges import BothOrders, Flip
from .batch import Progress
from .config import PoolConfig, load_models, load_pool, load_prompt
from .draws import AlpacaFarmDraws
from .pool import AnnotatorPool, Compat

if TYPE_CHECKING:
    from ..llm.ledger.store import Ledger


def make_pool(
    pool: str | Path | PoolConfig = "alpaca_farm",
    *,
    models: Any = None,
    model: str | None = None,
    base_url: str | None = None,
    api_key_env: str = OPENAI_KEY,
    ledger: Ledger | str | Path | None = None,
    seed: int = 0,
    budget_usd: float | None = None,
    replay: bool = False,
    flip: float | None = None,
    both_orders: bool = False,
    compat: Compat | None = None,
    prices: Mapping[str, tuple[float, float]] | None = None,
    max_concurrency: int = ClientConfig.max_concurrency,
    requests_per_minute: float | None = ClientConfig.requests_per_minute,
    attempt_timeout_s: float = ClientConfig.attempt_timeout_s,
    deadline_s: float = ClientConfig.deadline_s,
    allow_insecure: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> PreferenceOracle:
    """The pool with its noise, asked in one order or both.

    Args:
        pool: "alpaca_farm" (the 13), "eval" (the same), "ann" (with 25 % flips), "greedy", "weighted", a YAML file, or
            a `PoolConfig`.
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
        max_concurrency: Requests in flight at once; fewer where the server asks for it.
        requests_per_minute: At most so many; None: no limit of our own.
        attempt_timeout_s: Seconds for one attempt, its whole reply included.
        deadline_s: Seconds for one request, all its attempts and waits included.
        allow_insecure: Take http:// to another machine too, where anybody on the way can read key and texts.
        on_progress: Called after each answer.

    Raises:
        PoolError: The pool or the models are not well written, both `models` and `model` are given, or the variable
            named by `api_key_env` is not set.
        ValueError: `flip` is not within 0 and 0.5, or `both_orders` with `compat`, whose orders are drawn.
    """
    if both_orders and compat:
        raise ValueError(f"both_orders shows each pair in both orders, compat={compat!r} draws one: leave one out.")
    client = ClientConfig(
        max_concurrency=max_concurrency,
        requests_per_minute=requests_per_minute,
        attempt_timeout_s=attempt_timeout_s,
        deadline_s=deadline_s,
    )
    asked = AnnotatorPool(
        pool,
        model_spec(models, model),
        base_url=base_url,
        api_key_env=api_key_env,
        allow_insecure=allow_insecure,
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
    judge: PreferenceOracle = BothOrders(asked) if both_orders else asked
    p = asked.config.flip if flip is None else flip
    return Flip(judge, p, seed=seed, draws=AlpacaFarmDraws(seed) if compat else None) if p else judge


def model_spec(models: Any, model: str | None) -> Any:
    """What `make_pool`'s `models` and `model` say together, for `load_models`.

    Raises:
        PoolError: Both are given.
    """
    if models is not None and model is not None:
        raise PoolError(f"Give models or model, not both; got models={models!r} and model={model!r}.")
    return {"model": model} if model is not None else "openai" if models is None else models


def fingerprint(spec: Mapping[str, Any]) -> str:
    """What a mapping of `make_pool`'s keywords stands for besides its own text: files and variables as they are now."""
    variables = [os.environ.get(name) for name in ("OPENAI_BASE_URL", "ALPACAFARM_LEDGER", "XDG_CACHE_HOME")]
    return content_key([content(spec), variables])


def content(spec: Mapping[str, Any]) -> str:
    """A hash of the files that a mapping of `make_pool`'s keywords names: its annotators, their prompts and models."""
    pool = load_pool(spec["pool"])
    prompts = [load_prompt(annotator.prompt).digest for annotator in pool.annotators]
    models = spec.get("models")
    listed = load_models(models, pool.roles) if isinstance(models, str | Path) else {}
    files = [pool.model_dump(mode="json"), prompts, {role: model.model_dump() for role, model in listed.items()}]
    return content_key(files)
