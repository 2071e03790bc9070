"""The ledger's row of each attempt, and what an `ask` has cost so far."""

import asyncio
import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeVar

from .endpoint import Endpoint
from .ledger import operations as sql
from .ledger.store import Ledger
from .pricing import Prices
from .replies import Failure, Reply, told_usage
from .requests import Request

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
COMMIT_S = 10.0
"""Seconds that a cancelled request waits for the ledger to commit what it handed in."""


@dataclass(eq=False)
class Job:
    """One `ask` under way."""

    request: Request
    questions: tuple[str, ...]
    label: str
    owner: sql.Owner | None
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))  # from the first attempt on
    attempts: int = 0
    sending: bool = False
    problem: str = ""  # how the last attempt ended
    reserve_usd: float | None = None  # the most that the last attempt can have cost; None: the model has no price
    cost_usd: float = 0.0  # what all attempts count in the ledger


class AttemptRecorder:
    """Writes the rows of one client's attempts; without a ledger it only adds up costs. Args as in `Client`."""

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
            return await committed(future)
        except asyncio.CancelledError:  # it may be in the file by now
            if future.done() and future.exception() is None:
                self._close(future.result(), "cancelled before it was sent", state="failed", cost_usd=0.0)
            raise

    def answered(self, job: Job, attempt_id: int, raw: str, reply: Reply) -> Future[Any] | None:
        """Hand in the row of an attempt that brought an answer."""
        reported = (reply.prompt_tokens, reply.completion_tokens)
        prompt, completion = job.request.bounds.believable(reported)
        cost = self._charge(job, raw)
        job.cost_usd += nan if cost is None else cost
        if self._ledger is None:
            return None
        told = {"prompt_tokens": prompt, "completion_tokens": completion, "question_keys": job.questions}
        return self._ledger.do(sql.succeed, attempt_id, raw=raw, cost_usd=cost, **told)

    def failed(self, job: Job, attempt_id: int, failure: Failure, raw: str) -> Future[Any] | None:
        """Hand in the row of an attempt that brought none; `raw` is what came instead."""
        cost: float | None = 0.0
        if failure.billed:
            known = None not in job.request.bounds.believable(told_usage(raw))
            cost = self._charge(job, raw) if known else None
        counted = job.reserve_usd if cost is None else cost
        job.cost_usd += nan if counted is None else counted
        state = "unknown" if failure.billed else "failed"
        return self._end(attempt_id, failure.message, failure.status, state=state, cost_usd=cost)

    def drop(self, job: Job, attempt_id: int, why: str) -> None:
        """End the row of an attempt that nobody waits for any more; it may have been billed."""
        job.cost_usd += nan if job.reserve_usd is None else job.reserve_usd
        self._close(attempt_id, why, state="unknown", cost_usd=None)

    def _close(self, attempt_id: int, why: str, **told: Any) -> None:
        if ended := self._end(attempt_id, why, **told):
            wait([ended], COMMIT_S)

    def _end(self, attempt_id: int, why: str, status: int | None = None, **told: Any) -> Future[None] | None:
        if self._ledger is None:
            return None
        return self._ledger.do(sql.fail, attempt_id, error=why, status=status, **told)

    def _charge(self, job: Job, raw: str) -> float | None:
        """What to charge for a reply. The first impossible usage of each model is logged."""
        if self._prices is None:
            return None
        request, usage = job.request, told_usage(raw)
        cost = self._prices.charge(request.model, request.bounds, usage)
        if request.model not in self._doubted and (doubt := request.bounds.doubts(usage)):
            self._doubted.add(request.model)
            charged = "nothing is charged, as it has no price" if cost is None else f"${cost:.6f} is charged"
            text = "%s reports a usage of model %r that cannot be: %s. For this request %s, from the larger number."
            more = "Later ones of this model are not logged."
            _LOG.warning(f"{text} {more}", self._endpoint.host, request.model, doubt, charged)
        return cost


async def committed(future: Future[T]) -> T:
    """What an operation of the ledger returns. A cancelled caller waits for the commit: the answer is paid for."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        wait([future], COMMIT_S)
        raise
