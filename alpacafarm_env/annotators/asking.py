"""How a batch of questions is asked: shared requests, repeats, what other processes ask at the same time.

A question is one pair shown to one annotator in one order. Questions of one annotator share requests, in the order of
the batch: what a model says of a pair may depend on the pairs that were asked with it, the first time. A shared reply
without exactly one verdict a pair is asked for again pair by pair, and a pair's own reply without a verdict up to
`MAX_TRIES` times in all. Replies are stored as they come and read from there, so that nothing is paid for twice: not
after a kill, not by a process beside this one (it leases what it asks), not by a better parser.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..api import ledger_sql as sql
from ..api.client import Client
from ..api.replies import read_reply
from ..api.requests import Request
from ..errors import (
    APIError,
    ContentRefusedError,
    LedgerError,
    ReplayMissError,
    TransientAPIError,
    UnparsableVerdictError,
)
from ..oracles.base import shorten
from .config import AnnotatorConfig, ModelConfig, Prompt
from .prompts import Item, render
from .verdicts import parse

if TYPE_CHECKING:
    from .pool import AnnotatorPool

T = TypeVar("T")
MAX_TRIES: Final = 3
"""Requests for one pair alone, after which replies without a verdict are final."""
_POLL_S: Final = 0.1
"""Seconds between looks at what another process is asking."""


@dataclass(frozen=True)
class Served:
    """One annotator of a pool with its prompt and the model that plays its role."""

    config: AnnotatorConfig
    prompt: Prompt
    model: ModelConfig


@dataclass(frozen=True)
class Question:
    """One pair, shown to one annotator in one order; `key` is the key of the request that asks it alone."""

    annotator: int
    item: Item
    key: str

    @classmethod
    def about(cls, served: Served, annotator: int, item: Item, *, base_url: str, seed: int) -> Question:
        """The question and its key. It counts whether the annotator shares requests: neighbours may sway it."""
        alone = make_request(served, [item], base_url=base_url, sample=f"seed {seed} of {served.config.batch_size}")
        return cls(annotator, item, alone.key)


@dataclass(frozen=True)
class Answer:
    """What is known of a question: P(second shown preferred), or NaN and why."""

    score: float = math.nan
    cost_usd: float = 0.0
    cached: bool = True
    reason: str = ""


@dataclass(frozen=True)
class Progress:
    """How far one call is."""

    done: int
    total: int
    cost_usd: float
    """Spent by this call so far; NaN if a model has no price."""
    seconds: float


def make_request(served: Served, items: Sequence[Item], *, base_url: str, sample: str) -> Request:
    """The request that asks one annotator about up to its batch size of items."""
    config, model = served.config, served.model
    prompt = render(served.prompt, items, model.kind)
    body: dict[str, Any] = {"model": model.model, "messages" if model.kind == "chat" else "prompt": prompt}
    body[model.max_tokens_field] = config.max_tokens + model.extra_tokens
    body |= {"temperature": config.temperature, "top_p": config.top_p}
    if model.kind == "completion":
        body["stop"] = ["\n\n"]  # a model that continues texts would go on to pairs of its own
    if served.prompt.format == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 20} if model.kind == "chat" else {"logprobs": 20}
    kept = {name: value for name, value in body.items() if name not in model.omit}
    return Request(base_url, model.kind, kept, sample)


class Asking:
    """One call of a pool: `run` answers its questions."""

    def __init__(self, pool: AnnotatorPool, questions: Mapping[str, Question]) -> None:
        self._pool, self._ledger, self._questions = pool, pool.ledger, questions
        self._answers: dict[str, Answer] = {}
        self._costs: dict[str, float] = dict.fromkeys(self._questions, 0.0)
        self._fatal: APIError | LedgerError | None = None
        self._start = monotonic()

    async def run(self) -> dict[str, Answer]:
        """The answer of each question, by key."""
        await self._read(list(self._questions))
        if self._pending and self._ledger.replay:
            missing = self._questions[self._pending[0]]
            name = self._pool.served[missing.annotator].config.name
            raise ReplayMissError(
                f"{len(self._pending)} of {len(self._questions)} pairs have no stored answer in {self._ledger.path}; "
                f"the first is for {name}, instruction {shorten(missing.item.instruction)}. Run once without replay."
            )
        if self._pending:
            pool = self._pool
            async with Client(
                pool.endpoint,
                config=pool.client_config,
                ledger=self._ledger,
                prices=pool.prices,
                budget_usd=pool.budget_usd,
            ) as client:
                await self._ask_all(client)
        return self._answers

    @property
    def _pending(self) -> list[str]:
        return [key for key in self._questions if key not in self._answers]

    async def _ask_all(self, client: Client) -> None:
        owner = self._ledger.new_owner()
        while self._pending:
            mine = await self._do(sql.claim, self._pending, owner)
            try:
                stored = await self._read(mine)  # answered between the look and the claim
                async with asyncio.TaskGroup() as group:
                    for batch, tries in self._batches([key for key in mine if key not in self._answers], stored):
                        group.create_task(self._ask(client, batch, tries))
            finally:
                await self._do(sql.release, mine, owner)
            if self._fatal:
                raise self._fatal
            if self._pending:  # another process is asking these
                await asyncio.sleep(_POLL_S)
                await self._read(self._pending)

    def _batches(self, keys: Sequence[str], tries: dict[str, int]) -> list[tuple[list[Question], int]]:
        """Questions never asked share requests; one whose reply had no verdict goes alone."""
        new: dict[int, list[Question]] = {}
        alone: list[tuple[list[Question], int]] = []
        for key in keys:
            question = self._questions[key]
            if key in tries:
                alone.append(([question], tries[key]))
            else:
                new.setdefault(question.annotator, []).append(question)
        batches = list(alone)
        for annotator, questions in new.items():
            size = self._pool.served[annotator].config.batch_size
            batches += [(questions[n : n + size], 0) for n in range(0, len(questions), size)]
        return batches

    async def _ask(self, client: Client, questions: list[Question], tries: int) -> None:
        """Asks until each question has a verdict or a reason why not.

        Errors that end the call are kept for its end, so that requests in flight, which are paid for, still arrive.
        """
        if self._fatal:
            return
        pool, served = self._pool, self._pool.served[questions[0].annotator]
        keys = [question.key for question in questions]
        sample = f"seed {pool.seed}" + (f", try {tries}" if tries else "")
        items = [question.item for question in questions]
        request = make_request(served, items, base_url=pool.endpoint.base_url, sample=sample)
        try:
            reply = await client.ask(request, questions=keys, label=served.config.name)
        except (ContentRefusedError, TransientAPIError) as error:
            if len(questions) == 1 or isinstance(error, TransientAPIError):
                self._settle(keys, [Answer(cached=False, reason=f"{type(error).__name__}: {error}")] * len(keys))
            else:  # one of them may have been refused: the others are not to suffer
                await self._ask_singly(client, questions)
            return
        except (APIError, LedgerError) as error:
            self._fatal = self._fatal or error
            return
        for key in keys:
            self._costs[key] += reply.cost_usd / len(keys)
        try:
            scores = parse(served.prompt.format, reply.reply, len(keys))
        except UnparsableVerdictError as error:
            if len(questions) > 1:
                await self._ask_singly(client, questions)
            elif tries + 1 < MAX_TRIES:
                await self._ask(client, questions, tries + 1)
            else:
                self._settle(keys, [Answer(reason=_unparsable(error), cached=False)])
            return
        self._settle(keys, [Answer(score, cached=reply.cached) for score in scores])

    async def _ask_singly(self, client: Client, questions: list[Question]) -> None:
        async with asyncio.TaskGroup() as group:
            for question in questions:
                group.create_task(self._ask(client, [question], 0))

    async def _read(self, keys: Sequence[str]) -> dict[str, int]:
        """Settles the questions whose stored reply has a verdict; the tries so far of those whose has none."""
        unread: dict[str, int] = {}
        for key, stored in (await self._do(sql.lookup, keys)).items():
            question = self._questions[key]
            served = self._pool.served[question.annotator]
            try:
                reply = read_reply(served.model.kind, stored.raw)
                score = parse(served.prompt.format, reply, stored.size)[stored.position]
                self._settle([key], [Answer(score)])
            except (UnparsableVerdictError, APIError) as error:
                if stored.size == 1 and stored.tries >= MAX_TRIES:
                    self._settle([key], [Answer(reason=_unparsable(error))])
                else:
                    unread[key] = stored.tries
        return unread

    def _settle(self, keys: Sequence[str], answers: Sequence[Answer]) -> None:
        for key, answer in zip(keys, answers, strict=True):
            self._answers[key] = replace(answer, cost_usd=self._costs[key])
        if self._pool.on_progress:
            spent = sum(self._costs.values())
            seconds = monotonic() - self._start
            self._pool.on_progress(Progress(len(self._answers), len(self._questions), spent, seconds))

    async def _do(self, operation: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._ledger.do(operation, *args))


def _unparsable(error: Exception) -> str:
    return f"{UnparsableVerdictError.__name__}: no verdict in {MAX_TRIES} replies; the last: {error}"
