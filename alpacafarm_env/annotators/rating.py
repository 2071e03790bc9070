"""A pool of LLM annotators that rate: a number from 1 to 7 for a response, and a critique in words.

One annotator of the pool is drawn for each response, keyed on the seed, the instruction and the response. Requests,
ledger, budget and limits are those of `pool`, but two responses to one instruction never share a request. The scale is
that of Ouyang et al. 2022 (arXiv 2203.02155), figure 12. No noise is added.

    pool = RatingPool("raters", models={"model": "my-model"}, base_url="http://localhost:8000/v1")
    pool.score([instruction], [response])  # 6.0
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np

from ..llm.client import ClientConfig
from ..oracles.base import UNSCORED_REASON, DetailedOracle, Verdicts
from ..oracles.draws import KeyedDraws
from .batch import Question
from .config import PoolConfig
from .pool import CLIENT_LIMITS, model_spec
from .prompts import Single, check_item
from .served import ServedOptions, ServedPool, columns


class RatingPool(ServedPool, DetailedOracle):
    """Asks a served model for the rating of each response; see `ServedPool` for the arguments and their errors."""

    rates: ClassVar[bool] = True

    def __init__(
        self, pool: str | Path | PoolConfig = "raters", models: Any = "openai", **served: Unpack[ServedOptions]
    ) -> None:
        super().__init__(pool, models, **served)
        self.name += "_rating"
        self._draws = KeyedDraws(self.seed, f"{self.config.stream}_rating")

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Ratings 1 to 7 with details, [B], one call for the whole batch; NaN without a verdict.

        Details: `annotator`, `critique`, `cost_usd` (of this call; NaN where the model has no price), `cached` (nothing
        was asked), `unscored_reason` (type and message of the error, where NaN).

        Raises:
            PermanentAPIError, OutageError, LedgerError: See `answers`.
            InvalidResponseError: A text holds half of a surrogate pair, which cannot be sent; nothing is asked then.
        """
        questions = self.questions(instructions, responses)
        answers = self.answers(questions)
        details = [
            {
                "annotator": self.served[question.annotator].config.name,
                "critique": answer.words,
                "cost_usd": answer.cost_usd,
                "cached": answer.cached,
                UNSCORED_REASON: answer.reason,
            }
            for question, answer in zip(questions, answers, strict=True)
        ]
        return Verdicts(np.array([answer.score for answer in answers], np.float64), columns(details))

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


def make_raters(
    pool: str | Path | PoolConfig = "raters",
    *,
    models: Any = None,
    model: str | None = None,
    **options: Any,
) -> RatingPool:
    """A pool that rates, from plain keywords: those of `pool.make_pool`, but flip, both_orders and compat.

    Raises PoolError and ValueError as `make_pool` does.
    """
    limits = {key: options.pop(key) for key in CLIENT_LIMITS if key in options}
    return RatingPool(pool, model_spec(models, model), client_config=ClientConfig(**limits), **options)
