"""What every pool of LLM annotators has: members on a server, a ledger, a budget, limits; see `pool`, `rating`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..errors import PoolError
from ..llm.client import Client, ClientConfig, run
from ..llm.endpoint import OPENAI_KEY, Endpoint, require_key_variable
from ..llm.ledger.operations import check_budget
from ..llm.ledger.store import Ledger, shared_ledger
from ..llm.limits import Limiter
from ..llm.pricing import Prices
from ..oracles.base import NoDeepCopy
from .batch import Answer, BatchRun, Progress, Question, Served
from .config import ModelConfig, PoolConfig, check_form, load_models, load_pool, load_prompt


def check_server(spec: Mapping[str, Any]) -> None:
    """Refuses a mapping of a pool's keywords that could ask nobody, or spend without a limit that anybody has set.

    Raises:
        PoolError: The server is not on this machine and `budget_usd` is not given (None for no limit), or the variable
            named by `api_key_env` is not set.
        PermanentAPIError: The server needs a key, and there is none.
        ValueError: `base_url` is no address.
    """
    if getattr(spec.get("ledger"), "replay", spec.get("replay", False)):  # asks nobody
        return
    require_key_variable(spec.get("api_key_env", OPENAI_KEY))
    given = {key: spec[key] for key in ("base_url", "api_key_env", "allow_insecure") if key in spec}
    endpoint = Endpoint(**given)
    endpoint.key()
    if not endpoint.local and "budget_usd" not in spec:
        raise PoolError(
            f"Pool {spec['pool']!r}: expected budget_usd, the US dollars that its ledger may have spent in all (None, "
            f"in JSON null: no limit), got none, and answers of {endpoint.host} may cost money. Give it, or the "
            "base_url of a server on this machine."
        )


class ServedOptions(TypedDict, total=False):
    """Keywords of `ServedPool`."""

    base_url: str | None
    api_key: str | None
    api_key_env: str
    allow_insecure: bool
    ledger: Ledger | Path | str | None
    seed: int
    budget_usd: float | None
    replay: bool
    client_config: ClientConfig | None
    prices: Mapping[str, tuple[float, float]] | None
    on_progress: Callable[[Progress], None] | None


class ServedPool(NoDeepCopy):
    """Annotators behind an OpenAI-compatible server, and what they have answered.

    Args:
        pool: The name of a pool, a YAML file, or a `PoolConfig`. Its noise is not added here, see `make_pool`.
        models: Which model plays which role, see `config.load_models`.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: the variable named by `api_key_env`, read at each call.
        api_key_env: The environment variable that holds the key; one that you name must be set, except for a replay.
        allow_insecure: Accept http:// to another machine, where anybody on the way can read key and texts.
        ledger: The file of answers and spending, or an open `Ledger`; None: the user's own, see
            `llm.ledger.file.default_path`.
        seed: Another seed is another opinion on the same texts, asked and paid for anew.
        budget_usd: What the ledger may have spent in all, in US dollars; None: no limit.
        replay: Answer from the ledger alone; a question without a stored answer is an error. An open `Ledger` must have
            been opened for it.
        client_config: Time limits, concurrency, repeats. What is learned of the server's limits is kept between calls.
        prices: US dollars per million tokens by model, (input, output), over the package's own table.
        on_progress: Called after each answer.

    Raises:
        PoolError: A pool or its models are malformed, it rates where pairs are to be compared or the other way round, a
            role has no model, a model has two prices, or the variable named by `api_key_env` is not set.
        ValueError: A bad seed or budget, a replay from a `Ledger` that is open for more.
    """

    rates: ClassVar[bool] = False
    """Whether it is shown single responses, to rate, and not pairs."""

    def __init__(
        self,
        pool: str | Path | PoolConfig,
        models: Any = "openai",
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str = OPENAI_KEY,
        allow_insecure: bool = False,
        ledger: Ledger | Path | str | None = None,
        seed: int = 0,
        budget_usd: float | None = None,
        replay: bool = False,
        client_config: ClientConfig | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed: expected an integer, got {seed!r}.")
        check_budget(budget_usd)
        if replay and isinstance(ledger, Ledger) and not ledger.replay:
            raise ValueError(
                f"replay: {ledger.path} is open for asking too. Open it with replay=True, or give its path."
            )
        if not (ledger.replay if isinstance(ledger, Ledger) else replay):
            require_key_variable(api_key_env)
        self.config = pool if isinstance(pool, PoolConfig) else load_pool(pool)
        check_form(self.config, rates=self.rates)
        roles = load_models(models, self.config.roles)
        self.name = self.config.name
        self.paid = True
        self.endpoint = Endpoint(base_url, api_key, api_key_env=api_key_env, allow_insecure=allow_insecure)
        self.served = tuple(
            Served(annotator, load_prompt(annotator.prompt), roles[annotator.role], self.endpoint.base_url, seed)
            for annotator in self.config.annotators
        )
        self.ledger = ledger if isinstance(ledger, Ledger) else shared_ledger(ledger, replay=replay)
        self.seed, self.on_progress = seed, on_progress
        self.budget_usd, self.client_config = budget_usd, client_config or ClientConfig()
        self.prices = Prices.load(overrides={**_prices_in(roles.values()), **(prices or {})})
        self._limiter = Limiter(self.client_config)

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """The answer to each question, one call for all.

        Rows with the same question share one answer, and the first of them bears its cost.

        Raises:
            PermanentAPIError: The server refused for good (key, model, quota). Answers so far are kept.
            OutageError: The server has stopped answering. Answers so far are kept.
            LedgerError: The budget is reached, a replay misses, or the ledger's file cannot be used.
        """
        wanted = {question.key: question for question in questions}
        found = run(self.asking(wanted).run()) if wanted else {}
        answers = []
        for question in questions:
            answers.append(found[question.key])
            found[question.key] = replace(found[question.key], cost_usd=0.0, cached=True)
        return answers

    def asking(self, questions: Mapping[str, Question]) -> BatchRun:
        """A call about questions, by key; `answers` runs it. What it learns of the server's limits is kept."""
        client = partial(
            Client,
            self.endpoint,
            config=self.client_config,
            ledger=self.ledger,
            prices=self.prices,
            budget_usd=self.budget_usd,
            limiter=self._limiter,
        )
        return BatchRun(questions, self.served, self.ledger, client, self.on_progress)


def _prices_in(models: Iterable[ModelConfig]) -> dict[str, tuple[float, float]]:
    """The prices given with the models.

    Raises:
        PoolError: Two roles give one model different prices.
    """
    found: dict[str, tuple[float, float]] = {}
    for model in models:
        price = model.price_usd_per_million
        if price and found.setdefault(model.model, price) != price:
            raise PoolError(
                f"models: expected one price for {model.model!r} in all its roles, got {list(found[model.model])} and "
                f"{list(price)} USD per million tokens."
            )
    return found


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """The details of a batch of one row or more, each an array [B]; texts are objects."""
    kinds = {key: object if isinstance(value, str) else None for key, value in rows[0].items()} if rows else {}
    return {key: np.array([row[key] for row in rows], kind) for key, kind in kinds.items()}
