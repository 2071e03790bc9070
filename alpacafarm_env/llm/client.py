"""Asks served models so that no answer is lost and none is paid for twice: retries, deadlines, limits, the ledger.

1. A request whose answer is in the ledger is answered from there.
2. Else attempts: leave from the limiter, a row and the budget's leave from the ledger, the HTTP request under a
   wall-clock deadline, the reply, and the end of the row. The answer is on the disk before `ask` returns.
3. What may pass is asked again with jitter, never earlier than the server says. What cannot pass ends at once, and a
   refused key ends the client.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from typing import Any, Self, TypeVar

from .. import errors
from .endpoint import Endpoint
from .ledger import operations as sql
from .ledger.store import Ledger
from .limits import ClientConfig as ClientConfig
from .limits import Limiter
from .pricing import Prices
from .replies import Failure, Reply, read_reply, told_usage
from .requests import Request
from .transport import Sender

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
COMMIT_S = 10.0
"""Seconds that a cancelled request waits for the ledger to commit what it handed in."""
WAIT_INITIAL_S, WAIT_MAX_S = 0.25, 8.0
"""The wait after a first failure, doubled with each, and the longest; jitter shortens it by up to a half."""


@dataclass(frozen=True)
class Answer:
    """What `Client.ask` returns.

    Attributes:
        raw: The reply's whole body.
        cost_usd: What it cost, failed attempts included; 0 from the ledger; NaN if the model has no price.
        cached: Whether it came from the ledger.
        attempts: Requests sent for it.
    """

    reply: Reply
    raw: str
    cost_usd: float
    cached: bool
    attempts: int


class _PassingError(errors.TransientAPIError):
    """A failed attempt, to be followed by another after `_Job.wait_s`."""


@dataclass(eq=False)
class _Job:
    """One `ask` under way."""

    request: Request
    questions: tuple[str, ...]
    label: str
    owner: sql.Owner | None
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))  # from the first attempt on
    attempts: int = 0
    sending: bool = False
    problem: str = ""  # how the last attempt ended
    wait_s: float = 0.0  # until the next attempt
    reserve_usd: float | None = None  # the most that the last attempt can have cost; None: the model has no price
    cost_usd: float = 0.0  # what all attempts count in the ledger


class _Recorder:
    """Writes the ledger's row of each attempt, and adds up costs. Arguments as in `Client`."""

    def __init__(
        self, endpoint: Endpoint, ledger: Ledger | None, prices: Prices | None, budget_usd: float | None
    ) -> None:
        self._endpoint, self._ledger, self._prices, self._budget_usd = endpoint, ledger, prices, budget_usd
        self._doubted: set[str] = set()

    async def begin(self, job: _Job) -> int:
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
            return await _committed(future)
        except asyncio.CancelledError:  # it may be in the file by now
            if future.done() and future.exception() is None:
                self._close(future.result(), "cancelled before it was sent", state="failed", cost_usd=0.0)
            raise

    def answered(self, job: _Job, attempt_id: int, raw: str, reply: Reply) -> Future[Any] | None:
        """Hand in the row of an attempt that brought an answer."""
        reported = (reply.prompt_tokens, reply.completion_tokens)
        prompt, completion = job.request.bounds.believable(reported)
        cost = self._charge(job, raw)
        job.cost_usd += nan if cost is None else cost
        if self._ledger is None:
            return None
        told = {"prompt_tokens": prompt, "completion_tokens": completion, "question_keys": job.questions}
        return self._ledger.do(sql.succeed, attempt_id, raw=raw, cost_usd=cost, **told)

    def failed(self, job: _Job, attempt_id: int, failure: Failure, raw: str) -> Future[Any] | None:
        """Hand in the row of an attempt that brought none; `raw` is what came instead."""
        cost: float | None = 0.0
        if failure.billed:
            cost = self._charge(job, raw)  # which logs an impossible usage
            if None in job.request.bounds.believable(told_usage(raw)):
                cost = None
        counted = job.reserve_usd if cost is None else cost
        job.cost_usd += nan if counted is None else counted
        state = "unknown" if failure.billed else "failed"
        return self._end(attempt_id, failure.message, failure.status, state=state, cost_usd=cost)

    def drop(self, job: _Job, attempt_id: int, why: str) -> None:
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

    def _charge(self, job: _Job, raw: str) -> float | None:
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


class Client:
    """Asks one endpoint, from one event loop at a time. Use it as `async with client: await client.ask(...)`.

    Args:
        ledger: Keeps answers and attempts; None: nothing is kept.
        prices: What models cost; None: unknown.
        budget_usd: The most that all attempts of the ledger together may cost.
        limiter: Replaces `config`'s limits and outlives this client: the next one given it knows how many requests at
            once the server takes, and until when to wait.

    Raises:
        ValueError: A budget without a ledger, or one that is no amount.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        config: ClientConfig | None = None,
        ledger: Ledger | None = None,
        prices: Prices | None = None,
        budget_usd: float | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        if budget_usd is not None and ledger is None:
            raise ValueError("budget_usd needs a ledger, as that is where it is counted")
        sql.check_budget(budget_usd)
        self.endpoint, self.config, self.ledger = endpoint, config or ClientConfig(), ledger
        self.limiter = limiter or Limiter(self.config)
        self._recorder = _Recorder(endpoint, ledger, prices, budget_usd)
        self._sender = Sender(endpoint, timeout_s=self.config.attempt_timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: sql.Owner | None = None
        self._unanswered: set[_Job] = set()
        self._jitter = random.Random()  # unseeded: clients that failed together must not come back together

    def __repr__(self) -> str:
        return f"Client({self.endpoint!r}, {self.config!r})"

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError(f"{self!r} is open already; every event loop needs a client of its own")
        self._loop = asyncio.get_running_loop()
        self._owner = self.ledger.new_owner() if self.ledger else None
        self.limiter = self.limiter.fresh()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        await self._sender.close()

    async def ask(self, request: Request, *, questions: Sequence[str] = (), label: str = "") -> Answer:
        """The answer to a request, from the ledger or the server.

        `questions` are the keys of the questions in it, in their order, for the ledger to link to the answer; `label`
        is what it is for, such as an annotator's name, for the ledger's report.

        Raises:
            APIError: PermanentAPIError (ContentRefusedError if only for this text), TransientAPIError or OutageError.
                Its `cost_usd` is what the attempts count in the ledger: their known cost, else their reserve.
            LedgerError: The ledger cannot be used, or gives no leave: BudgetExceededError, PriceError, ReplayMissError.
            RuntimeError: The client is not open in this event loop.
            ValueError: The request is for another server.
        """
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("Client.ask works inside `async with client:`, in the event loop that runs it")
        if request.base_url != self.endpoint.base_url:
            raise ValueError(f"the request is for {request.base_url}, but this client asks {self.endpoint.base_url}")
        job = _Job(request, tuple(questions), label, self._owner)
        stored = await self._stored(job)
        return stored or await self._persist(job, await self.limiter.acquire())

    async def _stored(self, job: _Job) -> Answer | None:
        if self.ledger is None:
            return None
        raw = await _committed(self.ledger.do(sql.stored_reply, job.request.key))
        if raw is None:
            return None
        reply = _reread(job.request, raw)
        if job.questions:
            await _committed(self.ledger.do(sql.link, job.request.key, job.questions))
        return Answer(reply, raw, 0.0, True, 0)

    async def _persist(self, job: _Job, started: float) -> Answer:
        """Attempts until one brings an answer."""
        import stamina

        failure: errors.APIError
        config, job.deadline = self.config, asyncio.timeout(self.config.deadline_s)

        def pause(error: Exception) -> bool | float:
            return job.wait_s if isinstance(error, _PassingError) else False

        # No timeout here: the deadline is the wall clock's, and ends an attempt under way too.
        attempts = stamina.retry_context(on=pause, attempts=config.max_attempts, timeout=None)
        try:
            async with job.deadline:
                self._unanswered.add(job)
                async for attempt in attempts:
                    with attempt:
                        if attempt.num > 1:
                            started = await self.limiter.acquire(again=True)
                        return await self._attempt(job, started)
        except TimeoutError:
            problem = f"No answer within deadline_s={config.deadline_s:g} seconds, repeats included; the last: "
            failure = self.limiter.refused() or errors.TransientAPIError(problem + (job.problem or "silence"))
        except _PassingError as last:
            failure = errors.TransientAPIError(f"No valid reply after {job.attempts} attempts; the last: {last}")
        except errors.APIError as last:
            failure = last
        finally:
            self._unanswered.discard(job)
        failure = type(failure)(*failure.args)  # another one, so that nothing hangs on it as its context
        failure.cost_usd = job.cost_usd
        raise failure

    async def _attempt(self, job: _Job, started: float) -> Answer:
        """One attempt, and its row."""
        job.sending = True
        try:
            if not self.ledger or not self.ledger.replay:  # which needs no key
                self._sender.connect()
            attempt_id = await self._recorder.begin(job)
            job.attempts += 1
            try:
                raw, reply = await self._sender.send(job.request)
            except BaseException as ended:
                self._recorder.drop(job, attempt_id, f"ended by {type(ended).__name__}")
                raise
            # The row's end is handed in before the slot is given back: the ledger keeps the order, so that the next
            # request is not sent before this row's end is committed.
            if isinstance(reply, Failure):
                row = self._recorder.failed(job, attempt_id, reply, raw)
                error = self._judge(job, reply, started)
            else:
                row = self._recorder.answered(job, attempt_id, raw, reply)
                self.limiter.succeeded(started)
                self._keep(job)
        finally:
            job.sending = False
            self.limiter.release()
        stands = await _committed(row) if row else raw
        if isinstance(reply, Failure):
            raise error
        if stands != raw:  # another process was faster, and its answer is the one that is kept
            raw, reply = stands, _reread(job.request, stands)
        return Answer(reply, raw, job.cost_usd, False, job.attempts)

    def _keep(self, job: _Job) -> None:
        """An answer that has come is only to be stored: nothing but its caller may end it now."""
        self._unanswered.discard(job)
        with suppress(RuntimeError):  # it is ending already
            job.deadline.reschedule(None)

    def _judge(self, job: _Job, failure: Failure, started: float) -> errors.APIError:
        """The error a failure means for the request; ends all others too if it concerns them."""
        job.problem = failure.message
        where = f"{self.endpoint.host}, model {job.request.model!r}: {failure.message}"
        if failure.kind in ("text", "final"):
            return errors.ContentRefusedError(where) if failure.kind == "text" else errors.PermanentAPIError(where)
        if failure.kind == "closed":
            self._refuse(errors.PermanentAPIError(where))
        elif self.limiter.failed(started, crowded=failure.status in (429, 503), retry_after_s=failure.retry_after_s):
            silent = f"{self.endpoint.host} has not answered any of the last {self.limiter.failures} attempts"
            kept = "What was answered before is kept: run again when the server is back"
            self._refuse(errors.OutageError(f"{silent} ({failure.message}). {kept}"))
        longest = min(WAIT_MAX_S, WAIT_INITIAL_S * 2 ** (job.attempts - 1))
        job.wait_s = failure.retry_after_s or longest * self._jitter.uniform(0.5, 1)
        return self.limiter.refused() or _PassingError(where)

    def _refuse(self, error: errors.APIError) -> None:
        """End all requests that wait or are between attempts; in an outage those under way too."""
        self.limiter.refuse(error)
        for job in self._unanswered:
            if not job.deadline.expired() and (isinstance(error, errors.OutageError) or not job.sending):
                with suppress(RuntimeError):  # it has just ended
                    job.deadline.reschedule(asyncio.get_running_loop().time())


async def _committed(future: Future[T]) -> T:
    """What an operation of the ledger returns. A cancelled caller waits for the commit: the answer is paid for."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        wait([future], COMMIT_S)
        raise


def _reread(request: Request, raw: str) -> Reply:
    """Read a reply that is in the ledger."""
    try:
        return read_reply(request.kind, raw)
    except errors.InvalidReplyError as error:
        problem = str(error)
    raise errors.LedgerError(
        f"The ledger's reply to request {request.key} is not read by this version ({problem}). It is not asked "
        "again, as it was paid for: use the version that stored it, or another seed, which makes other requests"
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result.

    Where an event loop runs in this thread already (a notebook), the coroutine gets a loop and a thread of its own.
    Ctrl-C cancels it, waits until it has cleaned up, and raises KeyboardInterrupt.
    """
    try:
        asyncio.get_running_loop()
        inside = True
    except RuntimeError:
        inside = False
    if not inside:  # out here, lest every error has that RuntimeError as its context
        return asyncio.run(main)
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def cancellable() -> T:
        task = asyncio.create_task(main)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, cancellable())
        try:
            while not future.done():  # in slices: a wait without an end can miss Ctrl-C while other threads run
                wait([future], timeout=0.1)
            return future.result()
        except KeyboardInterrupt:  # leaving the block waits for the thread, so end its requests first
            for loop, task in tasks:
                with suppress(RuntimeError):  # the loop has ended by itself
                    loop.call_soon_threadsafe(task.cancel)
            raise
