"""The ledger's row of each attempt, and what an `ask` has cost so far."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeVar

from .endpoint import Endpoint
from .failures import Failure
from .ledger import operations as sql
from .ledger.store import Ledger
from .pricing import Prices
from .replies import Reply, raw_usage, told_usage
from .requests import Request

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
COMMIT_S = 10.0
"""Seconds that a cancelled request waits until the ledger has what it handed in: its beginning, its end, its answer."""


@dataclass(eq=False)
class Job:
    """One `ask` under way.

    Attributes:
        deadline: Ends it by the wall clock, from its first attempt on.
        attempts: Requests sent for it.
        sending: Whether one is under way.
        problem: What the last one ended with.
        reserve_usd: The most that the last one can have cost; None: the model has no price.
        cost_usd: What all of them count in the ledger.
    """

    request: Request
    questions: tuple[str, ...]
    label: str
    owner: sql.Owner | None
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))
    attempts: int = 0
    sending: bool = False
    problem: str = ""
    reserve_usd: float | None = None
    cost_usd: float = 0.0


class AttemptRecorder:
    """Writes the rows of one client's attempts; without a ledger it only adds up.

    Args:
        endpoint: The server.
        ledger: Where rows go, or None.
        prices: What models cost, or None.
        budget_usd: The most that all attempts of the ledger together may count.
    """

    def __init__(
        self, endpoint: Endpoint, ledger: Ledger | None, prices: Prices | None, budget_usd: float | None
    ) -> None:
        self._endpoint, self._ledger, self._prices, self._budget_usd = endpoint, ledger, prices, budget_usd
        self._doubted: set[str] = set()

    async def begin(self, job: Job) -> int:
        """The attempt's row, once it is on the disk; 0 without a ledger.

        Raises:
            LedgerError: The ledger gives no leave.
        """
        request = job.request
        job.reserve_usd = self._prices.upper_bound(request.model, request.bounds) if self._prices else None
        if self._ledger is None:
            return 0
        future = self._ledger.do(
            sql.begin,
            request_key=request.key,
            host=self._endpoint.host,
            model=request.model,
            label=job.label,
            num_questions=len(job.questions) or 1,
            reserve_usd=job.reserve_usd,
            budget_usd=self._budget_usd,
            owner=job.owner,
        )
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            wait([future], COMMIT_S)  # it may be in the file by now
            if future.done() and future.exception() is None:
                self._end(future.result(), "cancelled before it was sent", billed=False)
            raise

    def answered(self, job: Job, attempt_id: int, raw: str, reply: Reply) -> Future[Any] | None:
        """Hand in the row of an attempt that brought an answer."""
        request = job.request
        usage = request.bounds.believable((reply.prompt_tokens, reply.completion_tokens))
        cost = self._cost(job, usage, raw)
        job.cost_usd += _nan_for_none(cost)
        if self._ledger is None:
            return None
        told = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "question_keys": job.questions}
        return self._ledger.do(sql.succeed, attempt_id, raw=raw, cost_usd=cost, **told)

    def failed(self, job: Job, attempt_id: int, failure: Failure, raw: str) -> Future[Any] | None:
        """Hand in the row of an attempt that brought none; `raw` is what came instead."""
        usage = raw_usage(raw)
        cost = 0.0 if not failure.billed else self._cost(job, usage, raw) if None not in usage else None
        job.cost_usd += _nan_for_none(job.reserve_usd if cost is None else cost)
        if self._ledger is None:
            return None
        state = "unknown" if failure.billed else "failed"
        told = {"error": failure.message, "status": failure.status, "state": state, "cost_usd": cost}
        return self._ledger.do(sql.fail, attempt_id, **told)

    def _cost(self, job: Job, usage: tuple[int | None, int | None], raw: str) -> float | None:
        """What to charge for a reply; the first of a model whose usage cannot be is told."""
        if self._prices is None:
            return None
        request = job.request
        cost = self._prices.charge(request.model, request.bounds, usage)
        plain = None not in usage and (usage[0] or 0) >= request.bounds.fewest_prompt  # most are, and need no reading
        if not plain and request.model not in self._doubted:
            doubt = request.bounds.doubts(told_usage(raw))
            if doubt:
                self._doubted.add(request.model)
                charged = "nothing is charged, as it has no price" if cost is None else f"${cost:.6f} is charged"
                text = "%s reports a usage of model %r that cannot be: %s. For this request %s, from the larger number."
                _LOG.warning(
                    f"{text} Later ones of this model are not told.", self._endpoint.host, request.model, doubt, charged
                )
        return cost

    def drop(self, job: Job, attempt_id: int, why: str) -> None:
        """End the row of an attempt that nobody waits for any more; it may have been billed."""
        job.cost_usd += _nan_for_none(job.reserve_usd)
        self._end(attempt_id, why, billed=True)

    def _end(self, attempt_id: int, why: str, *, billed: bool) -> None:
        if self._ledger is not None:
            state, cost = ("unknown", None) if billed else ("failed", 0.0)
            wait([self._ledger.do(sql.fail, attempt_id, error=why, status=None, state=state, cost_usd=cost)], COMMIT_S)


async def committed(future: Future[T]) -> T:
    """What an operation of the ledger returns. A cancelled caller waits for the commit: the answer is paid for."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        wait([future], COMMIT_S)
        raise


def _nan_for_none(cost_usd: float | None) -> float:
    return nan if cost_usd is None else cost_usd
