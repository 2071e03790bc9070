"""Asks served models so that no answer is lost and none is paid for twice: retries, deadlines, limits, the ledger.

1. A request whose answer is in the ledger is answered from there.
2. Else attempts: leave from the limiter, a row and the budget's leave from the ledger, the HTTP request under a
   wall-clock deadline, the reply read strictly, and the end of the row. The answer is on the disk before `ask` returns.
3. What may pass (connections, time-outs, 408, 409, 425, 429, 5xx, replies that are none) is asked again with jitter and
   never earlier than the server says. What cannot pass ends at once, and a refused key ends the client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from typing import Any, Self, TypeVar

from ..errors import (
    APIError,
    ContentRefusedError,
    InvalidReplyError,
    LedgerError,
    OutageError,
    PermanentAPIError,
    TransientAPIError,
)
from . import ledger_sql as sql
from .endpoint import Endpoint
from .failures import Failure
from .ledger import Ledger
from .limits import ClientConfig, Limiter, Slot
from .prices import Prices, believable
from .replies import FinalReplyError, Reply, raw_usage, read_reply
from .requests import Request
from .sending import Sender

__all__ = ["Answer", "Client", "ClientConfig"]

T = TypeVar("T")
WAIT_INITIAL_S, WAIT_MAX_S = 0.25, 8.0
"""The wait after a first failure, doubled with each, and the longest; jitter takes up to half of it away."""
COMMIT_S = 10.0
"""Seconds that a cancelled request waits until its answer, which has come, is on the disk."""


@dataclass(frozen=True)
class Answer:
    """What `Client.ask` returns.

    Attributes:
        reply: The reply, read.
        raw: Its whole body.
        cost_usd: What it cost, 0 from the ledger; NaN: unknown, as the model has no price.
        cached: Whether it came from the ledger.
        attempts: Requests sent for it.
    """

    reply: Reply
    raw: str
    cost_usd: float
    cached: bool
    attempts: int


class _PassingError(TransientAPIError):
    """A failed attempt that is followed by another one, after `wait_s` seconds."""

    wait_s = 0.0


@dataclass
class _Job:
    """One `ask` under way."""

    request: Request
    questions: tuple[str, ...]
    label: str
    owner: sql.Owner | None
    attempts: int = 0
    sending: bool = False
    problem: str = ""


class Client:
    """Asks one endpoint, from one event loop at a time. Use it as `async with client: await client.ask(...)`.

    Args:
        endpoint: The server and the key.
        config: Limits.
        ledger: Keeps answers and attempts; None: nothing is kept.
        prices: What models cost; None: not known.
        budget_usd: The most that all attempts of the ledger together may cost; needs a ledger.
        transport: An async transport of the HTTP library that openai uses, instead of the network.

    Raises:
        ValueError: A budget without a ledger.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        config: ClientConfig | None = None,
        ledger: Ledger | None = None,
        prices: Prices | None = None,
        budget_usd: float | None = None,
        transport: Any = None,
    ) -> None:
        if budget_usd is not None and ledger is None:
            raise ValueError("budget_usd needs a ledger, as that is where it is counted")
        self.endpoint, self.config, self.ledger = endpoint, config or ClientConfig(), ledger
        self.prices, self.budget_usd = prices, budget_usd
        self.limiter = Limiter(
            self.config.max_concurrency, per_minute=self.config.requests_per_minute, max_wait_s=self.config.max_wait_s
        )
        self._sender = Sender(endpoint, timeout_s=self.config.attempt_timeout_s, transport=transport)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: sql.Owner | None = None
        self._deadlines: dict[asyncio.Timeout, _Job] = {}
        self._jitter = random.Random()  # from the system: clients that failed together must not come back together

    def __repr__(self) -> str:
        return f"Client({self.endpoint!r}, {self.config!r})"

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError(f"{self!r} is open already; every event loop needs a client of its own")
        self._loop = asyncio.get_running_loop()
        self._owner = self.ledger.new_owner() if self.ledger else None
        self.limiter.reopen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        await self._sender.close()

    async def ask(
        self, request: Request, *, questions: Sequence[str] = (), label: str = "", owner: sql.Owner | None = None
    ) -> Answer:
        """The answer to a request, from the ledger or the server.

        Args:
            request: What to ask; its `base_url` is the endpoint's.
            questions: Keys of the questions in it, in their order, for the ledger to link to the answer.
            label: What it is for, such as an annotator's name, for the ledger's report.
            owner: Who claimed the questions in the ledger; None: this client.

        Raises:
            PermanentAPIError: The server refused this request, or the key; asking again will not help. It is a
                ContentRefusedError where the request's own text is why, so that others may pass.
            TransientAPIError: No valid reply within the attempts or the time allowed.
            OutageError: The server has stopped answering anything.
            LedgerError: The ledger cannot be used, or has no leave to give: BudgetExceededError, PriceError,
                ReplayMissError.
            RuntimeError: The client is not open in this event loop.
            ValueError: The request is for another server.
        """
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("Client.ask works inside `async with client:`, in the event loop that runs it")
        if request.base_url != self.endpoint.base_url:
            raise ValueError(f"the request is for {request.base_url}, but this client asks {self.endpoint.base_url}")
        job = _Job(request, tuple(questions), label, owner or self._owner)
        stored = await self._stored(job)
        return stored or await self._persist(job, await self.limiter.acquire())

    async def _stored(self, job: _Job) -> Answer | None:
        if self.ledger is None:
            return None
        raw = await self._do(sql.stored_reply, job.request.key)
        if raw is None:
            return None
        reply = _reread(job.request, raw)
        if job.questions:
            await self._do(sql.link, job.request.key, job.questions)
        return Answer(reply, raw, 0.0, True, 0)

    async def _persist(self, job: _Job, slot: Slot) -> Answer:
        """Attempts until one brings an answer."""
        import stamina

        failure: APIError
        config, deadline = self.config, asyncio.timeout(self.config.deadline_s)

        def pause(error: Exception) -> bool | float:
            return error.wait_s if isinstance(error, _PassingError) else False

        # No timeout here: the deadline is the wall clock's, and ends an attempt under way too.
        attempts = stamina.retry_context(on=pause, attempts=config.max_attempts, timeout=None)
        taken: Slot | None = slot
        try:
            async with deadline:
                self._deadlines[deadline] = job
                async for attempt in attempts:
                    with attempt:
                        used, taken = taken or await self.limiter.acquire(again=True), None
                        return await self._attempt(job, used)
        except TimeoutError:
            problem = f"No answer within deadline_s={config.deadline_s:g} seconds, repeats included"
            failure = self.limiter.refused() or TransientAPIError(f"{problem}; the last: {job.problem or 'silence'}")
        except _PassingError as last:
            failure = TransientAPIError(f"No valid reply after {job.attempts} attempts; the last: {last}")
        except APIError as last:
            failure = last
        finally:
            self._deadlines.pop(deadline, None)
        raise type(failure)(*failure.args)  # out here, so that nothing hangs on it as its context

    async def _attempt(self, job: _Job, slot: Slot) -> Answer:
        """One attempt, and its row."""
        job.sending = True
        try:
            attempt_id = await self._begin(job)
            job.attempts += 1
            try:
                outcome = await self._sender.send(job.request)
            except BaseException as error:
                self._drop(attempt_id, f"ended by {type(error).__name__}")
                raise
            if isinstance(outcome, str):
                return await self._read(job, attempt_id, outcome, slot)
            await self._end(attempt_id, outcome, cost_usd=None if outcome.billed else 0.0)
            failure = self._judge(job, outcome, slot)
        finally:
            job.sending = False
            self.limiter.release()
        raise failure

    async def _begin(self, job: _Job) -> int:
        ledger, request = self.ledger, job.request
        if ledger is None:
            self._sender.connect()
            return 0
        if not ledger.replay:  # which needs no key
            self._sender.connect()
        reserve = self.prices.upper_bound(request.model, request.body) if self.prices else None
        future = ledger.do(
            sql.begin,
            request_key=request.key,
            host=self.endpoint.host,
            model=request.model,
            label=job.label,
            num_questions=len(job.questions) or 1,
            reserve_usd=reserve,
            budget_usd=self.budget_usd,
            owner=job.owner,
        )
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            wait([future], COMMIT_S)  # it may be in the file by now
            if future.done() and future.exception() is None:
                self._drop(future.result(), "cancelled before it was sent", billed=False)
            raise

    async def _read(self, job: _Job, attempt_id: int, raw: str, slot: Slot) -> Answer:
        """Read the reply and store it, or store why it is none."""
        reply: Reply | None = None
        try:
            reply = read_reply(job.request.kind, raw)
        except InvalidReplyError as error:
            kind: Any = "text" if isinstance(error, FinalReplyError) else "passing"
            failure = Failure(self.endpoint.redact(str(error)), kind, 200)
        request = job.request
        if reply is None:
            usage = raw_usage(raw)
            cost = self._cost(request, usage) if None not in usage else None
            await self._end(attempt_id, failure, cost_usd=cost)
            raise self._judge(job, failure, slot)
        self.limiter.succeeded(slot)
        usage = believable(request.body, (reply.prompt_tokens, reply.completion_tokens))
        cost = self._cost(request, usage)
        if self.ledger is not None:
            stands = await self._do(
                sql.succeed,
                attempt_id,
                raw=raw,
                cost_usd=cost,
                prompt_tokens=usage[0],
                completion_tokens=usage[1],
                question_keys=job.questions,
            )
            if stands != raw:  # another process was faster, and its answer is the one that is kept
                raw, reply = stands, _reread(request, stands)
        return Answer(reply, raw, nan if cost is None else cost, False, job.attempts)

    def _judge(self, job: _Job, failure: Failure, slot: Slot) -> APIError:
        """What a failure means for the request and for all others."""
        job.problem = failure.message
        where = f"{self.endpoint.host}, model {job.request.model!r}: {failure.message}"
        if failure.kind in ("text", "final"):
            return ContentRefusedError(where) if failure.kind == "text" else PermanentAPIError(where)
        if failure.kind == "closed":
            self._refuse(PermanentAPIError(where))
        elif self.limiter.failed(slot, crowded=failure.crowded, retry_after_s=failure.retry_after_s):
            self._refuse(
                OutageError(
                    f"{self.endpoint.host} has not answered any of the last {self.limiter.failures} attempts ("
                    f"{failure.message}). What was answered before is kept: run again when the server is back"
                )
            )
        passing = _PassingError(where)
        longest = min(WAIT_MAX_S, WAIT_INITIAL_S * 2 ** (job.attempts - 1))
        passing.wait_s = failure.retry_after_s or longest * self._jitter.uniform(0.5, 1)
        return self.limiter.refused() or passing

    def _refuse(self, error: APIError) -> None:
        """End all requests: those that wait, those between attempts, and in an outage those under way too."""
        self.limiter.refuse(error)
        for deadline, job in self._deadlines.items():
            if not deadline.expired() and (isinstance(error, OutageError) or not job.sending):
                with suppress(RuntimeError):  # it has just ended
                    deadline.reschedule(asyncio.get_running_loop().time())

    def _cost(self, request: Request, usage: tuple[int | None, int | None]) -> float | None:
        return self.prices.charge(request.model, request.body, usage) if self.prices else None

    async def _do(self, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """An operation of the ledger. A cancelled caller waits for the commit: the answer has been paid for."""
        assert self.ledger is not None
        future = self.ledger.do(operation, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            wait([future], COMMIT_S)
            raise

    async def _end(self, attempt_id: int, failure: Failure, cost_usd: float | None) -> None:
        if self.ledger is not None:
            state = "unknown" if failure.billed else "failed"
            told = {"error": failure.message, "status": failure.status, "state": state, "cost_usd": cost_usd}
            await self._do(sql.fail, attempt_id, **told)

    def _drop(self, attempt_id: int, why: str, *, billed: bool = True) -> None:
        """End the row of an attempt that nobody waits for any more; it may have been billed."""
        if self.ledger is not None:
            state, cost = ("unknown", None) if billed else ("failed", 0.0)
            wait([self.ledger.do(sql.fail, attempt_id, error=why, status=None, state=state, cost_usd=cost)], COMMIT_S)


def _reread(request: Request, raw: str) -> Reply:
    """Read a reply that is in the ledger."""
    problem = ""
    try:
        return read_reply(request.kind, raw)
    except InvalidReplyError as error:
        problem = str(error)
    raise LedgerError(
        f"The ledger's reply to request {request.key} is not read by this version ({problem}). It is not asked "
        "again, as it was paid for: use the version that stored it, or another seed, which makes other requests"
    )
