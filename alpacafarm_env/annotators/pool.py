"""A pool of LLM annotators behind an OpenAI-compatible server, as a `PreferenceOracle`.

For each pair one annotator of the pool is drawn, and an order of the two responses. The pairs of one annotator share
requests of up to its batch size; all requests are in flight together, and every reply goes to the ledger before it is
read, so a pair that was answered before costs nothing. Source: Dubois et al. 2023 (arXiv 2305.14387), section 3 and
appendix C. Draws are keyed on the unordered pair; the released code keys them on the instruction alone
(`compat="alpacafarm"` does too).

    pool = AnnotatorPool("alpaca_farm", models={"model": "my-model"}, base_url="http://localhost:8000/v1")
    pool.compare([instruction], [a], [b])  # 1.0: b is preferred
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import PoolError, did_you_mean
from ..llm.client import Client, ClientConfig, run
from ..llm.endpoint import OPENAI_KEY, Endpoint, require_key_variable
from ..llm.ledger.operations import check_budget
from ..llm.ledger.store import Ledger, shared_ledger
from ..llm.limits import Limiter
from ..llm.pricing import Prices
from ..llm.requests import content_key
from ..oracles.base import UNSCORED_REASON, NoDeepCopy, PreferenceOracle, Verdicts
from ..oracles.draws import KeyedDraws
from ..oracles.judges import BothOrders, Flip
from .batch import BatchRun, Progress, Question, Served
from .config import ModelConfig, PoolConfig, load_models, load_pool, load_prompt
from .draws import AlpacaFarmDraws
from .prompts import Item, check_item

Order = Literal["random", "as_given"]
Compat = Literal["alpacafarm"]


class AnnotatorPool(NoDeepCopy):
    """Asks a served model for each verdict: 0 or 1, or between for prompts that read the answers' probabilities.

    Args:
        pool: The name of a pool, a YAML file, or a `PoolConfig`. Its noise is not added here, see `make_pool`.
        models: Which model plays which role, see `config.load_models`.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: the variable named by `api_key_env`, read at each call.
        api_key_env: The environment variable that holds the key; one that you name must be set, except for a replay.
        allow_insecure: Accept http:// to another machine, where anybody on the way can read key and texts.
        ledger: The file of answers and spending, or an open `Ledger`; None: the user's own, see
            `llm.ledger.file.default_path`.
        seed: Another seed is another opinion on the same pairs, asked and paid for anew.
        budget_usd: What the ledger may have spent in all, in US dollars; None: no limit.
        replay: Answer from the ledger alone; a pair without a stored answer is an error. An open `Ledger` must have
            been opened for it.
        order: "random" draws which response is shown first; "as_given" shows `a` first (for `BothOrders`).
        compat: "alpacafarm" draws annotators and orders as the released code does.
        client_config: Time limits, concurrency, repeats. What is learned of the server's limits is kept between calls.
        prices: US dollars per million tokens by model, (input, output), over the package's own table.
        on_progress: Called after each answer.

    Raises:
        PoolError: A pool or its models are malformed, a role has no model, a model has two prices, or the variable
            named by `api_key_env` is not set.
        ValueError: An unknown order or compat, a bad seed or budget, a replay from a `Ledger` that is open for more.
    """

    blank: Final[Mapping[str, Any]] = {
        "annotator": "",
        "shown_first": "",
        "cost_usd": 0.0,
        "cached": False,
        UNSCORED_REASON: "",
    }

    def __init__(
        self,
        pool: str | Path | PoolConfig = "alpaca_farm",
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
        order: Order = "random",
        compat: Compat | None = None,
        client_config: ClientConfig | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if order not in get_args(Order):
            raise did_you_mean("order", order, get_args(Order))
        if compat is not None and compat not in get_args(Compat):
            raise did_you_mean("compat", compat, get_args(Compat))
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
        roles = load_models(models, self.config.roles)
        self.name = self.config.name + (f"+{compat}_draws" if compat else "")
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
        self.draws_order = order == "random"
        # Pools of one stream draw alike: what "eval" has asked, "ann" need not ask again.
        self._draws = AlpacaFarmDraws(seed) if compat else KeyedDraws(seed, self.config.stream)
        self._limiter = Limiter(self.client_config)

    def compare(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """P(b preferred), [B]; 0.5 for equal texts, which are not asked about, NaN without a verdict."""
        return self.judge(instructions, a, b).scores

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """Verdicts with details, one call for the whole batch.

        Details: `annotator`, `shown_first` ("a" or "b"), `cost_usd` (of this call; NaN where the model has no price),
        `cached` (nothing was asked), `unscored_reason` (type and message of the error, where NaN).

        Raises:
            PermanentAPIError: The server refused for good (key, model, quota). Answers so far are kept.
            OutageError: The server has stopped answering. Answers so far are kept.
            LedgerError: The budget is reached, a replay misses, or the ledger's file cannot be used.
            InvalidResponseError: See `questions`; nothing is asked then.
        """
        questions = self.questions(instructions, a, b)
        wanted = {question.key: question for question in questions if question is not None}
        answers = run(self.asking(wanted).run()) if wanted else {}
        scores = np.full(len(questions), 0.5)
        details: list[dict[str, Any]] = [dict(self.blank) for _ in questions]
        for row, question in enumerate(questions):
            if question is not None:
                answer, b_first = answers[question.key], question.item.first == b[row]
                scores[row] = 1 - answer.score if b_first else answer.score
                details[row] = {
                    "annotator": self.served[question.annotator].config.name,
                    "shown_first": "b" if b_first else "a",
                    "cost_usd": answer.cost_usd,
                    "cached": answer.cached,
                    UNSCORED_REASON: answer.reason,
                }
                # Rows with the same question share one answer, and the first of them bears its cost.
                answers[question.key] = replace(answer, cost_usd=0.0, cached=True)
        kinds = {key: object if isinstance(value, str) else None for key, value in self.blank.items()}
        return Verdicts(scores, {key: np.array([row[key] for row in details], kind) for key, kind in kinds.items()})

    def questions(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> list[Question | None]:
        """Who is asked about each pair, in which order; None for equal texts, which nobody is asked about.

        Raises:
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the pair.
        """
        rows = list(zip(instructions, a, b, strict=True))
        for number, row in enumerate(rows, 1):
            if row[1] != row[2]:
                check_item(Item(*row), number)
        who = self._draws.annotators(rows, len(self.served)).tolist()
        b_first = self._draws.b_first(rows) if self.draws_order else np.zeros(len(rows), bool)
        items = [Item(str(i), *((y, x) if swap else (x, y))) for (i, x, y), swap in zip(rows, b_first, strict=True)]
        return [
            None if item.first == item.second else self.served[n].question(n, item)
            for n, item in zip(who, items, strict=True)
        ]

    def asking(self, questions: Mapping[str, Question]) -> BatchRun:
        """A call about questions, by key; `judge` runs it. What it learns of the server's limits is kept."""
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
    """A pool with its noise, asked in one order or both, from plain keywords: a judge's mapping, the command line.

    Other keywords are those of `AnnotatorPool`, but not the key: an environment's keywords are stored in its spec.

    * `pool`: "alpaca_farm" (the 13), "eval" (the same), "ann" (25 % flips), "greedy", "weighted", or see there.
    * `models`: Which model plays which role, see `config.load_models`; "openai" unless `model`, one for all, is given.
    * `flip`: Probability that a verdict is flipped, 0 to 0.5; None: the pool's own.
    * `both_orders`: Ask about each pair in both orders and average.
    * `compat`: "alpacafarm": draw annotators, orders and noise as the released code does.
    * `max_concurrency`, `requests_per_minute`, `attempt_timeout_s`, `deadline_s`: See `ClientConfig`.

    Raises:
        PoolError: See `AnnotatorPool`; or both `models` and `model` are given.
        ValueError: `flip` is not within 0 and 0.5, or `both_orders` with `compat`, whose orders are drawn.
    """
    if both_orders and compat:
        raise ValueError(f"both_orders shows each pair in both orders, compat={compat!r} draws one: leave one out.")
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
        client_config=ClientConfig(
            max_concurrency=max_concurrency,
            requests_per_minute=requests_per_minute,
            attempt_timeout_s=attempt_timeout_s,
            deadline_s=deadline_s,
        ),
        prices=prices,
        on_progress=on_progress,
    )
    judge: PreferenceOracle = BothOrders(asked) if both_orders else asked
    p = asked.config.flip if flip is None else flip
    return Flip(judge, p, seed=seed, draws=AlpacaFarmDraws(seed) if compat else None) if p else judge


def model_spec(models: Any, model: str | None) -> Any:
    """What `make_pool`'s `models` and `model` mean together, for `load_models`.

    Raises:
        PoolError: Both are given.
    """
    if models is not None and model is not None:
        raise PoolError(f"Give models or model, not both; got models={models!r} and model={model!r}.")
    return {"model": model} if model is not None else "openai" if models is None else models


def fingerprint(spec: Mapping[str, Any]) -> str:
    """The present state of the files and variables that `make_pool`'s keywords refer to."""
    variables = [os.environ.get(name) for name in ("OPENAI_BASE_URL", "ALPACAFARM_LEDGER", "XDG_CACHE_HOME")]
    return content_key([content(spec), variables])


def content(spec: Mapping[str, Any]) -> str:
    """A hash of the files that `make_pool`'s keywords refer to: annotators, prompts and models."""
    pool = load_pool(spec["pool"])
    prompts = [load_prompt(annotator.prompt).digest for annotator in pool.annotators]
    models = spec.get("models")
    listed = load_models(models, pool.roles) if isinstance(models, str | Path) else {}
    return content_key([pool.model_dump(mode="json"), prompts, {r: m.model_dump() for r, m in listed.items()}])
