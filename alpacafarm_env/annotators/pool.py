"""Pools of LLM annotators behind an OpenAI-compatible server, as oracles: they compare pairs, or rate responses.

For each pair one annotator of the pool is drawn, and an order of the two responses. The pairs of one annotator share
requests of up to its batch size; all requests are in flight together, and every reply goes to the ledger before it is
read, so a pair that was answered before costs nothing. Source: Dubois et al. 2023 (arXiv 2305.14387), section 3 and
appendix C. Draws are keyed on the unordered pair; the released code keys them on the instruction alone.

    pool = AnnotatorPool("alpaca_farm", model="my-model", base_url="http://localhost:8000/v1")
    pool.compare([instruction], [a], [b])  # 1.0: b is preferred
    pool = RatingPool("raters", model="my-model", base_url="http://localhost:8000/v1")
    pool.score([instruction], [response])  # 6.0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import PoolError
from ..llm.client import Client, ClientConfig, run
from ..llm.endpoint import OPENAI_KEY, Endpoint, require_key_variable
from ..llm.ledger import Ledger, shared_ledger
from ..llm.ledger import operations as sql
from ..llm.limits import Pace
from ..llm.requests import Prices, content_key
from ..oracles.base import UNSCORED_REASON, DetailedJudge, DetailedOracle, NoDeepCopy, PreferenceOracle, Verdicts, place
from ..oracles.judges import BothOrders, Flip, KeyedDraws
from .config import ModelConfig, PoolConfig, check_form, load_models, load_pool, load_prompt
from .prompts import Item, Single, check_item
from .served import Answer, Call, Progress, Question, Served


class ServedPool(NoDeepCopy):
    """Annotators behind an OpenAI-compatible server, and what they have answered.

    Args:
        pool: The name of a pool, a YAML file, or a `PoolConfig`. Its noise is not added here, see `pool.make_pool`.
        models: Which model plays which role, see `config.load_models`; "openai" if there is no `model` either.
        model: One model for all roles, instead of `models`.
        base_url: The server's address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: the variable named by `api_key_env`, read at each call.
        api_key_env: The environment variable that holds the key; one that you name must be set, except for a replay.
        allow_insecure: Accept http:// to another machine, where anybody on the way can read key and texts.
        ledger: The file of answers and spending, or an open `Ledger`; None: the user's own, see
            `llm.ledger.file.default_path`.
        seed: Another seed is another opinion on the same texts, asked and paid for anew.
        budget_usd: What the ledger may have spent in all, in US dollars; None: no limit.
        replay: Answer from the ledger alone; a question without a stored answer is an error.
        prices: US dollars per million tokens by model, (input, output), over the package's own table.
        max_concurrency: As the next three, see `ClientConfig`. What is learned of the server's limits is kept between
            calls.
        on_progress: Called after each answer.

    Raises:
        PoolError: The pool, its models or prices are malformed, it rates where pairs are to be compared or the other
            way round, or the variable named by `api_key_env` is not set.
        ValueError: A bad seed or budget, a replay from a `Ledger` that is open for more.
    """

    rates: ClassVar[bool] = False
    """Whether it is shown single responses, to rate, and not pairs."""
    default: ClassVar[str] = "alpaca_farm"

    def __init__(
        self,
        pool: str | Path | PoolConfig | None = None,
        models: Any = None,
        *,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str = OPENAI_KEY,
        allow_insecure: bool = False,
        ledger: Ledger | Path | str | None = None,
        seed: int = 0,
        budget_usd: float | None = None,
        replay: bool = False,
        prices: Mapping[str, tuple[float, float]] | None = None,
        max_concurrency: int = ClientConfig.max_concurrency,
        requests_per_minute: float | None = ClientConfig.requests_per_minute,
        attempt_timeout_s: float = ClientConfig.attempt_timeout_s,
        deadline_s: float = ClientConfig.deadline_s,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed: expected an integer, got {seed!r}.")
        sql.check_budget(budget_usd)
        if replay and isinstance(ledger, Ledger) and not ledger.replay:
            raise ValueError(
                f"replay: {ledger.path} is open for asking too. Open it with replay=True, or give its path."
            )
        if not (ledger.replay if isinstance(ledger, Ledger) else replay):
            require_key_variable(api_key_env)
        self.config = pool if isinstance(pool, PoolConfig) else load_pool(pool or self.default)
        check_form(self.config, rates=self.rates)
        roles = load_models(models, self.config.roles, model)
        self.name, self.paid, self.seed, self.on_progress = self.config.name, True, seed, on_progress
        if self.rates:
            self.name += "_rating"
        self.endpoint = Endpoint(base_url, api_key, api_key_env=api_key_env, allow_insecure=allow_insecure)
        self.served = tuple(
            Served(annotator, load_prompt(annotator.prompt), roles[annotator.role], self.endpoint.base_url, seed)
            for annotator in self.config.annotators
        )
        self.ledger = ledger if isinstance(ledger, Ledger) else shared_ledger(ledger, replay=replay)
        self.prices = Prices.load({**_prices_in(roles.values()), **(prices or {})})
        self.budget_usd = budget_usd
        self.limits = ClientConfig(
            max_concurrency=max_concurrency,
            requests_per_minute=requests_per_minute,
            attempt_timeout_s=attempt_timeout_s,
            deadline_s=deadline_s,
        )
        self._pace = Pace(float(max_concurrency))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """The answer to each question, one call for all.

        Rows with the same question share one answer, and the first of them bears its cost.

        Raises:
            PermanentAPIError: The server refused for good (key, model, quota). Answers so far are kept.
            OutageError: The server has stopped answering. Answers so far are kept.
            LedgerError: The budget is reached, a replay misses, or the ledger's file cannot be used.
        """
        wanted = {question.key: question for question in questions}
        by_key = run(Call(self, wanted).run()) if wanted else {}
        answers = []
        for question in questions:
            answers.append(by_key[question.key])
            by_key[question.key] = replace(by_key[question.key], cost_usd=0.0, cached=True)
        return answers

    def details(self, questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, NDArray[Any]]:
        """Who was asked, the cost, whether the ledger had the answer, and why there is none, each [questions]."""
        names = [self.served[question.annotator].config.name for question in questions]
        return {
            "annotator": np.array(names, object),
            "cost_usd": np.array([answer.cost_usd for answer in answers], np.float64),
            "cached": np.array([answer.cached for answer in answers], bool),
            UNSCORED_REASON: np.array([answer.reason for answer in answers], object),
        }

    def client(self) -> Client:
        """A client for one call, which goes on at the pace that those before it have found."""
        return Client(
            self.endpoint,
            config=self.limits,
            ledger=self.ledger,
            prices=self.prices,
            budget_usd=self.budget_usd,
            pace=self._pace,
        )


class AnnotatorPool(ServedPool, DetailedJudge):
    """Asks a served model for each verdict: 0 or 1, or between for prompts that read the answers' probabilities.

    Arguments and errors are those of `ServedPool`.

    Attributes:
        draws_order: Whether it is drawn which response is shown first; else that is `a` (for `BothOrders`).
    """

    draws_order = True
    blank: Final[Mapping[str, Any]] = {
        "annotator": "",
        "shown_first": "",
        "cost_usd": 0.0,
        "cached": False,
        UNSCORED_REASON: "",
    }

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """P(b preferred), [B], with details, one call for the batch; 0.5 for equal texts, which are not asked about.

        Details: `annotator`, `shown_first` ("a" or "b"), `cost_usd` (of this call; NaN where the model has no price),
        `cached` (nothing was asked), `unscored_reason` (type and message of the error, where NaN).

        Raises:
            PermanentAPIError, OutageError, LedgerError: See `answers`.
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the pair. Nothing
                is asked then.
        """
        pairs = list(zip(map(str, instructions), a, b, strict=True))
        rows = np.array([first != second for _, first, second in pairs], bool)
        for number in np.flatnonzero(rows).tolist():
            check_item(Item(*pairs[number]), number + 1)
        queried = [pair for pair, differs in zip(pairs, rows, strict=True) if differs]
        # Pools of one stream draw alike: what "eval" has asked, "ann" need not ask again.
        draws = KeyedDraws(self.seed, self.config.stream)
        who = draws.annotators(queried, len(self.served)).tolist()
        b_first = draws.b_first(queried) if self.draws_order else np.zeros(len(queried), bool)
        items = [Item(i, *((y, x) if swap else (x, y))) for (i, x, y), swap in zip(queried, b_first, strict=True)]
        questions = [self.served[n].question(n, item) for n, item in zip(who, items, strict=True)]
        answers = self.answers(questions)
        second_wins, scores = np.array([answer.score for answer in answers], np.float64), np.full(len(pairs), 0.5)
        scores[rows] = np.where(b_first, 1 - second_wins, second_wins)
        first = np.where(b_first, "b", "a").astype(object)
        return Verdicts(scores, place({**self.details(questions, answers), "shown_first": first}, rows, self.blank))


class RatingPool(ServedPool, DetailedOracle):
    """Asks a served model for a rating of each response, 1 to 7, and a critique; arguments as of `ServedPool`.

    One annotator is drawn for each response, keyed on the seed, the instruction and the response. Two responses to one
    instruction never share a request. No noise is added. The scale is that of Ouyang et al. 2022 (arXiv 2203.02155),
    figure 12.
    """

    rates: ClassVar[bool] = True
    default: ClassVar[str] = "raters"

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Ratings 1 to 7 with details, [B], one call for the whole batch; NaN without a verdict.

        Details: `critique`, and those of `AnnotatorPool` but `shown_first`; so for errors.
        """
        questions = self.questions(instructions, responses)
        answers = self.answers(questions)
        scores = np.array([answer.score for answer in answers], np.float64)
        critiques = np.array([answer.words for answer in answers], object)
        return Verdicts(scores, {**self.details(questions, answers), "critique": critiques})

    def questions(self, instructions: Sequence[str], responses: Sequence[str]) -> list[Question]:
        """Who is asked about each response.

        Raises:
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the response.
        """
        items = [Single(str(ask), response) for ask, response in zip(instructions, responses, strict=True)]
        for number, item in enumerate(items, 1):
            check_item(item, number)
        draws = KeyedDraws(self.seed, f"{self.config.stream}_rating")
        who = draws.annotators(items, len(self.served)).tolist()
        return [self.served[n].question(n, item) for n, item in zip(who, items, strict=True)]


def make_pool(
    pool: str | Path | PoolConfig = "alpaca_farm",
    *,
    flip: float | None = None,
    both_orders: bool = False,
    seed: int = 0,
    **served: Any,
) -> PreferenceOracle:
    """A pool with its noise, asked in one order or both; `served` are the keywords of `ServedPool`.

    * `pool`: "alpaca_farm" (the 13), "eval" (the same), "ann" (25 % flips), "greedy", "weighted", or see there.
    * `flip`: Probability that a verdict is flipped, 0 to 0.5; None: the pool's own.
    * `both_orders`: Ask about each pair in both orders and average.

    Raises:
        PoolError: See `ServedPool`.
        ValueError: `flip` is not within 0 and 0.5.
    """
    annotators = AnnotatorPool(pool, seed=seed, **served)
    annotators.draws_order = not both_orders
    judge: PreferenceOracle = BothOrders(annotators) if both_orders else annotators
    p = annotators.config.flip if flip is None else flip
    return Flip(judge, p, seed=seed) if p else judge


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


def _prices_in(models: Iterable[ModelConfig]) -> dict[str, tuple[float, float]]:
    """The prices given with the models.

    Raises:
        PoolError: Two roles give one model different prices.
    """
    prices: dict[str, tuple[float, float]] = {}
    for model in models:
        price = model.price_usd_per_million
        if price and prices.setdefault(model.model, price) != price:
            raise PoolError(
                f"models: expected one price for {model.model!r} in all its roles, got {list(prices[model.model])} and "
                f"{list(price)} USD per million tokens."
            )
    return prices
