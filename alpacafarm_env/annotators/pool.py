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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import PoolError, did_you_mean
from ..llm.client import ClientConfig
from ..llm.endpoint import OPENAI_KEY
from ..llm.ledger.store import Ledger
from ..llm.requests import content_key
from ..oracles.base import UNSCORED_REASON, PreferenceOracle, Verdicts
from ..oracles.draws import KeyedDraws, Row
from ..oracles.judges import BothOrders, Flip
from .batch import Progress, Question
from .config import PoolConfig, load_models, load_pool, load_prompt
from .draws import AlpacaFarmDraws
from .prompts import Item, check_item
from .served import ServedOptions, ServedPool, columns

Order = Literal["random", "as_given"]
Compat = Literal["alpacafarm"]
CLIENT_LIMITS: Final = ("max_concurrency", "requests_per_minute", "attempt_timeout_s", "deadline_s")
"""Keywords of `make_pool` that belong to `ClientConfig`."""


class AnnotatorPool(ServedPool):
    """Asks a served model for each verdict: 0 or 1, or between for prompts that read the answers' probabilities.

    Args:
        pool: See `ServedPool`; so for `models`.
        order: "random" draws which response is shown first; "as_given" shows `a` first (for `BothOrders`).
        compat: "alpacafarm" draws annotators and orders as the released code does.
        served: The server, the ledger and its limits, see `ServedPool`.

    Raises:
        PoolError: See `ServedPool`.
        ValueError: An unknown order or compat, and see `ServedPool`.
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
        order: Order = "random",
        compat: Compat | None = None,
        **served: Unpack[ServedOptions],
    ) -> None:
        if order not in get_args(Order):
            raise did_you_mean("order", order, get_args(Order))
        if compat is not None and compat not in get_args(Compat):
            raise did_you_mean("compat", compat, get_args(Compat))
        super().__init__(pool, models, **served)
        self.name += f"+{compat}_draws" if compat else ""
        self.draws_order = order == "random"
        # Pools of one stream draw alike: what "eval" has asked, "ann" need not ask again.
        self._draws = AlpacaFarmDraws(self.seed) if compat else KeyedDraws(self.seed, self.config.stream)

    def compare(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> NDArray[np.float64]:
        """P(b preferred), [B]; 0.5 for equal texts, which are not asked about, NaN without a verdict."""
        return self.judge(instructions, a, b).scores

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """Verdicts with details, one call for the whole batch.

        Details: `annotator`, `shown_first` ("a" or "b"), `cost_usd` (of this call; NaN where the model has no price),
        `cached` (nothing was asked), `unscored_reason` (type and message of the error, where NaN).

        Raises:
            PermanentAPIError, OutageError, LedgerError: See `answers`.
            InvalidResponseError: See `questions`; nothing is asked then.
        """
        questions = self.questions(instructions, a, b)
        answers = iter(self.answers([question for question in questions if question is not None]))
        scores = np.full(len(questions), 0.5)
        details = [dict(self.blank) for _ in questions]
        for row, question in enumerate(questions):
            if question is not None:
                answer, b_first = next(answers), question.item[1] == b[row]
                scores[row] = 1 - answer.score if b_first else answer.score
                details[row] = {
                    "annotator": self.served[question.annotator].config.name,
                    "shown_first": "b" if b_first else "a",
                    "cost_usd": answer.cost_usd,
                    "cached": answer.cached,
                    UNSCORED_REASON: answer.reason,
                }
        return Verdicts(scores, columns(details))

    def questions(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> list[Question | None]:
        """Who is asked about each pair, in which order; None for equal texts, which nobody is asked about.

        Raises:
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the pair.
        """
        pairs = list(zip(instructions, a, b, strict=True))
        shown = show(self._draws, pairs, len(self.served), in_order=not self.draws_order)
        return [None if each is None else self.served[each[0]].question(*each) for each in shown]


def show(
    draws: KeyedDraws | AlpacaFarmDraws, pairs: Sequence[Row], count: int, *, in_order: bool
) -> list[tuple[int, Item] | None]:
    """Which of `count` annotators is shown each pair, and how: `a` first if `in_order`; None for equal texts.

    Raises:
        InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the pair.
    """
    for number, pair in enumerate(pairs, 1):
        if pair[1] != pair[2]:
            check_item(Item(*pair), number)
    who = draws.annotators(pairs, count).tolist()
    b_first = np.zeros(len(pairs), bool) if in_order else draws.b_first(pairs)
    items = [Item(str(i), *((b, a) if swap else (a, b))) for (i, a, b), swap in zip(pairs, b_first, strict=True)]
    return [None if item.first == item.second else (n, item) for n, item in zip(who, items, strict=True)]


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
    return with_noise(asked, asked.config, flip=flip, both_orders=both_orders, compat=compat, seed=seed)


def with_noise(
    asked: PreferenceOracle,
    config: PoolConfig,
    *,
    flip: float | None,
    both_orders: bool,
    compat: Compat | None,
    seed: int,
) -> PreferenceOracle:
    """A pool's judge in one order or both, with its noise: keywords and errors as of `make_pool`."""
    if both_orders and compat:
        raise ValueError(f"both_orders shows each pair in both orders, compat={compat!r} draws one: leave one out.")
    judge: PreferenceOracle = BothOrders(asked) if both_orders else asked
    p = config.flip if flip is None else flip
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
