"""Asks served models so that no answer is lost and none is paid for twice: retries, deadlines, limits, the ledger.

1. A request whose answer is in the ledger is answered from there.
2. Else attempts: leave from the limiter, a row and the budget's leave from the ledger, the HTTP request under a
   wall-clock deadline, the reply, and the end of the row. The answer is on the disk before `ask` returns.
3. What may pass (connections, time-outs, 408, 409, 425, 429, 5xx, replies that are none) is asked again with jitter and
   never earlier than the server says. What cannot pass ends at once, and a refused key ends the client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
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
from .attempts import AttemptRecorder, Job, committed
from .endpoint import Endpoint
from .ledger import operations as sql
from .ledger.store import Ledger
from .limits import ClientConfig as ClientConfig
from .limits import Limiter
from .pricing import Prices
from .replies import Failure, Reply, read_reply
from .requests import Request
from .transport import Sender

T = TypeVar("T")
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


class _PassingError(TransientAPIError):
    """A failed attempt, to be followed by another after `wait_s` seconds."""

    wait_s = 0.0


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
        self._recorder = AttemptRecorder(endpoint, ledger, prices, budget_usd)
        self._sender = Sender(endpoint, timeout_s=self.config.attempt_timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: sql.Owner | None = None
        self._unanswered: set[Job] = set()
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
        job = Job(request, tuple(questions), label, self._owner)
        stored = await self._stored(job)
        return stored or await self._persist(job, await self.limiter.acquire())

    async def _stored(self, job: Job) -> Answer | None:
        if self.ledger is None:
            return None
        raw = await committed(self.ledger.do(sql.stored_reply, job.request.key))
        if raw is None:
            return None
        reply = _reread(job.request, raw)
        if job.questions:
            await committed(self.ledger.do(sql.link, job.request.key, job.questions))
        return Answer(reply, raw, 0.0, True, 0)

    async def _persist(self, job: Job, started: float) -> Answer:
        """Attempts until one brings an answer."""
        import stamina

        failure: APIError
        config, job.deadline = self.config, asyncio.timeout(self.config.deadline_s)

        def pause(error: Exception) -> bool | float:
            return error.wait_s if isinstance(error, _PassingError) else False

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
            problem = f"No answer within deadline_s={config.deadline_s:g} seconds, repeats included"
            failure = self.limiter.refused() or TransientAPIError(f"{problem}; the last: {job.problem or 'silence'}")
        except _PassingError as last:
            failure = TransientAPIError(f"No valid reply after {job.attempts} attempts; the last: {last}")
        except APIError as last:
            failure = last
        finally:
            self._unanswered.discard(job)
        failure = type(failure)(*failure.args)  # another one, so that nothing hangs on it as its context
        failure.cost_usd = job.cost_usd
        raise failure

    async def _attempt(self, job: Job, started: float) -> Answer:
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
        stands = await committed(row) if row else raw
        if isinstance(reply, Failure):
            raise error
        if stands != raw:  # another process was faster, and its answer is the one that is kept
            raw, reply = stands, _reread(job.request, stands)
        return Answer(reply, raw, job.cost_usd, False, job.attempts)

    def _keep(self, job: Job) -> None:
        """An answer that has come is only to be stored: nothing but its caller may end it now."""
        self._unanswered.discard(job)
        with suppress(RuntimeError):  # it is ending already
            job.deadline.reschedule(None)

    def _judge(self, job: Job, failure: Failure, started: float) -> APIError:
        """The error a failure means for the request; ends all others too if it concerns them."""
        job.problem = failure.message
        where = f"{self.endpoint.host}, model {job.request.model!r}: {failure.message}"
        if failure.kind in ("text", "final"):
            return ContentRefusedError(where) if failure.kind == "text" else PermanentAPIError(where)
        if failure.kind == "closed":
            self._refuse(PermanentAPIError(where))
        elif self.limiter.failed(started, crowded=failure.status in (429, 503), retry_after_s=failure.retry_after_s):
            silent = f"{self.endpoint.host} has not answered any of the last {self.limiter.failures} attempts"
            kept = "What was answered before is kept: run again when the server is back"
            self._refuse(OutageError(f"{silent} ({failure.message}). {kept}"))
        passing = _PassingError(where)
        longest = min(WAIT_MAX_S, WAIT_INITIAL_S * 2 ** (job.attempts - 1))
        passing.wait_s = failure.retry_after_s or longest * self._jitter.uniform(0.5, 1)
        return self.limiter.refused() or passing

    def _refuse(self, error: APIError) -> None:
        """End all requests that wait or are between attempts; in an outage those under way too."""
        self.limiter.refuse(error)
        for job in self._unanswered:
            if not job.deadline.expired() and (isinstance(error, OutageError) or not job.sending):
                with suppress(RuntimeError):  # it has just ended
                    job.deadline.reschedule(asyncio.get_running_loop().time())


def _reread(request: Request, raw: str) -> Reply:
    """Read a reply that is in the ledger."""
    try:
        return read_reply(request.kind, raw)
    except InvalidReplyError as error:
        problem = str(error)
    raise LedgerError(
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
