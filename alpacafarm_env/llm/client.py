"""Asks served models so that no answer is lost and none is paid for twice: retries, deadlines, limits, the ledger.

1. Attempts: leave from the limiter, a row and the budget's leave from the ledger, the HTTP request under a wall-clock
   deadline, the reply, and the end of the row. The answer is on the disk before `ask` returns. A request whose answer
   is in the ledger already is not sent.
2. What may pass is asked again with jitter, never earlier than the server says. What cannot pass ends at once, and a
   refused key ends the client.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from .. import errors
from .endpoint import Endpoint
from .ledger import Ledger
from .ledger import operations as sql
from .limits import ClientConfig as ClientConfig
from .limits import Limiter, Pace
from .replies import Failure, Reply, read_reply, reported_usage
from .requests import Prices, Request
from .transport import Sender

T = TypeVar("T")
REFUSALS = 10
"""Requests refused for what is in them, without one that was answered, after which it is taken for the settings."""
COMMIT_S = 10.0
"""Seconds that a cancelled request waits for the ledger to commit what it handed in."""
WAIT_INITIAL_S, WAIT_MAX_S = 0.25, 8.0
"""The wait after a first failure, doubled with each, and the longest; up to twice the first is added at random."""


@dataclass(frozen=True)
class Answer:
    """An answer and its cost.

    Attributes:
        raw: The reply's whole body.
        cost_usd: What it cost, failed attempts included; 0 from the ledger; NaN if the model has no price.
        attempts: Requests sent for it; 0 if it comes from the ledger.
    """

    reply: Reply
    raw: str
    cost_usd: float
    attempts: int


class _PassingError(errors.TransientAPIError):
    """A failed attempt, to be followed by another; `wait_s` is the least wait that the server asks for."""

    wait_s = 0.0


@dataclass(eq=False)
class _Job:
    """One `ask` under way."""

    request: Request
    questions: tuple[str, ...]
    label: str
    attempts: int = 0
    problem: str = "silence"  # how the last attempt ended
    cost_usd: float = 0.0  # what all attempts count in the ledger


class Client:
    """Asks one endpoint, from one event loop. Use it as `async with Client(...) as client: await client.ask(...)`.

    Args:
        ledger: Keeps answers and attempts; None: nothing is kept.
        prices: What models cost; None: unknown.
        budget_usd: The most that all attempts of the ledger together may cost.
        pace: Outlives this client: the next one given it knows how many requests at once the server takes, and until
            when to wait.

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
        pace: Pace | None = None,
    ) -> None:
        if budget_usd is not None and ledger is None:
            raise ValueError("budget_usd needs a ledger, as that is where it is counted")
        sql.check_budget(budget_usd)
        self.endpoint, self.config, self.ledger = endpoint, config or ClientConfig(), ledger
        self.limiter = Limiter(self.config, pace)
        self._prices, self._budget_usd = prices or Prices({}), budget_usd
        self._sender = Sender(endpoint, timeout_s=self.config.attempt_timeout_s)
        self._owner = ledger.new_owner() if ledger else None
        self._refusals = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sender.close()

    async def ask(self, request: Request, *, questions: Sequence[str] = (), label: str = "") -> Answer:
        """The answer to a request, from the ledger or the server.

        `questions` are the keys of the questions in it, in their order, for the ledger to link to the answer; `label`
        is what it is for, such as an annotator's name, for the ledger's report.

        Raises:
            APIError: PermanentAPIError (ContentRefusedError if only for this text), TransientAPIError or OutageError.
                Its `cost_usd` is what the attempts count in the ledger: their known cost, else their reserve.
            LedgerError: The ledger cannot be used, or gives no leave: BudgetExceededError, PriceError, ReplayMissError.
            ValueError: The request is for another server.
        """
        if request.base_url != self.endpoint.base_url:
            raise ValueError(f"the request is for {request.base_url}, but this client asks {self.endpoint.base_url}")
        job, problem = _Job(request, tuple(questions), label), ""
        failure: errors.APIError
        started = await self.limiter.acquire()
        try:
            async with asyncio.timeout(self.config.deadline_s):
                raw = await self._attempts(job, started)
        except TimeoutError:
            problem = f"No answer within deadline_s={self.config.deadline_s:g} seconds, repeats included; the last: "
            failure = self.limiter.refused() or errors.TransientAPIError(problem + job.problem)
        except _PassingError as last:
            failure = errors.TransientAPIError(f"No valid reply after {job.attempts} attempts; the last: {last}")
        except errors.APIError as last:
            failure = type(last)(*last.args)  # another one, so that nothing hangs on it as its context
        else:
            stands = raw if isinstance(raw, str) else await _committed(raw)  # the deadline ends no commit
            return Answer(_reread(request, stands), stands, job.cost_usd, job.attempts)
        failure.cost_usd = job.cost_usd
        raise failure

    async def _attempts(self, job: _Job, started: float) -> str | Future[str]:
        """Attempts until one brings an answer: the raw reply, or the commit that will say which one stands."""
        import stamina

        waits = {"wait_initial": WAIT_INITIAL_S, "wait_max": WAIT_MAX_S, "wait_jitter": 2 * WAIT_INITIAL_S}
        # No timeout here: the deadline is the wall clock's, and ends an attempt under way too.
        attempts = stamina.retry_context(on=_repeat, attempts=self.config.max_attempts, timeout=None, **waits)
        async for attempt in attempts:
            with attempt:
                if attempt.num > 1:
                    started = await self.limiter.acquire(again=True)
                return await self._attempt(job, started)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, job: _Job, started: float) -> str | Future[str]:
        """One attempt, and its row."""
        try:
            self._sender.connect()
            row = await self._begin(job)
            if isinstance(row, str):
                return row
            job.attempts += 1
            try:
                raw, reply = await self._sender.send(job.request)
            except BaseException as ended:  # it may have been billed
                self._wait(self._end(job, row, "", Failure(f"ended by {type(ended).__name__}")))
                raise
            # The row's end is handed in before the slot is given back: the ledger keeps the order, so that the next
            # request is not sent before this row's end is committed.
            end = self._end(job, row, raw, reply)
            if isinstance(reply, Failure):
                error = self._judge(job, reply, started)
            else:
                self.limiter.succeeded(started)
                self._refusals = -math.inf
        finally:
            self.limiter.release()
        if not isinstance(reply, Failure):
            return end or raw
        if end:
            await _committed(end)
        raise error

    async def _begin(self, job: _Job) -> int | str:
        """The attempt's row, once it is on the disk, 0 without a ledger; or the stored reply.

        Raises:
            LedgerError: The ledger gives no leave.
        """
        if self.ledger is None or self._owner is None:
            return 0
        future = self.ledger.do(
            sql.begin,
            request_key=job.request.key,
            host=self.endpoint.host,
            model=job.request.model,
            label=job.label,
            question_keys=job.questions,
            reserve_usd=self._prices.upper_bound(job.request),
            budget_usd=self._budget_usd,
            owner=self._owner,
        )
        try:
            return await _committed(future)
        except asyncio.CancelledError:  # it may be in the file by now
            if future.done() and future.exception() is None and isinstance(row := future.result(), int):
                self._wait(self._end(job, row, "", Failure("cancelled before it was sent", billed=False)))
            raise

    def _end(self, job: _Job, row: int, raw: str, reply: Reply | Failure) -> Future[Any] | None:
        """Hand in the end of an attempt's row, and add up its cost; `raw` is what came, "" if nothing did."""
        failure = reply if isinstance(reply, Failure) else None
        usage = reported_usage(raw)
        cost = 0.0 if failure and not failure.billed else self._prices.charge(job.request, usage)
        job.cost_usd += math.nan if cost is None else cost
        if self.ledger is None:
            return None
        if failure:
            end = {"error": failure.message, "status": failure.status}
            return self.ledger.do(sql.fail, row, state="unknown" if failure.billed else "failed", cost_usd=cost, **end)
        prompt, completion = job.request.bounds.believable(usage)
        tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
        return self.ledger.do(sql.succeed, row, raw=raw, cost_usd=cost, question_keys=job.questions, **tokens)

    def _wait(self, end: Future[Any] | None) -> None:
        """Where nothing can be awaited any more: the row of a request that nobody waits for is ended all the same."""
        if end:
            wait([end], COMMIT_S)

    def _judge(self, job: _Job, failure: Failure, started: float) -> errors.APIError:
        """The error a failure means for the request; ends all others too if it concerns them."""
        job.problem = failure.message
        where = f"{self.endpoint.host}, model {job.request.model!r}: {failure.message}"
        if failure.kind == "text":
            self._refusals += 1
            if self._refusals <= REFUSALS:
                return errors.ContentRefusedError(where)
        if failure.kind != "passing":
            self.limiter.refuse(errors.PermanentAPIError(where))
        elif self.limiter.failed(started, crowded=failure.status in (429, 503), retry_after_s=failure.retry_after_s):
            silent = f"{self.endpoint.host} has not answered any of the last {self.limiter.failures} attempts"
            kept = "What was answered before is kept: run again when the server is back"
            self.limiter.refuse(errors.OutageError(f"{silent} ({failure.message}). {kept}"))
        passing = _PassingError(where)
        passing.wait_s = failure.retry_after_s
        return self.limiter.refused() or passing


def _repeat(error: Exception) -> bool | float:
    """Whether an attempt is followed by another, or after how many seconds."""
    return isinstance(error, _PassingError) and (error.wait_s or True)


async def _committed(future: Future[T]) -> T:
    """The result of an operation of the ledger. A cancelled caller waits for the commit: the answer is paid for."""
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
    """Run a coroutine to its end and return its result, also where an event loop runs already (a notebook).

    It gets a loop and a thread of its own. Ctrl-C cancels it, waits until it has cleaned up, and raises
    KeyboardInterrupt.
    """
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
