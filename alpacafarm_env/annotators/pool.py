"""A pool of LLM annotators behind an OpenAI-compatible server, as a `PreferenceOracle`.

For each pair one annotator of the pool is drawn and an order to show the two responses in; the pairs of one annotator
share requests of up to its batch size, all requests are in flight together, and every reply goes to the ledger before
it is read. A pair that was answered before costs nothing. Source: Dubois et al. 2023 (arXiv 2305.14387), section 3 and
appendix C; the draws are keyed on the unordered pair where the released code keys them on the instruction alone
(`compat="alpacafarm"` draws as it does).

    pool = AnnotatorPool("alpaca_farm", models={"model": "my-model"}, base_url="http://localhost:8000/v1")
    pool.compare([instruction], [a], [b])  # 1.0: b is preferred
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from ..oracles.base import UNSCORED_REASON, NoDeepCopy, Verdicts
from .batch import Answer, BatchRun, Progress, Question, Served
from .config import ModelConfig, PoolConfig, load_models, load_pool, load_prompt
from .draws import AlpacaFarmDraws, KeyedDraws
from .prompts import Item, check_item

Order = Literal["random", "as_given"]
Compat = Literal["alpacafarm"]


class AnnotatorPool(NoDeepCopy):
    """Asks a served model for each verdict, by one of several prompts.

    P(b preferred) is 0 or 1; prompts whose letters are weighted by their probabilities give numbers between.

    Args:
        pool: The name of a pool ("alpaca_farm", "greedy", "weighted"), a YAML file, or a `PoolConfig`. Its noise is
            not added here: see `oracles.judges.Flip`.
        models: Which model plays which role: "openai", {"model": name} for one model in all roles, a mapping of roles,
            or a YAML file.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: the variable named by `api_key_env`, read at each call.
        api_key_env: The environment variable that holds the key; one that you name must be set, unless it is a replay.
        allow_insecure: Take http:// to another machine too, where anybody on the way can read key and texts.
        ledger: Where answers and spending are kept: a file or an open `Ledger`; None: the user's own, see
            `llm.ledger.file.default_path`.
        seed: Another seed is another opinion on the same pairs, asked and paid for anew.
        budget_usd: What the ledger may have spent in all, in US dollars; None: no limit.
        replay: Answer from the ledger alone; a pair without a stored answer is an error. An open `Ledger` must have
            been opened for it.
        order: "random" draws which response is shown first; "as_given" shows `a` first (for `BothOrders`).
        compat: "alpacafarm" draws annotators and orders as the released code does, by the instruction alone.
        client_config: Time limits, concurrency, repeats. What the server says of its limits is kept from call to call.
        prices: US dollars per million tokens by model, (input, output), over the package's own table.
        on_progress: Called after each answer.

    Raises:
        PoolError: A pool or its models are not well written, a role has no model, a model has two prices, or the
            variable named by `api_key_env` is not set.
        ValueError: An unknown order or compat, a seed that is no integer, a budget that is no amount, a replay from a
            `Ledger` that is open for more.
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
        self.served = tuple(
            Served(annotator, load_prompt(annotator.prompt), roles[annotator.role])
            for annotator in self.config.annotators
        )
        self.endpoint = Endpoint(base_url, api_key, api_key_env=api_key_env, allow_insecure=allow_insecure)
        self.ledger = ledger if isinstance(ledger, Ledger) else shared_ledger(ledger, replay=replay)
        self.seed, self.order, self.on_progress = seed, order, on_progress
        self.budget_usd, self.client_config = budget_usd, client_config or ClientConfig()
        self.prices = Prices.load(overrides={**_prices_in(roles.values()), **(prices or {})})
        self.draws_order = order == "random"
        # Pools of one stream draw alike: what "eval" has asked, "ann" need not ask again.
        self._draws = AlpacaFarmDraws(seed) if compat else KeyedDraws(seed, self.config.stream)
        self._limiter = Limiter(self.client_config)

    def compare(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """Returns P(b preferred), [B]; 0.5 for equal texts, which are not asked about, NaN without a verdict."""
        return self.judge(instructions, a, b).scores

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """Verdicts with details, one call for the whole batch.

        Details: `annotator`, `shown_first` ("a" or "b"), `cost_usd` (of this call; NaN where the model has no price),
        `cached` (nothing was asked), `unscored_reason` (the type of the error and what it says, where NaN).

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
        told: list[dict[str, Any]] = [dict(self.blank) for _ in questions]
        for row, question in enumerate(questions):
            if question is not None:
                answer, b_first = answers[question.key], question.item.first == b[row]
                scores[row] = 1 - answer.score if b_first else answer.score
                told[row] = self._details(question, answer, b_first=b_first)
                # Rows with the same question share one answer, and the first of them bears its cost.
                answers[question.key] = replace(answer, cost_usd=0.0, cached=True)
        kinds = {key: object if isinstance(value, str) else None for key, value in self.blank.items()}
        return Verdicts(scores, {key: np.array([row[key] for row in told], kind) for key, kind in kinds.items()})

    def questions(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> list[Question | None]:
        """What is asked about each pair: who, in which order. None for equal texts, which nobody is asked about.

        Raises:
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the pair.
        """
        rows = list(zip(instructions, a, b, strict=True))
        for number, row in enumerate(rows, 1):
            if row[1] != row[2]:
                check_item(Item(*row), number)
        who = self._draws.annotators(rows, len(self.served))
        b_first = self._draws.b_first(rows) if self.draws_order else np.zeros(len(rows), bool)
        return [
            None if x == y else self._question(int(who[n]), Item(str(i), *((y, x) if b_first[n] else (x, y))))
            for n, (i, x, y) in enumerate(rows)
        ]

    def client(self) -> Client:
        """A client for one call; what it learns of the server's limits is kept for the next."""
        return Client(
            self.endpoint,
            config=self.client_config,
            ledger=self.ledger,
            prices=self.prices,
            budget_usd=self.budget_usd,
            limiter=self._limiter,
        )

    def asking(self, questions: Mapping[str, Question]) -> BatchRun:
        """One call that answers questions, by key; `judge` runs it."""
        return BatchRun(
            questions,
            self.served,
            ledger=self.ledger,
            client=self.client,
            base_url=self.endpoint.base_url,
            seed=self.seed,
            on_progress=self.on_progress,
        )

    def _details(self, question: Question, answer: Answer, *, b_first: bool) -> dict[str, Any]:
        return {
            "annotator": self.served[question.annotator].config.name,
            "shown_first": "b" if b_first else "a",
            "cost_usd": answer.cost_usd,
            "cached": answer.cached,
            UNSCORED_REASON: answer.reason,
        }

    def _question(self, annotator: int, item: Item) -> Question:
        return Question.about(self.served[annotator], annotator, item, base_url=self.endpoint.base_url, seed=self.seed)


def _prices_in(models: Iterable[ModelConfig]) -> dict[str, tuple[float, float]]:
    """The prices that stand beside models' names.

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
