"""Pools of LLM annotators behind an OpenAI-compatible server, as oracles: they compare pairs, or rate responses.

For each pair one annotator of the pool is drawn, and an order of the two responses. The pairs of one annotator share
requests of up to its batch size; all requests are in flight together, and every reply goes to the ledger before it is
read, so a pair that was answered before costs nothing. Source: Dubois et al. 2023 (arXiv 2305.14387), section 3 and
appendix C. Draws are keyed on the unordered pair; the released code keys them on the instruction alone
(`compat="alpacafarm"` does too).

    pool = AnnotatorPool("alpaca_farm", models={"model": "my-model"}, base_url="http://localhost:8000/v1")
    pool.compare([instruction], [a], [b])  # 1.0: b is preferred
    pool = RatingPool("raters", models={"model": "my-model"}, base_url="http://localhost:8000/v1")
    pool.score([instruction], [response])  # 6.0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import PoolError, did_you_mean
from ..llm.client import ClientConfig
from ..llm.endpoint import OPENAI_KEY, Endpoint, require_key_variable
from ..llm.ledger.store import Ledger
from ..llm.requests import content_key
from ..oracles.base import UNSCORED_REASON, DetailedJudge, DetailedOracle, PreferenceOracle, Verdicts, place
from ..oracles.draws import KeyedDraws, Row, check_count
from ..oracles.judges import BothOrders, Flip
from .config import PoolConfig, load_models, load_pool, load_prompt
from .prompts import Item, Single, check_item
from .served import Progress, Question, ServedPool

Order = Literal["random", "as_given"]
Compat = Literal["alpacafarm"]
_LIMITS: Final = ("max_concurrency", "requests_per_minute", "attempt_timeout_s", "deadline_s")
"""Keywords that belong to `ClientConfig`."""


class AnnotatorPool(ServedPool, DetailedJudge):
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
        **served: Any,
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

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """P(b preferred), [B], with details, one call for the batch; 0.5 for equal texts, which are not asked about.

        Details: `annotator`, `shown_first` ("a" or "b"), `cost_usd` (of this call; NaN where the model has no price),
        `cached` (nothing was asked), `unscored_reason` (type and message of the error, where NaN).

        Raises:
            PermanentAPIError, OutageError, LedgerError: See `answers`.
            InvalidResponseError: See `questions`; nothing is asked then.
        """
        questions = self.questions(instructions, a, b)
        rows = np.array([question is not None for question in questions], bool)
        queried = [question for question in questions if question is not None]
        answers = self.answers(queried)
        b_first = np.array([q is not None and q.item[1] == text for q, text in zip(questions, b, strict=True)], bool)
        scores = np.full(len(rows), 0.5)
        scores[rows] = [answer.score for answer in answers]
        first = np.where(b_first[rows], "b", "a").astype(object)
        details = place({**self.details(queried, answers), "shown_first": first}, rows, self.blank)
        return Verdicts(np.where(b_first, 1 - scores, scores), details)

    def questions(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> list[Question | None]:
        """Who is asked about each pair, in which order; None for equal texts, which nobody is asked about.

        Raises:
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the pair.
        """
        pairs = list(zip(instructions, a, b, strict=True))
        shown = show(self._draws, pairs, len(self.served), in_order=not self.draws_order)
        return [None if each is None else self.served[each[0]].question(*each) for each in shown]


class RatingPool(ServedPool, DetailedOracle):
    """Asks a served model for a rating of each response, 1 to 7, and a critique; arguments as of `ServedPool`.

    One annotator is drawn for each response, keyed on the seed, the instruction and the response. Two responses to one
    instruction never share a request. No noise is added. The scale is that of Ouyang et al. 2022 (arXiv 2203.02155),
    figure 12.
    """

    rates: ClassVar[bool] = True

    def __init__(self, pool: str | Path | PoolConfig = "raters", models: Any = "openai", **served: Any) -> None:
        super().__init__(pool, models, **served)
        self.name += "_rating"
        self._draws = KeyedDraws(self.seed, f"{self.config.stream}_rating")

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Ratings 1 to 7 with details, [B], one call for the whole batch; NaN without a verdict.

        Details: `critique`, and those of `AnnotatorPool` but `shown_first`; so for errors.
        """
        questions = self.questions(instructions, responses)
        answers = self.answers(questions)
        critiques = np.array([answer.words for answer in answers], object)
        scores = np.array([answer.score for answer in answers], np.float64)
        return Verdicts(scores, {**self.details(questions, answers), "critique": critiques})

    def questions(self, instructions: Sequence[str], responses: Sequence[str]) -> list[Question]:
        """Who is asked about each response.

        Raises:
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; names the response.
        """
        items = [Single(str(ask), response) for ask, response in zip(instructions, responses, strict=True)]
        for number, item in enumerate(items, 1):
            check_item(item, number)
        who = self._draws.annotators(items, len(self.served)).tolist()
        return [self.served[n].question(n, item) for n, item in zip(who, items, strict=True)]


@dataclass(frozen=True)
class AlpacaFarmDraws:
    """The draws of the released AlpacaFarm and AlpacaEval, bit for bit, to recompute their runs.

    Python's `random.Random` is seeded with a text of purpose, instruction and seed (the released default is 0).
    Whatever the responses are, one instruction has one annotator, one order and one noise decision: harmless for a set
    with one pair an instruction, and wrong for the reward of an agent that answers each instruction many times.

    Releases differ in what counts as the instruction. Until July 2023 it was the instruction without its input; later
    AlpacaEval joined both by an empty line, and AlpacaFarm without anything between. The two runs whose allocation the
    authors logged used the instruction without its input; order and noise of the recorded AlpacaEval judgements used
    the joined text; all at seed 0. So `annotators` reads the `instruction` of an `Instruction`, and `b_first` and
    `noise` its text; of any other text, all three read that text.

    Example:
        >>> AlpacaFarmDraws().b_first([("Name a colour.", "Red.", "Blue."), ("Name a colour.", "x", "y")])
        array([ True,  True])
    """

    seed: int = 0

    def annotators(self, rows: Sequence[Row], count: int) -> NDArray[np.int64]:
        """The index of each instruction's annotator in the pool's order, [B] in [0, count).

        Raises:
            ValueError: `count` is not positive.
        """
        check_count(count)
        alone = [(getattr(text, "instruction", text), a, b) for text, a, b in rows]
        return np.array([self._random("annotator", row).choices(range(count))[0] for row in alone], np.int64)

    def b_first(self, rows: Sequence[Row]) -> NDArray[np.bool_]:
        """Whether b is shown before a, [B]: the same for (b, a), so a preference for one position does not cancel."""
        purpose = "is_switched_outputs"
        return np.array([self._random(purpose, row).choices((False, True))[0] for row in rows], bool)

    def noise(self, rows: Sequence[Row], p: float) -> NDArray[np.float64]:
        """The label that replaces the annotator's, [B]: 1 = a preferred, 2 = b preferred, NaN = no noise.

        A share 2p of the labels is drawn, so p of them are flipped; identical responses, which the released code then
        calls a tie, get one too.

        Raises:
            ValueError: `p` is not within 0 and 0.5.
        """
        if not 0 <= p <= 0.5:
            raise ValueError(f"Noise needs a probability p from 0 to 0.5 (0.5 = a coin, no annotator), got {p!r}.")
        labels, weights = (float("nan"), 1.0, 2.0), (1 - 2 * p, p, p)
        return np.array([self._random("noisy_preference", row).choices(labels, weights)[0] for row in rows], np.float64)

    def _random(self, purpose: str, row: Row) -> Random:
        # As bytes, which seed as their text does: a lone surrogate cannot be encoded otherwise.
        return Random(f"{purpose}{row[0]}{self.seed}".encode("utf-8", "surrogatepass"))


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
    annotators = AnnotatorPool(
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
    return with_noise(annotators, annotators.config, flip=flip, both_orders=both_orders, compat=compat, seed=seed)


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


def with_noise(
    annotators: PreferenceOracle,
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
    judge: PreferenceOracle = BothOrders(annotators) if both_orders else annotators
    p = config.flip if flip is None else flip
    return Flip(judge, p, seed=seed, draws=AlpacaFarmDraws(seed) if compat else None) if p else judge


def make_raters(
    pool: str | Path | PoolConfig = "raters", *, models: Any = None, model: str | None = None, **options: Any
) -> RatingPool:
    """A pool that rates, from plain keywords: those of `make_pool`, but flip, both_orders and compat.

    Raises PoolError and ValueError as `make_pool` does.
    """
    limits = {key: options.pop(key) for key in _LIMITS if key in options}
    return RatingPool(pool, model_spec(models, model), client_config=ClientConfig(**limits), **options)


def model_spec(models: Any, model: str | None) -> Any:
    """The models that `make_pool`'s `models` and `model` name together, for `load_models`.

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
